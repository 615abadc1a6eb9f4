#pragma once

#include "cuda/pipelines/plan.cuh"

namespace megavm {

struct MatmulPlan : ProductPlan<Matmul> {
  static constexpr uint32_t kPairs = 1;  // an item is two columns
  static constexpr uint32_t kItemsPerUnit = kUnitRows / 2;
  static_assert(matmul::kPartColumns % kTileColumns == 0, "parts begin with tiles");
  static constexpr uint32_t kHalfItems = 2 * kItemsPerUnit;

  uint32_t first_unit;
  float result[2];  // the last finished item has these two sums
  float squares = 0.0f;
  uint32_t result_column = kNone;

  __device__ __forceinline__ explicit MatmulPlan(const Stage& stage)
      : ProductPlan(stage), first_unit(in.inst.column_begin / kUnitRows) {}

  __device__ __forceinline__ ProductInput input() const {
    uint32_t k = in[&Matmul::weight].columns;
    if (program::kAnyPartOfK) k = min_of(in.inst.part_k, k - first_k());
    ProductInput p = input_of(k, ceil_div(in.inst.column_end, kUnitRows) - first_unit, kHalfItems);
    p.wants_end = in.has(&Matmul::peaks);
    p.row_index = word_if_there(&Matmul::row_index);
    p.x_rows = in.inst.x_rows;
    p.first_k = first_k();
    return p;
  }
  __device__ __forceinline__ uint32_t first_k() const { return in.inst.part * in.inst.part_k; }
  // The column of `out` that receives column 0 of this part: each part but the first has its own
  // columns.
  __device__ __forceinline__ uint32_t out_begin() const {
    if (!program::kAnyPartOfK || in.inst.part == 0) return 0;
    return (in.inst.part - 1) * in[&Matmul::weight].rows;
  }
  __device__ __forceinline__ WeightRows weights() const {
    const Tensor& weight = in[&Matmul::weight];
    const uint64_t skipped = program::kAnyPartOfK ? first_k() / kTileColumns * kTileBytes : 0;
    const uint64_t from = base_of(weight) + first_unit * unit_bytes(weight) + skipped;
    return {{from, 0, 0}, {kNone, kNone, kNone}, false, unit_bytes(weight)};
  }

  static __device__ __forceinline__ void place(uint32_t item, uint32_t, uint32_t& unit,
                                               uint32_t& column) {
    unit = item / kItemsPerUnit;
    column = item % kItemsPerUnit * 2;
  }
  __device__ __forceinline__ uint32_t column_of(uint32_t item, uint32_t unit) const {
    return (first_unit + unit) * kUnitRows + item * 2;
  }

  // Whether one load fetches the residual of an item.
  __device__ __forceinline__ bool has_paired_residual() const {
    return in.has(&Matmul::residual) && is_f32(in[&Matmul::residual]) &&
           in[&Matmul::residual].columns % 2 == 0;
  }

  __device__ __forceinline__ void prefetch(uint32_t item, uint32_t unit, uint32_t row,
                                           Prefetched& out) const {
    const uint32_t column = column_of(item, unit);
    load_bias(in, &Matmul::bias, column, out.value[0], out.value[1]);
    out.number[0] = out.number[1] = in.tag() + 1;
    if (has_paired_residual() && is_tagged(in[&Matmul::residual]) && column < in.inst.column_end) {
      load_residual(row, column, out);
    }
    const uint32_t to = out_begin(), begin = in.inst.column_begin, end = in.inst.column_end;
    out.set_place(place_of(in[&Matmul::out], row, to + column, to + begin, to + end));
    if (!is_scaled()) return;
    load_pair(in, &Matmul::out_gain, column, out.value[4], out.value[5]);
    out.set_scaled_place(place_of(in[&Matmul::out_scaled], row, column, begin, end));
  }

  // Fetch the residual if it is not tagged: it may be read only after the waits.
  __device__ __forceinline__ void prefetch_ready(uint32_t item, uint32_t unit, uint32_t row,
                                                 Prefetched& out) const {
    const uint32_t column = column_of(item, unit);
    if (!has_paired_residual() || is_tagged(in[&Matmul::residual]) || column >= in.inst.column_end)
      return;
    const ptx::Words2 words = ptx::load_relaxed2(element_at(in[&Matmul::residual], row, column));
    out.value[2] = __uint_as_float(words.x);
    out.value[3] = __uint_as_float(words.y);
    out.number[0] = out.number[1] = in.tag();
  }

  __device__ __forceinline__ void finish(uint32_t item, uint32_t unit, uint32_t row,
                                         float (&values)[2], const Prefetched& early) {
    const uint32_t column = column_of(item, unit), tag = in.tag(), out_tag = in.out_tag();
    const uint32_t begin = in.inst.column_begin, end = in.inst.column_end;
    values[0] += early.value[0], values[1] += early.value[1];
    if (in.has(&Matmul::residual)) {
      if (early.number[0] == tag && early.number[1] == tag) {
        values[0] += early.value[2];
        values[1] += early.value[3];
      } else {
        const Tensor& residual = in[&Matmul::residual];
        const OperandWord word = in.word(&Matmul::residual);
#pragma unroll 1
        for (uint32_t j = 0; j < 2; ++j)
          if (column + j >= begin && column + j < end)
            (j ? values[1] : values[0]) += read_element(residual, row, column + j, tag, word);
      }
    }
    if constexpr (program::kMaxAddends > 0)
      if (in.has(&Matmul::addends)) add_parts(row, column, values);
    if (is_scaled()) {
      // Store these first: readers of this row wait for them.
      const float first = values[0] * early.value[4], second = values[1] * early.value[5];
      if (early.scaled_kind != kNone)
        early.scaled_place().store(first, second, out_tag);
      else
        write_columns(in[&Matmul::out_scaled], row, column, begin, end, first, second, out_tag);
      squares = column < end ? values[0] * values[0] : 0.0f;
      if (column + 1 < end) squares = fmaf(values[1], values[1], squares);
    }
    if (early.kind != kNone) {
      early.place().store(values[0], values[1], out_tag);
    } else {
      const uint32_t to = out_begin();
      write_columns(in[&Matmul::out], row, to + column, to + begin, to + end, values[0], values[1],
                    out_tag);
    }
    result[0] = values[0], result[1] = values[1];
    result_column = column;
  }

  __device__ __forceinline__ bool is_scaled() const {
    return program::kAnyOutScaled && in.has(&Matmul::out_scaled);
  }

  // Store the sum of squares of a unit. Its four items are in lanes that are `apart` lanes apart.
  __device__ __forceinline__ void end_item(bool active, uint32_t item, uint32_t unit, uint32_t row,
                                           uint32_t apart) const {
    static_assert(kItemsPerUnit == 4);
    if (!is_scaled()) return;
    float sum = active ? squares : 0.0f;
    sum += __shfl_xor_sync(~0u, sum, apart);
    sum += __shfl_xor_sync(~0u, sum, 2 * apart);
    if (active && item % kItemsPerUnit == 0)
      write_element(in[&Matmul::out_squares], row, first_unit + unit + item / kItemsPerUnit, sum,
                    in.out_tag());
  }

  // Wait for the residual if it is tagged and had not arrived when it was prefetched.
  __device__ __forceinline__ void await_residual(uint32_t item, uint32_t unit, uint32_t row,
                                                 Prefetched& out) const {
    const uint32_t column = column_of(item, unit), tag = in.tag();
    if (!has_paired_residual() || column >= in.inst.column_end) return;
    const Tensor& residual = in[&Matmul::residual];
    while (is_tagged(residual) && (out.number[0] != tag || out.number[1] != tag)) {
      if (__builtin_expect(is_stopping(), 0)) {
        const bool first = out.number[0] != tag;
        stop_at_tag(in.word(&Matmul::residual), row, column + !first,
                    first ? out.number[0] : out.number[1], tag);
      }
      load_residual(row, column, out);
    }
  }

  __device__ __forceinline__ void load_residual(uint32_t row, uint32_t column,
                                                Prefetched& out) const {
    const ptx::Words4 words =
        ptx::load_relaxed_tagged2(word_at(in[&Matmul::residual], row, column));
    out.value[2] = __uint_as_float(words.x);
    out.number[0] = words.y;
    out.value[3] = __uint_as_float(words.z);
    out.number[1] = words.w;
  }

  // Add the other parts of the product. They complete at about the same time as this one.
  __device__ __forceinline__ void add_parts(uint32_t row, uint32_t column,
                                            float (&values)[2]) const {
    const Tensor& addends = in[&Matmul::addends];
    const OperandWord word = in.word(&Matmul::addends);
    const uint32_t size = in[&Matmul::weight].rows, parts = addends.columns / size;
    const uint32_t tag = in.tag(), end = in.inst.column_end;
    if (!is_tagged(addends) || size % 2 != 0 || column < in.inst.column_begin ||
        column + 1 >= end) {
#pragma unroll 1
      for (uint32_t part = 0; part < parts; ++part)
#pragma unroll 1
        for (uint32_t j = 0; j < 2; ++j)
          if (column + j >= in.inst.column_begin && column + j < end)
            (j ? values[1] : values[0]) +=
                read_element(addends, row, part * size + column + j, tag, word);
      return;
    }
    // Poll: all loads are issued before any tag is checked.
    constexpr uint32_t kMost = max_of(1, program::kMaxAddends);
    ptx::Words4 pair[kMost];
    while (true) {
#pragma unroll
      for (uint32_t part = 0; part < kMost; ++part)
        pair[part] = ptx::load_relaxed_tagged2(
            word_at(addends, row, min_of(part, parts - 1) * size + column));
      uint32_t missing = kNone, found = tag;
#pragma unroll
      for (uint32_t part = 0; part < kMost; ++part) {
        if (pair[part].y != tag) missing = part, found = pair[part].y;
        if (pair[part].w != tag) missing = part, found = pair[part].w;
      }
      if (missing == kNone) break;
      if (__builtin_expect(is_stopping(), 0))
        stop_at_tag(word, row, min_of(missing, parts - 1) * size + column, found, tag);
    }
#pragma unroll
    for (uint32_t part = 0; part < kMost; ++part) {
      if (part >= parts) break;
      values[0] += __uint_as_float(pair[part].x);
      values[1] += __uint_as_float(pair[part].z);
    }
  }

  // Keep the larger of two results, or the lower column if they are equal. NaN beats all values.
  static __device__ __forceinline__ void keep_larger(float value, uint32_t column, float& best,
                                                     uint32_t& best_column) {
    if (best != best) return;
    if (value != value || value > best || (value == best && column < best_column)) {
      best = value;
      best_column = column;
    }
  }

  __device__ __forceinline__ void consider(float& best, uint32_t& best_column) const {
    if (!in.has(&Matmul::peaks) || result_column == kNone) return;
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j)
      if (result_column + j >= in.inst.column_begin && result_column + j < in.inst.column_end)
        keep_larger(result[j], result_column + j, best, best_column);
  }

  // Store the peak of a row: the largest result of all lanes, and its column.
  __device__ __forceinline__ void end_row(uint32_t row, float best, uint32_t best_column) const {
    for (uint32_t offset = 16; offset > 0; offset /= 2) {
      const float value = __shfl_xor_sync(~0u, best, offset);
      const uint32_t column = __shfl_xor_sync(~0u, best_column, offset);
      keep_larger(value, column, best, best_column);
    }
    if (lane_index() == 0)
      write_pair(in[&Matmul::peaks], row, 2 * in.inst.tile, best, static_cast<float>(best_column),
                 true, in.out_tag());
  }

  // The same for all rows of a group, over the results of all consumers.
  __device__ __forceinline__ void end_group(Consumer& consumer, uint32_t first_row, uint32_t rows,
                                            uint32_t most, float& best,
                                            uint32_t& best_column) const {
    if (!in.has(&Matmul::peaks)) return;
    static_assert(kSingleRow || 4 * kPartialFloats >= 8 * kNumConsumerThreads,
                  "room for a pair of each thread");
    const uint32_t from = partials_at(consumer.sums.half(), 0, 0);
    const ItemShare share(most, consumer.thread());
    ptx::store_shared2(from + 8 * consumer.thread(), __float_as_uint(best), best_column);
    consumer.sync();
    for (uint32_t row = consumer.warp(); row < rows; row += kNumConsumers) {
      best = -kInfinity;
      best_column = kNone;
      for (uint32_t thread = lane_index(); thread < kNumConsumerThreads; thread += kLanes) {
        const ptx::Words2 pair = ptx::load_shared2(from + 8 * thread);
        if (pair.y != kNone && ItemShare::row_of(thread / share.threads) == row)
          keep_larger(__uint_as_float(pair.x), pair.y, best, best_column);
      }
      end_row(first_row + row, best, best_column);
    }
    consumer.sums.advance();
    best = -kInfinity;
    best_column = kNone;
  }
};

template <>
struct Kernel<Matmul> : ProductKernel<MatmulPlan> {};

}  // namespace megavm
