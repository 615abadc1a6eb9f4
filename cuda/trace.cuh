// Timestamps of a worker's events, compiled in only for programs that are traced.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// Record the time of an event of the instruction.
__device__ __forceinline__ void note(const Launch& launch, const Stage& stage, Event event) {
  if constexpr (program::kTrace) {
    const uint64_t row = static_cast<uint64_t>(stage.trace_row) * kTraceColumns;
    launch.trace[row + static_cast<uint32_t>(event)] = ptx::global_timer();
  }
}

// Record which worker executes the instruction, and on which SM.
__device__ __forceinline__ void note_worker(const Launch& launch, const Stage& stage) {
  if constexpr (program::kTrace) {
    const uint64_t row = static_cast<uint64_t>(stage.trace_row) * kTraceColumns;
    const uint32_t worker = (program::kRanks > 1 ? launch.rank * gridDim.x : 0) + blockIdx.x;
    launch.trace[row + kWorkerColumn] =
        (static_cast<uint64_t>(ptx::sm_number()) + 1) << kSmShift | worker;
  }
}

}  // namespace megavm
