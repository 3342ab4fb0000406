// packed_fused_decode: fused_decode over ragged sequences of up to T tokens, with a state
// checkpoint per token.
#include "fused.h"

namespace kda {
namespace {

struct PackedCall : FusedCall {
  Integers starts, accepted, row_slots;  // query_start_loc, num_accepted_tokens, t1_state_indices
  int64_t sequences, tokens;             // N, T
  bool by_row;  // T = 1 with t1_state_indices: every row in use is a sequence of its own

  int64_t start(int64_t n) const {
    const int64_t value = starts.at(n);
    return value < 0 ? 0 : value > rows ? rows : value;
  }
  int64_t slot(int64_t n, int64_t token) const {
    return rule(by_row ? row_slots.at(n) : indices.at(n, token));
  }
};

// One step of the recurrence from `pool_source`, or from scratch where that is null, to `pool`, to
// scratch, or both.
template <class S, bool Kv>
void any_step(const void* pool_source, void* pool, float* scratch, bool keep, Token& t) {
  if (pool_source != nullptr) {
    if (pool == nullptr) return recur<S, S, Kv, false, true>(pool_source, pool, scratch, t, 0, D);
    if (!keep) return recur<S, S, Kv, true, false>(pool_source, pool, scratch, t, 0, D);
    return recur<S, S, Kv, true, true>(pool_source, pool, scratch, t, 0, D);
  }
  if (pool == nullptr) return recur<float, S, Kv, false, true>(scratch, pool, scratch, t, 0, D);
  if (!keep) return recur<float, S, Kv, true, false>(scratch, pool, scratch, t, 0, D);
  return recur<float, S, Kv, true, true>(scratch, pool, scratch, t, 0, D);
}

using AnyStep = void (*)(const void*, void*, float*, bool, Token&);

AnyStep any_step_for(Type state, bool kv) {
  if (state == Type::f32) return kv ? any_step<float, true> : any_step<float, false>;
  return kv ? any_step<BF16, true> : any_step<BF16, false>;
}

template <class A>
void sequence_task(const PackedCall& c, AnyStep step, int64_t n, int64_t head) {
  const int64_t begin = c.by_row ? n : c.start(n), end = c.by_row ? n + 1 : c.start(n + 1);
  const int64_t length = end - begin < c.tokens ? end - begin : c.tokens;
  int64_t a = 0;
  if (c.tokens > 1) {
    const int64_t accepted = c.accepted.at(n);
    a = (accepted < 1 ? 1 : accepted > c.tokens ? c.tokens : accepted) - 1;
  }
  const int64_t home = length > 0 ? c.slot(n, 0) : -1;
  const int64_t source_slot = length > 0 ? c.slot(n, a) : -1;
  const bool live = home >= 0 && source_slot >= 0;
  for (int64_t row = live ? begin + length : begin; row < end; ++row) zero_row<A>(c, row, head);
  if (!live) return;

  Columns columns;
  Token t;
  alignas(64) float scratch[D * D];
  read_history<A>(c, home, head, a, columns);
  const Window<A> window = c.window_of<A>(home);
  for (int part = 0; part < 3; ++part) {
    const int64_t channel = (part * c.heads + head) * D;
    window.move(channel, a + 1, 0);
    window.move(channel, a + 2, 1);
    for (int64_t i = 0; i < length; ++i)
      window.write(channel, i + 2, c.x.at<A>(begin + i, channel));
  }
  const void* source = c.state_of(source_slot, head);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t row = begin + i, slot = c.slot(n, i);
    mix_token<A>(c, row, head, i, columns, t, nullptr);
    step(source, slot < 0 ? nullptr : c.state_of(slot, head), scratch, i + 1 < length, t);
    source = nullptr;
    if (slot < 0) {
      zero_row<A>(c, row, head);
    } else {
      finish_token<A>(c, row, head, t);
    }
  }
}

template <class A>
void run(const PackedCall& c) {
  // Rows of no sequence: their tasks would have nothing to do but this.
  int64_t covered = 0;
  for (int64_t n = 0; n < c.sequences; ++n) {
    const int64_t begin = c.by_row ? n : c.start(n), end = c.by_row ? n + 1 : c.start(n + 1);
    if (end <= begin) continue;
    for (; covered < begin; ++covered)
      memset(static_cast<void*>(c.output_row<A>(covered, 0)), 0, c.heads * D * sizeof(A));
    if (end > covered) covered = end;
  }
  for (; covered < c.rows; ++covered)
    memset(static_cast<void*>(c.output_row<A>(covered, 0)), 0, c.heads * D * sizeof(A));
  const AnyStep step = any_step_for(c.state_type, c.kv);
  parallel(c.sequences * c.heads,
           [&](int64_t i) { sequence_task<A>(c, step, i / c.heads, i % c.heads); });
}

}  // namespace
}  // namespace kda

KDA_EXPORT __tvm_ffi_packed_fused_decode(void*, const TVMFFIAny* args, int32_t count,
                                         TVMFFIAny* result) {
  using namespace kda;
  Arguments a(args, count);
  const Tensor x = a.tensor(), weight = a.tensor(), conv_state = a.tensor(), gate = a.tensor(),
               beta = a.tensor();
  const Tensor a_log = a.tensor(), dt_bias = a.tensor(), indices = a.tensor(), state = a.tensor();
  const Tensor output_gate = a.tensor(), norm_weight = a.tensor();
  const Tensor starts = a.tensor(), accepted = a.tensor();
  double bound = 0;
  const bool bounded = a.optional_number(&bound);
  const float norm_eps = a.number(1e-5);
  const Tensor row_slots = a.optional_tensor(), conv_bias = a.optional_tensor();
  const float scale = a.number(kDefaultScale);
  int64_t first_slot = 0;
  const bool has_first = a.optional_integer(&first_slot);
  const bool kv = a.is_word("kv");
  const Tensor output = a.tensor();
  if (!a.complete(
          "packed_fused_decode: the object and the caller disagree about the argument list"))
    return -1;
  result->type_index = kTVMFFINone;
  result->v_int64 = 0;
  if (x.shape[0] == 0) return 0;
  const int64_t sequences = indices.shape[0], tokens = indices.shape[1];
  PackedCall call{
      {weight,
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
       slot_rule(state.shape[0], true, has_first, first_slot),
       Gate{bounded, (float)bound},
       norm_eps,
       scale,
       x.shape[0],
       state.shape[1],
       state.type,
       kv,
       output.data},
      Integers(starts),
      Integers(accepted),
      Integers(row_slots),
      sequences,
      tokens,
      tokens == 1 && row_slots,
  };
  if (call.by_row) call.sequences = starts.shape[0] > 0 ? call.start(starts.shape[0] - 1) : 0;
  if (x.type == Type::bf16) run<BF16>(call);
  if (x.type == Type::f16) run<F16>(call);
  if (x.type == Type::f32) run<float>(call);
  return 0;
}
