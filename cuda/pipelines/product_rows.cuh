// Products of several rows: groups of 8 rows are multiplied one after the other, and all consumers
// finish a block together. A warp holds its columns of a chunk of the input as operands A in
// registers. It loads them from memory in operand order; no other warp needs them. See product.cuh.
#pragma once

#include "cuda/pipelines/row_squares.cuh"
#include "cuda/pipelines/rows_input.cuh"

namespace megavm {

// The sums of one unit, with the input in registers.
struct RowsSums : UnitSums {
  // Add the products of a page, which is page `number` of the chunk.
  __device__ __forceinline__ void add(const PageTiles& page, const RowsInput& x, uint32_t number,
                                      uint32_t warp, uint32_t tiles) {
#pragma unroll
    for (uint32_t i = 0; i < kTilesPerWarp; ++i) {
      if (program::kAnyPartialPages && i * kNumConsumers + warp >= tiles) break;
      const ptx::Words4 &a = x[number * kTilesPerWarp + i], &w = page.tile[i];
      if constexpr (kF32Weights) {
#pragma unroll
        for (uint32_t row = 0; row < kGroupRows; ++row) {
          // The lane that holds these columns of the row.
          const uint32_t lane = row * 4 + lane_index() % 4;
          const auto of_row = [&](uint32_t word) { return __shfl_sync(~0u, word, lane); };
          multiply_f32(sum[row][0], {of_row(a.x), of_row(a.y), of_row(a.z), of_row(a.w)}, w);
        }
      } else {
        multiply(i, a, w);
      }
    }
  }
};

// The item of a block that this thread finishes, alone or with neighbouring threads. A thread has
// the same row in every block. Four neighbouring items belong to the same row; in matmul they are
// the items of one unit.
struct ItemShare {
  uint32_t threads;  // threads that share the item
  uint32_t part;     // this thread's number among them
  uint32_t row;      // of the group
  uint32_t item;     // among the row's items in the block

  // `most`: items of a row in a full block.
  __device__ __forceinline__ ItemShare(uint32_t most, uint32_t thread) {
    const uint32_t total = ceil_div(most, kNeighbours) * kNeighbours * kGroupRows;
    threads = total * 4 <= kNumConsumerThreads ? 4 : total * 2 <= kNumConsumerThreads ? 2 : 1;
    part = thread % threads;
    const uint32_t number = thread / threads;
    row = row_of(number);
    item = number / kNeighbours / kGroupRows * kNeighbours + number % kNeighbours;
  }

  // The row of item `number` of the group; the item of a thread has number thread / threads.
  static __device__ __forceinline__ uint32_t row_of(uint32_t number) {
    return number / kNeighbours % kGroupRows;
  }

 private:
  static constexpr uint32_t kNeighbours = 4;
};

// Add up the partial sums of this thread's item, and finish it.
template <class Plan>
__device__ __forceinline__ void finish_block(Plan& plan, const Consumer& consumer,
                                             const ItemShare& share, bool active,
                                             uint32_t first_unit, uint32_t first_row, float scale,
                                             const Prefetched& prefetched) {
  constexpr uint32_t kPairs = Plan::kPairs;
  float values[2 * kPairs] = {};
  if (active) {
#pragma unroll
    for (uint32_t i = 0; i < kPairs; ++i) {
      uint32_t unit, column;
      plan.place(share.item, i, unit, column);
      const uint32_t from = partials_at(consumer.sums.half(), unit, share.part) +
                            4 * (share.row * kUnitRows + column);
      // Issue all loads before the first addition.
      ptx::Words2 sums[kNumConsumers];
#pragma unroll
      for (uint32_t warp = 0; warp < kNumConsumers; ++warp) {
        sums[warp] = {0, 0};
        if (warp * share.threads + share.part < kNumConsumers)
          sums[warp] = ptx::load_shared2(from + 4 * warp * share.threads * kGroupRows * kUnitRows);
      }
#pragma unroll
      for (const ptx::Words2& sum : sums) {
        values[2 * i] += __uint_as_float(sum.x);
        values[2 * i + 1] += __uint_as_float(sum.y);
      }
    }
  }
#pragma unroll 1
  for (uint32_t offset = 1; offset < share.threads; offset *= 2)
#pragma unroll
    for (float& value : values) value += __shfl_xor_sync(~0u, value, offset);
  active = active && share.part == 0;
  hold_stores(consumer.warp());
  if (active) {
#pragma unroll
    for (float& value : values) value *= scale;
    plan.finish(share.item, first_unit, first_row + share.row, values, prefetched);
  }
  plan.end_item(active, share.item, first_unit, first_row + share.row, share.threads);
}

// The consumers: multiply and finish.
template <class Used>
__device__ __forceinline__ void product_rows(const Stage& stage, Consumer& consumer) {
  ProductInput input = no_input();
  uint32_t best_column = kNone;
  float best = -kInfinity;
  dispatch_product<Used>(stage, [&]<class Plan>(Plan*) { input = Plan(stage).input(); });
  const Tiling& tiling = input.tiling;
  RowsInput x(stage, input, consumer);

  bool waited = false;
  const uint32_t end = live_end(stage, input), groups = num_groups(stage, input);

#pragma unroll 1
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t first_row = input.row_begin + group * kGroupRows;
    const uint32_t rows = end > first_row ? min_of(kGroupRows, end - first_row) : 0;
    const uint32_t most = min_of(kBlockUnits, tiling.units) * input.half_items / 2;
    x.begin(first_row, rows);
    float scale = 1.0f;  // of this thread's row
#pragma unroll 1
    for (uint32_t first_unit = 0; first_unit < tiling.units; first_unit += kBlockUnits) {
      const uint32_t units = min_of(kBlockUnits, tiling.units - first_unit);
      const auto share = [&] { return ItemShare(most, ptx::thread_index()); };
      const auto is_active = [&](const ItemShare& mine) {
        return mine.item < units * input.half_items / 2 && mine.row < rows;
      };
      Prefetched prefetched;
      if (const ItemShare mine = share(); is_active(mine))
        dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
          Plan(stage).prefetch(mine.item, first_unit, first_row + mine.row, prefetched);
        });
#pragma unroll 1
      for (uint32_t chunk = 0; chunk < tiling.chunks(); ++chunk) {
        const uint32_t pages = tiling.pages_of(chunk);
        // Take the weight pages that have arrived into registers, before the input arrives.
        // NOTE: every register is written on every path. A register that keeps its old value on
        // some path would be live in the whole kernel.
        PageTiles early[kPreload];
        uint32_t num_early = 0;
        // A unit has one or two pages in a chunk.
        const bool paired = kChunkPages == 2 && (!program::kAnyOddPages || pages == 2);
#pragma unroll
        for (uint32_t i = 0; i < kPreload; ++i) {
          early[i].clear();
          if (i == num_early && i < units * pages &&
              has_arrived(consumer.page, paired && i % 2 == 0)) {
            early[i].load(consumer.page.address(), consumer.warp());
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
        // Each warp computes the scale of one row.
        RowSquares squares(stage, input);
        const bool scales =
            input.x_squares != kNone && first_unit == 0 && chunk == 0 && consumer.warp() < rows;
        if (tiling.chunks() > 1 || first_unit == 0) x.fetch(chunk, rows > 0);
        if (scales) squares.ask(x_row(stage, input, first_row + consumer.warp()));
        if (chunk == 0)
          if (const ItemShare mine = share(); is_active(mine))
            dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
              Plan(stage).prefetch_ready(mine.item, first_unit, first_row + mine.row, prefetched);
            });
        if (!waited) consumer.end_waiting();
        waited = true;
        if (first_unit == 0 && chunk == 0) consumer.note(stage, Event::kInputs);
        RowsSums sums;
        sums.clear();
        uint32_t unit = 0;
        const auto end_unit = [&] {
          sums.flush(partials_at(consumer.sums.half(), unit, consumer.warp()), chunk > 0);
          ++unit;
        };
        const uint32_t last_tiles = tiling.tiles_of(chunk * kChunkPages + pages - 1);
        const auto add = [&](const PageTiles& tiles) {
          sums.add(tiles, x, 0, consumer.warp(), last_tiles);
          end_unit();
        };
        const auto add_pair = [&](const PageTiles& first, const PageTiles& second) {
          sums.add(first, x, 0, consumer.warp(), kTilesPerPage);
          sums.add(second, x, kChunkPages - 1, consumer.warp(), last_tiles);
          end_unit();
        };
        if (paired) {
#pragma unroll
          for (uint32_t i = 0; i < kPreload; i += 2)
            if (i < num_early) add_pair(early[i], early[i + 1]);
#pragma unroll 1
          while (unit < units) {
            PageTiles first, second;
            PageCursor next = consumer.page;
            next.advance();
            page_arrived(consumer.page.slot).wait(consumer.page.phase);
            page_arrived(next.slot).wait(next.phase);
            consumer.note(stage, Event::kLoadArrived);
            first.load(consumer.page.address(), consumer.warp());
            second.load(next.address(), consumer.warp());
            consumer.finish_pages(2);
            add_pair(first, second);
          }
        } else {
#pragma unroll
          for (uint32_t i = 0; i < kPreload; ++i)
            if (i < num_early) add(early[i]);
#pragma unroll 1
          while (unit < units) {
            PageTiles tiles;
            page_arrived(consumer.page.slot).wait(consumer.page.phase);
            consumer.note(stage, Event::kLoadArrived);
            tiles.load(consumer.page.address(), consumer.warp());
            consumer.finish_pages(1);
            add(tiles);
          }
        }
        if (scales) {
          const float found = squares.scale();
          if (lane_index() == 0)
            ptx::store_shared(scale_at(consumer.sums.half(), consumer.warp()),
                              __float_as_uint(found));
        }
      }
      consumer.sync();
      if (first_unit + kBlockUnits >= tiling.units) consumer.note(stage, Event::kComputed);
      dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
        Plan plan(stage);
        const ItemShare mine = share();
        if (input.x_squares != kNone && first_unit == 0)
          scale = __uint_as_float(ptx::load_shared(scale_at(consumer.sums.half(), mine.row)));
        finish_block(plan, consumer, mine, is_active(mine), first_unit, first_row, scale,
                     prefetched);
        plan.consider(best, best_column);
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
