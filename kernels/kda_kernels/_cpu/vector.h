// Float32 vectors of the machine's width, bf16 and f16 in registers, and the few functions of the
// gates.
//
// One source for AVX-512, AVX2, NEON and anything else with GCC or Clang vector extensions. Every
// multiply-add is spelled (the build forbids contraction), so equal inputs give equal bits in
// whichever operator the code lands. What is not here: tensors, the delta rule, threads.
#pragma once

#include <stdint.h>
#include <string.h>

#include <utility>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kda_ops reads pairs of bf16 out of 32-bit words and is written for little-endian machines"
#endif

#define KDA_INLINE inline __attribute__((always_inline))

namespace kda {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float F __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint16_t H __attribute__((vector_size(2 * W)));

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

template <class To, class From>
KDA_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

KDA_INLINE F splat(float x) { return x - F{}; }
KDA_INLINE U splat(uint32_t x) { return x - U{}; }
KDA_INLINE F either(I mask, F yes, F no) { return mask ? yes : no; }
KDA_INLINE U either(I mask, U yes, U no) { return mask ? yes : no; }

KDA_INLINE F fma(F a, F b, F c) {
#if defined(__AVX512F__)
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// ---- shuffles ----

using Lanes = std::make_integer_sequence<int, W>;

template <int... L>
KDA_INLINE F shuffle(F a, F b) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, L...);
#else
  return __builtin_shuffle(a, b, I{L...});
#endif
}

template <int S, int... L>
KDA_INLINE F fold(F a, F b, std::integer_sequence<int, L...>) {
  return shuffle<((L & S) ? L - S + W : L)...>(a, b) + shuffle<((L & S) ? L + W : L + S)...>(a, b);
}

// Lane i of the result is the sum over the lanes of rows[i]: W sums for W - 1 folds.
template <int S = 1>
KDA_INLINE F sum_rows(const F* rows) {
  if constexpr (S == W) {
    return rows[0];
  } else {
    F folded[W / (2 * S)];
    for (int i = 0; i < W / (2 * S); ++i)
      folded[i] = fold<S>(rows[2 * i], rows[2 * i + 1], Lanes{});
    return sum_rows<2 * S>(folded);
  }
}

template <int S = 1>
KDA_INLINE float sum_lanes(F x) {
  if constexpr (S == W) {
    return x[0];
  } else {
    return sum_lanes<2 * S>(fold<S>(x, x, Lanes{}));
  }
}

template <int... L>
KDA_INLINE void split_pair(F a, F b, F& even, F& odd, std::integer_sequence<int, L...>) {
  even = shuffle<(2 * L)...>(a, b);
  odd = shuffle<(2 * L + 1)...>(a, b);
}

template <int... L>
KDA_INLINE void join_pair(F even, F odd, F& a, F& b, std::integer_sequence<int, L...>) {
  a = shuffle<((L & 1) ? W + L / 2 : L / 2)...>(even, odd);
  b = shuffle<((L & 1) ? W + (W + L) / 2 : (W + L) / 2)...>(even, odd);
}

// ---- loads, stores and the roundings ----

KDA_INLINE U bf16_bits(F x) {  // the upper half holds the bf16, the lower half is rubbish
  const U u = bits_as<U>(x);
  return either(x != x, u | 0x00400000u, u + (0x7fffu + ((u >> 16) & 1u)));
}

KDA_INLINE U f16_bits(F x) {
  const U u = bits_as<U>(x), a = u & 0x7fffffffu;
  const U normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  const U tiny =
      bits_as<U>(bits_as<F>(a) + 0.5f) - 0x3f000000u;  // one ulp of 0.5 is f16's smallest step
  const U huge = either(a > 0x7f800000u, U{} + 0x7e00u, U{} + 0x7c00u);
  const U small = either(a < 0x38800000u, tiny, normal);
  return either(a >= 0x47800000u, huge, small) | ((u >> 16) & 0x8000u);
}

KDA_INLINE F from_f16_bits(U h) {
  const U a = h & 0x7fffu;
  const U normal = (a << 13) + either(a >= 0x7c00u, U{} + 0x70000000u, U{} + 0x38000000u);
  const F tiny = __builtin_convertvector(bits_as<I>(a), F) * 0x1p-24f;
  return bits_as<F>(either(a < 0x400u, bits_as<U>(tiny), normal) | ((h & 0x8000u) << 16));
}

KDA_INLINE U load_halves(const void* p) {
  H h;
  memcpy(&h, p, sizeof(h));
  return __builtin_convertvector(h, U);
}

KDA_INLINE void store_halves(void* p, U u) {
  const H h = __builtin_convertvector(u, H);
  memcpy(p, &h, sizeof(h));
}

KDA_INLINE F load(const float* p) {
  F x;
  memcpy(&x, p, sizeof(x));
  return x;
}
KDA_INLINE F load(const BF16* p) { return bits_as<F>(load_halves(p) << 16); }
KDA_INLINE F load(const F16* p) { return from_f16_bits(load_halves(p)); }

KDA_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof(x)); }
KDA_INLINE void store(BF16* p, F x) { store_halves(p, bf16_bits(x) >> 16); }
KDA_INLINE void store(F16* p, F x) { store_halves(p, f16_bits(x)); }

// x rounded to T (nearest even, NaN stays NaN), still as float32.
template <class T>
KDA_INLINE F rounded(F x) {
  if constexpr (sizeof(T) == 4) {
    return x;
  } else if constexpr (std::is_same<T, BF16>::value) {
    return bits_as<F>(bf16_bits(x) & 0xffff0000u);
  } else {
    return from_f16_bits(f16_bits(x));
  }
}

KDA_INLINE float scalar(const float* p) { return *p; }
template <class T>
KDA_INLINE float scalar(const T* p) {
  uint16_t b;
  memcpy(&b, p, 2);
  if constexpr (std::is_same<T, BF16>::value) return bits_as<float>((uint32_t)b << 16);
  return from_f16_bits(U{} + (uint32_t)b)[0];
}

// A state is handled as pairs of vectors, 2 * W neighbours at a time. For float32 the pair is
// (first half, second half); for bf16 it is (even elements, odd elements), which costs a shift and
// a mask instead of shuffles. Arrays that meet the state along its contiguous axis are brought to
// that order once per head: to_state_order.
KDA_INLINE void load_pair(const float* p, F& a, F& b) {
  a = load(p);
  b = load(p + W);
}
KDA_INLINE void load_pair(const BF16* p, F& a, F& b) {
  U u;
  memcpy(&u, p, sizeof(u));
  a = bits_as<F>(u << 16);
  b = bits_as<F>(u & 0xffff0000u);
}
KDA_INLINE void store_pair(float* p, F a, F b) {
  store(p, a);
  store(p + W, b);
}
// The NaN test of bf16_bits is left out here, it would cost a third of the loop: a NaN survives the
// rounding if its low half is zero, which holds for what is read from a bf16 state, for the NaN
// that arithmetic makes, and after plain_nan for the rest.
KDA_INLINE void store_pair(BF16* p, F a, F b) {
  const U u = bits_as<U>(a), v = bits_as<U>(b);
  const U even = (u + (0x7fffu + ((u >> 16) & 1u))) >> 16;
  const U odd = (v + (0x7fffu + ((v >> 16) & 1u))) & 0xffff0000u;
  const U both = even | odd;
  memcpy(p, &both, sizeof(both));
}

KDA_INLINE F plain_nan(F x) { return bits_as<F>(either(x != x, U{} + 0x7fc00000u, bits_as<U>(x))); }

template <class S>
KDA_INLINE void to_state_order(float* x, int n) {
  if constexpr (std::is_same<S, BF16>::value) {
    for (int i = 0; i < n; i += 2 * W) {
      F a, b;
      split_pair(load(x + i), load(x + i + W), a, b, Lanes{});
      store_pair(x + i, a, b);
    }
  }
}

template <class S>
KDA_INLINE void from_state_order(float* x, int n) {
  if constexpr (std::is_same<S, BF16>::value) {
    for (int i = 0; i < n; i += 2 * W) {
      F a, b;
      join_pair(load(x + i), load(x + i + W), a, b, Lanes{});
      store_pair(x + i, a, b);
    }
  }
}

// ---- functions: at most 2 ulp, right limits at both ends, NaN stays NaN ----

KDA_INLINE F exp(F x) {
  x = either(x > 89.0f, splat(89.0f), x);      // exp(89) is inf
  x = either(x < -104.0f, splat(-104.0f), x);  // exp(-104) is 0
  const F magic = splat(12582912.0f);          // 1.5 * 2^23: the integer lands in the low bits
  const F t = fma(x, splat(1.44269504f), magic);
  const F n = t - magic;
  F r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.0f / 5040);
  p = fma(p, r, splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p * r, r, r) + 1.0f;
  const I whole = bits_as<I>(bits_as<U>(t) - bits_as<U>(magic));
  const I low = whole >> 1;  // two factors, so that subnormal results round once
  const U high = bits_as<U>(whole) - bits_as<U>(low);
  return p * bits_as<F>((bits_as<U>(low) + 127u) << 23) * bits_as<F>((high + 127u) << 23);
}

KDA_INLINE F sigmoid(F x) { return 1.0f / (exp(-x) + 1.0f); }
KDA_INLINE F silu(F x) { return x / (exp(-x) + 1.0f); }

// max(x, 0) + log1p(exp(-|x|)): no overflow; beyond 20 the second term is below half an ulp, which
// is the linear branch. log1p(z) = 2 atanh(z / (2 + z)), whose argument is at most 1/3.
KDA_INLINE F softplus(F x) {
  const F z = exp(-bits_as<F>(bits_as<U>(x) & 0x7fffffffu));
  const F s = z / (z + 2.0f), s2 = s * s;
  F p = splat(1.0f / 17);
  p = fma(p, s2, splat(1.0f / 15));
  p = fma(p, s2, splat(1.0f / 13));
  p = fma(p, s2, splat(1.0f / 11));
  p = fma(p, s2, splat(1.0f / 9));
  p = fma(p, s2, splat(1.0f / 7));
  p = fma(p, s2, splat(1.0f / 5));
  p = fma(p, s2, splat(1.0f / 3));
  const F twice = s + s;
  return either(x < 0.0f, F{}, x) + fma(twice * s2, p, twice);
}

}  // namespace kda
