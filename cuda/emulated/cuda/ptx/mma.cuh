// The functions of cuda/ptx/mma.cuh, emulated.
#pragma once

#include "cuda/ptx/memory.cuh"

namespace megavm::ptx {

inline float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
inline float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
inline float from_bf16(unsigned short bits) { return __uint_as_float(uint32_t{bits} << 16); }
inline float exp2(float x) { return std::exp2(x); }
inline float log2(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline void exp2_in_place(float& x, float factor, float addend) {
  x = exp2(std::fma(x, factor, addend));
}

// Rounded to nearest, ties to even.
inline uint32_t bits_of_bf16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = __float_as_uint(value);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bf16(float low, float high) {
  return bits_of_bf16(high) << 16 | bits_of_bf16(low);
}

// PTX ISA, "Matrix fragments for mma.m16n8k16". With i = lane / 4 and j = 2 (lane % 4): A has in
// words 0 and 2 row i, in 1 and 3 row i + 8, from column j on, in 2 and 3 from column j + 8; B has
// column i, rows from j and from j + 8 on.
inline void mma(float (&sums)[4], const Words4& a, uint32_t b0, uint32_t b1) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const Fragments mine = {{a.x, a.y, a.z, a.w}, {b0, b1}};
  const emulated::Meeting& all = emulated::meet("mma", mine);
  const uint32_t lane = lane_index();
  const auto element = [](uint32_t word, uint32_t k) {
    return k % 2 ? high_bf16(word) : low_bf16(word);
  };
  for (uint32_t s = 0; s < 4; ++s) {
    const uint32_t row = lane / 4, upper = s / 2, column = lane % 4 * 2 + s % 2;
    for (uint32_t k = 0; k < 16; ++k) {
      const auto of_a = emulated::brought<Fragments>(all, row * 4 + k % 8 / 2);
      const auto of_b = emulated::brought<Fragments>(all, column * 4 + k % 8 / 2);
      sums[s] += element(of_a.a[upper + k / 8 * 2], k) * element(of_b.b[k / 8], k);
    }
  }
}

inline void mma_8_rows(float (&sums)[2], uint32_t a0, uint32_t a2, uint32_t b0, uint32_t b1) {
  float all[4] = {sums[0], sums[1], 0.0f, 0.0f};
  mma(all, {a0, 0, a2, 0}, b0, b1);
  sums[0] = all[0];
  sums[1] = all[1];
}

template <uint32_t kRegisters>
void grow_registers() {}
template <uint32_t kRegisters>
void shrink_registers() {}

inline uint64_t global_timer() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

inline uint32_t sm_number() { return blockIdx.x; }

}  // namespace megavm::ptx
