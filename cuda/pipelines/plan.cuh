// Base of the plans of all product instructions.
#pragma once

#include "cuda/pipelines/product_row.cuh"
#include "cuda/pipelines/product_rows.cuh"
#include "cuda/pipelines/rows.cuh"

namespace megavm {

template <class Instruction>
struct ProductPlan {
  const Operands<Instruction> in;

  __device__ __forceinline__ explicit ProductPlan(const Stage& stage) : in(stage) {}

  __device__ __forceinline__ OperandWord word_if_there(uint32_t Instruction::* operand) const {
    return in.has(operand) ? in.word(operand) : kNone;
  }

  // The operands that all products have; `k` columns and `units` of the weights are multiplied.
  __device__ __forceinline__ ProductInput input_of(uint32_t k, uint32_t units,
                                                   uint32_t half_items) const {
    return {{k, units},
            half_items,
            false,
            in.word(&Instruction::x),
            word_if_there(&Instruction::x_squares),
            kNone,
            word_if_there(&Instruction::row_count),
            in.inst.row_end,
            in.inst.row_begin,
            in.inst.row_end,
            in.inst.eps,
            0};
  }

  // Hook: fetch data that is available only after the instruction's waits.
  __device__ __forceinline__ void prefetch_ready(uint32_t, uint32_t, uint32_t, Prefetched&) const {}

  // Hook: wait for a tagged residual.
  __device__ __forceinline__ void await_residual(uint32_t, uint32_t, uint32_t, Prefetched&) const {}

  // Hooks for results that are used beside being stored; see matmul, the only plan with any.
  __device__ __forceinline__ void end_item(bool, uint32_t, uint32_t, uint32_t, uint32_t) const {}
  __device__ __forceinline__ void consider(float&, uint32_t&) const {}
  __device__ __forceinline__ void end_row(uint32_t, float, uint32_t) const {}
  __device__ __forceinline__ void end_group(Consumer&, uint32_t, uint32_t, uint32_t, float&,
                                            uint32_t&) const {}
};

template <class P>
struct ProductKernel {
  using Plan = P;
};

__device__ __forceinline__ uint64_t unit_bytes(const Tensor& weight) {
  return uint64_t{ceil_div(weight.columns, kTileColumns)} * kTileBytes;
}

// Elements of a vector for two neighbouring columns; 0 for columns outside it.
template <class Instruction>
__device__ __forceinline__ void load_pair(const Operands<Instruction>& in,
                                          uint32_t Instruction::* vector, uint32_t column,
                                          float& first, float& second) {
  first = second = 0.0f;
  const Tensor& tensor = in[vector];
  if (column < tensor.rows) first = constant_element(tensor, column, 0);
  if (column + 1 < tensor.rows) second = constant_element(tensor, column + 1, 0);
}

// Biases of two neighbouring columns; 0 if the instruction has no bias.
template <class Instruction>
__device__ __forceinline__ void load_bias(const Operands<Instruction>& in,
                                          uint32_t Instruction::* bias, uint32_t column,
                                          float& first, float& second) {
  first = second = 0.0f;
  if (program::kAnyBias && in.has(bias)) load_pair(in, bias, column, first, second);
}

// The place of two neighbouring columns. Its kind is kNone unless both lie in [begin, end) and one
// store can write both.
__device__ __forceinline__ PairPlace place_of(const Tensor& out, uint32_t row, uint32_t column,
                                              uint32_t begin, uint32_t end) {
  if (column < begin || column + 1 >= end) return {};
  return {out, row, column};
}

// Store two neighbouring columns, the first of them even, as far as they lie in [begin, end).
__device__ __forceinline__ void write_columns(const Tensor& out, uint32_t row, uint32_t column,
                                              uint32_t begin, uint32_t end, float first,
                                              float second, uint32_t tag) {
  if (column >= begin && column + 1 < end)
    write_pair(out, row, column, first, second, true, tag);
  else if (column >= begin && column < end)
    write_element(out, row, column, first, tag);
  else if (column + 1 >= begin && column + 1 < end)
    write_element(out, row, column + 1, second, tag);
}

}  // namespace megavm
