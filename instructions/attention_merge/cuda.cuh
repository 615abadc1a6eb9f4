#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

template <>
struct Kernel<AttentionMerge> : KernelDefaults {
  static constexpr uint32_t kBatch = 8;  // splits in flight
  static constexpr float kLog2E = 1.4426950408889634f;

  // Factor of a split whose largest score is `m`; -inf marks a split without tokens.
  static __device__ __forceinline__ float factor(float m, float highest) {
    return m == -kInfinity ? 0.0f : ptx::exp2((m - highest) * kLog2E);
  }

  // The largest value of the warp's lanes.
  static __device__ __forceinline__ float largest_of_warp(float value) {
    // Map to integers in the order of the floats, reduce, and map back.
    int32_t key = __float_as_int(value);
    key = __reduce_max_sync(~0u, key ^ (key >> 31 & 0x7fffffff));
    return __int_as_float(key ^ (key >> 31 & 0x7fffffff));
  }

  // Heads with an even number of elements: a warp merges up to 32 elements of a head. It loads a
  // batch of splits in one round trip; lane i has the score of split i of the batch.
  template <bool kTagged>
  static __device__ __forceinline__ void merge_heads(const Operands<AttentionMerge>& in,
                                                     Consumer& consumer, uint32_t rows) {
    const uint32_t warp = consumer.warp();
    const AttentionMerge& inst = in.inst;
    const Tensor& partial = in[&AttentionMerge::partial];
    const Tensor& out = in[&AttentionMerge::out];
    const uint32_t d = inst.head_dim, heads = own_columns(out) / d, splits = inst.num_splits;
    const uint32_t parts = ceil_div(d, kLanes), lane = lane_index();
    const uint32_t per_row = (inst.head_end - inst.head_begin) * parts;
    using Score = Loaded<true, 2>;  // the largest score and the total of a split
    using Sum = Loaded<true, 1>;
    constexpr uint32_t kBytes = Sum::kColumnBytes;
    const auto store = [&](uint32_t item, float value) {
      const uint32_t row = inst.row_begin + item / per_row;
      const uint32_t head = inst.head_begin + item % per_row / parts;
      const uint32_t e = item % parts * kLanes + lane;
      const float next = __shfl_down_sync(~0u, value, 1);
      if (e >= d) return;
      // A lane stores its own float32; an even lane stores two bf16, its own and the next lane's.
      if (is_f32(out))
        write_element(out, row, head * d + e, value);
      else if (e % 2 == 0)
        write_pair(out, row, head * d + e, value, next, true);
    };
    // With tagged words, results stay in registers until all warps have read their inputs.
    static_assert(kLanes == attention_merge::kItemElements);
    constexpr uint32_t kHeld = attention_merge::kMaxItems / kNumConsumers;
    const uint32_t items = rows * per_row;
    const bool waits = (kTagged || is_tagged(out)) && items <= attention_merge::kMaxItems;
    float held[kHeld] = {};  // this warp's results, the latest first
#pragma unroll 1
    for (uint32_t item = warp; item < items; item += kNumConsumers) {
      const uint32_t row = inst.row_begin + item / per_row;
      const uint32_t head = inst.head_begin + item % per_row / parts;
      const uint32_t e = item % parts * kLanes + lane;
      const uint32_t base = head * (d + 2), stride = heads * (d + 2);  // stride: between splits
      const SourceRow from = Sum::row_of(partial, row, in.word(&AttentionMerge::partial));
      float highest = -kInfinity, total = 0.0f, sum = 0.0f;  // total: of this lane's splits
#pragma unroll 1
      for (uint32_t first = 0; first < splits; first += kBatch) {
        const uint32_t count = min_of(kBatch, splits - first);
        const bool has_score = lane < count, has_sums = e < d;
        // NOTE: no load is conditional: lanes without words of their own load others. With a
        // predicate for every load, some words would be checked before all loads are issued.
        const uint32_t score_column = base + (first + min_of(lane, count - 1)) * stride + d;
        const auto column = [&](uint32_t i) {
          return base + (first + min_of(i, count - 1)) * stride + min_of(e, d - 1);
        };
        Score score;
        Sum sums[kBatch];
        await(
            [&] {
              score.load(from.address + uint64_t{score_column} * kBytes);
#pragma unroll
              for (uint32_t i = 0; i < kBatch; ++i)
                sums[i].load(from.address + uint64_t{column(i)} * kBytes);
            },
            [&] {
              uint32_t missing = kNone;
#pragma unroll
              for (uint32_t i = 0; i < kBatch; ++i)
                if (kTagged && !sums[i].is_there()) missing = column(i);
              return !kTagged || score.is_there() ? missing : score_column;
            },
            [&](uint32_t missing) {
              if (missing == score_column)
                Score::find_missing(from, missing);
              else
                Sum::find_missing(from, missing);
            });
        if (item == warp && first == 0) consumer.note(in.stage, Event::kInputs);
        const float m = has_score ? score.value(0) : -kInfinity;
        const float before = highest;
        highest = fmaxf(highest, largest_of_warp(m));
        const float rescale = factor(before, highest), mine = factor(m, highest);
        total *= rescale, sum *= rescale;
        if (has_score) total = fmaf(mine, score.value(1), total);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (i >= count) continue;
          const float f = __shfl_sync(~0u, mine, i);
          if (has_sums) sum = fmaf(f, sums[i].value(0), sum);
        }
      }
#pragma unroll
      for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2)
        total += __shfl_xor_sync(~0u, total, offset);
      if (!waits) store(item, sum / total);
#pragma unroll
      for (uint32_t i = kHeld - 1; i > 0; --i) held[i] = held[i - 1];
      held[0] = sum / total;
    }
    if (!waits) return;
    consumer.sync();
    if (items <= warp) return;
#pragma unroll 1
    for (uint32_t item = warp + (items - 1 - warp) / kNumConsumers * kNumConsumers;;
         item -= kNumConsumers) {
      store(item, held[0]);
      if (item == warp) break;
#pragma unroll
      for (uint32_t i = 0; i + 1 < kHeld; ++i) held[i] = held[i + 1];
    }
  }

  // One element of the result.
  static __device__ __forceinline__ float merged(const Operands<AttentionMerge>& in, uint32_t row,
                                                 uint32_t column) {
    const Tensor& partial = in[&AttentionMerge::partial];
    const OperandWord word = in.word(&AttentionMerge::partial);
    const uint32_t d = in.inst.head_dim, heads = own_columns(in[&AttentionMerge::out]) / d;
    float highest = -kInfinity, total = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (uint32_t split = 0; split < in.inst.num_splits; ++split) {
      const uint32_t base = (split * heads + column / d) * (d + 2);
      const float part = read_element(partial, row, base + column % d, word);
      const float m = read_element(partial, row, base + d, word);
      const float l = read_element(partial, row, base + d + 1, word);
      const float before = highest;
      highest = fmaxf(highest, m);
      const float rescale = factor(before, highest), mine = factor(m, highest);
      total = fmaf(mine, l, total * rescale);
      sum = fmaf(mine, part, sum * rescale);
    }
    return sum / total;
  }

  // Heads with an odd number of elements: a thread merges the two elements of a bf16 word.
  static __device__ __forceinline__ void merge_elements(const Operands<AttentionMerge>& in,
                                                        uint32_t rows, uint32_t thread) {
    const AttentionMerge& inst = in.inst;
    const Tensor& out = in[&AttentionMerge::out];
    const uint32_t begin = inst.head_begin * inst.head_dim, end = inst.head_end * inst.head_dim;
    const uint32_t first_pair = begin / 2, per_row = ceil_div(end, 2) - first_pair;
    const bool whole_words = is_tagged(out) && !is_f32(out);
#pragma unroll 1
    for (uint32_t item = thread; item < rows * per_row; item += kNumConsumerThreads) {
      const uint32_t row = inst.row_begin + item / per_row;
      const uint32_t column = (first_pair + item % per_row) * 2;
      float x = 0.0f, y = 0.0f;
#pragma unroll 1
      for (uint32_t j = 0; j < 2; ++j) {
        float value = 0.0f;
        if (column + j >= begin && column + j < end)
          value = merged(in, row, column + j);
        else if (whole_words)  // a word of which one element is written keeps the other
          value = __uint_as_float(
              written_word(out, word_at(out, row, column)) << (j == 0 ? 16 : 0) & 0xffff0000u);
        (j == 0 ? x : y) = value;
      }
      if (whole_words || column >= begin)
        write_pair(out, row, column, x, y, whole_words || column + 1 < end);
      else
        write_element(out, row, column + 1, y);
    }
  }

  static __device__ __forceinline__ void consume(const Operands<AttentionMerge>& in,
                                                 Consumer& consumer) {
    const AttentionMerge& inst = in.inst;
    const uint32_t live = live_end(in, &AttentionMerge::row_count, inst.row_begin, inst.row_end);
    const uint32_t rows = live - inst.row_begin;
    consumer.wait_ready();
    if (inst.head_begin >= inst.head_end) return;
    if (inst.head_dim % 2)
      merge_elements(in, rows, consumer.thread());
    else if (is_tagged(in[&AttentionMerge::partial]))
      merge_heads<true>(in, consumer, rows);
    else
      merge_heads<false>(in, consumer, rows);
  }
};

}  // namespace megavm
