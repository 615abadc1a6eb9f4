// Sample on the GPU: greedy choices from the peaks, the others by Sampler.
#pragma once

#include "instructions/sample/sampler.cuh"

namespace megavm {

template <>
struct Kernel<Sample> : NoPages {
  static constexpr uint32_t kBatch = 8;  // pairs that a lane has in flight

  // One warp chooses the token of a row: the largest of `peaks`.
  static __device__ __forceinline__ void take_largest(const Choice& choice) {
    const Operands<Sample>& in = choice.in;
    const Tensor& peaks = in[&Sample::peaks];
    const OperandWord operand = in.word(&Sample::peaks);
    const uint32_t pairs = peaks.columns / 2, lane = lane_index(), tag = in.tag();
    const bool tagged = is_tagged(peaks);
    uint64_t best = 0;
#pragma unroll 1
    for (uint32_t first = lane; first < pairs; first += kBatch * kLanes) {
      ptx::Words4 raw[kBatch] = {};  // value, its tag, column, its tag
      while (true) {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          const uint32_t column = (first + i * kLanes) * 2;
          if (first + i * kLanes >= pairs) continue;
          if (tagged) {
            raw[i] = ptx::load_relaxed_tagged2(word_at(peaks, choice.row, column));
          } else {
            raw[i].x = ptx::load_relaxed1(element_at(peaks, choice.row, column));
            raw[i].z = ptx::load_relaxed1(element_at(peaks, choice.row, column + 1));
          }
        }
        if (!tagged) break;
        uint32_t found = tag, wrong = 0;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (first + i * kLanes >= pairs || (raw[i].y == tag && raw[i].w == tag)) continue;
          found = raw[i].y != tag ? raw[i].y : raw[i].w;
          wrong = (first + i * kLanes) * 2;
        }
        if (found == tag) break;
        if (is_stopping()) stop_at_tag(operand, choice.row, wrong, found, tag);
      }
      bool unordered = false;
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (first + i * kLanes >= pairs) continue;
        const float value = __uint_as_float(raw[i].x);
        unordered |= value != value;
        const uint64_t other = candidate(value, static_cast<uint32_t>(__uint_as_float(raw[i].z)));
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
