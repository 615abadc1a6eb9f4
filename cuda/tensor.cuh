// Access to tensors by row and column, for any element type, tagged or not.
#pragma once

#include "cuda/fault.cuh"

namespace megavm {

__device__ __forceinline__ DType dtype_of(const Tensor& t) {
  return static_cast<DType>(t.address >> kDtypeShift & 0xf);
}
__device__ __forceinline__ bool is_tagged(const Tensor& t) { return t.address >> kTaggedShift & 1; }
__device__ __forceinline__ bool is_f32(const Tensor& t) { return dtype_of(t) == DType::kF32; }
__device__ __forceinline__ Layout layout_of(const Tensor& t) {
  return static_cast<Layout>(t.address >> kLayoutShift & 0xf);
}
__device__ __forceinline__ uint64_t base_of(const Tensor& t) {
  return t.address & ((uint64_t{1} << kDtypeShift) - 1);
}
__device__ __forceinline__ uint32_t element_bytes(const Tensor& t) {
  return dtype_of(t) == DType::kBf16 ? 2 : 4;
}

// Address of an element of an untagged, row-major tensor.
__device__ __forceinline__ uint64_t element_at(const Tensor& t, uint32_t row, uint32_t column) {
  return base_of(t) + (static_cast<uint64_t>(row) * t.columns + column) * element_bytes(t);
}

// Address of the tagged word that holds an element.
__device__ __forceinline__ uint64_t word_at(const Tensor& t, uint32_t row, uint32_t column) {
  const uint32_t per_word = 4 / element_bytes(t);
  const uint32_t shift = per_word - 1;  // 1 or 2 elements in a word
  return base_of(t) + 8 * (static_cast<uint64_t>(row) * (t.columns >> shift) + (column >> shift));
}

// Index of the operand word that names a tensor; fault records use it.
using OperandWord = uint32_t;

// An element of a weight or of another tensor that no instruction writes.
__device__ __forceinline__ float constant_element(const Tensor& t, uint32_t row, uint32_t column) {
  const uint64_t address = element_at(t, row, column);
  if (is_f32(t)) return __uint_as_float(ptx::load_constant(address));
  return ptx::from_bf16(ptx::load_constant_half(address));
}

__device__ __forceinline__ int32_t constant_integer(const Tensor& t, uint32_t row,
                                                    uint32_t column) {
  return static_cast<int32_t>(ptx::load_constant(element_at(t, row, column)));
}

__device__ __forceinline__ unsigned short to_bf16(float value) {
  return static_cast<unsigned short>(ptx::pack_bf16(value, 0.0f));
}

// Store two neighbouring elements, the first in an even column. Without `with_second` only the
// first is stored, except that a tagged bf16 word always stores both.
__device__ __forceinline__ void write_pair(const Tensor& t, uint32_t row, uint32_t column,
                                           float first, float second, bool with_second,
                                           uint32_t tag) {
  if (is_tagged(t)) {
    const uint64_t address = word_at(t, row, column);
    // A row is made of whole words, so the second bf16 element always exists.
    if (!is_f32(t)) return ptx::store_relaxed_tagged(address, ptx::pack_bf16(first, second), tag);
    ptx::store_relaxed_tagged(address, __float_as_uint(first), tag);
    if (with_second) ptx::store_relaxed_tagged(address + 8, __float_as_uint(second), tag);
    return;
  }
  const uint64_t address = element_at(t, row, column);
  if (is_f32(t)) {
    ptx::store(address, __float_as_uint(first));
    if (with_second) ptx::store(address + 4, __float_as_uint(second));
  } else if (with_second && address % 4 == 0) {
    ptx::store(address, ptx::pack_bf16(first, second));
  } else {
    ptx::store_half(address, to_bf16(first));
    if (with_second) ptx::store_half(address + 2, to_bf16(second));
  }
}

// The destination of two neighbouring elements, computed ahead of the store.
struct PairPlace {
  uint64_t address = 0;
  uint32_t kind = 0;  // bits: 1 float32, 2 tagged; 0 bf16. kNone: not one store, see below

  __device__ __forceinline__ PairPlace() : address(0), kind(kNone) {}
  __device__ __forceinline__ PairPlace(uint64_t address, uint32_t kind)
      : address(address), kind(kind) {}
  __device__ __forceinline__ PairPlace(const Tensor& t, uint32_t row, uint32_t column)
      : address(is_tagged(t) ? word_at(t, row, column) : element_at(t, row, column)),
        kind(is_f32(t) + 2 * is_tagged(t)) {
    // One store instruction writes both elements, so the address must be aligned for it.
    if (address % (kind == 3 ? 16 : kind == 0 ? 4 : 8) != 0) kind = kNone;
  }

  // The place that is `columns` (an even number) further in the row.
  __device__ __forceinline__ PairPlace after(uint32_t columns) const {
    PairPlace place = *this;
    place.address += columns * (kind == 3 ? 8 : kind == 0 ? 2 : 4);
    return place;
  }

  __device__ __forceinline__ void store(float first, float second, uint32_t tag) const {
    if (kind == 3)
      ptx::store_relaxed_tagged2(address, __float_as_uint(first), __float_as_uint(second), tag);
    else if (kind == 2)
      ptx::store_relaxed_tagged(address, ptx::pack_bf16(first, second), tag);
    else if (kind == 1)
      ptx::store2(address, __float_as_uint(first), __float_as_uint(second));
    else
      ptx::store(address, ptx::pack_bf16(first, second));
  }
};

// Store one element. The other element of a tagged bf16 word keeps its value.
__device__ __forceinline__ void write_element(const Tensor& t, uint32_t row, uint32_t column,
                                              float value, uint32_t tag) {
  if (!is_tagged(t) || is_f32(t)) return write_pair(t, row, column, value, 0.0f, false, tag);
  const uint64_t address = word_at(t, row, column);
  const uint32_t old = ptx::load_relaxed_tagged(address).x;
  const uint32_t half = to_bf16(value);
  ptx::store_relaxed_tagged(
      address, column % 2 ? half << 16 | (old & 0xffff) : (old & 0xffff0000u) | half, tag);
}

}  // namespace megavm
