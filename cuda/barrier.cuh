// Barriers: counters in global memory, between workers. Instructions signal them in every step;
// they are never reset.
#pragma once

#include "cuda/stage.cuh"

namespace megavm {

// Whether the instructions of all ranks signal a barrier.
__device__ __forceinline__ bool all_ranks_signal(const Launch& launch, uint32_t number) {
  return program::kRanks > 1 && (number < launch.shared_barriers || number >= launch.step_barriers);
}

// The barrier that workers signal when they have ended a step of the launch.
__device__ __forceinline__ uint32_t step_barrier(const Launch& launch, uint32_t step) {
  return launch.step_barriers + (launch.steps_before + step) % 2;
}

// Whether a worker waits for the end of an earlier step before this instruction.
__device__ __forceinline__ bool begins_step(const Launch& launch, const Stage& stage) {
  return launch.step_barriers != kNone && !launch.alone && (stage.position == 0 || launch.dynamic);
}

// A counter and the target that it must reach.
struct Awaited {
  const uint32_t* counter = nullptr;
  uint32_t barrier = 0;
  uint32_t target = 0;
  bool is_shared = false;  // other ranks signal it too

  Awaited() = default;

  // The target: all signals of earlier steps, and `more` signals of this one.
  __device__ __forceinline__ Awaited(const Launch& launch, uint32_t number, uint32_t step,
                                     uint32_t more)
      : counter(launch.barriers + number * kBarrierStride),
        barrier(number),
        target((launch.steps_before + step) * launch.signals[number] + more),
        is_shared(all_ranks_signal(launch, number)) {}

  // The end of step `step` - 2 of the launch. Even and odd steps have a barrier each: nobody ends
  // the next step of the same kind before this is over, so that the number of signals tells that
  // all workers have given theirs.
  static __device__ __forceinline__ Awaited end_before(const Launch& launch, uint32_t step) {
    Awaited awaited;
    awaited.barrier = step_barrier(launch, step);
    awaited.counter = launch.barriers + awaited.barrier * kBarrierStride;
    const bool is_even = awaited.barrier == launch.step_barriers;
    // Every other step of the launch has signalled this one.
    awaited.target =
        (is_even ? launch.even_steps : launch.odd_steps) + step / 2 * launch.step_signals;
    awaited.is_shared = program::kRanks > 1;
    return awaited;
  }

  // Whether the counter has reached the target. The load acquires, so the signallers' stores are
  // visible then. Stops this warp when the worker is stopping.
  __device__ __forceinline__ bool is_over() const {
    const uint32_t value = acquired();
    if (has_reached(value)) return true;
    if (__builtin_expect(is_stopping(), 0)) stop(FaultKind::kBarrier, barrier, 0, 0, value, target);
    return false;
  }

  // The same, but it never stops the warp.
  __device__ __forceinline__ bool is_over_quietly() const { return has_reached(acquired()); }

  // The same for hints: relaxed, so it orders nothing, and it never stops the warp.
  __device__ __forceinline__ bool is_likely() const {
    return has_reached(ptx::load_relaxed(counter));
  }

 private:
  __device__ __forceinline__ uint32_t acquired() const {
    return is_shared ? ptx::load_acquire_system(counter) : ptx::load_acquire(counter);
  }
  // Counters wrap around, so compare by difference.
  __device__ __forceinline__ bool has_reached(uint32_t value) const {
    return static_cast<int32_t>(value - target) >= 0;
  }
};

}  // namespace megavm
