// What fused_decode and packed_fused_decode share: their arguments, and one token of one head from
// window to output row.
//
// What is not here: which rows, slots and columns a call touches (<op>/cpu.cc), the mathematics
// (kda.h).
#pragma once

#include "kda.h"

namespace kda {

struct FusedCall {
  Tensor weight, conv_state, a_log, dt_bias, state, conv_bias, norm_weight;
  Rows x, gate, beta, output_gate;
  Integers indices;
  SlotRule rule;
  Gate gate_kind;
  float norm_eps, scale;
  int64_t rows, heads;
  Type state_type;
  bool kv;
  char* output;

  template <class A>
  A* output_row(int64_t row, int64_t head) const {
    return reinterpret_cast<A*>(output) + (row * heads + head) * D;
  }
  void* state_of(int64_t slot, int64_t head) const {
    return state.data + (slot * state.stride[0] + head * D * D) * state.bytes;
  }
  template <class A>
  Window<A> window_of(int64_t slot) const {
    return {conv_state.at<A>(slot * conv_state.stride[0]), conv_state.stride[1],
            conv_state.stride[2]};
  }
};

constexpr int kAheadBytes = 8192;  // of a state, asked for beside each part's convolution

// Float32 columns of the 384 channels of a head: a ring of the last four, so that the next token
// finds its history in place.
struct alignas(64) Columns {
  float value[4][3][D];
};

// Columns `first`, first + 1 and first + 2 of the window of `slot` into the ring's places 0 to 2.
template <class A>
inline void read_history(const FusedCall& c, int64_t slot, int64_t head, int64_t first,
                         Columns& columns) {
  const Window<A> window = c.window_of<A>(slot);
  for (int part = 0; part < 3; ++part) {
    for (int i = 0; i < 3; ++i) window.ask((part * c.heads + head) * D, first + i);
  }
  for (int part = 0; part < 3; ++part) {
    for (int i = 0; i < 3; ++i)
      window.read((part * c.heads + head) * D, first + i, columns.value[i][part]);
  }
}

// Convolution, gates and norms of row `row`, the token's place in the ring being (token + 3) % 4.
// Memory would idle meanwhile, so the first part of a float32 `state` that comes next is asked for
// (null: none; for bf16 states, whose arithmetic weighs more, it gained nothing).
template <class A>
inline void mix_token(const FusedCall& c, int64_t row, int64_t head, int64_t token,
                      Columns& columns, Token& t, const void* state) {
  float* const mixed[3] = {t.q, t.k, t.v};
  t.last_head = head + 1 == c.heads;
  for (int part = 0; part < 3; ++part) {
    if (state != nullptr) {
      prefetch(static_cast<const char*>(state) + part * kAheadBytes, kAheadBytes);
    }
    const int64_t channel = (part * c.heads + head) * D;
    alignas(64) float taps[4][D];
    alignas(64) float bias[D];
    read_taps(c.weight, part, head * D, taps);
    if (c.conv_bias) read_span(c.conv_bias, channel, bias);
    const A* x = c.x.at<A>(row, channel);
    float* newest = columns.value[(token + 3) % 4][part];
    for (int i = 0; i < D; i += W) store(newest + i, load(x + i));
    const float* const ordered[4] = {columns.value[token % 4][part],
                                     columns.value[(token + 1) % 4][part],
                                     columns.value[(token + 2) % 4][part], newest};
    convolve<A>(ordered, taps, c.conv_bias ? bias : nullptr, mixed[part]);
  }
  prepare(t, c.gate.at<A>(row, head * D), c.beta.at<A>(row, head), c.a_log, c.dt_bias, head,
          c.gate_kind, c.scale);
}

template <class A>
inline void finish_token(const FusedCall& c, int64_t row, int64_t head, const Token& t) {
  gated_norm(t.o, c.output_gate.at<A>(row, head * D), c.norm_weight.at<float>(0), c.norm_eps,
             c.output_row<A>(row, head));
}

template <class A>
inline void zero_row(const FusedCall& c, int64_t row, int64_t head) {
  memset(static_cast<void*>(c.output_row<A>(row, head)), 0, D * sizeof(A));
}

}  // namespace kda
