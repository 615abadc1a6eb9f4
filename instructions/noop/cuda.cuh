#pragma once

#include "cuda/kernel.cuh"

namespace megavm {

template <>
struct Kernel<Noop> : KernelDefaults {
  static __device__ __forceinline__ void consume(const Operands<Noop>&, Consumer& consumer) {
    consumer.wait_ready();
  }
};

}  // namespace megavm
