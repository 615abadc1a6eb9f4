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
// Where some rows are live, the words of dead rows need not be looked at: the host lets only
// instructions be which read words of the same writers in all their rows (vm/cuda_exchange.py), so
// that those of a live row speak for all.
#pragma once

#include "cuda/storer.cuh"

namespace megavm {

// Whether the storer has to see to words of the running instruction. Of most it has not.
__device__ __forceinline__ bool has_tagged_rows(const Stage& stage) {
  return __builtin_expect(stage.num_regions != 0, 0);
}

// Call use(operand, address, row, word) for this lane's share of the words of the regions that the
// instruction reads, or writes.
template <class Use>
__device__ __forceinline__ void each_tagged_word(const Launch& launch, const Stage& stage,
                                                 bool written, Use&& use) {
#pragma unroll 1
  for (uint32_t i = 0; i < stage.num_regions; ++i) {
    const TaggedRegion& region = launch.regions[stage.regions_begin + i];
    if ((region.written != 0) != written) continue;
    const Tensor& tensor = stage.tensors[region.operand];
    const uint32_t row_begin = max_of(region.row_begin, stage.first_row);
    const uint32_t rows = region.row_end > row_begin ? region.row_end - row_begin : 0;
    const uint32_t width = region.word_end - region.word_begin;
    const uint32_t row_words = tensor.columns / (4 / element_bytes(tensor));
#pragma unroll 1
    for (uint32_t item = lane_index(); item < rows * width; item += kLanes) {
      const uint32_t row = row_begin + item / width, word = region.word_begin + item % width;
      use(region.operand, base_of(tensor) + 8 * (uint64_t{row} * row_words + word), row, word);
    }
  }
}

// When the instruction begins: wait for the words that nobody else looks at.
__device__ __forceinline__ void await_tagged_rows(const Launch& launch, Stage& stage) {
  if (!stage.awaits_words) return;
  each_tagged_word(launch, stage, false,
                   [&](OperandWord operand, uint64_t address, uint32_t row, uint32_t word) {
                     read_tagged(address, stage.tag, operand, row, word);
                   });
  __syncwarp();
  // Let the waiter go on.
  if (lane_index() == 0) ptx::store_shared_release(ptx::shared_address(&stage.is_held), 0);
  __syncwarp();
}

// When its results are stored: tag the words, with the values that they have.
__device__ __forceinline__ void publish_tagged_rows(const Launch& launch, const Stage& stage) {
  each_tagged_word(launch, stage, true, [&](OperandWord, uint64_t address, uint32_t, uint32_t) {
    ptx::store_relaxed_tagged(address, ptx::load_relaxed_tagged(address).x, stage.tag);
  });
  __syncwarp();
}

}  // namespace megavm
