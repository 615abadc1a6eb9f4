// Tagged words that the storer handles, because the kernel of the instruction does not.
//
// The rule of all machines: which rows are live decides what an instruction computes, never what it
// waits for or announces. Before its first store that other workers can see, an instruction waits
// for every tagged word that it declares as read. When it has read everything, it tags every word
// that it declares as written; the values of dead rows are unspecified. So the order that the
// verifier proves holds for any number of live rows.
//
// Kernels process live rows only, and kernels that pass over their work several times store first
// results while they still read. The storer does the rest:
//   - If the kernel keeps the rule for live rows (Instruction.tag_order), the storer handles the
//     words of dead rows.
//   - Otherwise it handles all words ("by machine"). The instruction begins when the storer has
//     found every word that it reads. The kernel stores its words in the copies that it would make
//     empty, where no reader looks; at the end the storer publishes them.
//
// If some rows are live, no warp polls the words that an instruction reads of dead rows, as long as
// all rows that it reads have the same writers: the words of a live row prove those of the dead
// rows. Where the writers differ (vm/cuda/exchange.py), the storer waits for the words of dead rows
// before the instruction begins.
#pragma once

#include "cuda/storer.cuh"

namespace megavm {

// Call use(operand, address, row, word) for this lane's share of the tagged words that the
// instruction reads (or, with `written`, writes), from `first_row` on.
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
      use(region.operand, base_of(tensor) + 4 * (uint64_t{row} * row_words + word), row, word);
    }
  }
  __syncwarp();
}

// Wait for the words that the instruction reads, from `first_row` on, in place of the consumers.
__device__ __forceinline__ void await_tagged_rows(const Launch& launch, const Stage& stage,
                                                  uint32_t first_row) {
  each_tagged_word(launch, stage, false, first_row,
                   [&](OperandWord operand, uint64_t address, uint32_t row, uint32_t word) {
                     read_word(address, operand, row, word);
                   });
}

// Called when an instruction begins: wait for the words that it reads, or those of dead rows, if
// the storer does so. Until then the instruction is not ready.
__device__ __forceinline__ void begin_tagged_rows(const Launch& launch, const Stage& stage,
                                                  const StageCursor& cursor) {
  if (!awaits_words(stage)) return;
  // NOTE: by then no consumer may have waited for anything in this step.
  if (begins_step(launch, stage)) {
    const Awaited end = Awaited::end_before(launch, stage.step - launch.first_step);
    while (!end.is_over()) __nanosleep(20);
    __syncwarp();
  }
  await_tagged_rows(launch, stage, is_by_machine(stage) ? 0 : stage.tagged_row);
  if (lane_index() == 0) cursor.ready().arrive();
  __syncwarp();
}

// Called when its results are stored: publish the words from `first_row` on. Those of dead rows may
// have any value.
// If no row is live, no warp has waited for the words that the instruction reads, so wait first.
__device__ __forceinline__ void end_tagged_rows(const Launch& launch, const Stage& stage,
                                                uint32_t first_row) {
  if (!program::kAnyTaggedRows || __builtin_expect(first_row == kNone, 1)) return;
  // Both passes share the loop: code beside the storer's path costs every instruction time.
  const bool awaited = is_by_machine(stage) || first_row != stage.exchange.row_begin;
#pragma unroll 1
  for (uint32_t written = awaited; written < 2; ++written)
    each_tagged_word(launch, stage, written, first_row,
                     [&](OperandWord operand, uint64_t address, uint32_t row, uint32_t word) {
                       if (!written) {
                         read_word(address, operand, row, word);
                         return;
                       }
                       const Tensor& tensor = stage.tensors[operand];
                       const uint32_t value = written_word(tensor, address);
                       if (is_by_machine(stage)) address ^= kOtherHalf;
                       store_shares(is_gathered(tensor), address,
                                    [&](uint64_t to) { publish(to, value); });
                     });
}

}  // namespace megavm
