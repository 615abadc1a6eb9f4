// Products of several rows: groups of 8 go through one after the other, their input chunk by chunk,
// and all consumers finish a block together. See product.cuh.
#pragma once

#include "cuda/pipelines/product.cuh"

namespace megavm {

constexpr uint32_t kInputBatch = 4;  // loads of float32 input that a lane has in flight

struct RowsPanel : Panel {
  using Panel::Panel;

  // Fill the chunk's columns of `rows` rows, `first_row` on. A lane has a part of every page of
  // every row; it issues kBatch loads before it looks at any.
  template <bool kF32, bool kTagged, uint32_t kBatch>
  __device__ __forceinline__ void fill(uint32_t first_row, uint32_t rows, uint32_t chunk) const {
    constexpr uint32_t kColumnBytes = (kF32 ? 4 : 2) * (kTagged ? 2 : 1);
    constexpr uint32_t kPageStride = kPageColumns * kColumnBytes;
    const Tensor x = this->x();
    const uint32_t first_column = column + chunk * kChunkPages * kPageColumns;
    const uint32_t pages = input.tiling.pages_of(chunk);
    // Pages in which this lane's columns exist.
    const uint32_t mine =
        !program::kAnyPartialPages ? pages
        : first_column >= input.tiling.k
            ? 0
            : min_of(pages, ceil_div(input.tiling.k - first_column, kPageColumns));
    const uint32_t tag = stage.tag;
#pragma unroll 1
    for (uint32_t row = 0; row < rows; ++row) {
      const uint64_t from =
          base_of(x) +
          (static_cast<uint64_t>(x_row(first_row + row)) * x.columns + first_column) * kColumnBytes;
      float sum = 0.0f;
#pragma unroll 1
      for (uint32_t begin = 0; begin < pages; begin += kBatch) {
        RawInput<kF32, kTagged> raw[kBatch];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) raw[i].clear(~tag);
        while (true) {
          // Again and again what is still missing; all loads before a look at any.
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
            if (begin + i < mine && (!kTagged || raw[i].check(tag) != tag))
              raw[i].load(from + begin * kPageStride + i * kPageStride);
          if constexpr (!kTagged) break;
          uint32_t missing = kBatch, found = tag;
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
            if (begin + i < mine && raw[i].check(tag) != tag)
              missing = i, found = raw[i].check(tag);
          if (missing == kBatch) break;
          if (__builtin_expect(is_stopping(), 0))
            stop_at_tag(input.x, x_row(first_row + row),
                        (first_column + (begin + missing) * kPageColumns) / (kF32 ? 1 : 2), found,
                        tag);
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (begin + i >= mine) break;
          float value[kLaneColumns];
#pragma unroll
          for (uint32_t j = 0; j < kLaneColumns; ++j) {
            value[j] = raw[i].value(j);
            sum = fmaf(value[j], value[j], sum);
          }
          if (has_gain()) {
            Gain gain;
            gain.load(this->gain(), first_column + (begin + i) * kPageColumns);
            const bool f32_gain = is_f32(this->gain());
#pragma unroll
            for (uint32_t j = 0; j < kLaneColumns; ++j) value[j] *= gain.value(f32_gain, j);
          }
          put(begin + i, row, value);
        }
      }
      if (has_gain()) add_squares(row, sum, chunk == 0);
    }
  }

  // The same for several rows of an untagged input: a page of all rows at a time.
  template <bool kF32>
  __device__ __forceinline__ void fill_rows(uint32_t first_row, uint32_t rows,
                                            uint32_t chunk) const {
    constexpr uint32_t kColumnBytes = kF32 ? 4 : 2;
    const Tensor x = this->x();
    const uint32_t first_column = column + chunk * kChunkPages * kPageColumns;
    const uint32_t pages = input.tiling.pages_of(chunk);
    // Lane r knows where row r of x begins.
    uint64_t mine = 0;
    if (lane_index() < rows)
      mine = base_of(x) +
             static_cast<uint64_t>(x_row(first_row + lane_index())) * x.columns * kColumnBytes;
    float sums[kGroupRows] = {};
#pragma unroll 1
    for (uint32_t page = 0; page < pages; ++page) {
      const uint32_t at = first_column + page * kPageColumns;
      const bool inside = !program::kAnyPartialPages || at < input.tiling.k;
      RawInput<kF32, false> raw[kGroupRows];
#pragma unroll
      for (uint32_t row = 0; row < kGroupRows; ++row) {
        raw[row].clear(0);
        const uint64_t from = __shfl_sync(~0u, mine, row);
        if (row < rows && inside) raw[row].load(from + at * kColumnBytes);
      }
      if (!inside) continue;
      Gain gain;
      gain.words = ptx::zero4();
      if (has_gain()) gain.load(this->gain(), at);
      const bool f32_gain = has_gain() && is_f32(this->gain());
#pragma unroll
      for (uint32_t row = 0; row < kGroupRows; ++row) {
        if (row >= rows) break;
        float value[kLaneColumns];
#pragma unroll
        for (uint32_t j = 0; j < kLaneColumns; ++j) {
          value[j] = raw[row].value(j);
          sums[row] = fmaf(value[j], value[j], sums[row]);
          if (has_gain()) value[j] *= gain.value(f32_gain, j);
        }
        put(page, row, value);
      }
    }
    if (!has_gain()) return;
#pragma unroll
    for (uint32_t row = 0; row < kGroupRows; ++row)
      if (row < rows) add_squares(row, sums[row], chunk == 0);
  }

  __device__ __forceinline__ void fill(uint32_t first_row, uint32_t rows, uint32_t chunk) const {
    // All of this warp must be done with what was there.
    __syncwarp();
    if constexpr (program::kAnyRaggedK) {
      fill_ragged(first_row, rows, chunk);
    } else {
      // Only the kinds of input that the program has.
      const uint32_t kind = 1u << (2 * is_f32(x()) + is_tagged(x()));
      if (program::kAnyInputs & kind & 8) fill<true, true, kInputBatch>(first_row, rows, chunk);
      if (program::kAnyInputs & kind & 4) fill_rows<true>(first_row, rows, chunk);
      if (program::kAnyInputs & kind & 1) fill_rows<false>(first_row, rows, chunk);
      if (program::kAnyInputs & kind & 2)
        fill<false, true, 2 * kInputBatch>(first_row, rows, chunk);
    }
    __syncwarp();
  }
};

// Which item of a block this thread finishes, together with others. A thread keeps its row from
// block to block.
struct ItemShare {
  uint32_t item;     // of the block, for one row
  uint32_t row;      // of the group
  uint32_t part;     // of the threads that share the item
  uint32_t threads;  // that share it
  bool active;

  // `most`: items of a row in a whole block; `items`: in this one.
  __device__ __forceinline__ ItemShare(uint32_t most, uint32_t items, uint32_t rows,
                                       uint32_t thread) {
    const uint32_t total = most * rows;
    threads = total * 4 <= kNumConsumerThreads ? 4 : total * 2 <= kNumConsumerThreads ? 2 : 1;
    part = thread % threads;
    row = thread / threads % max_of(rows, 1);
    item = thread / threads / max_of(rows, 1);
    active = item < items && rows > 0;
  }
};

// Add up the partial sums of an item, and finish it.
template <class Plan>
__device__ __forceinline__ void finish_block(Plan& plan, const ProductInput& input,
                                             const Consumer& consumer, const ItemShare& share,
                                             uint32_t first_unit, uint32_t first_row,
                                             const Prefetched& prefetched) {
  constexpr uint32_t kPairs = Plan::kPairs;
  float values[2 * kPairs] = {};
  if (share.active) {
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      uint32_t unit, column;
      plan.place(share.item, i, unit, column);
      const uint32_t from = partials_at(consumer.sums.half(), unit, share.part) +
                            4 * (share.row * kUnitRows + column);
#pragma unroll 1
      for (uint32_t warp = 0; warp + share.part < kNumConsumers; warp += share.threads) {
        const ptx::Words2 sums = ptx::load_shared2(from + 4 * warp * kGroupRows * kUnitRows);
        values[2 * i] += __uint_as_float(sums.x);
        values[2 * i + 1] += __uint_as_float(sums.y);
      }
    }
  }
#pragma unroll 1
  for (uint32_t offset = 1; offset < share.threads; offset *= 2)
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, offset);
  if (!share.active || share.part != 0) return;
  if (input.gain != kNone) {
    const float scale =
        rms_scale(squares_at(consumer.sums.half(), share.row), input.tiling.k, input.eps);
#pragma unroll
    for (float& value : values) value *= scale;
  }
  plan.finish(share.item, first_unit, first_row + share.row, values, prefetched);
}

// Copy this warp's sums of squares into the half of the scratch that is used next.
__device__ __forceinline__ void carry_squares(Consumer& consumer) {
  if (lane_index() != 0) return;
#pragma unroll
  for (uint32_t row = 0; row < kGroupRows; ++row) {
    const uint32_t half = consumer.sums.half(), at = 4 * consumer.warp();
    ptx::store_shared(squares_at(half, row) + at, ptx::load_shared(squares_at(half ^ 1, row) + at));
  }
}

template <class Used>
__device__ __forceinline__ void product_rows(const Stage& stage, Consumer& consumer) {
  ProductInput input = no_input();
  uint32_t best_column = kNone;
  float best = -kInfinity;
  dispatch_product<Used>(stage, [&]<class Plan>(Plan*) { input = Plan(stage).input(); });
  const Tiling& tiling = input.tiling;
  const uint32_t warp = consumer.warp();
  const RowsPanel panel(stage, input, consumer);
  const uint32_t groups = num_groups(stage, input), chunks = tiling.chunks();

  bool waited = false;

#pragma unroll 1
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t first_row = input.row_begin + group * kGroupRows;
    const uint32_t end = live_end(stage, input);
    const uint32_t rows = end > first_row ? min_of(kGroupRows, end - first_row) : 0;
    const uint32_t most = min_of(kBlockUnits, tiling.units) * input.half_items / 2;
#pragma unroll 1
    for (uint32_t first_unit = 0; first_unit < tiling.units; first_unit += kBlockUnits) {
      const uint32_t units = min_of(kBlockUnits, tiling.units - first_unit);
      const ItemShare share(most, units * input.half_items / 2, rows, consumer.thread());
      Prefetched prefetched;
      if (share.active)
        dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
          Plan(stage).prefetch(share.item, first_unit, first_row + share.row, prefetched);
        });
#pragma unroll 1
      for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
        const uint32_t pages = tiling.pages_of(chunk);
        // Take the pages of weights that are there into registers, while the input is not.
        // NOTE: every register is written on every path: one that keeps its old value somewhere
        // would be live in all of the kernel.
        PageTiles early[kPreload];
        uint32_t num_early = 0;
        const bool paired = !program::kAnyOddPages || pages % 2 == 0;  // taken two at a time
#pragma unroll
        for (uint32_t i = 0; i < kPreload; ++i) {
          early[i].clear();
          if (i == num_early && i < units * pages &&
              has_arrived(consumer.page, paired && i % 2 == 0)) {
            early[i].load(consumer.page.address(), warp);
            consumer.finish(consumer.page);
            consumer.page.advance();
            num_early = i + 1;
          }
        }
        if (!waited) {
          consumer.begin_waiting();
          consumer.wait_ready();
          consumer.wait_hinted();
        }
        if (chunks > 1 || first_unit == 0)
          panel.fill(first_row, rows, chunk);
        else if (input.gain != kNone)
          carry_squares(consumer);
        if (!waited) consumer.end_waiting();
        waited = true;
        if (first_unit == 0 && chunk == 0) consumer.note(Event::kInputs);
        UnitSums sums;
        sums.clear();
        uint32_t page = 0, unit = 0;
        const auto add = [&](const PageTiles& tiles) {
          sums.add(tiles, consumer.scratch() + page * kTilesPerPage * kGroupRows * kTileRowBytes,
                   warp, tiling.tiles_of(chunk * kChunkPages + page));
          if (++page == pages) {
            sums.flush(partials_at(consumer.sums.half(), unit, warp), chunk > 0);
            page = 0;
            ++unit;
          }
        };
        const auto take = [&](PageTiles& tiles) {
          page_arrived(consumer.page.slot).wait(consumer.page.phase);
          consumer.note(Event::kArrived);
          tiles.load(consumer.page.address(), warp);
          consumer.finish(consumer.page);
          consumer.page.advance();
        };
        if (paired) {
          const auto add_pair = [&](const PageTiles& first, const PageTiles& second) {
            sums.add_pair(first, second,
                          consumer.scratch() + page * kTilesPerPage * kGroupRows * kTileRowBytes,
                          warp, tiling.tiles_of(chunk * kChunkPages + page + 1));
            page += 2;
            if (page == pages) {
              sums.flush(partials_at(consumer.sums.half(), unit, warp), chunk > 0);
              page = 0;
              ++unit;
            }
          };
#pragma unroll
          for (uint32_t i = 0; i < kPreload; i += 2)
            if (i < num_early) add_pair(early[i], early[i + 1]);
#pragma unroll 1
          while (unit < units) {
            PageTiles first, second;
            take(first);
            take(second);
            add_pair(first, second);
          }
        } else {
#pragma unroll
          for (uint32_t i = 0; i < kPreload; ++i)
            if (i < num_early) add(early[i]);
#pragma unroll 1
          while (unit < units) {
            PageTiles tiles;
            take(tiles);
            add(tiles);
          }
        }
      }
      consumer.sync();
      if (first_unit + kBlockUnits >= tiling.units) consumer.note(Event::kComputed);
      dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
        Plan plan(stage);
        finish_block(plan, input, consumer, share, first_unit, first_row, prefetched);
        if (input.wants_end) plan.consider(best, best_column);
      });
      consumer.sums.advance();
    }
    if (input.wants_end)
      dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
        Plan(stage).end_group(consumer, first_row, rows, most, best, best_column);
      });
  }
  if (!waited) consumer.wait_ready();
}

}  // namespace megavm
