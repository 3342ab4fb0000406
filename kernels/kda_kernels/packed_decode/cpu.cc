// packed_decode: gates, delta rule and output for one token a row, from a packed post-convolution
// row.
#include "kda.h"

namespace kda {
namespace {

struct Call {
  Rows qkv, gate, beta;
  Tensor a_log, dt_bias;
  Tensor state;
  Integers indices;
  SlotRule rule;
  float scale;
  Gate gate_kind;
  char* output;
  int64_t rows, heads;
  bool float_output;
  Recur step;
};

// Value rows [v0, v1) of one head of one row. A head that is split over several tasks prepares its
// token in each of them.
template <class A>
void head_task(const Call& c, int64_t row, int64_t head, int v0, int v1) {
  const int64_t first = (row * c.heads + head) * D;
  const int64_t slot = c.rule(c.indices.data != nullptr ? c.indices.at(row) : row);
  const int out_bytes = c.float_output ? 4 : (int)sizeof(A);
  if (slot < 0) {
    memset(c.output + (first + v0) * out_bytes, 0, (size_t)(v1 - v0) * out_bytes);
    return;
  }
  Token t;
  t.last_head = head + 1 == c.heads;
  const A* qkv = c.qkv.at<A>(row, head * D);
  for (int i = 0; i < D; i += W) {
    store(t.q + i, load(qkv + i));
    store(t.k + i, load(qkv + c.heads * D + i));
    store(t.v + i, load(qkv + 2 * c.heads * D + i));
  }
  prepare(t, c.gate.at<A>(row, head * D), c.beta.at<A>(row, head), c.a_log, c.dt_bias, head,
          c.gate_kind, c.scale);
  void* state = c.state.data + (slot * c.state.stride[0] + head * D * D) * c.state.bytes;
  c.step(state, state, nullptr, t, v0, v1);
  for (int i = v0; i < v1; i += W) {
    if (c.float_output) {
      store(reinterpret_cast<float*>(c.output) + first + i, load(t.o + i));
    } else {
      store(reinterpret_cast<A*>(c.output) + first + i, load(t.o + i));
    }
  }
}

// Heads are split by value rows only where there are fewer of them than threads: each part prepares
// the token anew.
template <class A>
void run(const Call& c) {
  const int64_t heads = c.rows * c.heads, threads = thread_count();
  int64_t parts = 1;
  while (parts < 4 && heads * parts < threads) parts *= 2;
  const int width = D / (int)parts;
  parallel(heads * parts, [&](int64_t i) {
    const int64_t head = i / parts;
    const int v0 = (int)(i % parts) * width;
    head_task<A>(c, head / c.heads, head % c.heads, v0, v0 + width);
  });
}

}  // namespace
}  // namespace kda

KDA_EXPORT __tvm_ffi_packed_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  using namespace kda;
  Arguments a(args, count);
  const Tensor qkv = a.tensor(), gate = a.tensor(), beta = a.tensor(), a_log = a.tensor(),
               dt_bias = a.tensor();
  const Tensor state = a.tensor(), indices = a.optional_tensor();
  const float scale = a.number(kDefaultScale);
  double bound = 0;
  const bool bounded = a.optional_number(&bound);
  int64_t first_slot = 0;
  const bool has_first = a.optional_integer(&first_slot);
  const bool kv = a.is_word("kv");
  const Tensor output = a.tensor();
  if (!a.complete("packed_decode: the object and the caller disagree about the argument list"))
    return -1;
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  const int64_t rows = qkv.shape[0], heads = state.shape[1];
  if (rows == 0) return 0;
  const Call call{
      Rows(qkv, 0),
      Rows(gate, gate.ndim == 4),  // [1, B, H, D]
      Rows(beta, beta.ndim == 3),  // [1, B, H]
      a_log,
      dt_bias,
      state,
      Integers(indices),
      slot_rule(state.shape[0], bool(indices), has_first, first_slot),
      scale,
      Gate{bounded, (float)bound},
      output.data,
      rows,
      heads,
      output.type == Type::f32,
      pool_step(state.type, kv),
  };
  if (qkv.type == Type::bf16) run<BF16>(call);
  if (qkv.type == Type::f16) run<F16>(call);
  if (qkv.type == Type::f32) run<float>(call);
  return 0;
}
