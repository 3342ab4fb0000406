// fused_decode: convolution, gates, delta rule and gated RMSNorm for one token a row.
#include "fused.h"

namespace kda {
namespace {

template <class A>
void head_task(const FusedCall& c, Recur step, int64_t row, int64_t head) {
  const int64_t slot = c.rule(c.indices.data != nullptr ? c.indices.at(row) : row);
  if (slot < 0) return zero_row<A>(c, row, head);
  const int64_t length = c.conv_state.shape[2];
  Columns columns;
  Token t;
  read_history<A>(c, slot, head, length - 3, columns);
  void* state = c.state_of(slot, head);
  mix_token<A>(c, row, head, 0, columns, t, c.state_type == Type::f32 ? state : nullptr);
  const Window<A> window = c.window_of<A>(slot);
  for (int part = 0; part < 3; ++part) {
    const int64_t channel = (part * c.heads + head) * D;
    for (int64_t i = 0; i + 1 < length; ++i) window.move(channel, i + 1, i);
    window.write(channel, length - 1, c.x.at<A>(row, channel));
  }
  step(state, state, nullptr, t, 0, D);
  finish_token<A>(c, row, head, t);
}

template <class A>
void run(const FusedCall& c) {
  const Recur step = pool_step(c.state_type, c.kv);
  parallel(c.rows * c.heads, [&](int64_t i) { head_task<A>(c, step, i / c.heads, i % c.heads); });
}

}  // namespace
}  // namespace kda

KDA_EXPORT __tvm_ffi_fused_decode(void*, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  using namespace kda;
  Arguments a(args, count);
  const Tensor x = a.tensor(), weight = a.tensor(), conv_state = a.tensor(), gate = a.tensor(),
               beta = a.tensor();
  const Tensor a_log = a.tensor(), dt_bias = a.tensor(), indices = a.optional_tensor(),
               state = a.tensor();
  const Tensor output_gate = a.tensor(), norm_weight = a.tensor();
  double bound = 0;
  const bool bounded = a.optional_number(&bound);
  const float norm_eps = a.number(1e-5);
  const Tensor conv_bias = a.optional_tensor();
  const float scale = a.number(kDefaultScale);
  int64_t first_slot = 0;
  const bool has_first = a.optional_integer(&first_slot);
  const bool kv = a.is_word("kv");
  const Tensor output = a.tensor();
  if (!a.complete("fused_decode: the object and the caller disagree about the argument list"))
    return -1;
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  if (x.shape[0] == 0) return 0;
  FusedCall call{
      weight,
      conv_state,
      a_log,
      dt_bias,
      state,
      conv_bias,
      norm_weight,
      Rows(x, 0),
      Rows(gate, gate.ndim == 4),
      Rows(beta, beta.ndim == 3),
      Rows(output_gate, output_gate.ndim == 4),
      Integers(indices),
      slot_rule(state.shape[0], bool(indices), has_first, first_slot),
      Gate{bounded, (float)bound},
      norm_eps,
      scale,
      x.shape[0],
      state.shape[1],
      state.type,
      kv,
      output.data,
  };
  if (x.type == Type::bf16) run<BF16>(call);
  if (x.type == Type::f16) run<F16>(call);
  if (x.type == Type::f32) run<float>(call);
  return 0;
}
