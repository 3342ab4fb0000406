// The mathematics of one head: gates and L2 norms, the delta rule over the state in both layouts,
// convolution, gated RMSNorm.
//
// Everything is float32 between a load and a store. What is not here: which rows and slots a call
// touches (<op>/cpu.cc), the border to Python (ffi.h), vectors and roundings (vector.h).
#pragma once

#include <math.h>

#include "ffi.h"
#include "vector.h"

namespace kda {

// One token of one head. q and k are normalised, decay is d; dk = d*k and dq = d*q, so that both
// dot products of the old state with the decayed key and query come out of one read of it:  S'k =
// S(dk), S'q = S(dq), o = S'q + beta*u*(k.q).
struct alignas(64) Token {
  float q[D], k[D], v[D], decay[D], dk[D], dq[D], o[D], update[D];
  float beta, kq;
  bool last_head;  // nothing of this slot's state comes after this head
};

struct Gate {
  bool bounded;
  float lower_bound;
};

inline float read_number(const Tensor& t, int64_t i) {
  if (t.type == Type::f32) return *t.at<float>(i);
  return t.type == Type::bf16 ? scalar(t.at<BF16>(i)) : scalar(t.at<F16>(i));
}

inline void read_span(const Tensor& t, int64_t first, float* out) {
  for (int i = 0; i < D; i += W) {
    if (t.type == Type::f32) store(out + i, load(t.at<float>(first + i)));
    if (t.type == Type::bf16) store(out + i, load(t.at<BF16>(first + i)));
    if (t.type == Type::f16) store(out + i, load(t.at<F16>(first + i)));
  }
}

// From the raw q, k, v in `t` to everything the recurrence needs.
template <class A>
inline void prepare(Token& t, const A* raw_gate, const A* raw_beta, const Tensor& a_log,
                    const Tensor& dt_bias, int64_t head, Gate gate, float scale) {
  F qq = {}, kk = {};
  for (int i = 0; i < D; i += W) {
    const F q = load(t.q + i), k = load(t.k + i);
    qq = fma(q, q, qq);
    kk = fma(k, k, kk);
  }
  const float q_norm = scale * (1.0f / sqrtf(sum_lanes(qq) + 1e-6f));
  const float k_norm = 1.0f / sqrtf(sum_lanes(kk) + 1e-6f);
  const float exp_a = expf(read_number(a_log, head));
  float bias[D];
  read_span(dt_bias, head * D, bias);
  F kq = {};
  for (int i = 0; i < D; i += W) {
    const F q = load(t.q + i) * q_norm, k = plain_nan(load(t.k + i) * k_norm);
    const F a = load(raw_gate + i) + load(bias + i);
    const F g = gate.bounded ? sigmoid(a * exp_a) * gate.lower_bound : softplus(a) * -exp_a;
    const F d = plain_nan(exp(g));
    kq = fma(k, q, kq);
    store(t.q + i, q);
    store(t.k + i, k);
    store(t.decay + i, d);
    store(t.dk + i, d * k);
    store(t.dq + i, d * q);
  }
  t.kq = sum_lanes(kq);
  t.beta = 1.0f / (1.0f + expf(-scalar(raw_beta)));
}

// ---- the delta rule ----
// Source is where a state is read: the pool (its own type) or float32 scratch. Pool and Keep say
// where the new state goes: to the pool, rounded to its type, to float32 scratch for the next
// token, or both.

constexpr int kRows =
    4;  // state rows walked together: 8 accumulators hide the latency of a multiply-add

// Loads one byte of every cache line in order. Walking several rows at once looks random to the
// hardware's prefetcher, so every block is first touched in memory order.
template <class Source>
KDA_INLINE void touch(const Source* p, int elements) {
  const volatile char* line = reinterpret_cast<const volatile char*>(p);
  for (int i = 0; i < elements * (int)sizeof(Source); i += 64) (void)line[i];
}

// Asks for the cache lines of the walk's next stretch while this one is computed. A prefetch never
// faults, so a stretch may end beyond the pool.
template <class Source>
KDA_INLINE void prefetch(const Source* p, int elements) {
  for (int i = 0; i < elements * (int)sizeof(Source); i += 64) {
    __builtin_prefetch(reinterpret_cast<const char*>(p) + i, 0, 3);
  }
}

// Layout vk. Value rows [v0, v1), multiples of W. Per block of W rows the first phase reads the
// rows (from memory) and forms both dot products, the second reads them again (from the first-level
// cache) and writes the new rows.
template <class Source, class S, bool Pool, bool Keep>
void recur_vk(const Source* source, S* pool, float* keep, Token& t, int v0, int v1) {
  for (int block = v0; block < v1; block += W) {
    F sk[W], sq[W];
    touch(source + (int64_t)block * D, W * D);
    for (int r = 0; r < W; r += kRows) {
      const Source* rows = source + (int64_t)(block + r) * D;
      F k[kRows] = {}, q[kRows] = {};
      for (int i = 0; i < D; i += 2 * W) {
        const F dk0 = load(t.dk + i), dk1 = load(t.dk + i + W), dq0 = load(t.dq + i),
                dq1 = load(t.dq + i + W);
        for (int j = 0; j < kRows; ++j) {
          F a, b;
          load_pair(rows + j * D + i, a, b);
          k[j] = fma(b, dk1, fma(a, dk0, k[j]));
          q[j] = fma(b, dq1, fma(a, dq0, q[j]));
        }
      }
      for (int j = 0; j < kRows; ++j) {
        sk[r + j] = k[j];
        sq[r + j] = q[j];
      }
    }
    const F update = plain_nan((load(t.v + block) - sum_rows(sk)) * t.beta);
    store(t.update + block, update);
    store(t.o + block, fma(update, splat(t.kq), sum_rows(sq)));
    for (int r = 0; r < W; r += kRows) {
      const int64_t first = (int64_t)(block + r) * D;
      F u[kRows];
      for (int j = 0; j < kRows; ++j) u[j] = splat(t.update[block + r + j]);
      for (int i = 0; i < D; i += 2 * W) {
        prefetch(source + first + W * D + i * kRows, kRows * 2 * W);
        const F d0 = load(t.decay + i), d1 = load(t.decay + i + W), k0 = load(t.k + i),
                k1 = load(t.k + i + W);
        for (int j = 0; j < kRows; ++j) {
          F a, b;
          load_pair(source + first + j * D + i, a, b);
          a = fma(u[j], k0, a * d0);
          b = fma(u[j], k1, b * d1);
          if (Pool) store_pair(pool + first + j * D + i, a, b);
          if (Keep) store_pair(keep + first + j * D + i, a, b);
        }
      }
    }
  }
}

// Layout kv. Value columns [v0, v1), multiples of 2 * W. Both phases walk the key rows in memory
// order; the sums over keys stay in an array of one float per column (first-level cache), and the
// second phase finds the head's state in the second-level cache. While it works memory would idle,
// so it asks for the next head's state: for all of it in bf16, where rounding keeps the units busy;
// in float32 for its first rows only (all of it gained nothing).
template <class Source, class S, bool Pool, bool Keep>
void recur_kv(const Source* source, S* pool, float* keep, Token& t, int v0, int v1) {
  alignas(64) float sk[D] = {}, sq[D] = {};
  constexpr int kAhead = 4 * kRows;
  constexpr bool whole = sizeof(Source) == 2;
  const Source* next = source + (t.last_head ? 0 : D * D);
  for (int key = 0; key < D; key += kRows) {
    const Source* rows = source + (int64_t)key * D;
    for (int j = 0; j < kRows; ++j) touch(rows + j * D + v0, v1 - v0);
    F dk[kRows], dq[kRows];
    for (int j = 0; j < kRows; ++j) {
      dk[j] = splat(t.dk[key + j]);
      dq[j] = splat(t.dq[key + j]);
    }
    for (int i = v0; i < v1; i += 2 * W) {
      if (!whole) prefetch(rows + kAhead * D + (i - v0) * kRows, kRows * 2 * W);
      F k0 = {}, k1 = {}, q0 = {}, q1 = {};
      for (int j = 0; j < kRows; ++j) {
        F a, b;
        load_pair(rows + j * D + i, a, b);
        k0 = fma(a, dk[j], k0);
        k1 = fma(b, dk[j], k1);
        q0 = fma(a, dq[j], q0);
        q1 = fma(b, dq[j], q1);
      }
      store_pair(sk + i, load(sk + i) + k0, load(sk + i + W) + k1);
      store_pair(sq + i, load(sq + i) + q0, load(sq + i + W) + q1);
    }
  }
  for (int i = v0; i < v1; i += W) {
    const F update = plain_nan((load(t.v + i) - load(sk + i)) * t.beta);
    store(t.update + i, update);
    store(t.o + i, fma(update, splat(t.kq), load(sq + i)));
  }
  for (int key = 0; key < D; key += kRows) {
    const int64_t first = (int64_t)key * D;
    F d[kRows], k[kRows];
    for (int j = 0; j < kRows; ++j) {
      d[j] = splat(t.decay[key + j]);
      k[j] = splat(t.k[key + j]);
    }
    for (int i = v0; i < v1; i += 2 * W) {
      if (whole) prefetch(next + first + (i - v0) * kRows, kRows * 2 * W);
      if (!whole && key >= D - kAhead)
        prefetch(next + first - (D - kAhead) * D + (i - v0) * kRows, kRows * 2 * W);
      const F u0 = load(t.update + i), u1 = load(t.update + i + W);
      for (int j = 0; j < kRows; ++j) {
        F a, b;
        load_pair(source + first + j * D + i, a, b);
        a = fma(u0, k[j], a * d[j]);
        b = fma(u1, k[j], b * d[j]);
        if (Pool) store_pair(pool + first + j * D + i, a, b);
        if (Keep) store_pair(keep + first + j * D + i, a, b);
      }
    }
  }
}

// One head (or some of its value rows) of one token: brings the token to the state's order, runs
// the rule, leaves o in plain order.
template <class Source, class S, bool Kv, bool Pool, bool Keep>
void recur(const void* source, void* pool, float* keep, Token& t, int v0, int v1) {
  const Source* from = static_cast<const Source*>(source);
  S* to = static_cast<S*>(pool);
  if (Kv) {
    to_state_order<S>(t.v + v0, v1 - v0);
    recur_kv<Source, S, Pool, Keep>(from, to, keep, t, v0, v1);
    from_state_order<S>(t.o + v0, v1 - v0);
  } else {
    to_state_order<S>(t.decay, D);
    to_state_order<S>(t.k, D);
    to_state_order<S>(t.dk, D);
    to_state_order<S>(t.dq, D);
    recur_vk<Source, S, Pool, Keep>(from, to, keep, t, v0, v1);
  }
}

using Recur = void (*)(const void* source, void* pool, float* keep, Token& t, int v0, int v1);

// The step from a pool slot to a pool slot.
inline Recur pool_step(Type state, bool kv) {
  if (state == Type::f32) {
    return kv ? recur<float, float, true, true, false> : recur<float, float, false, true, false>;
  }
  return kv ? recur<BF16, BF16, true, true, false> : recur<BF16, BF16, false, true, false>;
}

// ---- convolution ----

// The window of a slot, read and written for the 128 channels of one part of one head.
template <class A>
struct Window {
  A* slot;
  int64_t channel_step,
      column_step;  // elements; one of the two is 1 (SD: channel_step, DS: column_step)

  // Asks for column `column` of D channels from `channel` on, before it is read.
  void ask(int64_t channel, int64_t column) const {
    prefetch(slot + channel * channel_step + column * column_step, channel_step == 1 ? D : 1);
  }
  // Column `column` of D channels from `channel` on, as float32.
  void read(int64_t channel, int64_t column, float* out) const {
    const A* p = slot + channel * channel_step + column * column_step;
    if (channel_step == 1) {
      for (int i = 0; i < D; i += W) store(out + i, load(p + i));
    } else {
      A gathered[D];
      for (int i = 0; i < D; ++i) gathered[i] = p[i * channel_step];
      for (int i = 0; i < D; i += W) store(out + i, load(gathered + i));
    }
  }
  // Raw bits: column `from` to column `to`.
  void move(int64_t channel, int64_t from, int64_t to) const {
    const A* p = slot + channel * channel_step + from * column_step;
    A* q = slot + channel * channel_step + to * column_step;
    if (channel_step == 1) {
      memmove(q, p, D * sizeof(A));
    } else {
      for (int i = 0; i < D; ++i) q[i * channel_step] = p[i * channel_step];
    }
  }
  void write(int64_t channel, int64_t column, const A* x) const {
    A* q = slot + channel * channel_step + column * column_step;
    if (channel_step == 1) {
      memcpy(q, x, D * sizeof(A));
    } else {
      for (int i = 0; i < D; ++i) memcpy(q + i * channel_step, x + i, sizeof(A));
    }
  }
};

// The four taps of D channels from `channel` on (of part `part`, channel counted within it), as
// float32.
inline void read_taps(const Tensor& weight, int part, int64_t channel, float (*taps)[D]) {
  const int64_t first = part * weight.stride[0] + channel * weight.stride[2];
  if (weight.stride[2] == 1) {
    for (int tap = 0; tap < 4; ++tap) read_span(weight, first + tap * weight.stride[1], taps[tap]);
  } else {
    float flat[4 * D];
    for (int i = 0; i < 4; ++i) read_span(weight, first + i * D, flat + i * D);
    for (int i = 0; i < D; ++i) {
      for (int tap = 0; tap < 4; ++tap) taps[tap][i] = flat[4 * i + tap];
    }
  }
}

// silu(w0*h0 + w1*h1 + w2*h2 + w3*x + bias), rounded to the activation type.
template <class A>
inline void convolve(const float* const* columns, const float (*taps)[D], const float* bias,
                     float* out) {
  for (int i = 0; i < D; i += W) {
    F m = load(taps[0] + i) * load(columns[0] + i);
    for (int tap = 1; tap < 4; ++tap) m = fma(load(taps[tap] + i), load(columns[tap] + i), m);
    if (bias != nullptr) m = m + load(bias + i);
    store(out + i, rounded<A>(silu(m)));
  }
}

// ---- gated RMSNorm ----

template <class A>
inline void gated_norm(const float* o, const A* gate, const float* weight, float eps, A* out) {
  float rounded_o[D];
  F oo = {};
  for (int i = 0; i < D; i += W) {
    const F x = rounded<A>(load(o + i));
    oo = fma(x, x, oo);
    store(rounded_o + i, x);
  }
  const float r = 1.0f / sqrtf(sum_lanes(oo) * (1.0f / D) + eps);
  for (int i = 0; i < D; i += W) {
    store(out + i, load(rounded_o + i) * r * load(weight + i) * sigmoid(load(gate + i)));
  }
}

}  // namespace kda
