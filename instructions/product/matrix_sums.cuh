// The sums of matrix products: in the registers of a warpgroup, and *staged* in shared memory. A
// warp stages 16 rows of the weight and up to 64 rows of x at a time (staged_at).
#pragma once

#include "instructions/product/matrix_pages.cuh"

namespace megavm {

__device__ __forceinline__ uint32_t warpgroup_index() { return warp_index() / 4; }

// The sums of a warpgroup, of each of its blocks.
struct MatrixSums : MatrixSizes {
  float sum[kMaxBlocks][kRows / 2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (uint32_t b = 0; b < kMaxBlocks; ++b)
#pragma unroll
      for (float& s : sum[b]) s = 0.0f;
  }

  // Keep the compiler from moving accesses to the sums across this point.
  __device__ __forceinline__ void settle() {
#pragma unroll
    for (auto& of_block : sum) ptx::settle(of_block);
  }

  // Stage the sums of kStagedRows rows of x and of one of the blocks, from address `to` on.
  // NOTE: a switch, because ptxas makes a jump of it. Of conditions it makes predicates, and runs
  // through the stores of all parts for each.
  __device__ __forceinline__ void stage(uint32_t block, uint32_t part, uint32_t to) const {
    const uint32_t lane = lane_index(), weight_row = lane / 4, x_rows = lane % 4;
    // Row 2 x_rows + next of x, row weight_row + 8 half of the weight; see staged_at.
    uint32_t places[2][2];
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half)
#pragma unroll
      for (uint32_t next = 0; next < 2; ++next)
        places[half][next] = to + staged_at(2 * x_rows + next, weight_row + 8 * half);
    switch (block * kParts + part) {
      case 0:
        return put<0>(places);
      case 1:
        return put<1>(places);
      case 2:
        return put<2>(places);
      case 3:
        return put<3>(places);
    }
  }

  static constexpr uint32_t kParts = kRows / kStagedRows;
  static_assert(kMaxBlocks * kParts <= 4);

 private:
  template <uint32_t kNumber>
  __device__ __forceinline__ void put(const uint32_t (&places)[2][2]) const {
    if constexpr (kNumber < kMaxBlocks * kParts)
#pragma unroll
      for (uint32_t i = 0; i < kStagedRows / 2; ++i)
        // Register 4 * (eighth row) + 2 * (lower half of the weight's rows) + (next row).
        ptx::store_shared(
            places[i / 2 % 2][i % 2] + i / 4 * 8 * kStagedRowBytes,
            __float_as_uint(sum[kNumber / kParts][kNumber % kParts * (kStagedRows / 2) + i]));
  }
};

// The staged sums of the warps that have the same 16 rows of the weight: of one warp, or in a
// shared group of one of each warpgroup, whose sums are added.
struct Staged {
  uint32_t own, other;
  bool is_shared;

  template <class Words, class Load>
  __device__ __forceinline__ Words add(uint32_t at, Load&& load) const {
    Words words = load(own + at);
    if (is_shared) add_words(words, load(other + at));
    return words;
  }
  __device__ __forceinline__ ptx::Words4 load4(uint32_t at) const {
    return add<ptx::Words4>(at, [](uint32_t from) { return ptx::load_shared4(from); });
  }
  __device__ __forceinline__ ptx::Words2 load2(uint32_t at) const {
    return add<ptx::Words2>(at, [](uint32_t from) { return ptx::load_shared2(from); });
  }

 private:
  static __device__ __forceinline__ uint32_t sum(uint32_t a, uint32_t b) {
    return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
  }
  static __device__ __forceinline__ void add_words(ptx::Words2& to, const ptx::Words2& words) {
    to = {sum(to.x, words.x), sum(to.y, words.y)};
  }
  static __device__ __forceinline__ void add_words(ptx::Words4& to, const ptx::Words4& words) {
    to = {sum(to.x, words.x), sum(to.y, words.y), sum(to.z, words.z), sum(to.w, words.w)};
  }
};

}  // namespace megavm
