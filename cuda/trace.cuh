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

// What one thread notes of an instruction that others wait for. It stays in registers until the
// instruction is over: stores on the way would make it longer. Nothing where nothing is traced.
template <bool kTrace>
class NotesOf {
 public:
  __device__ __forceinline__ void begin(const Stage& stage) {
    row_ = static_cast<uint64_t>(stage.trace_row) * kNumEvents;
#pragma unroll
    for (uint64_t& time : times_) time = 0;
  }

  __device__ __forceinline__ void add(Event event) {
    times_[static_cast<uint32_t>(event)] = ptx::global_timer();
  }

  __device__ __forceinline__ void store(const Launch& launch) const {
#pragma unroll
    for (uint32_t i = 0; i < kNumEvents; ++i)
      if (times_[i] != 0) launch.trace[row_ + i] = times_[i];
  }

 private:
  uint64_t row_;
  uint64_t times_[kNumEvents];  // 0: not noted
};
template <>
class NotesOf<false> {
 public:
  __device__ __forceinline__ void begin(const Stage&) {}
  __device__ __forceinline__ void add(Event) {}
  __device__ __forceinline__ void store(const Launch&) const {}
};
using Notes = NotesOf<program::kTrace>;

}  // namespace megavm
