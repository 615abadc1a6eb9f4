#pragma once

#include "instructions/squares.cuh"
#include "instructions/step_rows.cuh"

namespace megavm {

// One warp copies a row, or several do when there are fewer rows than warps. Before the wait, a
// thread computes the address of the token of its first row. After the wait, two dependent loads
// follow, the token and its embedding, and the store.
template <>
struct Kernel<Embed> : KernelDefaults {
  static constexpr uint32_t kBatch = 4;  // pairs of columns that a thread has in flight

  // Addresses of the elements of a row of the table.
  struct TableRow {
    const Tensor& table;
    uint64_t base;
    uint32_t tile_columns;  // 0: row-major
    uint32_t bytes;         // of an element
    uint32_t exchanged;  // chunk c of a tile's row lies 16 * c ^ exchanged bytes from its beginning

    __device__ __forceinline__ TableRow(const Tensor& table, uint32_t row)
        : table(table), bytes(element_bytes(table)), exchanged(row % kUnitRows / 2 * 16) {
      tile_columns = layout_of(table) == Layout::kUnits ? 64 / bytes : 0;
      base = element_at(table, row, 0);
      if (tile_columns == 0) return;
      const uint64_t unit = uint64_t{ceil_div(table.columns, tile_columns)} * kTileBytes;
      base = base_of(table) + row / kUnitRows * unit + row % kUnitRows * 64;
    }
    __device__ __forceinline__ uint64_t at(uint32_t column) const {
      if (tile_columns == 0) return base + uint64_t{column} * bytes;
      return base + uint64_t{column / tile_columns} * kTileBytes +
             (column % tile_columns * bytes ^ exchanged);
    }
    // Two neighbouring elements as loaded from memory: one word of two bf16, or two of float32.
    __device__ __forceinline__ ptx::Words2 load(uint32_t column) const {
      const uint64_t address = at(column);
      if (column + 1 < table.columns && address % (2 * bytes) == 0) {
        if (bytes == 4) return ptx::load_constant2(address);
        return {ptx::load_constant(address), 0};
      }
      const uint64_t next = at(min_of(column + 1, table.columns - 1));
      if (bytes == 4) return {ptx::load_constant(address), ptx::load_constant(next)};
      const uint32_t high = ptx::load_constant_half(next);
      return {ptx::load_constant_half(address) | high << 16, 0};
    }
  };

  static __device__ __forceinline__ void copy_row(const Operands<Embed>& in, uint32_t row,
                                                  uint32_t token, uint32_t thread,
                                                  uint32_t threads) {
    const Tensor& table = in[&Embed::table];
    const Tensor& out = in[&Embed::out];
    const uint32_t begin = in.inst.column_begin, end = in.inst.column_end;
    const TableRow from(table, token);
    // All lanes run the same iterations, as scale() shuffles.
#pragma unroll 1
    for (uint32_t base = begin / 2; base * 2 < end; base += kBatch * threads) {
      const uint32_t first = base + thread;
      ptx::Words2 raw[kBatch] = {};
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t column = (first + i * threads) * 2;
        if (column < end) raw[i] = from.load(column);
      }
      if constexpr (embed::kAnyScaled)
        if (in.has(&Embed::out_scaled)) scale(in, row, first, threads, raw);
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t column = (first + i * threads) * 2;
        if (column >= end) continue;
        const float x = is_f32(table) ? __uint_as_float(raw[i].x) : ptx::low_bf16(raw[i].x);
        const float y = is_f32(table) ? __uint_as_float(raw[i].y) : ptx::high_bf16(raw[i].x);
        // NOTE: a tagged word of two bf16 is stored whole even if one of them belongs to another
        // instruction, which stores the same value.
        if (column >= begin || (is_tagged(out) && !is_f32(out)))
          write_pair(out, row, column, x, y, column + 1 < end);
        else
          write_element(out, row, column + 1, y);
      }
    }
  }

  // ---- Eight columns by one thread, in steps of several rows.

  static constexpr uint32_t kUnitBatch = 4;  // units that a thread has in flight

  static __device__ __forceinline__ bool takes_units(const Operands<Embed>& in) {
    // Units add squares up in another order than pairs do.
    if constexpr (kSingleRow || program::kFixedOrder) return false;
    const Tensor& table = in[&Embed::table];
    const Embed& inst = in.inst;
    bool all = !is_f32(table) && table.columns % kUnitRows == 0 && base_of(table) % 16 == 0 &&
               inst.column_begin % kUnitRows == 0 && inst.column_end % kUnitRows == 0 &&
               takes_fours(in[&Embed::out]);
    if constexpr (embed::kAnyScaled)
      if (in.has(&Embed::out_scaled))
        all &=
            takes_fours(in[&Embed::out_scaled]) && EightConstants::can_load(in[&Embed::out_gain]);
    return all;
  }

  static __device__ __forceinline__ void copy_units(const Operands<Embed>& in, uint32_t row,
                                                    uint32_t token, uint32_t thread,
                                                    uint32_t threads) {
    const TableRow from(in[&Embed::table], token);
    const uint32_t end = in.inst.column_end / kUnitRows;
    const bool scaled = embed::kAnyScaled && in.has(&Embed::out_scaled);
#pragma unroll 1
    for (uint32_t first = in.inst.column_begin / kUnitRows + thread; first - lane_index() < end;
         first += kUnitBatch * threads) {
      ptx::Words4 raw[kUnitBatch];
      EightConstants gain[kUnitBatch] = {};
      // NOTE: no load is conditional: all of them are in flight together.
      const auto column = [&](uint32_t i) {
        return min_of(first + i * threads, end - 1) * kUnitRows;
      };
#pragma unroll
      for (uint32_t i = 0; i < kUnitBatch; ++i) raw[i] = ptx::load_constant4(from.at(column(i)));
      if (scaled)
#pragma unroll
        for (uint32_t i = 0; i < kUnitBatch; ++i) gain[i].load(in[&Embed::out_gain], column(i));
#pragma unroll
      for (uint32_t i = 0; i < kUnitBatch; ++i) {
        if (first - lane_index() + i * threads >= end) break;
        const bool exists = first + i * threads < end;
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        Four value[2], product[2];
        float squares = 0.0f;
#pragma unroll
        for (uint32_t j = 0; j < kUnitRows; ++j) {
          const float x = j % 2 ? ptx::high_bf16(words[j / 2]) : ptx::low_bf16(words[j / 2]);
          value[j / 4].value[j % 4] = x;
          squares = fmaf(x, x, squares);
          if (scaled) product[j / 4].value[j % 4] = x * gain[i].value(in[&Embed::out_gain], j);
        }
        if (scaled) {
          const Tensor &out = in[&Embed::out_scaled], &sums = in[&Embed::out_squares];
          const uint32_t unit = squares_unit(out, sums);
          if (exists) ColumnPlace(out, column(i)).store_two(row, product);
          squares = add_neighbours(squares, unit / kUnitRows);
          if (exists && column(i) % unit == 0) write_element(sums, row, column(i) / unit, squares);
        }
        if (exists) ColumnPlace(in[&Embed::out], column(i)).store_two(row, value);
      }
    }
  }

  // Store the pairs `first`, first + step, ... multiplied by their gain, and their squares. The
  // pairs of a sum of squares are in neighbouring lanes.
  static __device__ __forceinline__ void scale(const Operands<Embed>& in, uint32_t row,
                                               uint32_t first, uint32_t step,
                                               const ptx::Words2 (&raw)[kBatch]) {
    const uint32_t unit = squares_unit(in[&Embed::out_scaled], in[&Embed::out_squares]);
    const Tensor& gain = in[&Embed::out_gain];
    const bool f32 = is_f32(in[&Embed::table]);
    const uint32_t end = in.inst.column_end;
    float factor[kBatch][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t column = (first + i * step) * 2;
      if (column < end) factor[i][0] = constant_element(gain, column, 0);
      if (column + 1 < end) factor[i][1] = constant_element(gain, column + 1, 0);
    }
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      const uint32_t column = (first + i * step) * 2;
      const float x = f32 ? __uint_as_float(raw[i].x) : ptx::low_bf16(raw[i].x);
      const float y = f32 ? __uint_as_float(raw[i].y) : ptx::high_bf16(raw[i].x);
      if (column < end)
        write_pair(in[&Embed::out_scaled], row, column, x * factor[i][0], y * factor[i][1],
                   column + 1 < end);
      float squares = column < end ? x * x : 0.0f;
      if (column + 1 < end) squares = fmaf(y, y, squares);
      squares = add_neighbours(squares, unit / 2);
      if (column < end && column % unit == 0)
        write_element(in[&Embed::out_squares], row, column / unit, squares);
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Embed>& in, Consumer& consumer) {
    const Embed& inst = in.inst;
    const Tensor& tokens = in[&Embed::tokens];
    const uint32_t vocabulary = in[&Embed::table].rows;
    const uint32_t live = live_end(in, &Embed::row_count, inst.row_begin, inst.row_end);
    const uint32_t rows = live - inst.row_begin;
    const uint32_t parts = rows == 0 ? 1 : max_of(1, kNumConsumers / rows);
    const uint32_t threads = parts * kLanes, step = kNumConsumers / parts;
    const uint32_t thread = consumer.warp() % parts * kLanes + lane_index();
    const bool by_units = takes_units(in);
    bool ready = false;
    // If no warp has several rows, synchronise once: every warp has read its token before any warp
    // stores a tagged word.
    bool together = writes_words(in) && inst.row_end - inst.row_begin <= kNumConsumers;
    // Warps beyond the last row skip the loop.
#pragma unroll 1
    for (uint32_t row = inst.row_begin + consumer.warp() / parts; row < live; row += step) {
      const uint32_t sequence = sequence_of(in[&Embed::row_sequence], row, tokens);
      const uint32_t position =
          position_of(in[&Embed::row_position], row, in.step(), tokens.columns);
      if (!ready) consumer.wait_ready();
      ready = true;
      const uint32_t token = ptx::load_relaxed1(element_at(tokens, sequence, position));
      if (token >= vocabulary)
        stop_instruction(Fault::kToken, sequence, position, token, vocabulary);
      if (together) consumer.sync();
      together = false;
      if (by_units)
        copy_units(in, row, token, thread, threads);
      else
        copy_row(in, row, token, thread, threads);
    }
    if (!ready) consumer.wait_ready();
    if (together) consumer.sync();
  }

  // Whether a result is tagged.
  static __device__ __forceinline__ bool writes_words(const Operands<Embed>& in) {
    bool tagged = is_tagged(in[&Embed::out]);
    if constexpr (embed::kAnyScaled)
      tagged |= in.has(&Embed::out_scaled) &&
                (is_tagged(in[&Embed::out_scaled]) || is_tagged(in[&Embed::out_squares]));
    return tagged;
  }
};

}  // namespace megavm
