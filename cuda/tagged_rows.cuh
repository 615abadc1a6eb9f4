// Tagged words that the kernel of an instruction does not see to itself.
//
// The rule of all machines: which rows are live decides what is computed, never what an instruction
// waits for or announces. It waits for every tagged word that it declares as read before its first
// store that others see, and when it has read everything it tags every word that it declares as
// written; values of dead rows are unspecified. So the order that the verifier proves holds for any
// number of live rows.
//
// Kernels look at live rows only, and those that go over their work several times store the first
// results while they still read. The storer therefore does the rest: for the dead rows of an
// instruction whose kernel keeps the rule for live ones (Instruction.tag_order), and for all rows
// of the others. Those begin when the storer has found all their words, and store their own with a
// tag that nobody waits for; in the end the storer tags them.
//
// Where some rows are live, nobody looks at the words of the dead ones. The words of a live row
// speak for them, because all rows that the instruction reads have the same writers; where they
// have not, vm/cuda/exchange.py leaves all words to the storer.
#pragma once

#include "cuda/storer.cuh"

namespace megavm {

// Call use(operand, address, row, word) for this lane's share of the words of the regions that the
// instruction reads, or writes, from `first_row` on.
template <class Use>
__device__ __forceinline__ void each_tagged_word(const Launch& launch, const Stage& stage,
                                                 bool written, uint32_t first_row, Use&& use) {
#pragma unroll 1
  for (uint32_t i = 0; i < stage.exchange.num_regions; ++i) {
    const TaggedRegion& region = launch.regions[stage.exchange.regions_begin + i];
    if ((region.written != 0) != written) continue;
    const Tensor& tensor = stage.tensors[region.operand];
    const uint32_t row_begin = max_of(region.row_begin, first_row);
    const uint32_t rows = region.row_end > row_begin ? region.row_end - row_begin : 0;
    const uint32_t width = region.word_end - region.word_begin;
    const uint32_t row_words = tensor.columns / (4 / element_bytes(tensor));
#pragma unroll 1
    for (uint32_t item = lane_index(); item < rows * width; item += kLanes) {
      const uint32_t row = row_begin + item / width, word = region.word_begin + item % width;
      use(region.operand, base_of(tensor) + 8 * (uint64_t{row} * row_words + word), row, word);
    }
  }
  __syncwarp();
}

// Wait for words that nobody else looks at.
__device__ __forceinline__ void await_tagged_rows(const Launch& launch, const Stage& stage,
                                                  uint32_t first_row) {
  each_tagged_word(launch, stage, false, first_row,
                   [&](OperandWord operand, uint64_t address, uint32_t row, uint32_t word) {
                     read_tagged(address, stage.tag, operand, row, word);
                   });
}

// When an instruction begins whose words the storer sees to: wait for them, and let it go on.
__device__ __forceinline__ void begin_tagged_rows(const Launch& launch, Stage& stage) {
  if (!is_by_machine(stage)) return;
  await_tagged_rows(launch, stage, 0);
  if (lane_index() == 0) ptx::store_shared_release(ptx::shared_address(&stage.is_held), 0);
  __syncwarp();
}

// When its results are stored: tag the words from `first_row` on, with the values that they have.
// Where no row is live, nobody has looked at the words that the instruction reads.
__device__ __forceinline__ void end_tagged_rows(const Launch& launch, const Stage& stage,
                                                uint32_t first_row) {
  if (__builtin_expect(first_row == kNone, 1)) return;
  if (!is_by_machine(stage) && first_row == stage.exchange.row_begin)
    await_tagged_rows(launch, stage, first_row);
  each_tagged_word(
      launch, stage, true, first_row, [&](OperandWord, uint64_t address, uint32_t, uint32_t) {
        ptx::store_relaxed_tagged(address, ptx::load_relaxed_tagged(address).x, stage.tag);
      });
}

}  // namespace megavm
