// Sample on the GPU: the largest logit, or a choice from adjusted logits.
#pragma once

#include "instructions/sample/sampler.cuh"

namespace megavm {

template <>
struct Kernel<Sample> : KernelDefaults {
  using Row = Choice<Sample>;

  static constexpr uint32_t kBatch = 8;  // values, or pairs, that a lane has in flight

  // One warp chooses the token of a row: the largest of `peaks`, or of `logits`.
  template <bool kPeaks>
  static __device__ __forceinline__ void take_largest(const Row& row) {
    const Operands<Sample>& in = row.in;
    constexpr uint32_t kColumns = kPeaks ? 2 : 1;  // value, column
    const auto operand = kPeaks ? &Sample::peaks : &Sample::logits;
    const Tensor& values = in[operand];
    const uint32_t count = values.columns / kColumns, lane = lane_index();
    const bool tagged = is_tagged(values);
    using Source = Loaded<true, kColumns>;
    const SourceRow from = Source::row_of(values, row.row, in.word(operand));
    uint64_t best = 0;
    bool unordered = false;
#pragma unroll 1
    for (uint32_t first = lane; first < count; first += kBatch * kLanes) {
      Source raw[kBatch] = {};
      const auto exists = [&](uint32_t i) { return first + i * kLanes < count; };
      const auto column = [&](uint32_t i) { return (first + i * kLanes) * kColumns; };
      await(from, raw, exists, column, tagged);
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (!exists(i)) continue;
        const float value = raw[i].value(0);
        unordered |= value != value;
        const uint32_t token =
            kPeaks ? static_cast<uint32_t>(raw[i].value(kColumns - 1)) : first + i * kLanes;
        const uint64_t other = candidate(value, token);
        best = other > best ? other : best;
      }
    }
    // All lanes stop together: one that went on would give the fault another instruction.
    if (__any_sync(~0u, unordered)) stop_instruction(Fault::kNanLogits, row.row, 0, 0, 0);
    best = largest_of_warp(best);
    if (lane == 0)
      ptx::store(element_at(in[&Sample::tokens], row.sequence, row.position + 1), token_of(best));
  }

  // One warp waits for the words of a row that chooses nothing (Sample.tag_order).
  static __device__ __forceinline__ void await_words(const Operands<Sample>& in, uint32_t row) {
    const auto operand = in.has(&Sample::peaks) ? &Sample::peaks : &Sample::logits;
    const Tensor& values = in[operand];
    if (!is_tagged(values)) return;
    using Source = Loaded<true, 1>;
    const SourceRow from = Source::row_of(values, row, in.word(operand));
#pragma unroll 1
    for (uint32_t first = lane_index(); first < values.columns; first += kBatch * kLanes) {
      Source raw[kBatch] = {};
      megavm::await(
          from, raw, [&](uint32_t i) { return first + i * kLanes < values.columns; },
          [&](uint32_t i) { return first + i * kLanes; }, true);
    }
  }

  // Whether the choice is one from adjusted logits. Most programs have one kind of choice, and code
  // for no other.
  static __device__ __forceinline__ bool is_sampled(const Operands<Sample>& in) {
    if constexpr (sample::kAnySegments && sample::kAnyLargest) return in.has(&Sample::segments);
    return sample::kAnySegments;
  }

  static __device__ __forceinline__ void consume(const Operands<Sample>& in, Consumer& consumer) {
    const Sample& inst = in.inst;
    const uint32_t live = live_end(in, &Sample::logit_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const Row choice(in, row);
      if (!choice.enabled) continue;
      if (is_sampled(in)) {
        Sampler sampler(choice, consumer);
        if (!ready) consumer.wait_ready();
        sampler.run();
      } else {
        if (!ready) consumer.wait_ready();
        if ((row - inst.row_begin) % kNumConsumers == consumer.warp()) {
          if (in.has(&Sample::peaks))
            take_largest<true>(choice);
          else
            take_largest<false>(choice);
        }
      }
      ready = true;
    }
    if (ready) return;
    consumer.wait_ready();
    if (!is_sampled(in) && consumer.warp() == 0) await_words(in, inst.row_begin);
  }
};

}  // namespace megavm
