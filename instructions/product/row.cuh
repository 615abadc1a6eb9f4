// Products of one row, where latency counts. The consumers issue the loads of the input first, take
// weights into registers while they are in flight, and leave partial sums for the storer. The
// storer computes where results go before the sums are complete, and finishes the sums while the
// consumers begin the next instruction. See product.cuh and epilogue.cuh.
#pragma once

#include "cuda/storer.cuh"
#include "instructions/product/epilogue.cuh"
#include "instructions/product/row_input.cuh"
#include "instructions/product/row_squares.cuh"

namespace megavm {

// The sums of one unit, with the input in the panel.
struct RowSums : UnitSums {
  __device__ __forceinline__ void add(const PageTiles& page, uint32_t panel_page, uint32_t warp) {
    const uint32_t lane = lane_index();
#pragma unroll
    for (uint32_t i = 0; i < kTilesPerWarp; ++i) {
      const uint32_t tile = i * kNumConsumers + warp;
      const ptx::Words4 a = ptx::load_shared4(panel_page + tile * kTileRowBytes + lane % 4 * 16);
      const ptx::Words4& w = page.tile[i];
      if constexpr (kF32Weights) {
        multiply_f32(sum[0][0], a, w);
      } else {
        multiply(i, a, w);
      }
    }
  }

  // Two pages of the same unit: their loads and products overlap.
  __device__ __forceinline__ void add_pair(const PageTiles& first, const PageTiles& second,
                                           uint32_t panel_page, uint32_t warp) {
    if constexpr (kF32Weights) {
      add(first, panel_page, warp);
      add(second, panel_page + kTilesPerPage * kTileRowBytes, warp);
    } else {
      const uint32_t from = panel_page + warp * kTileRowBytes + lane_index() % 4 * 16;
      ptx::Words4 a[2 * kTilesPerWarp];
#pragma unroll
      for (uint32_t i = 0; i < 2 * kTilesPerWarp; ++i)
        a[i] = ptx::load_shared4(from + i * kNumConsumers * kTileRowBytes);
#pragma unroll
      for (uint32_t i = 0; i < 2 * kTilesPerWarp; ++i)
        multiply(i, a[i], i < kTilesPerWarp ? first.tile[i] : second.tile[i - kTilesPerWarp]);
    }
  }
};

// The number of next pages that have arrived, at most `most` <= kPreload.
__device__ __forceinline__ uint32_t count_arrived(PageCursor first, uint32_t most) {
  PageCursor page = first;
  page.advance(lane_index() % kPreload);
  const bool there = lane_index() < most && page_arrived(page.slot).is_over(page.phase);
  const uint32_t count = __ffs(~__ballot_sync(~0u, there)) - 1;
  __syncwarp();
  if constexpr (kWarpArrivals > 1)
    for (uint32_t i = 0; i < count; ++i, first.advance())
      page_arrived(first.slot).wait(first.phase);
  return count;
}

// Whether a unit's pages in a chunk are processed two at a time.
__device__ __forceinline__ bool is_paired(uint32_t pages) {
  return !any_pages_left(2) || pages % 2 == 0;
}

// The consumers: multiply, and leave partial sums block by block.
__device__ __forceinline__ void product_row(const Stage& stage, const Product& input,
                                            Consumer& consumer) {
  // NOTE: functions, because values would occupy registers that the pages need.
  const auto warp = [&] { return consumer.warp(); };
  const uint32_t first_pages = input.tiling.pages_of(0);
  const bool live = live_end(stage, input) > input.row_begin;
  const Panel panel(stage, input, consumer);
  RowInput x(panel, input, live);
  x.ask(consumer.is_hinted());

  // Take the weight pages that have arrived into registers.
  // NOTE: every register is written on every path. A register that keeps its old value on some path
  // would be live in the whole kernel.
  uint32_t num_early = count_arrived(
      consumer.page, min_of(kPreload, min_of(kBlockUnits, input.tiling.units) * first_pages));
  if (is_paired(first_pages)) num_early &= ~1u;
  PageTiles early[kPreload];
  {
    PageCursor page = consumer.page;
#pragma unroll
    for (uint32_t i = 0; i < kPreload; ++i) {
      early[i].clear();
      if (i < num_early) {
        early[i].load(page.address(), warp(), input.tiling.tiles_of(i % first_pages));
        page.advance();
      }
    }
    consumer.finish_pages(num_early);
    if (num_early > 0) consumer.note(stage, Event::kLoadArrived);
  }

  consumer.begin_waiting();
  consumer.wait_ready();
  consumer.wait_hinted();
  consumer.wait_sums();
  if (live) x.fill(0);
  consumer.end_waiting();
  consumer.note(stage, Event::kInputs);

  RowSums sums;
  sums.clear();
  const uint32_t units = input.tiling.units;
  const auto chunks = [&] { return input.tiling.chunks(); };  // a function, as warp
  uint32_t chunk = 0, pages = first_pages;                    // pages: of a unit in the chunk
  uint32_t page = 0, unit = 0;  // page of the chunk, unit of the block
  const auto panel_page = [&] { return scratch_at(page * kTilesPerPage * kTileRowBytes); };
  const auto flush = [&] {
    if (page < pages) return;
    sums.flush(partials_at(consumer.sums.half(), unit, warp()), chunk > 0);
    page = 0;
    ++unit;
  };
  const auto add = [&](const PageTiles& tiles) {
    sums.add(tiles, panel_page(), warp());
    ++page;
    flush();
  };
  const auto add_pair = [&](const PageTiles& first, const PageTiles& second) {
    sums.add_pair(first, second, panel_page(), warp());
    page += 2;
    flush();
  };
  // Take page `ahead` after the next one to add.
  const auto take = [&](PageTiles& tiles, uint32_t ahead) {
    page_arrived(consumer.page.slot).wait(consumer.page.phase);
    consumer.note(stage, Event::kLoadArrived);
    tiles.load(consumer.page.address(), warp(),
               input.tiling.tiles_of(chunk * kChunkPages + page + ahead));
    consumer.finish(consumer.page);
    consumer.page.advance();
  };
  if (is_paired(pages)) {
#pragma unroll
    for (uint32_t i = 0; i < kPreload; i += 2)
      if (i < num_early) add_pair(early[i], early[i + 1]);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < kPreload; ++i)
      if (i < num_early) add(early[i]);
  }
#pragma unroll 1
  for (uint32_t first_unit = 0; first_unit < units; first_unit += kBlockUnits) {
    const uint32_t block = min_of(kBlockUnits, units - first_unit);
    if (first_unit > 0) consumer.wait_sums();
#pragma unroll 1
    for (chunk = 0; chunk < chunks(); ++chunk) {
      if (!kOneChunk && (first_unit > 0 || chunk > 0) && chunks() > 1) {
        if (live) x.fill(chunk);
        pages = input.tiling.pages_of(chunk);
      }
      if (is_paired(pages)) {
#pragma unroll 1
        while (unit < block) {
          PageTiles first, second;
          take(first, 0);
          take(second, 1);
          add_pair(first, second);
        }
      } else {
#pragma unroll 1
        while (unit < block) {
          PageTiles tiles;
          take(tiles, 0);
          add(tiles);
        }
      }
      unit = 0;
    }
    // Pass the sums of the block to the storer.
    if (first_unit + kBlockUnits >= units) consumer.note(stage, Event::kComputed);
    consumer.sums.arrived().arrive_together();
    consumer.sums.advance();
  }
}

// The storer: finish the sums, block by block; a lane finishes a pair of each block.
template <class Instruction>
__device__ __forceinline__ void finish_row(const Stage& stage, Storer& storer) {
  static_assert(kBlockUnits * kUnitPairs == kLanes);
  const Epilogue<Instruction> epilogue(stage);
  const Product input = epilogue.product();
  const uint32_t row = input.row_begin, units = input.tiling.units;
  const bool live = live_end(stage, input) > row;
  float scale = 1.0f;
  typename Epilogue<Instruction>::Kept kept = {};
#pragma unroll 1
  for (uint32_t first_unit = 0; first_unit < units; first_unit += kBlockUnits) {
    const uint32_t pair = input.pair(first_unit, lane_index());
    const bool active = live && input.finishes(pair);
    typename Epilogue<Instruction>::Early early = {};
    if (active) epilogue.begin(row, pair, early);
    storer.stage.ready().wait(storer.stage.phase);
    // Every lane waits here for the words of its pair. The lanes synchronise below, so no result is
    // stored before all of these words have arrived.
    if (active) epilogue.await(row, pair, early);
    if (live && input.x_squares != kNone && first_unit == 0) {
      storer.stage.hinted().wait(storer.stage.phase);
      RowSquares<> squares(stage, input);
      squares.ask(x_row(stage, input, row));
      scale = squares.scale();
    }
    storer.sums.arrived().wait(storer.sums.phase());
    PairSums sums = {};
    if (active) {
      const uint32_t from = partials_at(storer.sums.half(), lane_index() / kUnitPairs, 0) +
                            8 * (lane_index() % kUnitPairs);
      // Issue all loads before the first addition.
      ptx::Words2 partial[kNumConsumers];
#pragma unroll
      for (uint32_t warp = 0; warp < kNumConsumers; ++warp)
        partial[warp] = ptx::load_shared2(from + 4 * warp * kGroupRows * kUnitRows);
      sums = add_up(partial);
    }
    hold_stores(1);
    sums.first *= scale, sums.second *= scale;
    __syncwarp();
    epilogue.complete({row, pair, active, 1}, sums);
    epilogue.finish({row, pair, active, 1}, sums, early, kept);
    storer.sums.finished().arrive_together();
    storer.sums.advance();
  }
  if (epilogue.keeps() && live) epilogue.end(row, merge_lanes(kept));
  if (lane_index() == 0) storer.note(stage, Event::kEnd);
}

}  // namespace megavm
