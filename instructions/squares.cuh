// Sums of squares of results, which products that read the normalised rows add up (see Matmul).
#pragma once

#include "cuda/tensor.cuh"

namespace megavm {

// Columns of a result in each of its sums of squares. `scaled`: the result times its gain.
__device__ __forceinline__ uint32_t squares_unit(const Tensor& scaled, const Tensor& squares) {
  if constexpr ((program::kSquaresUnits & kWideSquares) == 0) return kUnitRows;
  if constexpr (program::kSquaresUnits == kWideSquares) return kWideSquares;
  const bool wide = own_columns(squares) * kWideSquares == own_columns(scaled);
  return wide ? kWideSquares : kUnitRows;
}

// The sum over `count` neighbouring lanes, a power of two; the number of the first is a multiple of
// `count`. All lanes of the warp call this.
__device__ __forceinline__ float add_neighbours(float value, uint32_t count) {
  for (uint32_t apart = 1; apart < count; apart *= 2) value += __shfl_xor_sync(~0u, value, apart);
  return value;
}
// The same of several values, in place.
template <uint32_t kCount>
__device__ __forceinline__ void add_neighbours(float (&values)[kCount], uint32_t count) {
#pragma unroll 1
  for (uint32_t apart = 1; apart < count; apart *= 2)
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, apart);
}

}  // namespace megavm
