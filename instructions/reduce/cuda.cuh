#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

// A thread adds a pair of columns of a row; four neighbouring lanes have the 8 columns of a sum of
// squares.
template <>
struct Kernel<Reduce> : KernelDefaults {
  static constexpr uint32_t kBatch = 4;  // parts that a thread has in flight
  static constexpr uint32_t kGroup = kUnitRows / 2;

  struct Pair {
    float x, y;
  };

  // The sum of all parts of two neighbouring columns; y is 0 if the row ends before it.
  static __device__ __forceinline__ Pair sum_of(const Operands<Reduce>& in, uint32_t row,
                                                uint32_t column, bool with_second) {
    const Tensor& parts = in[&Reduce::parts];
    const uint32_t size = in[&Reduce::out].columns;
    const OperandWord word = in.word(&Reduce::parts);
    if (size % 2 == 0 && is_tagged(parts)) {
      using Words = Loaded<true, true, 2>;
      const SourceRow from = Words::row_of(parts, row, in.tag(), word);
      Pair sum{0.0f, 0.0f};
#pragma unroll 1
      for (uint32_t first = column; first < parts.columns; first += kBatch * size) {
        Words raw[kBatch] = {};
        const auto exists = [&](uint32_t i) { return first + i * size < parts.columns; };
        const auto at = [&](uint32_t i) { return first + i * size; };
        await(from, raw, exists, at);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (!exists(i)) continue;
          const bool begins = first == column && i == 0;
          sum.x = begins ? raw[i].value(0) : sum.x + raw[i].value(0);
          sum.y = begins ? raw[i].value(1) : sum.y + raw[i].value(1);
        }
      }
      return sum;
    }
    Pair sum{read_element(parts, row, column, in.tag(), word), 0.0f};
    if (with_second) sum.y = read_element(parts, row, column + 1, in.tag(), word);
#pragma unroll 1
    for (uint32_t at = column + size; at < parts.columns; at += size) {
      sum.x += read_element(parts, row, at, in.tag(), word);
      if (with_second) sum.y += read_element(parts, row, at + 1, in.tag(), word);
    }
    return sum;
  }

  static __device__ __forceinline__ Pair add_others(const Operands<Reduce>& in, uint32_t row,
                                                    uint32_t column, bool with_second, Pair sum) {
    if (in.has(&Reduce::bias)) {
      sum.x += constant_element(in[&Reduce::bias], column, 0);
      if (with_second) sum.y += constant_element(in[&Reduce::bias], column + 1, 0);
    }
    if (in.has(&Reduce::residual)) {
      const Tensor& residual = in[&Reduce::residual];
      const OperandWord word = in.word(&Reduce::residual);
      sum.x += read_element(residual, row, column, in.tag(), word);
      if (with_second) sum.y += read_element(residual, row, column + 1, in.tag(), word);
    }
    return sum;
  }

  // All lanes of a warp call it, as they add squares together.
  static __device__ __forceinline__ void store(const Operands<Reduce>& in, bool exists,
                                               uint32_t row, uint32_t column, bool with_second,
                                               Pair sum) {
    if (exists) write_pair(in[&Reduce::out], row, column, sum.x, sum.y, with_second, in.out_tag());
    if (!in.has(&Reduce::out_scaled)) return;
    float squares = 0.0f;
    if (exists) {
      const Tensor& gain = in[&Reduce::out_gain];
      const float first = constant_element(gain, column, 0);
      const float second = with_second ? constant_element(gain, column + 1, 0) : 0.0f;
      write_pair(in[&Reduce::out_scaled], row, column, sum.x * first, sum.y * second, with_second,
                 in.out_tag());
      squares = fmaf(sum.y, sum.y, sum.x * sum.x);
    }
    for (uint32_t apart = 1; apart < kGroup; apart *= 2)
      squares += __shfl_xor_sync(~0u, squares, apart);
    if (exists && lane_index() % kGroup == 0)
      write_element(in[&Reduce::out_squares], row, column / kUnitRows, squares, in.out_tag());
  }

  static __device__ __forceinline__ void consume(const Operands<Reduce>& in, Consumer& consumer) {
    const Reduce& inst = in.inst;
    const uint32_t live = live_end(in, &Reduce::row_count, inst.row_begin, inst.row_end);
    const uint32_t rows = live - inst.row_begin;
    // Each row begins with a lane of its own group of four.
    const uint32_t pairs = ceil_div(inst.column_end - inst.column_begin, 2);
    const uint32_t per_row = ceil_div(pairs, kGroup) * kGroup;
    const uint32_t all_rows = inst.row_end - inst.row_begin;
    const bool once = all_rows * per_row <= kNumConsumerThreads;
    consumer.wait_ready();
#pragma unroll 1
    for (uint32_t base = 0; once ? base == 0 : base < rows * per_row; base += kNumConsumerThreads) {
      const uint32_t item = base + consumer.thread();
      const uint32_t row = inst.row_begin + item / per_row;
      const uint32_t column = inst.column_begin + item % per_row * 2;
      const bool exists = item < rows * per_row && column < inst.column_end;
      const bool with_second = column + 1 < inst.column_end;
      Pair sum{0.0f, 0.0f};
      if (exists)
        sum = add_others(in, row, column, with_second, sum_of(in, row, column, with_second));
      if (once) consumer.sync();  // all reads come before all stores
      store(in, exists, row, column, with_second, sum);
    }
  }
};

}  // namespace megavm
