#pragma once

#include "instructions/attention/any.cuh"
#include "instructions/attention/fast.cuh"

namespace megavm {

// Which of the two a program uses.
constexpr bool kFastAttention = attention::kBf16 &&
                                (attention::kHeadDim == 64 || attention::kHeadDim == 128) &&
                                attention::kGroup <= 8 && attention::kBlockSize % 8 == 0 &&
                                (attention::kBlockSize & (attention::kBlockSize - 1)) == 0;

template <bool kFast>
struct ChosenAttention : FastAttention<attention::kHeadDim> {};
template <>
struct ChosenAttention<false> : AnyAttention {};

template <>
struct Kernel<Attention> : ChosenAttention<kFastAttention> {};

}  // namespace megavm
