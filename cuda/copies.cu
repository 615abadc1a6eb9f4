// Words of a table at any places, to and from lists that may be in the host's memory.
// vm/cuda/copies.py launches these kernels with one thread for each word.
#include "cuda/integers.cuh"

namespace megavm {

extern "C" __global__ void megavm_gather(uint32_t* list, const uint32_t* table,
                                         const int64_t* places, uint32_t count) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) list[i] = table[places[i]];
}

extern "C" __global__ void megavm_scatter(const uint32_t* list, uint32_t* table,
                                          const int64_t* places, uint32_t count) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) table[places[i]] = list[i];
}

}  // namespace megavm
