#pragma once

#include "instructions/attention/any.cuh"
#include "instructions/attention/fast.cuh"

namespace megavm {

template <bool kFast>
struct ChosenAttention : FastAttention<attention::kHeadDim> {};
template <>
struct ChosenAttention<false> : AnyAttention {};

template <>
struct Kernel<Attention> : ChosenAttention<attention::kFast != 0> {};

}  // namespace megavm
