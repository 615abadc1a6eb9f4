// Rows of a step: which rows are live, and where their keys and values lie.
#pragma once

#include "cuda/kernel.cuh"

namespace megavm {

// End of the live rows of [begin, end).
template <class Instruction>
__device__ __forceinline__ uint32_t live_end(const Operands<Instruction>& in,
                                             uint32_t Instruction::* row_count, uint32_t begin,
                                             uint32_t end) {
  if (!in.has(row_count)) return end;
  const uint32_t count = static_cast<uint32_t>(constant_integer(in[row_count], 0, 0));
  return max_of(begin, min_of(end, count));
}

// An entry of a row_index, checked.
__device__ __forceinline__ void check_indexed_row(uint32_t found, uint32_t row, uint32_t x_rows) {
  if (found >= x_rows) stop_instruction(Fault::kRowIndex, row, 0, found, x_rows);
}

// Sequence of a row, checked; `table` has one row per sequence.
__device__ __forceinline__ void check_sequence(uint32_t sequence, uint32_t row,
                                               const Tensor& table) {
  if (sequence >= table.rows) stop_instruction(Fault::kRowSequence, row, 0, sequence, table.rows);
}
__device__ __forceinline__ uint32_t sequence_of(const Tensor& row_sequence, uint32_t row,
                                                const Tensor& table) {
  const uint32_t sequence = static_cast<uint32_t>(constant_integer(row_sequence, row, 0));
  check_sequence(sequence, row, table);
  return sequence;
}

// Position of a row in its sequence in this step; it must be below `limit`.
__device__ __forceinline__ void check_position(uint32_t position, uint32_t row, uint32_t limit) {
  if (position >= limit) stop_instruction(Fault::kPosition, row, 0, position, limit);
}
__device__ __forceinline__ uint32_t position_of(const Tensor& row_position, uint32_t row,
                                                uint32_t step, uint32_t limit) {
  const uint32_t position = static_cast<uint32_t>(constant_integer(row_position, row, 0)) + step;
  check_position(position, row, limit);
  return position;
}

// KV block in entry `column` of a sequence's row of the block table, as it is there; checked.
__device__ __forceinline__ uint32_t unchecked_kv_block(const Tensor& block_table, uint32_t sequence,
                                                       uint32_t column) {
  return static_cast<uint32_t>(constant_integer(block_table, sequence, column));
}
__device__ __forceinline__ void check_kv_block(uint32_t block, uint32_t sequence, uint32_t column,
                                               uint32_t num_blocks) {
  if (block >= num_blocks) stop_instruction(Fault::kKvBlock, sequence, column, block, num_blocks);
}
__device__ __forceinline__ uint32_t kv_block(const Tensor& block_table, uint32_t sequence,
                                             uint32_t column, uint32_t num_blocks) {
  const uint32_t block = unchecked_kv_block(block_table, sequence, column);
  check_kv_block(block, sequence, column, num_blocks);
  return block;
}

// Offset of element e within the row of a KV head at this slot. Rows of a swizzled cache are
// permuted in runs of 8 elements.
__device__ __forceinline__ uint32_t swizzled_element(bool swizzled, uint32_t slot, uint32_t e) {
  return swizzled ? (e / 8 ^ (slot & 7)) * 8 + e % 8 : e;
}

}  // namespace megavm
