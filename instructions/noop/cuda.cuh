#pragma once

#include "cuda/kernel.cuh"

namespace megavm {

template <>
struct Kernel<Noop> : KernelDefaults {};

}  // namespace megavm
