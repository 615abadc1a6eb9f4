// Vectors of sixteen float lanes on any processor, and their operations.
//
// Every level computes in 16 lanes with the same tree of additions: in one register of 512 bits,
// two of 256 or four of 128.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "vm/cpu/worker.hpp"

namespace megavm::MEGAVM_LEVEL {

constexpr int kLanes = kCpuLanes;  // of a vector
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

typedef float NativeFloats __attribute__((vector_size(4 * kNative), may_alias));
typedef int32_t NativeInts __attribute__((vector_size(4 * kNative), may_alias));
typedef uint32_t NativeWords __attribute__((vector_size(4 * kNative), may_alias));
typedef uint16_t NativeHalves __attribute__((vector_size(2 * kNative), may_alias));

struct Vec {
  NativeFloats part[kParts];
};

struct Mask {
  NativeInts part[kParts];
};

struct Bf16 {
  uint16_t bits;
};

// For loops with a small, constant number of iterations. They must be unrolled, so that arrays of
// vectors stay in registers.
#if defined(__clang__)
#define MEGAVM_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MEGAVM_UNROLL _Pragma("GCC unroll 16")
#endif
#define MEGAVM_EACH_PART MEGAVM_UNROLL for (int i_ = 0; i_ < kParts; ++i_)

MEGAVM_INLINE Vec splat(float value) {
  Vec out;
  // NOTE: the compiler drops a subtraction of 0; an addition it keeps, for the sake of -0.
  MEGAVM_EACH_PART out.part[i_] = value - NativeFloats{};
  return out;
}

MEGAVM_INLINE Vec zero() { return splat(0.0f); }

MEGAVM_INLINE Vec operator+(Vec a, const Vec& b) {
  MEGAVM_EACH_PART a.part[i_] += b.part[i_];
  return a;
}

MEGAVM_INLINE Vec operator-(Vec a, const Vec& b) {
  MEGAVM_EACH_PART a.part[i_] -= b.part[i_];
  return a;
}

MEGAVM_INLINE Vec operator*(Vec a, const Vec& b) {
  MEGAVM_EACH_PART a.part[i_] *= b.part[i_];
  return a;
}

MEGAVM_INLINE Vec operator/(Vec a, const Vec& b) {
  MEGAVM_EACH_PART a.part[i_] /= b.part[i_];
  return a;
}

MEGAVM_INLINE Mask operator<(const Vec& a, const Vec& b) {
  Mask out;
  MEGAVM_EACH_PART out.part[i_] = a.part[i_] < b.part[i_];
  return out;
}

MEGAVM_INLINE Vec select(const Mask& mask, const Vec& yes, const Vec& no) {
  Vec out;
  MEGAVM_EACH_PART out.part[i_] = mask.part[i_] ? yes.part[i_] : no.part[i_];
  return out;
}

// The larger of a and b, lane by lane; b where a is NaN.
MEGAVM_INLINE Vec max(const Vec& a, const Vec& b) { return select(b < a, a, b); }

// a * b + c, rounded once if the level has such an instruction.
MEGAVM_INLINE NativeFloats fma(NativeFloats a, NativeFloats b, NativeFloats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
  return (NativeFloats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

MEGAVM_INLINE Vec fma(const Vec& a, const Vec& b, Vec c) {
  MEGAVM_EACH_PART c.part[i_] = fma(a.part[i_], b.part[i_], c.part[i_]);
  return c;
}

// Loads and stores need no alignment. With `count`, only the first `count` lanes are accessed; a
// load sets the others to zero.

MEGAVM_INLINE Vec load(const float* from) {
  Vec out;
  MEGAVM_EACH_PART std::memcpy(&out.part[i_], from + i_ * kNative, sizeof(NativeFloats));
  return out;
}

MEGAVM_INLINE Vec load(const Bf16* from) {
  Vec out;
  MEGAVM_EACH_PART {
    NativeHalves halves;
    std::memcpy(&halves, from + i_ * kNative, sizeof(halves));
    out.part[i_] = (NativeFloats)(__builtin_convertvector(halves, NativeWords) << 16);
  }
  return out;
}

MEGAVM_INLINE Vec load(const float* from, int count) {
#if defined(__AVX512F__)
  return {_mm512_maskz_loadu_ps((1u << count) - 1, from)};
#else
  Vec out = zero();
  std::memcpy(&out, from, sizeof(float) * count);
  return out;
#endif
}

MEGAVM_INLINE Vec load(const Bf16* from, int count) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  const __m256i halves = _mm256_maskz_loadu_epi16((1u << count) - 1, from);
  return {(NativeFloats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16)};
#else
  Bf16 buffer[kLanes] = {};
  std::memcpy(buffer, from, sizeof(Bf16) * count);
  return load(buffer);
#endif
}

MEGAVM_INLINE void store(float* to, const Vec& value) {
  MEGAVM_EACH_PART std::memcpy(to + i_ * kNative, &value.part[i_], sizeof(NativeFloats));
}

MEGAVM_INLINE void store(float* to, const Vec& value, int count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (1u << count) - 1, value.part[0]);
#else
  std::memcpy(to, &value, sizeof(float) * count);
#endif
}

// Round to bfloat16, to nearest even. NaN stays NaN.
MEGAVM_INLINE void round_to(Bf16 (&out)[kLanes], const Vec& value) {
  MEGAVM_EACH_PART {
    const NativeWords bits = (NativeWords)value.part[i_];
    const NativeWords rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const NativeWords quiet = (bits >> 16) | 0x40;
    const NativeInts ordered = value.part[i_] == value.part[i_];
    const NativeHalves halves = __builtin_convertvector(ordered ? rounded : quiet, NativeHalves);
    std::memcpy(out + i_ * kNative, &halves, sizeof(halves));
  }
}

MEGAVM_INLINE void store(Bf16* to, const Vec& value) {
  Bf16 rounded[kLanes];
  round_to(rounded, value);
  std::memcpy(to, rounded, sizeof(rounded));
}

MEGAVM_INLINE void store(Bf16* to, const Vec& value, int count) {
  Bf16 rounded[kLanes];
  round_to(rounded, value);
  std::memcpy(to, rounded, sizeof(Bf16) * count);
}

// The sum of the lanes: l and l + 8, then l and l + 4, l + 2, l + 1. All kernels use this tree, so
// all levels add in the same order.
MEGAVM_INLINE float sum(const Vec& value) {
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(value.part[0]),
                                     _mm512_extractf32x8_ps(value.part[0], 1));
#elif defined(__AVX2__)
  const __m256 eight = _mm256_add_ps(value.part[0], value.part[1]);
#endif
#if defined(__AVX2__)
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  const NativeFloats four = (value.part[0] + value.part[2]) + (value.part[1] + value.part[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
#endif
}

MEGAVM_INLINE float largest(const Vec& value) {
  float lanes[kLanes];
  store(lanes, value);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i)
      lanes[i] = lanes[i] < lanes[i + width] ? lanes[i + width] : lanes[i];
  return lanes[0];
}

MEGAVM_INLINE float first_lane(const Vec& value) { return value.part[0][0]; }

// Lane i of the result is sum(rows[i]), for the first kCount lanes.
template <int kCount>
MEGAVM_INLINE Vec sums(const Vec (&rows)[kLanes]) {
#if defined(__AVX512F__)
  // One addition does a stage of the tree for two vectors: shuffles bring the halves together.
  __m512 quarter[4];
  for (int i = 0; i < 4; ++i) {
    const __m512 a = rows[i].part[0], b = rows[i + 4].part[0];
    const __m512 c = rows[i + 8].part[0], d = rows[i + 12].part[0];
    const __m512 ab =
        _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    const __m512 cd =
        _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
    quarter[i] =
        _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  __m512 half[2];
  for (int i = 0; i < 2; ++i) {
    const __m512 a = quarter[2 * i], b = quarter[2 * i + 1];
    half[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return {_mm512_add_ps(_mm512_shuffle_ps(half[0], half[1], 0x88),
                        _mm512_shuffle_ps(half[0], half[1], 0xdd))};
#elif defined(__AVX2__)
  // The same for eight vectors at a time.
  Vec out = zero();
  MEGAVM_UNROLL
  for (int first = 0; first < kCount; first += 8) {
    __m256 quarter[4];
    MEGAVM_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Vec &low = rows[first + i], &high = rows[first + i + 4];
      const __m256 a = low.part[0] + low.part[1], b = high.part[0] + high.part[1];
      quarter[i] = _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
    }
    __m256 half[2];
    MEGAVM_UNROLL
    for (int i = 0; i < 2; ++i) {
      const __m256 a = quarter[2 * i], b = quarter[2 * i + 1];
      half[i] = _mm256_shuffle_ps(a, b, 0x44) + _mm256_shuffle_ps(a, b, 0xee);
    }
    out.part[first / 8] =
        _mm256_shuffle_ps(half[0], half[1], 0x88) + _mm256_shuffle_ps(half[0], half[1], 0xdd);
  }
  return out;
#else
  float out[kLanes] = {};
  MEGAVM_UNROLL
  for (int i = 0; i < kCount; ++i) out[i] = sum(rows[i]);
  return load(out);
#endif
}

// e^x with a relative error below 2e-7; 0 below -87.3, infinity above 88.7 (Cephes' reduction and
// polynomial).
MEGAVM_INLINE Vec exp(const Vec& x) {
  Vec out;
  MEGAVM_EACH_PART {
    const NativeFloats raw = x.part[i_];
    NativeFloats v = raw < -87.33f ? NativeFloats{} - 87.33f : raw;
    v = v > 88.72f ? NativeFloats{} + 88.72f : v;
    // Adding 1.5 * 2^23 rounds to the nearest integer and leaves it in the low bits.
    const NativeFloats shifted = v * 1.44269504f + 12582912.0f;
    const NativeFloats n = shifted - 12582912.0f;
    const NativeFloats r = (v - n * 0.693359375f) + n * 2.12194440e-4f;
    NativeFloats p = NativeFloats{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    // Multiply with 2^n in two factors: n may be 128, where a single factor would overflow.
    const NativeInts exponent = (NativeInts)shifted - 0x4b400000;
    const NativeInts half = exponent >> 1;
    const NativeFloats low = (NativeFloats)((half + 127) << 23);
    const NativeFloats high = (NativeFloats)((exponent - half + 127) << 23);
    NativeFloats result = p * low * high;
    result = raw < -87.33f ? NativeFloats{} : result;
    result = raw > 88.72f ? NativeFloats{} + __builtin_inff() : result;
    out.part[i_] = raw == raw ? result : raw;
  }
  return out;
}

// ---- Transposition.

#if defined(__AVX512F__)
// Transpose 16 x 16 words in place.
MEGAVM_INLINE void transpose(__m512i (&rows)[16]) {
  __m512i pairs[16];
  for (int i = 0; i < 8; ++i) {
    pairs[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    pairs[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
  // quads[4 i + j]: words j, j + 4, j + 8, j + 12 of rows 4 i .. 4 i + 3.
  __m512i quads[16];
  for (int i = 0; i < 4; ++i) {
    quads[4 * i] = _mm512_unpacklo_epi64(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 1] = _mm512_unpackhi_epi64(pairs[4 * i], pairs[4 * i + 2]);
    quads[4 * i + 2] = _mm512_unpacklo_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
    quads[4 * i + 3] = _mm512_unpackhi_epi64(pairs[4 * i + 1], pairs[4 * i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i a = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
    const __m512i c = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(a, b, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(a, b, 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(c, d, 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(c, d, 0xdd);
  }
}
#elif defined(__AVX2__)
// Rows [8 part, 8 part + 8) of the transposed matrix, from part `part` of all rows.
MEGAVM_INLINE void transpose_part(const Vec (&rows)[kLanes], int part, Vec (&out)[kLanes]) {
  for (int half = 0; half < 2; ++half) {
    const Vec* from = rows + 8 * half;
    __m256 pairs[8], quads[8];
    for (int i = 0; i < 4; ++i) {
      pairs[2 * i] = _mm256_unpacklo_ps(from[2 * i].part[part], from[2 * i + 1].part[part]);
      pairs[2 * i + 1] = _mm256_unpackhi_ps(from[2 * i].part[part], from[2 * i + 1].part[part]);
    }
    for (int i = 0; i < 2; ++i) {
      quads[4 * i] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0x44);
      quads[4 * i + 1] = _mm256_shuffle_ps(pairs[4 * i], pairs[4 * i + 2], 0xee);
      quads[4 * i + 2] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0x44);
      quads[4 * i + 3] = _mm256_shuffle_ps(pairs[4 * i + 1], pairs[4 * i + 3], 0xee);
    }
    for (int j = 0; j < 4; ++j) {
      out[8 * part + j].part[half] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x20);
      out[8 * part + 4 + j].part[half] = _mm256_permute2f128_ps(quads[j], quads[4 + j], 0x31);
    }
  }
}
#endif

// Transpose 16 x 16 lanes in place.
MEGAVM_INLINE void transpose(Vec (&rows)[kLanes]) {
#if defined(__AVX512F__)
  __m512i words[kLanes];
  for (int i = 0; i < kLanes; ++i) words[i] = (__m512i)rows[i].part[0];
  transpose(words);
  for (int i = 0; i < kLanes; ++i) rows[i].part[0] = (NativeFloats)words[i];
#elif defined(__AVX2__)
  Vec out[kLanes];
  transpose_part(rows, 0, out);
  transpose_part(rows, 1, out);
  for (int i = 0; i < kLanes; ++i) rows[i] = out[i];
#else
  float from[kLanes][kLanes], to[kLanes][kLanes];
  for (int i = 0; i < kLanes; ++i) store(from[i], rows[i]);
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) to[j][i] = from[i][j];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(to[i]);
#endif
}

// ---- Multiply-accumulate of one step (64 bytes) of two rows, in 16 lanes.

template <typename Element>
constexpr int kStep = 64 / sizeof(Element);

struct FloatStep {
  Vec values;
};

// 32 bfloat16 elements: lane i holds elements 2 i (low) and 2 i + 1 (high).
struct Bf16Step {
  NativeWords part[kParts];
};

MEGAVM_INLINE FloatStep load_step(const float* from) { return {load(from)}; }
MEGAVM_INLINE FloatStep load_step(const float* from, int count) { return {load(from, count)}; }

MEGAVM_INLINE Bf16Step load_step(const Bf16* from) {
  Bf16Step out;
  MEGAVM_EACH_PART std::memcpy(&out.part[i_], from + i_ * 2 * kNative, sizeof(NativeWords));
  return out;
}

MEGAVM_INLINE Bf16Step load_step(const Bf16* from, int count) {
#if defined(__AVX512BW__)
  const __mmask32 mask = static_cast<__mmask32>((uint64_t{1} << count) - 1);
  return {(NativeWords)_mm512_maskz_loadu_epi16(mask, from)};
#else
  Bf16Step out = {};
  std::memcpy(&out, from, sizeof(Bf16) * count);
  return out;
#endif
}

// A part of a step in float32: `kTerms` factors for each of its lanes.
template <typename Element>
constexpr int kTerms = 4 / sizeof(Element);
template <typename Element>
constexpr int64_t kPartStep = kTerms<Element> * kNative;

template <typename Element>
struct Terms {
  NativeFloats term[kTerms<Element>];
};

MEGAVM_INLINE Terms<float> load_terms(const float* from) {
  Terms<float> out;
  std::memcpy(&out, from, sizeof(out));
  return out;
}

MEGAVM_INLINE Terms<Bf16> terms_of(NativeWords pairs) {
  return {{(NativeFloats)(pairs << 16), (NativeFloats)(pairs & 0xffff0000u)}};
}

MEGAVM_INLINE Terms<Bf16> load_terms(const Bf16* from) {
  NativeWords pairs;
  std::memcpy(&pairs, from, sizeof(pairs));
  return terms_of(pairs);
}

template <typename Element>
MEGAVM_INLINE void accumulate(NativeFloats& to, const Terms<Element>& a, const Terms<Element>& b) {
  MEGAVM_UNROLL
  for (int i = 0; i < kTerms<Element>; ++i) to = fma(a.term[i], b.term[i], to);
}

MEGAVM_INLINE void accumulate(Vec& to, const FloatStep& a, const FloatStep& b) {
  to = fma(a.values, b.values, to);
}

MEGAVM_INLINE void accumulate(Vec& to, const Bf16Step& a, const Bf16Step& b) {
#if defined(__AVX512BF16__)
  to.part[0] = _mm512_dpbf16_ps(to.part[0], (__m512bh)a.part[0], (__m512bh)b.part[0]);
#else
  MEGAVM_EACH_PART accumulate(to.part[i_], terms_of(a.part[i_]), terms_of(b.part[i_]));
#endif
}

}  // namespace megavm::MEGAVM_LEVEL
