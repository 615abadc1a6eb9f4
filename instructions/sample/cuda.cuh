// Sample on the GPU: greedy choices from the peaks, the others by Sampler.
#pragma once

#include "instructions/sample/sampler.cuh"

namespace megavm {

template <>
struct Kernel<Sample> : KernelDefaults {
  static constexpr uint32_t kBatch = 8;  // pairs that a lane has in flight

  // One warp chooses the token of a row: the largest of `peaks`.
  static __device__ __forceinline__ void take_largest(const Choice& choice) {
    const Operands<Sample>& in = choice.in;
    const Tensor& peaks = in[&Sample::peaks];
    const uint32_t pairs = peaks.columns / 2, lane = lane_index();
    const bool tagged = is_tagged(peaks);
    using Pair = Loaded<true, true, 2>;  // value, column
    const SourceRow from =
        Pair::row_of(peaks, choice.row, in.tag(), in.word(&Sample::peaks), tagged);
    uint64_t best = 0;
#pragma unroll 1
    for (uint32_t first = lane; first < pairs; first += kBatch * kLanes) {
      Pair raw[kBatch] = {};
      const auto exists = [&](uint32_t i) { return first + i * kLanes < pairs; };
      const auto column = [&](uint32_t i) { return (first + i * kLanes) * 2; };
      await(from, raw, exists, column, tagged);
      bool unordered = false;
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (!exists(i)) continue;
        const float value = raw[i].value(0, tagged);
        unordered |= value != value;
        const uint64_t other = candidate(value, static_cast<uint32_t>(raw[i].value(1, tagged)));
        best = other > best ? other : best;
      }
      if (unordered) stop_instruction(Fault::kNanLogits, choice.row, 0, 0, 0);
    }
    best = largest_of_warp(best);
    if (lane == 0) choice.append(token_of(best));
  }

  static __device__ __forceinline__ void consume(const Operands<Sample>& in, Consumer& consumer) {
    const Sample& inst = in.inst;
    const uint32_t live = live_end(in, &Sample::logit_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const Choice choice(in, row);
      if (!choice.enabled) continue;
      if (!ready) consumer.wait_ready();
      ready = true;
      if (in.has(&Sample::peaks) && choice.greedy && !choice.penalised && choice.masked == 0) {
        if ((row - inst.row_begin) % kNumConsumers == consumer.warp()) take_largest(choice);
      } else {
        Sampler(choice, consumer).run();
      }
    }
    if (!ready) consumer.wait_ready();
  }
};

}  // namespace megavm
