// Timestamps of what a worker does, compiled in only when the program asks for it.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// What a role notes of an instruction, in nanoseconds of the global timer. The trace of a launch is
// uint64 [instructions of all queues x steps, kNumEvents]: worker by worker, step by step.
enum class Event : uint32_t {
  kResolved = 0,   // controller: the instruction is decoded
  kReady = 1,      // waiter: the waits of its header are over
  kLoadBegin = 2,  // loader: before its first copy
  kLoadEnd = 3,    // loader: after its last copy was issued
  kBegin = 4,      // consumers: they turn to it
  kInputs = 5,     // consumers: its inputs are there
  kComputed = 6,   // consumers: its sums are complete
  kEnd = 7,        // consumers or storer: its results are stored
  kArrived = 8,    // consumers: they have seen its last page
  kSignalled = 9,  // storer: its barrier is signalled
  kWorker = 10,    // no time, but the worker that executes it
};
constexpr uint32_t kNumEvents = 11;

__device__ __forceinline__ void note(const Launch& launch, const Stage& stage, Event event) {
  if constexpr (program::kTrace) {
    const uint64_t row = static_cast<uint64_t>(stage.trace_row) * kNumEvents;
    launch.trace[row + static_cast<uint32_t>(event)] =
        event == Event::kWorker ? blockIdx.x : ptx::global_timer();
  }
}

}  // namespace megavm
