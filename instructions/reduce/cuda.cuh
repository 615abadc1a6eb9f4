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
      using Words = Loaded<true, 2>;
      const bool tagged = is_tagged(parts);
      const SourceRow from = Words::row_of(parts, row, word);
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
          const float x = raw[i].value(0), y = raw[i].value(1);
          sum.x = begins ? x : sum.x + x;
          sum.y = begins ? y : sum.y + y;
        }
      }
      return sum;
    }
    Pair sum{read_element(parts, row, column, word), 0.0f};
    if (with_second) sum.y = read_element(parts, row, column + 1, word);
#pragma unroll 1
    for (uint32_t at = column + size; at < parts.columns; at += size) {
      sum.x += read_element(parts, row, at, word);
      if (with_second) sum.y += read_element(parts, row, at + 1, word);
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
    if (in.has(&Reduce::out_scaled)) {
      // Store these first: readers of this row wait for them.
      float squares = 0.0f;
      if (exists) {
        write_pair(in[&Reduce::out_scaled], row, column, sum.x * gain.x, sum.y * gain.y,
                   with_second);
        squares = fmaf(sum.y, sum.y, sum.x * sum.x);
      }
      const uint32_t group = group_of(in);
      squares = add_neighbours(squares, group);
      if (exists && lane_index() % group == 0)
        write_element(in[&Reduce::out_squares], row, column / (2 * group), squares);
    }
    if (exists) write_pair(in[&Reduce::out], row, column, sum.x, sum.y, with_second);
  }

  // The sum of everything that is added. `gain` is looked up meanwhile.
  static __device__ __forceinline__ Pair add_up(const Operands<Reduce>& in, uint32_t row,
                                                uint32_t column, bool with_second, Pair& gain) {
    // Residual and bias are on their way while the parts are awaited.
    using Words = Loaded<true, 2>;
    const Tensor& residual = in[&Reduce::residual];
    const OperandWord word = in.word(&Reduce::residual);
    const bool is_pair = in.has(&Reduce::residual) && is_f32(residual) && residual.columns % 2 == 0;
    const bool tagged = is_pair && is_tagged(residual);
    const SourceRow from = Words::row_of(residual, row, word);
    Words added[1] = {};
    if (is_pair) added[0].load(from.address + uint64_t{column} * Words::kColumnBytes);
    gain = constants(in, &Reduce::out_gain, column, with_second);
    const Pair bias = constants(in, &Reduce::bias, column, with_second);
    Pair sum = sum_of(in, row, column, with_second);
    sum.x += bias.x, sum.y += bias.y;
    if (is_pair) {
      await<true>(
          from, added, [](uint32_t) { return true; }, [&](uint32_t) { return column; }, tagged);
      sum.x += added[0].value(0), sum.y += added[0].value(1);
    } else if (in.has(&Reduce::residual)) {
      sum.x += read_element(residual, row, column, word);
      if (with_second) sum.y += read_element(residual, row, column + 1, word);
    }
    return sum;
  }

  // ---- Four columns by one thread, where no word is tagged: steps of many rows.

  // Whether the instruction adds to a residual, and whether it scales the result. Kernels of a
  // Llama have no code for others: the end of a layer's half does both.
  static __device__ __forceinline__ bool adds(const Operands<Reduce>& in) {
    return !reduce::kBare || in.has(&Reduce::residual);
  }
  static __device__ __forceinline__ bool scales(const Operands<Reduce>& in) {
    return !reduce::kBare || in.has(&Reduce::out_scaled);
  }

  // NOTE: results that are not tagged, as all words are read before one of them is stored.
  static __device__ __forceinline__ bool takes_quads(const Operands<Reduce>& in) {
    const Reduce& inst = in.inst;
    if (in.has(&Reduce::bias)) return false;
    if (!reduce::kBare && (!in.has(&Reduce::residual) || !in.has(&Reduce::out_scaled)))
      return false;
    const Tensor &out = in[&Reduce::out], &scaled = in[&Reduce::out_scaled];
    return inst.column_begin % kUnitRows == 0 && inst.column_end % kUnitRows == 0 &&
           own_columns(out) % kUnitRows == 0 && takes_fours(out) && !is_tagged(out) &&
           has_fours(in[&Reduce::parts]) && (!adds(in) || has_fours(in[&Reduce::residual])) &&
           (!scales(in) || (Gain::can_load(in[&Reduce::out_gain]) && takes_fours(scaled) &&
                            !is_tagged(scaled) && !is_tagged(in[&Reduce::out_squares])));
  }

  using Gain = FourConstants<max_of(1, reduce::kGainKinds)>;
  // A thread has so many quads in flight, and so many parts of each.
  static constexpr uint32_t kQuads = 4, kQuadParts = 4;

  // How far apart the quads of a thread are that are in flight together: pairs of quads that are
  // near, and two such pairs that are far from each other; in rows, and in quads of a row.
  // Neighbouring lanes have neighbouring quads, so each access of a warp is of whole sectors.
  struct Apart {
    uint32_t near_rows, near_quads, far_rows, far_quads;
    __device__ __forceinline__ uint32_t rows(uint32_t q) const {
      return q / 2 * far_rows + q % 2 * near_rows;
    }
    __device__ __forceinline__ uint32_t quads(uint32_t q) const {
      return q / 2 * far_quads + q % 2 * near_quads;
    }
  };

  // Reduce the quads of a thread from this row and column on, as far as their rows are below
  // `live`. All lanes of a warp call it.
  //
  // NOTE: loads and stores have predicates in place of branches, so that the code is short:
  // fetching it took longer than running it.
  static __device__ __forceinline__ void reduce_quads(const Operands<Reduce>& in, uint32_t row,
                                                      uint32_t column, const Apart& apart,
                                                      uint32_t live) {
    constexpr uint32_t kF32 = 2;  // as a kind of ColumnPlace
    const uint32_t size = own_columns(in[&Reduce::out]);
    const uint32_t all_parts = in[&Reduce::parts].columns;
    const Tensor& gains = in[&Reduce::out_gain];
    const ColumnPlace<kF32> before(in[&Reduce::residual], column);
    const ColumnPlace<kF32> parts(in[&Reduce::parts], column);
    bool exists[kQuads];
    uint64_t from[kQuads];
    Gain gain[kQuads] = {};
    ptx::Words4 residual[kQuads] = {};
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t own = row + apart.rows(q), further = apart.quads(q);
      exists[q] = own < live && column + 4 * further < in.inst.column_end;
      from[q] = parts.address + uint64_t{own} * parts.row_bytes + 16 * further;
      gain[q].load(gains, column + 4 * further, exists[q] && scales(in));
      before.load(own, further, residual[q], exists[q] && adds(in));
    }
    Four sum[kQuads] = {};
#pragma unroll 1
    for (uint32_t skipped = 0; skipped < all_parts;) {
      ptx::Words4 words[kQuadParts][kQuads] = {};
#pragma unroll
      for (uint32_t p = 0; p < kQuadParts; ++p, skipped += size)
#pragma unroll
        for (uint32_t q = 0; q < kQuads; ++q) {
          ptx::load_relaxed4(from[q], words[p][q], exists[q] && skipped < all_parts);
          from[q] += 4 * size;
        }
#pragma unroll
      for (uint32_t p = 0; p < kQuadParts; ++p)
#pragma unroll
        for (uint32_t q = 0; q < kQuads; ++q) add_four(sum[q], words[p][q]);
    }
    float squares[kQuads];
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      add_four(sum[q], residual[q]);
      const float (&v)[4] = sum[q].value;
      // In the order of pairs.
      squares[q] = fmaf(v[1], v[1], v[0] * v[0]) + fmaf(v[3], v[3], v[2] * v[2]);
    }
    const bool wide =
        squares_unit(in[&Reduce::out_scaled], in[&Reduce::out_squares]) == kWideSquares;
    const uint32_t unit = wide ? kWideSquares : kUnitRows;
    add_neighbours(squares, unit / 4);
    const auto unit_of = [&](uint32_t c) { return wide ? c / kWideSquares : c / kUnitRows; };
    const ColumnPlace<reduce::kOutKinds> out(in[&Reduce::out], column);
    const ColumnPlace<reduce::kScaledKinds> scaled(in[&Reduce::out_scaled], column);
    const ColumnPlace<kF32> sums(in[&Reduce::out_squares], unit_of(column));
    const bool begins_unit = unit_of(column) * unit == column;
#pragma unroll
    for (uint32_t q = 0; q < kQuads; ++q) {
      const uint32_t own = row + apart.rows(q), further = apart.quads(q);
      Four product = gain[q].value(gains);
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) product.value[i] *= sum[q].value[i];
      // Store these first: readers of this row wait for them.
      const bool scaling = exists[q] && scales(in);
      scaled.store(own, further, product, scaling);
      sums.store_one(own, unit_of(4 * further), squares[q], scaling && begins_unit);
      out.store(own, further, sum[q], exists[q]);
    }
  }

  // The same for all quads of an instruction.
  static __device__ __forceinline__ void reduce_all_quads(const Operands<Reduce>& in,
                                                          uint32_t thread, uint32_t live) {
    const Reduce& inst = in.inst;
    const uint32_t quads = (inst.column_end - inst.column_begin) / 4;
    const uint32_t across = min_of(quads, kNumConsumerThreads);
    const uint32_t down = kNumConsumerThreads / across;  // rows that the threads have side by side
    // The threads go through a row so many times.
    const uint32_t sweeps = ceil_div(quads, kNumConsumerThreads);
    Apart apart = {0, across, 0, 2 * across};
    uint32_t rows = 1, turn = kQuads * across;
    if (sweeps == 2) apart.far_rows = 1, apart.far_quads = 0, rows = 2;
    if (sweeps == 1) apart = {down, 0, 2 * down, 0}, rows = kQuads * down;
    const uint32_t row = thread / across, column = inst.column_begin + thread % across * 4;
#pragma unroll 1
    for (uint32_t top = inst.row_begin; top < live; top += rows)
#pragma unroll 1
      for (uint32_t left = 0; left < quads; left += turn)
        reduce_quads(in, top + row, column + 4 * left, apart, row < down ? live : 0);
  }

  static __device__ __forceinline__ void consume(const Operands<Reduce>& in, Consumer& consumer) {
    const Reduce& inst = in.inst;
    const uint32_t live = live_end(in, &Reduce::row_count, inst.row_begin, inst.row_end);
    if constexpr (!kSingleRow && reduce::kOutKinds != 0)
      if (takes_quads(in)) {
        consumer.wait_ready();
        consumer.begin_waiting();
        consumer.note(in.stage, Event::kInputs);
        return reduce_all_quads(in, consumer.thread(), live);
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
