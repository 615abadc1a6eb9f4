#pragma once

#include "instructions/squares.cuh"
#include "instructions/step_rows.cuh"

namespace megavm {

// A thread adds a pair of columns of a row; neighbouring lanes have those of a sum of squares.
template <>
struct Kernel<Reduce> : KernelDefaults {
  // Parts that a thread has in flight.
  static constexpr uint32_t kBatch = program::kMatrixRows > 0 ? 8 : 4;

  struct Pair {
    float x, y;
  };

  // The sum of all parts of two neighbouring columns; y is 0 if the row ends before it.
  static __device__ __forceinline__ Pair sum_of(const Operands<Reduce>& in, uint32_t row,
                                                uint32_t column, bool with_second) {
    const Tensor& parts = in[&Reduce::parts];
    const uint32_t size = own_columns(in[&Reduce::out]);
    const OperandWord word = in.word(&Reduce::parts);
    if (size % 2 == 0) {
      using Words = Loaded<true, true, 2>;
      const bool tagged = is_tagged(parts);
      const SourceRow from = Words::row_of(parts, row, in.tag(), word, tagged);
      Pair sum{0.0f, 0.0f};
#pragma unroll 1
      for (uint32_t first = column; first < parts.columns; first += kBatch * size) {
        Words raw[kBatch] = {};
        const auto exists = [&](uint32_t i) { return first + i * size < parts.columns; };
        const auto at = [&](uint32_t i) { return first + i * size; };
        await(from, raw, exists, at, tagged);
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (!exists(i)) continue;
          const bool begins = first == column && i == 0;
          const float x = raw[i].value(0, tagged), y = raw[i].value(1, tagged);
          sum.x = begins ? x : sum.x + x;
          sum.y = begins ? y : sum.y + y;
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

  // Elements of a vector that no instruction writes; 0 if the instruction has none.
  static __device__ __forceinline__ Pair constants(const Operands<Reduce>& in,
                                                   uint32_t Reduce::* vector, uint32_t column,
                                                   bool with_second) {
    if (!in.has(vector)) return {0.0f, 0.0f};
    return {constant_element(in[vector], column, 0),
            with_second ? constant_element(in[vector], column + 1, 0) : 0.0f};
  }

  // Lanes that add a sum of squares together.
  static __device__ __forceinline__ uint32_t group_of(const Operands<Reduce>& in) {
    if (!in.has(&Reduce::out_squares)) return kUnitRows / 2;
    return squares_unit(in[&Reduce::out_scaled], in[&Reduce::out_squares]) / 2;
  }

  // All lanes of a warp call it.
  static __device__ __forceinline__ void store(const Operands<Reduce>& in, bool exists,
                                               uint32_t row, uint32_t column, bool with_second,
                                               const Pair& sum, const Pair& gain) {
    const uint32_t tag = in.out_tag();
    if (in.has(&Reduce::out_scaled)) {
      // Store these first: readers of this row wait for them.
      float squares = 0.0f;
      if (exists) {
        write_pair(in[&Reduce::out_scaled], row, column, sum.x * gain.x, sum.y * gain.y,
                   with_second, tag);
        squares = fmaf(sum.y, sum.y, sum.x * sum.x);
      }
      const uint32_t group = group_of(in);
      squares = add_neighbours(squares, group);
      if (exists && lane_index() % group == 0)
        write_element(in[&Reduce::out_squares], row, column / (2 * group), squares, tag);
    }
    if (exists) write_pair(in[&Reduce::out], row, column, sum.x, sum.y, with_second, tag);
  }

  // The sum of everything that is added. `gain` is looked up meanwhile.
  static __device__ __forceinline__ Pair add_up(const Operands<Reduce>& in, uint32_t row,
                                                uint32_t column, bool with_second, Pair& gain) {
    // Residual and bias are on their way while the parts are awaited.
    using Words = Loaded<true, true, 2>;
    const Tensor& residual = in[&Reduce::residual];
    const OperandWord word = in.word(&Reduce::residual);
    const bool is_pair = in.has(&Reduce::residual) && is_f32(residual) && residual.columns % 2 == 0;
    const bool tagged = is_pair && is_tagged(residual);
    const SourceRow from = Words::row_of(residual, row, in.tag(), word, tagged);
    Words added[1] = {};
    if (is_pair)
      added[0].load(from.address + uint64_t{column} * Words::column_bytes(tagged), tagged);
    gain = constants(in, &Reduce::out_gain, column, with_second);
    const Pair bias = constants(in, &Reduce::bias, column, with_second);
    Pair sum = sum_of(in, row, column, with_second);
    sum.x += bias.x, sum.y += bias.y;
    if (is_pair) {
      await<true>(
          from, added, [](uint32_t) { return true; }, [&](uint32_t) { return column; }, tagged);
      sum.x += added[0].value(0, tagged), sum.y += added[0].value(1, tagged);
    } else if (in.has(&Reduce::residual)) {
      sum.x += read_element(residual, row, column, in.tag(), word);
      if (with_second) sum.y += read_element(residual, row, column + 1, in.tag(), word);
    }
    return sum;
  }

  // ---- Eight columns by one thread, where no word is tagged: steps of many rows.

  // Whether the instruction adds to a residual and scales the result: the end of a layer's half.
  // NOTE: results that are not tagged, as all words are read before one of them is stored.
  static __device__ __forceinline__ bool takes_units(const Operands<Reduce>& in) {
    const Reduce& inst = in.inst;
    if (kSingleRow || !in.has(&Reduce::residual) || !in.has(&Reduce::out_scaled) ||
        in.has(&Reduce::bias))
      return false;
    const Tensor &out = in[&Reduce::out], &scaled = in[&Reduce::out_scaled];
    return inst.column_begin % kUnitRows == 0 && inst.column_end % kUnitRows == 0 &&
           own_columns(out) % kUnitRows == 0 && takes_fours(out) && !is_tagged(out) &&
           has_fours(in[&Reduce::parts]) && has_fours(in[&Reduce::residual]) &&
           EightConstants::can_load(in[&Reduce::out_gain]) && takes_fours(scaled) &&
           !is_tagged(scaled) && !is_tagged(in[&Reduce::out_squares]);
  }

  static constexpr uint32_t kUnitBatch = 4;  // parts of a unit in flight

  // A thread's units from number `first` on, kNumConsumerThreads apart; those below `count` exist.
  // All lanes of a warp call it.
  template <uint32_t kUnits>
  static __device__ __forceinline__ void reduce_units(const Operands<Reduce>& in, uint32_t first,
                                                      uint32_t count) {
    const Reduce& inst = in.inst;
    const Tensor& parts = in[&Reduce::parts];
    const uint32_t size = own_columns(in[&Reduce::out]), tag = in.out_tag();
    const uint32_t num_parts = parts.columns / size;
    const uint32_t of_row = (inst.column_end - inst.column_begin) / kUnitRows;
    constexpr uint32_t kFours = kUnitRows / 4;
    uint32_t row[kUnits], column[kUnits];
    EightConstants gain[kUnits];
    ptx::Words4 residual[kUnits][kFours];
    Four sum[kUnits][kFours] = {};
    // NOTE: no load is conditional: those of all units are in flight together.
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      const uint32_t number = min_of(first + u * kNumConsumerThreads, count - 1);
      row[u] = inst.row_begin + number / of_row;
      column[u] = inst.column_begin + number % of_row * kUnitRows;
      gain[u].load(in[&Reduce::out_gain], column[u]);
      const ColumnPlace before(in[&Reduce::residual], column[u]);
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) residual[u][i] = before.load(row[u], i);
    }
#pragma unroll 1
    for (uint32_t begin = 0; begin < num_parts; begin += kUnitBatch) {
      ptx::Words4 words[kUnits][kUnitBatch][kFours];
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u)
#pragma unroll
        for (uint32_t p = 0; p < kUnitBatch; ++p) {
          const ColumnPlace part(parts, min_of(begin + p, num_parts - 1) * size + column[u]);
#pragma unroll
          for (uint32_t i = 0; i < kFours; ++i) words[u][p][i] = part.load(row[u], i);
        }
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u)
#pragma unroll
        for (uint32_t p = 0; p < kUnitBatch; ++p)
          if (begin + p < num_parts)
#pragma unroll
            for (uint32_t i = 0; i < kFours; ++i) add_four(sum[u][i], words[u][p][i]);
    }
    const uint32_t unit = 2 * group_of(in);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      Four scaled[kFours];
      float squares = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        add_four(sum[u][i], residual[u][i]);
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const float value = sum[u][i].value[j];
          scaled[i].value[j] = value * gain[u].value(in[&Reduce::out_gain], 4 * i + j);
          squares = fmaf(value, value, squares);
        }
      }
      squares = add_neighbours(squares, unit / kUnitRows);
      if (first + u * kNumConsumerThreads >= count) continue;
      // Store these first: readers of this row wait for them.
      ColumnPlace(in[&Reduce::out_scaled], column[u]).store_two(row[u], scaled, tag);
      if (column[u] % unit == 0)
        write_element(in[&Reduce::out_squares], row[u], column[u] / unit, squares, tag);
      ColumnPlace(in[&Reduce::out], column[u]).store_two(row[u], sum[u], tag);
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Reduce>& in, Consumer& consumer) {
    const Reduce& inst = in.inst;
    const uint32_t live = live_end(in, &Reduce::row_count, inst.row_begin, inst.row_end);
    if (takes_units(in)) {
      consumer.wait_ready();
      consumer.begin_waiting();
      consumer.note(in.stage, Event::kInputs);
      const uint32_t units = (inst.column_end - inst.column_begin) / kUnitRows;
      const uint32_t count = (live - inst.row_begin) * units;
      uint32_t first = consumer.thread();
      // Two at a time, if a thread has more than two: else fetching their code takes too long.
      if constexpr (program::kMatrixRows > 0)
        if (count > 2 * kNumConsumerThreads)
#pragma unroll 1
          for (; first - consumer.thread() + kNumConsumerThreads < count;
               first += 2 * kNumConsumerThreads)
            reduce_units<2>(in, first, count);
#pragma unroll 1
      for (; first - lane_index() < count; first += kNumConsumerThreads)
        reduce_units<1>(in, first, count);
      return;
    }
    // Each row begins with a lane of its own group.
    const uint32_t pairs = ceil_div(inst.column_end - inst.column_begin, 2), group = group_of(in);
    const uint32_t per_row = ceil_div(pairs, group) * group;
    const uint32_t items = (live - inst.row_begin) * per_row;
    const uint32_t all_items = (inst.row_end - inst.row_begin) * per_row;
    const bool once = all_items <= kNumConsumerThreads;
    consumer.wait_ready();
    // The next product of few rows ends this; beside matrix products, attention. Until then, too,
    // the loader would delay other accesses.
    consumer.begin_waiting();
#pragma unroll 1
    for (uint32_t base = 0; once ? base == 0 : base < items; base += kNumConsumerThreads) {
      const uint32_t item = base + consumer.thread();
      const uint32_t row = inst.row_begin + item / per_row;
      const uint32_t column = inst.column_begin + item % per_row * 2;
      const bool exists = item < items && column < inst.column_end;
      const bool with_second = column + 1 < inst.column_end;
      Pair sum{0.0f, 0.0f}, gain{0.0f, 0.0f};
      if (exists) sum = add_up(in, row, column, with_second, gain);
      if (base == 0) consumer.note(in.stage, Event::kInputs);
      // All reads come before all stores.
      if (all_items <= kLanes)
        __syncwarp();
      else if (once)
        consumer.sync();
      store(in, exists, row, column, with_second, sum, gain);
    }
  }
};

}  // namespace megavm
