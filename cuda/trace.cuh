// Timestamps of what a worker does, compiled in only when the program asks for it.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// Note when an event of the instruction is.
__device__ __forceinline__ void note(const Launch& launch, const Stage& stage, Event event) {
  if constexpr (program::kTrace) {
    const uint64_t row = static_cast<uint64_t>(stage.trace_row) * kTraceColumns;
    launch.trace[row + static_cast<uint32_t>(event)] = ptx::global_timer();
  }
}

// Note who executes the instruction.
__device__ __forceinline__ void note_worker(const Launch& launch, const Stage& stage) {
  if constexpr (program::kTrace) {
    const uint64_t row = static_cast<uint64_t>(stage.trace_row) * kTraceColumns;
    launch.trace[row + kWorkerColumn] = blockIdx.x;
  }
}

}  // namespace megavm
