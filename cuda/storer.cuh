// The storer publishes results: when all consumers have stored theirs it signals the barrier of the
// instruction, so that the consumers need not wait for the fence.
#pragma once

#include "cuda/trace.cuh"

namespace megavm {

__device__ __forceinline__ void run_storer(const Launch& launch) {
  if (lane_index() != 0) return;
  StageCursor cursor;
  while (true) {
    cursor.resolved().wait(cursor.phase);
    const Stage& stage = stage_at(cursor.slot);
    if (stage.trace_row == kNone) return;
    set_current(stage.position, stage.step - launch.first_step);
    cursor.stored().wait(cursor.phase);
    if (stage.hint.signal != kNone)
      ptx::add_relaxed(launch.barriers + stage.hint.signal * kBarrierStride, 1);
    const uint32_t barrier = stage.words.header.signal;
    if (barrier != kNone && !launch.alone)
      ptx::add_release(launch.barriers + barrier * kBarrierStride, 1);
    cursor.released().arrive();
    cursor.advance();
  }
}

}  // namespace megavm
