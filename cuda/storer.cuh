// The storer finishes what the consumers leave to it and publishes results: it signals the hint and
// the barrier of the instruction when all are stored, so that the consumers need not wait for that.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

class Storer {
 public:
  __device__ __forceinline__ explicit Storer(const Launch& launch) : launch_(launch) {}

  __device__ __forceinline__ void note(const Stage& stage, Event event) const {
    megavm::note(launch_, stage, event);
  }

  // Say that the results of an instruction are stored.
  __device__ __forceinline__ void publish(const Stage& stage) const {
    if (launch_.in_order) ptx::fence_gpu();
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
};

}  // namespace megavm
