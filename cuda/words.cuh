// Words: how workers see a tagged tensor.
//
// A tagged tensor has kCopies copies, 1 << kCopyShift bytes apart. Each is stored like a tensor
// that is not tagged. Step n of the programs that exchange the tensor uses copy n % kCopies.
//
// A word has four bytes. It is *empty* until an instruction stores it, and a reader polls it until
// then. The instruction also empties the same word of the step after the next. So reading is the
// wait, and a word has no room for a tag.
//
// A worker begins a step when all workers have ended the last step but one (run_waiter in
// controller.cuh). So nobody reads a word that is emptied, which is two steps old; and words that
// were emptied are seen empty, as two steps lie between, with a release and an acquire.
#pragma once

#include "cuda/config.cuh"

namespace megavm {

constexpr uint64_t kOtherHalf = uint64_t{kCopies / 2} << kCopyShift;
static_assert(kCopies == 4 && kCopyShift >= 32, "the copy is a number in the upper half");

// A value that is stored is not the empty word. That one is NaN as float32, and two of bf16.
__device__ __forceinline__ uint32_t not_empty(uint32_t value) {
  return value == kEmptyWord ? kEmptyWord >> 1 : value;
}

// Store a word, or two neighbours.
__device__ __forceinline__ void publish(uint64_t address, uint32_t value, bool active = true) {
  ptx::store_word(address, not_empty(value), active);
  ptx::store_word(address ^ kOtherHalf, kEmptyWord, active);
}
__device__ __forceinline__ void publish2(uint64_t address, uint32_t first, uint32_t second,
                                         bool active = true) {
  ptx::store_word2(address, not_empty(first), not_empty(second), active);
  ptx::store_word2(address ^ kOtherHalf, kEmptyWord, kEmptyWord, active);
}

}  // namespace megavm
