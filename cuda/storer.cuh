// The storer finishes what the consumers leave to it and publishes results: it signals the hint and
// the barrier of the instruction when all are stored, so that the consumers need not wait for that.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

class Storer {
 public:
  __device__ __forceinline__ explicit Storer(const Launch& launch) : launch_(launch) {}

  __device__ __forceinline__ void begin_notes(const Stage& stage) { notes_.begin(stage); }
  __device__ __forceinline__ void note(Event event) { notes_.add(event); }
  __device__ __forceinline__ void store_notes() const { notes_.store(launch_); }

  // Say that the results of an instruction are stored.
  __device__ __forceinline__ void publish(const Stage& stage) const {
    if (stage.hint.signal != kNone)
      ptx::add_relaxed(launch_.barriers + stage.hint.signal * kBarrierStride, 1);
    const uint32_t barrier = stage.words.header.signal;
    if (barrier != kNone && !launch_.alone)
      ptx::add_release(launch_.barriers + barrier * kBarrierStride, 1);
  }

  StageCursor stage;
  SumsCursor sums;  // the next block of sums

 private:
  const Launch& launch_;
  Notes notes_;
};

}  // namespace megavm
