// Products of several rows: groups of 8 go through one after the other, their input chunk by chunk,
// and all consumers finish a block together. See product.cuh.
#pragma once

#include "cuda/pipelines/product.cuh"

namespace megavm {

constexpr uint32_t kInputBatch = 4;  // loads of float32 input that a lane has in flight

struct RowsPanel : Panel {
  using Panel::Panel;

  // Fill the chunk's columns of `rows` rows of a tagged input, `first_row` on. A lane has a part of
  // every page of every row; it issues kBatch loads before it looks at any.
  template <bool kF32, uint32_t kBatch>
  __device__ __forceinline__ void fill(uint32_t first_row, uint32_t rows, uint32_t chunk) const {
    constexpr uint32_t kColumnBytes = kF32 ? 8 : 4;
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
        RawInput<kF32, true> raw[kBatch];
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) raw[i].clear(~tag);
        while (true) {
          // Again and again what is still missing; all loads before a look at any.
#pragma unroll
          for (uint32_t i = 0; i < kBatch; ++i)
            if (begin + i < mine && raw[i].check(tag) != tag)
              raw[i].load(from + begin * kPageStride + i * kPageStride);
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
};

// A group's rows of x on their way to the panel. What a lane asks for at a time is a *batch*: its
// kLaneColumns columns of every row, of so many pages as make 16 bytes a row.
class RowsInput {
 public:
  __device__ __forceinline__ RowsInput(const Stage& stage, const ProductInput& input,
                                       const Consumer& consumer)
      : stage_(stage), input_(input), consumer_(consumer) {}

  // Turn to a group of rows.
  __device__ __forceinline__ void begin(uint32_t first_row, uint32_t rows) {
    x_row_ = rows > 0 ? panel().x_row(first_row + lane_index() % rows) : 0;
  }

  // Fill the panel with a chunk of the rows that were turned to.
  __device__ __forceinline__ void fill(uint32_t first_row, uint32_t rows, uint32_t chunk) const {
    // All of this warp must be done with what was there.
    __syncwarp();
    const RowsPanel panel = this->panel();
    const bool tagged = is_tagged(panel.x()), f32 = is_f32(panel.x());
    if (program::kAnyRaggedK || (program::kAnyNormalisedBf16 && panel.has_gain() && !f32)) {
      // A bfloat16 input that is normalised is not worth code of its own.
      panel.fill_ragged(first_row, rows, chunk);
    } else {
      // Only the kinds of input that the program has.
      if (program::kAnyInputs & 8 && tagged && f32)
        panel.fill<true, kInputBatch>(first_row, rows, chunk);
      if (program::kAnyInputs & 2 && tagged && !f32)
        panel.fill<false, 2 * kInputBatch>(first_row, rows, chunk);
      if (program::kAnyInputs & 4 && !tagged && f32) fill<true>(panel, chunk);
      if (program::kAnyInputs & 1 && !tagged && !f32) fill<false>(panel, chunk);
    }
    __syncwarp();
  }

 private:
  static constexpr bool kGainsAhead = !program::kAnyF32Gain && !kF32Weights;
  template <bool kF32>
  static constexpr uint32_t kBatchPages =
      kF32Weights ? 1 : min_of(4 / RawInput<kF32, false>::kWordsIn, kChunkPages);

  struct Batch {
    uint32_t words[kGroupRows][4];  // by number in the order of this lane
    ptx::Words2 gain;

    template <uint32_t kWords, class Raw>
    __device__ __forceinline__ void set(uint32_t number, uint32_t page, const Raw& raw) {
#pragma unroll
      for (uint32_t i = 0; i < kWords; ++i) words[number][page * kWords + i] = raw.word(i);
    }

    // NOTE: see product_rows about registers that are written on every path.
    __device__ __forceinline__ void clear() {
#pragma unroll
      for (auto& four : words)
#pragma unroll
        for (uint32_t& word : four) word = ptx::zero();
      gain = {ptx::zero(), ptx::zero()};
    }
  };

  // Made anew where it is wanted, and not kept in registers.
  __device__ __forceinline__ RowsPanel panel() const { return {stage_, input_, consumer_}; }

  // Number i of the rows, in this lane's order, is row i ^ order(). Workers, and the quarters of a
  // warp, take the rows in different orders: the ones not to ask for the same words at the same
  // time, the others not to store into the same banks.
  static __device__ __forceinline__ uint32_t order() {
    // NOTE: read anew: what is worked out from it would take registers of the whole kernel.
    return (ptx::block_index() ^ ptx::thread_index() % kLanes / 8) % kGroupRows;
  }

  // End of the chunk's pages in which this lane's columns exist.
  __device__ __forceinline__ uint32_t end_page(const RowsPanel& panel, uint32_t chunk) const {
    const uint32_t end = chunk * kChunkPages + input_.tiling.pages_of(chunk), k = input_.tiling.k;
    if constexpr (!program::kAnyPartialPages) return end;
    return panel.column >= k ? 0 : min_of(end, ceil_div(k - panel.column, kPageColumns));
  }

  // Ask for the batch that begins at this page and does not go beyond `end`.
  template <bool kF32>
  __device__ __forceinline__ void load(const RowsPanel& panel, Batch& batch, uint32_t begin,
                                       uint32_t end) const {
    constexpr uint32_t kBytes = kF32 ? 4 : 2, kWords = RawInput<kF32, false>::kWordsIn;
    const Tensor& x = panel.x();
    uint32_t column[kBatchPages<kF32>];
#pragma unroll
    for (uint32_t page = 0; page < kBatchPages<kF32>; ++page)
      column[page] = begin + page < end ? panel.column + (begin + page) * kPageColumns : 0;
    const uint32_t order = this->order();
#pragma unroll
    for (uint32_t i = 0; i < kGroupRows; ++i) {
      const uint32_t x_row = __shfl_sync(~0u, x_row_, i ^ order);
      const uint64_t from = base_of(x) + uint64_t{x_row} * (x.columns * kBytes);
#pragma unroll
      for (uint32_t page = 0; page < kBatchPages<kF32>; ++page) {
        // NOTE: no load is left out, not even of rows that are not live: one that merges with other
        // values would be waited for.
        RawInput<kF32, false> raw;
        raw.load(from + column[page] * kBytes);
        batch.set<kWords>(i, page, raw);
      }
    }
    if constexpr (kGainsAhead && kF32)
      if (panel.has_gain() && begin < end)
        batch.gain = ptx::load_constant2(element_at(panel.gain(), 0, 0) +
                                         2 * (panel.column + begin * kPageColumns));
  }

  // Put that batch into the panel, from its page `to` on. What becomes of rows that are not live is
  // not looked at.
  template <bool kF32>
  __device__ __forceinline__ void put(const RowsPanel& panel, const Batch& batch, uint32_t begin,
                                      uint32_t end, uint32_t to,
                                      float (&squares)[kGroupRows]) const {
    constexpr uint32_t kWords = RawInput<kF32, false>::kWordsIn;
    const bool has_gain = kF32 && panel.has_gain();
    const uint32_t order = this->order();
#pragma unroll
    for (uint32_t page = 0; page < kBatchPages<kF32>; ++page) {
      if (begin + page >= end) break;
      Gain gain;
      gain.words = ptx::zero4();
      if constexpr (kGainsAhead && kF32) {
        static_assert(kBatchPages<kF32> == 1);
        gain.words.x = batch.gain.x, gain.words.y = batch.gain.y;
      } else if (has_gain) {
        gain.load(panel.gain(), panel.column + (begin + page) * kPageColumns);
      }
      const bool f32_gain = has_gain && is_f32(panel.gain());
#pragma unroll
      for (uint32_t i = 0; i < kGroupRows; ++i) {
        const uint32_t row = i ^ order;
        const uint32_t (&words)[4] = batch.words[i];
        if constexpr (!kF32 && !kF32Weights) {
          panel.put_words(to + page, row, words[page * kWords], words[page * kWords + 1]);
          continue;
        }
        RawInput<kF32, false> raw;
        raw.low = {words[page * kWords], words[(page * kWords + 1) % 4], words[2], words[3]};
        float value[kLaneColumns];
#pragma unroll
        for (uint32_t j = 0; j < kLaneColumns; ++j) {
          value[j] = raw.value(j);
          squares[i] = fmaf(value[j], value[j], squares[i]);
          if (has_gain) value[j] *= gain.value(f32_gain, j);
        }
        panel.put(to + page, row, value);
      }
    }
  }

  // Two batches take turns: one is on its way while the other is put in.
  template <bool kF32>
  __device__ __forceinline__ void fill(const RowsPanel& panel, uint32_t chunk) const {
    constexpr uint32_t kPages = kBatchPages<kF32>;
    const uint32_t begin = chunk * kChunkPages, pages = input_.tiling.pages_of(chunk);
    const uint32_t end = end_page(panel, chunk);
    float squares[kGroupRows] = {};
    Batch batch, other;
    batch.clear();
    other.clear();
    load<kF32>(panel, batch, begin, end);
#pragma unroll
    for (uint32_t page = 0; page < kChunkPages; page += 2 * kPages) {
      if (page + kPages < pages) load<kF32>(panel, other, begin + page + kPages, end);
      if (page < pages) put<kF32>(panel, batch, begin + page, end, page, squares);
      if (page + 2 * kPages < pages) load<kF32>(panel, batch, begin + page + 2 * kPages, end);
      if (page + kPages < pages)
        put<kF32>(panel, other, begin + page + kPages, end, page + kPages, squares);
    }
    if (kF32 && panel.has_gain()) add_squares(panel, squares, chunk == 0);
  }

  // Add up the lanes' squares of every row: halve the rows that a lane has three times, then add
  // those of the quarters of the warp.
  __device__ __forceinline__ void add_squares(const RowsPanel& panel, float (&squares)[kGroupRows],
                                              bool first) const {
    if constexpr (kGroupRows == 1) return panel.add_squares(0, squares[0], first);
    const uint32_t lane = lane_index();
#pragma unroll
    for (uint32_t left = kGroupRows / 2; left > 0; left /= 2) {
      const bool upper = lane & left;
#pragma unroll
      for (uint32_t i = 0; i < left; ++i) {
        const float kept = upper ? squares[i + left] : squares[i];
        const float given = upper ? squares[i] : squares[i + left];
        squares[i] = kept + __shfl_xor_sync(~0u, given, left);
      }
    }
    // Lane i of quarter q now has number i of its order: the row that lane i ^ 1 of quarter q ^ 1
    // has, and lane i ^ 2 of quarter q ^ 2.
    float sum = squares[0];
    sum += __shfl_xor_sync(~0u, sum, 8 | 1);
    sum += __shfl_xor_sync(~0u, sum, 16 | 2);
    if (lane >= kGroupRows) return;
    const uint32_t at = panel.squares(lane ^ order());
    if (!first) sum += __uint_as_float(ptx::load_shared(at));
    ptx::store_shared(at, __float_as_uint(sum));
  }

  const Stage& stage_;
  const ProductInput& input_;
  const Consumer& consumer_;
  uint32_t x_row_ = 0;  // lane r knows the row of x of row r of the group, or of a live one
};

// Which item of a block this thread finishes, together with others. A thread keeps its row from
// block to block.
struct ItemShare {
  uint32_t threads;  // that share it
  uint32_t part;     // of the threads that share the item
  uint32_t row;      // of the group
  uint32_t item;     // of the block, for one row

  // `most`: items of a row in a whole block.
  __device__ __forceinline__ ItemShare(uint32_t most, uint32_t thread) {
    const uint32_t total = most * kGroupRows;
    threads = total * 4 <= kNumConsumerThreads ? 4 : total * 2 <= kNumConsumerThreads ? 2 : 1;
    part = thread % threads;
    row = thread / threads % kGroupRows;
    item = thread / threads / kGroupRows;
  }
};

// Add up the partial sums of an item, and finish it.
template <class Plan>
__device__ __forceinline__ void finish_block(Plan& plan, const Consumer& consumer,
                                             const ItemShare& share, bool active,
                                             uint32_t first_unit, uint32_t first_row,
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
      // All loads before a look at any.
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
  if (!active || share.part != 0) return;
  const ProductInput input = plan.input();
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
  RowsInput x(stage, input, consumer);

  bool waited = false;

#pragma unroll 1
  for (uint32_t group = 0; group < num_groups(stage, input); ++group) {
    const uint32_t first_row = input.row_begin + group * kGroupRows;
    const uint32_t end = live_end(stage, input);
    const uint32_t rows = end > first_row ? min_of(kGroupRows, end - first_row) : 0;
    const uint32_t most = min_of(kBlockUnits, tiling.units) * input.half_items / 2;
    x.begin(first_row, rows);
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
        if (chunk == 0)
          if (const ItemShare mine = share(); is_active(mine))
            dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
              Plan(stage).prefetch_ready(mine.item, first_unit, first_row + mine.row, prefetched);
            });
        if (tiling.chunks() > 1 || first_unit == 0)
          x.fill(first_row, rows, chunk);
        else if (input.gain != kNone)
          carry_squares(consumer);
        if (!waited) consumer.end_waiting();
        waited = true;
        if (first_unit == 0 && chunk == 0) consumer.note(stage, Event::kInputs);
        UnitSums sums;
        sums.clear();
        uint32_t page = 0, unit = 0;
        const auto add = [&](const PageTiles& tiles) {
          sums.add(tiles, consumer.scratch() + page * kTilesPerPage * kGroupRows * kTileRowBytes,
                   consumer.warp(), tiling.tiles_of(chunk * kChunkPages + page));
          if (++page == pages) {
            sums.flush(partials_at(consumer.sums.half(), unit, consumer.warp()), chunk > 0);
            page = 0;
            ++unit;
          }
        };
        const auto take = [&](PageTiles& tiles) {
          page_arrived(consumer.page.slot).wait(consumer.page.phase);
          consumer.note(stage, Event::kArrived);
          tiles.load(consumer.page.address(), consumer.warp());
          consumer.finish(consumer.page);
          consumer.page.advance();
        };
        if (paired) {
          const auto add_pair = [&](const PageTiles& first, const PageTiles& second) {
            sums.add_pair(first, second,
                          consumer.scratch() + page * kTilesPerPage * kGroupRows * kTileRowBytes,
                          consumer.warp(), tiling.tiles_of(chunk * kChunkPages + page + 1));
            page += 2;
            if (page == pages) {
              sums.flush(partials_at(consumer.sums.half(), unit, consumer.warp()), chunk > 0);
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
      if (first_unit + kBlockUnits >= tiling.units) consumer.note(stage, Event::kComputed);
      dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
        Plan plan(stage);
        const ItemShare mine = share();
        finish_block(plan, consumer, mine, is_active(mine), first_unit, first_row, prefetched);
        plan.consider(best, best_column);
      });
      consumer.sums.advance();
    }
    dispatch_product<Used>(stage, [&]<class Plan>(Plan*) {
      Plan(stage).end_group(consumer, first_row, rows, most, best, best_column);
    });
  }
  if (!waited) consumer.wait_ready();
}

}  // namespace megavm
