// Matrix instructions and conversions.
#pragma once

#include "cuda/ptx/memory.cuh"

namespace megavm::ptx {

// D += A . B (m16n8k16, bf16). With i = lane / 4 and j = 2 (lane % 4), a lane holds:
//   A: x has row i, columns j and j + 1; y has row 8 + i; z and w have these rows, 8 columns on;
//   B: b0 has column i, rows j and j + 1; b1 has the rows 8 further on;
//   D: sums[0..1] have row i, columns j and j + 1; sums[2..3] have row 8 + i.
__device__ __forceinline__ void mma(float (&sums)[4], const Words4& a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

// The same for a matrix A of which only the first 8 rows are used: rows 8 to 15 count as zero, and
// a lane holds no words of them.
__device__ __forceinline__ void mma_8_rows(float (&sums)[2], uint32_t a0, uint32_t a2, uint32_t b0,
                                           uint32_t b1) {
  [[maybe_unused]] float unused0, unused1;
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %8, %5, %8}, {%6, %7}, {%0, %1, %9, %9};"
      : "+f"(sums[0]), "+f"(sums[1]), "=f"(unused0), "=f"(unused1)
      : "r"(a0), "r"(a2), "r"(b0), "r"(b1), "r"(0), "f"(0.0f));
}

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// About 1 / x, or 0 if that is below the normal numbers.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// x = 2^(x * factor + addend).
// NOTE: in place, and not to be moved, so that a fragment of wgmma stays where it is. Otherwise
// ptxas gives its registers to the next product, whose own fragment it moves there and back.
__device__ __forceinline__ void exp2_in_place(float& x, float factor, float addend) {
  asm volatile("fma.rn.f32 %0, %0, %1, %2;\n\tex2.approx.ftz.f32 %0, %0;"
               : "+f"(x)
               : "f"(factor), "f"(addend));
}

// Two floats as bf16, `low` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}
__device__ __forceinline__ float from_bf16(unsigned short bits) {
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// Set the number of registers of each thread. All four warps of a warpgroup must call it.
template <uint32_t kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <uint32_t kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Nanoseconds, the same on every SM; steps of 32 ns on H200.
__device__ __forceinline__ uint64_t global_timer() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

// The SM that executes the thread. The two of a TPC have neighbouring numbers.
__device__ __forceinline__ uint32_t sm_number() {
  uint32_t number;
  asm volatile("mov.u32 %0, %smid;" : "=r"(number));
  return number;
}

}  // namespace megavm::ptx
