// Products of several rows: groups of 8 or 16 rows are multiplied one after the other, and all
// consumers finish a block together. A warp holds its columns of a chunk of the input as operands A
// in registers. It loads them from memory in operand order; no other warp needs them. See
// product.cuh.
#pragma once

#include "instructions/product/epilogue.cuh"
#include "instructions/product/row_squares.cuh"
#include "instructions/product/rows_input.cuh"

namespace megavm {

// Pages of weights that a warp holds while its input is in flight. The input of 16 rows takes their
// registers.
constexpr uint32_t kRowsPreload = kGroupEights > 1 ? 0 : kPreload;
// Whether some products have spans of several blocks.
constexpr bool kSpans = kSpanUnits > kBlockUnits;

// Call `use` with the number of pages of a unit in a chunk as a constant.
// NOTE: without a branch where all chunks are full. Behind one, loads of x merge with other values;
// 16 rows of 1B took 3 % more.
template <class Use>
__device__ __forceinline__ void with_pages(uint32_t pages, Use&& use) {
  static_assert(kMinRowsChunkPages == 2 && kMaxRowsChunkPages == 3);
  const auto when = [&]<uint32_t kOfUnit>() {
    if constexpr (kOfUnit < kChunkPages && any_pages_left(kChunkPages, kOfUnit))
      if (pages == kOfUnit) use.template operator()<kOfUnit>();
  };
  when.template operator()<1>();
  when.template operator()<2>();
  if (pages == kChunkPages) use.template operator()<kChunkPages>();
}

// The sums of one unit, with the input in registers.
struct RowsSums : UnitSums {
  // Add the products of a page, which is page `number` of the chunk.
  __device__ __forceinline__ void add(const PageTiles& page, const RowsInput& x, uint32_t number) {
#pragma unroll
    for (uint32_t i = 0; i < kTilesPerWarp; ++i) {
      const ptx::Words4 &a = x.first(number * kTilesPerWarp + i), &w = page.tile[i];
      if constexpr (kF32Weights) {
#pragma unroll
        for (uint32_t row = 0; row < kGroupRows; ++row) {
          // The lane that holds these columns of the row.
          const uint32_t lane = row * 4 + lane_index() % 4;
          const auto of_row = [&](uint32_t word) { return __shfl_sync(~0u, word, lane); };
          multiply_f32(sum[row][0], {of_row(a.x), of_row(a.y), of_row(a.z), of_row(a.w)}, w);
        }
      } else {
        multiply(i, a, x.second(number * kTilesPerWarp + i), w);
      }
    }
  }
};

// The pair of a pass that this thread finishes, alone or with neighbouring threads. A thread has
// the same row in every pass. Four neighbouring pairs of a row, those of a unit, belong to
// neighbouring threads.
struct PairShare {
  uint32_t threads;  // threads that share the pair
  uint32_t part;     // this thread's number among them
  uint32_t row;      // index of its row in the group
  uint32_t pair;     // among the pairs of the pass's units

  // `units`: those of a full pass.
  __device__ __forceinline__ PairShare(uint32_t units, uint32_t thread) {
    const uint32_t total = units * kUnitPairs * kGroupRows;
    threads = total * 4 <= kNumConsumerThreads ? 4 : total * 2 <= kNumConsumerThreads ? 2 : 1;
    if constexpr (program::kFixedOrder) threads = 1;
    part = thread % threads;
    const uint32_t number = thread / threads;
    row = row_of(number);
    pair = number / kUnitPairs / kGroupRows * kUnitPairs + number % kUnitPairs;
  }

  // The row of pair `number` of the group; the pair of a thread has number thread / threads.
  static __device__ __forceinline__ uint32_t row_of(uint32_t number) {
    return number / kUnitPairs % kGroupRows;
  }
};
static_assert(kPassUnits * kUnitPairs * kGroupRows <= kNumConsumerThreads);

// This thread's sums of the passes of a span, over the chunks so far.
class SpanSums {
 public:
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (PairSums& sums : sums_) sums = {0.0f, 0.0f};
  }
  // Add those of one more chunk to a pass's, and return all of them.
  __device__ __forceinline__ PairSums add(uint32_t pass, PairSums sums) {
#pragma unroll
    for (uint32_t i = 0; i < kPasses; ++i)
      if (i == pass) {
        sums_[i].first += sums.first, sums_[i].second += sums.second;
        sums = sums_[i];
      }
    return sums;
  }

 private:
  static constexpr uint32_t kPasses = kSpanUnits / kPassUnits;
  PairSums sums_[kPasses];
};

struct MyPair {
  PairShare share;
  PairAt at;
};

// Add up the partial sums of this thread's pair, in a pass that begins with unit `unit` of the
// block. The first thread of a pair gets all of them.
__device__ __forceinline__ PairSums add_partials(uint32_t half, const PairShare& share,
                                                 uint32_t unit, bool active) {
  PairSums total = {};
  if (active) {
    const uint32_t from = partials_at(half, unit + share.pair / kUnitPairs, share.part) +
                          4 * (share.row * kUnitRows + share.pair % kUnitPairs * 2);
    // Issue all loads before the first addition.
    ptx::Words2 partial[kNumConsumers];
#pragma unroll
    for (uint32_t warp = 0; warp < kNumConsumers; ++warp) {
      partial[warp] = {0, 0};
      if (warp * share.threads + share.part < kNumConsumers)
        partial[warp] = ptx::load_shared2(from + 4 * warp * share.threads * kGroupRows * kUnitRows);
    }
    total = add_up(partial);
  }
#pragma unroll 1
  for (uint32_t offset = 1; offset < share.threads; offset *= 2) {
    total.first += __shfl_xor_sync(~0u, total.first, offset);
    total.second += __shfl_xor_sync(~0u, total.second, offset);
  }
  return total;
}

// When all pairs of a group's rows are finished: one warp for each row stores what its threads
// kept.
template <class Instruction, class Kept>
__device__ __forceinline__ void end_rows(const Epilogue<Instruction>& epilogue, Consumer& consumer,
                                         uint32_t units, uint32_t first_row, uint32_t rows,
                                         const Kept& kept) {
  constexpr uint32_t kBytes = sizeof(Kept);
  static_assert(kBytes == 8 && 4 * kPartialFloats >= kBytes * kNumConsumerThreads, "room for all");
  const PairShare share(units, consumer.thread());
  const uint32_t from = partials_at(consumer.sums.half(), 0, 0);
  const auto mine = __builtin_bit_cast(ptx::Words2, kept);
  ptx::store_shared2(from + kBytes * consumer.thread(), mine.x, mine.y);
  consumer.sync();
#pragma unroll 1
  for (uint32_t row = consumer.warp(); row < rows; row += kNumConsumers) {
    Kept all = {};
#pragma unroll 1
    for (uint32_t thread = lane_index(); thread < kNumConsumerThreads; thread += kLanes)
      if (PairShare::row_of(thread / share.threads) == row)
        all.merge(__builtin_bit_cast(Kept, ptx::load_shared2(from + kBytes * thread)));
    epilogue.end(first_row + row, merge_lanes(all));
  }
  consumer.sums.advance();
}

// The consumers: multiply and finish. Used: the List of product instructions.
template <class Used>
__device__ __forceinline__ void product_rows(const Stage& stage, const Product& input,
                                             Consumer& consumer) {
  const auto with_epilogue = [&](auto&& use) {
    Used::dispatch(stage.words.header.opcode, [&]<class I>(I*) { use(Epilogue<I>(stage)); });
  };
  const Tiling& tiling = input.tiling;
  RowsInput x(stage, input, consumer);

  bool waited = false;
  const uint32_t end = live_end(stage, input), groups = num_groups(stage, input);

#pragma unroll 1
  for (uint32_t group = 0; group < groups; ++group) {
    const uint32_t first_row = input.row_begin + group * kGroupRows;
    const uint32_t rows = end > first_row ? min_of(kGroupRows, end - first_row) : 0;
    const uint32_t full_pass = min_of(kPassUnits, tiling.units);
    const uint32_t span_units = kSpans ? kSpanUnits : tiling.block_units();
    typename Used::Kept kept;
    x.begin(first_row, rows);
    float scale = 1.0f;  // RMSNorm scale of the row that this thread finishes
#pragma unroll 1
    for (uint32_t first_unit = 0; first_unit < tiling.units; first_unit += span_units) {
      const uint32_t span = min_of(span_units, tiling.units - first_unit);
      // If a span is a block, its sums stay in the scratch until its last chunk; of two passes,
      // they take both halves, when no warp adds up those of the block before any more. Else each
      // chunk's are added up at once.
      const bool stays = !kSpans || (tiling.chunks() > 1 && span <= kBlockUnits);
      const uint32_t block_units = stays ? tiling.block_units() : kPassUnits;
      const auto takes_both = [&] { return stays && block_units > kPassUnits; };
      const auto half = [&] { return takes_both() ? 0 : consumer.sums.half(); };
      if (takes_both() && (kSpans || first_unit == 0)) consumer.sync();
      SpanSums sums_before;  // sums of earlier chunks, unless they stay in the scratch
      sums_before.clear();
      // NOTE: computed anew where it is needed, so that it occupies no registers in between.
      const auto mine = [&](uint32_t unit) {  // in the pass that begins with this unit of the span
        const PairShare share(full_pass, ptx::thread_index());
        const uint32_t pair = input.pair(first_unit + unit, share.pair);
        const bool active =
            unit + share.pair / kUnitPairs < span && share.row < rows && input.finishes(pair);
        return MyPair{share, {first_row + share.row, pair, active, share.threads}};
      };
      typename Used::Early looked_up;
      const auto look_up = [&](uint32_t unit) {
        if (const PairAt at = mine(unit).at; at.active)
          with_epilogue([&]<class I>(const Epilogue<I>& epilogue) {
            typename Epilogue<I>::Early found = {};
            epilogue.begin(at.row, at.pair, found);
            looked_up.set(found);
          });
      };
      const auto await_pass = [&](uint32_t unit) {
        if (const PairAt at = mine(unit).at; at.active)
          with_epilogue([&]<class I>(const Epilogue<I>& epilogue) {
            auto found = looked_up.template get<typename Epilogue<I>::Early>();
            epilogue.await(at.row, at.pair, found);
            looked_up.set(found);
          });
      };
#pragma unroll 1
      for (uint32_t chunk = 0; chunk < tiling.chunks(); ++chunk) {
        const bool is_last = chunk + 1 == tiling.chunks();
        const bool looks_up = stays ? chunk == 0 : is_last;
        // A constant where all chunks are full.
        const uint32_t pages = any_pages_left(kChunkPages) ? tiling.pages_of(chunk) : kChunkPages;
        const uint32_t last_tiles = tiling.tiles_of(chunk * kChunkPages + pages - 1);
#pragma unroll 1
        for (uint32_t block = 0; block < span; block += block_units) {
          const uint32_t units = min_of(block_units, span - block);
          const bool is_first = first_unit + block == 0 && chunk == 0;
          if (looks_up) look_up(block);
          // Take the weight pages that have arrived into registers, before the input arrives.
          // NOTE: every register is written on every path. A register that keeps its old value on
          // some path would be live in the whole kernel.
          PageTiles early[max_of(1, kRowsPreload)];
          uint32_t num_early = 0;
#pragma unroll
          for (uint32_t i = 0; i != kRowsPreload; ++i) {
            early[i].clear();
            // A unit's pages are taken together.
            const auto has_unit = [&] {
              return i + pages <= kRowsPreload && i < units * pages &&
                     has_arrived(consumer.page, pages);
            };
            if (i == num_early && (i % pages > 0 || has_unit())) {
              early[i].load(consumer.page.address(), consumer.warp(),
                            (i + 1) % pages > 0 ? kTilesPerPage : last_tiles);
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
          // Each warp computes the scale of one row of each eight.
          RowSquares<kGroupEights> squares(stage, input);
          const auto has_scale = [&](uint32_t e) {
            return input.x_squares != kNone && is_first && 8 * e + consumer.warp() < rows;
          };
          if (block == 0 && (tiling.chunks() > 1 || first_unit == 0))
            with_pages(pages,
                       [&]<uint32_t kOfUnit>() { x.template fetch<kOfUnit>(chunk, rows > 0); });
#pragma unroll
          for (uint32_t e = 0; e < kGroupEights; ++e)
            if (has_scale(e))
              squares.ask(x_row(stage, input, first_row + 8 * e + consumer.warp()), e);
          if (looks_up) await_pass(block);
          if (!waited) consumer.end_waiting();
          waited = true;
          if (is_first) consumer.note(stage, Event::kInputs);
          RowsSums sums;
          sums.clear();
          uint32_t unit = 0;
          const auto end_unit = [&] {
            sums.flush(partials_at(half(), unit, consumer.warp()), stays && chunk > 0);
            ++unit;
          };
          with_pages(pages, [&]<uint32_t kOfUnit>() {
#pragma unroll
            for (uint32_t i = 0; i + kOfUnit <= kRowsPreload; i += kOfUnit)
              if (i < num_early) {
#pragma unroll
                for (uint32_t p = 0; p < kOfUnit; ++p) sums.add(early[i + p], x, p);
                end_unit();
              }
#pragma unroll 1
            while (unit < units) {
#pragma unroll
              for (uint32_t first = 0; first < kOfUnit; first += 2) {
                constexpr uint32_t kMost = min_of(kOfUnit, 2);
                const uint32_t count = min_of(kMost, kOfUnit - first);
                PageTiles tiles[kMost];
                PageCursor page = consumer.page;
#pragma unroll
                for (uint32_t i = 0; i < count; ++i, page.advance())
                  page_arrived(page.slot).wait(page.phase);
                consumer.note(stage, Event::kLoadArrived);
                page = consumer.page;
#pragma unroll
                for (uint32_t i = 0; i < count; ++i, page.advance())
                  tiles[i].load(page.address(), consumer.warp(),
                                first + i + 1 == kOfUnit ? last_tiles : kTilesPerPage);
                consumer.finish_pages(count);
#pragma unroll
                for (uint32_t i = 0; i < count; ++i) sums.add(tiles[i], x, first + i);
              }
              end_unit();
            }
          });
          if (has_scale(0)) {
            float found[kGroupEights];
            squares.scales(found);
#pragma unroll
            for (uint32_t e = 0; e < kGroupEights; ++e)
              if (has_scale(e) && lane_index() == 0)
                ptx::store_shared(scale_at(consumer.sums.half(), 8 * e + consumer.warp()),
                                  __float_as_uint(found[e]));
          }
          if (stays && !is_last) break;
          consumer.sync();
          if (is_last && first_unit + block + units == tiling.units)
            consumer.note(stage, Event::kComputed);
          if (input.x_squares != kNone && (is_first || (stays && first_unit == 0)))
            scale = __uint_as_float(
                ptx::load_shared(scale_at(consumer.sums.half(), mine(0).share.row)));
          hold_stores(consumer.warp());
#pragma unroll 1
          for (uint32_t pass = 0; pass < units; pass += kPassUnits) {
            if (kMostPasses > 1 && pass > 0) {
              look_up(pass);  // a block of two passes is the whole span
              await_pass(pass);
            }
            MyPair my = mine(block + pass);
            PairSums total = add_partials(half(), my.share, pass, my.at.active);
            if (!stays && tiling.chunks() > 1) total = sums_before.add(block / kPassUnits, total);
            if (is_last) {
              total.first *= scale, total.second *= scale;
              my.at.active &= my.share.part == 0;
              if constexpr (program::kMaxAddends > 0) {
                bool meets = false;
                with_epilogue([&]<class I>(const Epilogue<I>& epilogue) {
                  epilogue.complete(my.at, total);
                  meets = epilogue.completes();
                });
                if (meets) consumer.sync();
              }
              with_epilogue([&]<class I>(const Epilogue<I>& epilogue) {
                auto so_far = kept.template get<typename Epilogue<I>::Kept>();
                epilogue.finish(my.at, total, looked_up.template get<typename Epilogue<I>::Early>(),
                                so_far);
                kept.set(so_far);
              });
            }
            if constexpr (kMostPasses == 1) break;
          }
          if (takes_both()) consumer.sync();
          consumer.sums.advance();
          if constexpr (!kSpans) break;
        }
      }
    }
    with_epilogue([&]<class I>(const Epilogue<I>& epilogue) {
      if constexpr (kWordsOf<typename Epilogue<I>::Kept> > 0)
        if (epilogue.keeps())
          end_rows(epilogue, consumer, full_pass, first_row, rows,
                   kept.template get<typename Epilogue<I>::Kept>());
    });
  }
  if (!waited) consumer.wait_ready();
}

}  // namespace megavm
