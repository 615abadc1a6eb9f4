// Tagged words that the kernel of an instruction does not see to itself.
//
// The rule of all machines: which rows are live decides what is computed, never what an instruction
// waits for or announces. It waits for every tagged word that it declares as read before its first
// store that others see, and when it has read everything it tags every word that it declares as
// written; values of dead rows are unspecified. So the order that the verifier proves holds for any
// number of live rows.
//
// Kernels look at live rows only, and those that go over their work several times store the first
// results while they still read. Consumers therefore do the rest here, before a kernel begins and
// when it has ended: for the dead rows of an instruction whose kernel keeps the rule for live ones
// (Instruction.tag_order), and for all rows of the others, whose kernels store their words with a
// tag that nobody waits for. Of an instruction whose kernel reads late the verifier assumes less.
#pragma once

#include "cuda/consumer.cuh"

namespace megavm {

// Whether the running instruction has such words. Most have none.
__device__ __forceinline__ bool has_tagged_rows(const Stage& stage) {
  return __builtin_expect(stage.num_regions != 0, 0);
}

// Call use(tensor, address, row, word) for this thread's share of the words of the regions that the
// instruction reads, or writes.
template <class Use>
__device__ __forceinline__ void each_tagged_word(const Launch& launch, const Stage& stage,
                                                 bool written, uint32_t thread, Use&& use) {
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
    for (uint32_t item = thread; item < rows * width; item += kNumConsumerThreads) {
      const uint32_t row = row_begin + item / width, word = region.word_begin + item % width;
      use(region.operand, base_of(tensor) + 8 * (uint64_t{row} * row_words + word), row, word);
    }
  }
}

// Before the kernel: wait for the words.
__device__ __forceinline__ void await_tagged_rows(const Launch& launch, const Stage& stage,
                                                  Consumer& consumer) {
  consumer.wait_ready();
  each_tagged_word(launch, stage, false, consumer.thread(),
                   [&](OperandWord operand, uint64_t address, uint32_t row, uint32_t word) {
                     read_tagged(address, stage.tag, operand, row, word);
                   });
  consumer.sync();
}

// After it: tag the words, with the values that they have.
__device__ __forceinline__ void publish_tagged_rows(const Launch& launch, const Stage& stage,
                                                    Consumer& consumer) {
  if constexpr (kStorerFinishes) consumer.wait_all_sums();
  consumer.sync();
  each_tagged_word(launch, stage, true, consumer.thread(),
                   [&](OperandWord, uint64_t address, uint32_t, uint32_t) {
                     ptx::store_relaxed_tagged(address, ptx::load_relaxed_tagged(address).x,
                                               stage.tag);
                   });
}

}  // namespace megavm
