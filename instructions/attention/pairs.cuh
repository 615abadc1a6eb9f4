// Attention of rows of different sequences in steps of more than 8 rows. A *pair* is a row and a KV
// head. A worker takes up to eight pairs at a time, and their pages come in turn: page 0 of each
// pair, page 1 of each, ... With more than four pairs, each has a warp of its own; of fewer pairs,
// each has two, four or eight warps. When some pairs have no more pages, their warps help those
// that have many more.
#pragma once

#include "instructions/attention/warp.cuh"

namespace megavm {

template <uint32_t kD>
struct AttentionPairs {
  using Warp = AttentionWarp<kD>;
  using State = typename Warp::State;
  static constexpr uint32_t kBlockSize = attention::kBlockSize;
  static constexpr uint32_t kPageTokens = Warp::kPageTokens;
  static constexpr uint32_t kAtOnce = kNumConsumers;
  static constexpr uint32_t kPiece = min_of(kBlockSize, kPageTokens);  // tokens in one copy
  static constexpr uint32_t kPagePieces = kPageTokens / kPiece;
  static constexpr uint32_t kKnownPages = max_of(1, kLanes / kPagePieces);  // lanes look up pieces
  static constexpr uint32_t kUnitTokens = 2 * Warp::kWarpTokens;
  static constexpr uint32_t kPageUnits = kPageTokens / kUnitTokens;  // a warp takes one at a time
  // Warps help other pairs if the longest has so many more pages: to load its queries and to merge
  // the sums takes as long as two or three pages of a pair.
  static constexpr uint32_t kLeastPages = 8;
  // Lanes look up all pieces of a page at once, and the ring holds a page of each pair. How heads
  // and rows are cut decides how many warps a pair has, and that decides the order of its sums. So
  // pairs are not used where this order is fixed.
  static constexpr bool kUsed =
      attention::kPairs && kPagePieces <= kLanes && kAtOnce <= kPages && !program::kFixedOrder;

  // How many of the rows ahead, before `live`, are processed in this way: none, or up to 8.
  template <uint32_t kMost>
  static __device__ __forceinline__ uint32_t single_rows(const Operands<Attention>& in,
                                                         const RowsAhead<kMost>& ahead,
                                                         uint32_t live) {
    if constexpr (!kUsed) return 0;
    return ahead.single(in, kAtOnce, live);
  }

  // `ready`: whether the waits of the instruction are known to be over.
  static __device__ __forceinline__ void load(const Operands<Attention>& in, Loader& loader,
                                              uint32_t row, uint32_t rows, bool& ready) {
    const Tensor& keys = in[&Attention::k_cache];
    const Tensor& values = in[&Attention::v_cache];
    const Tensor& table = in[&Attention::block_table];
    const uint32_t kv_heads = keys.columns / (kBlockSize * kD);
#pragma unroll 1
    for (uint32_t first = 0; first < rows * heads_of(in); first += kAtOnce) {
      const Pairs pairs(in, row, rows, first);
      PageOrder order(pairs);
      Pieces next = order.next(table);
      while (next.pages > 0) {
        const Pieces pieces = next;
        if (pieces.exists)
          check_kv_block(pieces.block, pieces.sequence, pieces.token / kBlockSize, keys.rows);
        end_together();
        if (!ready) wait_caches(in, loader);
        ready = true;
        const uint32_t begin = pieces.token % kBlockSize;
        const uint64_t from =
            (uint64_t{pieces.block} * kv_heads + pieces.head) * kBlockSize + begin;
        // NOTE: before the loop, which otherwise waits for shared memory twice more for each page.
        const uint64_t key_rows = base_of(keys) + from * Warp::kRowBytes;
        const uint64_t value_rows = base_of(values) + from * Warp::kRowBytes;
        const uint32_t number = lane_index() / kPagePieces, piece = lane_index() % kPagePieces;
        const uint32_t at = piece * kPiece * Warp::kRowBytes;
        // Copy multiples of 8 tokens: matrix loads read 8 rows at a time.
        const uint32_t tokens = ceil_div(pieces.tokens, 8) * 8;
        const uint32_t bytes = min_of(kPiece, tokens - piece * kPiece) * Warp::kRowBytes;
#pragma unroll 1
        for (uint32_t taken = 0; taken < pieces.pages;) {
          const uint32_t mine = number - taken;
          PageCursor page;
          const uint32_t count =
              loader.begin_free_pages(min_of(pieces.at_once, pieces.pages - taken), mine,
                                      piece == 0 ? 2 * tokens * Warp::kRowBytes : 0, page);
          if (mine < count && pieces.exists) {
            loader.copy_own(page, at, key_rows, bytes);
            loader.copy_own(page, Warp::kValuesAt + at, value_rows, bytes);
          }
          __syncwarp();
          // While these are copied.
          if (taken == 0) next = order.next(table);
          taken += count;
        }
      }
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Attention>& in, Consumer& consumer,
                                                 uint32_t row, uint32_t rows, bool& ready) {
#pragma unroll 1
    for (uint32_t first = 0; first < rows * heads_of(in); first += kAtOnce) {
      const Pairs pairs(in, row, rows, first);
      Teams teams(pairs.count);
      uint32_t mine = teams.pair_of(consumer.warp()), page = 0;
      // Until this warp has its queries, the loader copies one page at a time.
      if (program::kMatrixRows > 0 && !ready) consumer.begin_waiting();
      if (!ready) consumer.wait_ready();
      State state;
      {
        const uint32_t begun = min_of(mine, pairs.count - 1);
        const bool newest = __shfl_sync(~0u, pairs.newest, begun);
        Warp::start(in, pairs.row_of(begun), pairs.head_of(begun),
                    newest && teams.part_of(consumer.warp()) == 0, state);
      }
      if (program::kMatrixRows > 0 && !ready) consumer.end_waiting();
      if (!ready) consumer.note(in.stage, Event::kInputs);
      ready = true;
      while (true) {
        const uint32_t end = pairs.end_of_turn(teams.shift);
        const uint32_t part = teams.part_of(consumer.warp());
        const uint32_t at_once = max_of(1, teams.warps() / kPageUnits);
#pragma unroll 1
        for (uint32_t next; page < end; page = next) {
          next = min_of(page + at_once, end);
          process(in, consumer, pairs, teams.warps(), mine, part, page, next, state);
        }
        const uint32_t going_on = pairs.with_page(end);
        if (going_on == 0) consumer.note(in.stage, Event::kComputed);
        const bool finishes = mine < kAtOnce && !(going_on >> mine & 1);
        finish(in, consumer, pairs, teams, mine, finishes, state);
        if (going_on == 0) break;
        teams.help(going_on);
        const bool begins = finishes || mine == kAtOnce;
        mine = teams.pair_of(consumer.warp());
        const uint32_t helped = min_of(mine, pairs.count - 1);
        const uint32_t my_row = pairs.row_of(helped), my_head = pairs.head_of(helped);
        if (begins && mine < kAtOnce) Warp::start(in, my_row, my_head, false, state);
      }
    }
  }

 private:
  static __device__ __forceinline__ uint32_t heads_of(const Operands<Attention>& in) {
    return in.inst.head_end - in.inst.head_begin;
  }

  struct Pairs;
  struct Teams;

  // The next pages: lane i knows piece i % kPagePieces of page i / kPagePieces.
  struct Pieces {
    uint32_t pages = 0;
    uint32_t at_once;         // so many of them are begun together, if they are free
    uint32_t tokens;          // in the page
    uint32_t head, sequence;  // those of the pair whose page it is
    uint32_t token, block;    // the first token of the piece, and its block, not checked
    bool exists;              // whether the page has this piece
  };

  // The order of the pages: page 0 of each pair, page 1 of each pair that has one, ...
  struct PageOrder {
    const Pairs& pairs;
    uint32_t page = 0;    // pages of this number come next
    uint32_t passed = 0;  // so many of them have come

    __device__ __forceinline__ explicit PageOrder(const Pairs& pairs) : pairs(pairs) {}

    __device__ __forceinline__ Pieces next(const Tensor& table) {
      const uint32_t number = lane_index() / kPagePieces, piece = lane_index() % kPagePieces;
      Pieces found;
      uint32_t pair = 0, of_pair = 0;
      // NOTE: a worker whose loader begins many pages at once gets more than its share of the
      // memory, and the step waits for the others. If it begins them one by one, it is too slow for
      // the warps of one or two pairs.
      const uint32_t left = __popc(pairs.with_page(page));
      found.at_once = left > 2 ? 1 : 1u << Teams::shift_for(left);
#pragma unroll 1
      while (found.pages < kKnownPages && page < pairs.most_pages) {
        const uint32_t with_page = pairs.with_page(page);
        const uint32_t all = __popc(with_page);
        const uint32_t count = min_of(all - passed, kKnownPages - found.pages);
        if (number - found.pages < count) {
          // Mostly the pairs with a page are the first ones.
          pair = passed + number - found.pages;
          if ((with_page & (with_page + 1)) != 0) pair = numbered_bit(with_page, pair);
          of_pair = page;
        }
        found.pages += count;
        passed += count;
        if (passed == all) ++page, passed = 0;
      }
      const uint32_t first = of_pair * kPageTokens;
      const uint32_t all = __shfl_sync(~0u, pairs.cached - pairs.begin, pair);
      found.tokens = min_of(kPageTokens, all - first);
      found.head = pairs.head_of(pair);
      found.sequence = __shfl_sync(~0u, pairs.sequence, pair);
      found.token = __shfl_sync(~0u, pairs.begin, pair) + first + piece * kPiece;
      found.exists = number < found.pages && piece * kPiece < found.tokens;
      found.block =
          found.exists ? unchecked_kv_block(table, found.sequence, found.token / kBlockSize) : 0;
      return found;
    }
  };

  // Process a round: the pages [page, end) of each pair, as many as its warps take at once. Every
  // warp waits for all of them and finishes them, those before its own page before it processes
  // that.
  static __device__ __forceinline__ void process(const Operands<Attention>& in, Consumer& consumer,
                                                 const Pairs& pairs, uint32_t warps, uint32_t mine,
                                                 uint32_t part, uint32_t page, uint32_t end,
                                                 State& state) {
    const uint32_t own = page + part / kPageUnits;
    const uint32_t before_mine = (1u << mine) - 1;
    uint32_t with_page = pairs.with_page(page);
    bool reads = own == page && with_page >> mine & 1;
    uint32_t before = __popc(own == page ? with_page & before_mine : with_page);
    uint32_t left = __popc(with_page) - before;
#pragma unroll 1
    for (uint32_t p = page + 1; p < end; ++p) {
      with_page = pairs.with_page(p);
      const uint32_t all = __popc(with_page), first = __popc(with_page & before_mine);
      if (p == own) reads = with_page >> mine & 1;
      before += p < own ? all : p == own ? first : 0;
      left += p < own ? 0 : p == own ? all - first : all;
    }
    consumer.wait_pages(before + reads);
    consumer.note(in.stage, Event::kLoadArrived);
    consumer.finish_pages(before);
    if (reads) {
      const uint32_t tokens = pairs.tokens_of(mine, own);
      const uint32_t step = min_of(warps, kPageUnits);  // a power of two
#pragma unroll 1
      for (uint32_t i = part & (step - 1); i * kUnitTokens < tokens; i += step)
        attend(consumer.page.address() + i * kUnitTokens * Warp::kRowBytes,
               tokens - i * kUnitTokens, in.inst.scale * kLog2E, state);
    }
    consumer.wait_pages(left);
    consumer.finish_pages(left);
  }

  // Store the results of pairs that have no more pages; `finishes`: this warp's is one of them.
  static __device__ __forceinline__ void finish(const Operands<Attention>& in, Consumer& consumer,
                                                const Pairs& pairs, const Teams& teams,
                                                uint32_t mine, bool finishes, State& state) {
    const uint32_t of_pair = min_of(mine, pairs.count - 1);
    const uint32_t row = pairs.row_of(of_pair), head = pairs.head_of(of_pair);
    if (teams.shift == 0) {
      if (finishes) Warp::store(in, row, head, state);
      return;
    }
    const uint32_t team = teams.warps_of(mine), part = teams.part_of(consumer.warp());
    if (finishes) {
      Warp::join(state);
      Warp::put(state, state_at(consumer.warp()));
    }
    consumer.sync();
    if (finishes) merge(in, row, head, team, part * kLanes + lane_index());
    consumer.sync();
  }

  // Up to 8 pairs, from number `first` on: the KV heads of `row`, those of the next row, ... Lane i
  // has pair i % 8, or the last one.
  struct Pairs {
    uint32_t count;
    uint32_t row, head;
    uint32_t sequence, begin, cached;  // see AttentionSpan
    bool newest;
    uint32_t most_pages;  // of a pair

    __device__ __forceinline__ Pairs(const Operands<Attention>& in, uint32_t first_row,
                                     uint32_t rows, uint32_t first) {
      const uint32_t heads = heads_of(in);
      count = min_of(kAtOnce, rows * heads - first);
      const uint32_t mine = first + min_of(lane_index() % kAtOnce, count - 1);
      row = first_row + mine / heads;
      head = in.inst.head_begin + mine % heads;
      const AttentionSpan span(in, row);
      end_together();
      sequence = span.sequence;
      begin = span.begin;
      cached = max_of(span.begin, span.cached);
      newest = span.newest;
      most_pages = __reduce_max_sync(~0u, ceil_div(cached - begin, kPageTokens));
    }

    __device__ __forceinline__ uint32_t row_of(uint32_t pair) const {
      return __shfl_sync(~0u, row, pair);
    }
    __device__ __forceinline__ uint32_t head_of(uint32_t pair) const {
      return __shfl_sync(~0u, head, pair);
    }

    // The number of pages after which so few pairs have more that each of them can get more warps
    // than the 1 << `shift` that it has until then.
    __device__ __forceinline__ uint32_t end_of_turn(uint32_t shift) const {
      const uint32_t lane = lane_index(), pages = ceil_div(cached - begin, kPageTokens);
      const uint32_t fewest = ~__reduce_max_sync(~0u, ~pages);
      if (1u << shift == kAtOnce || most_pages - fewest < kLeastPages) return most_pages;
      uint32_t longer = 0;  // pairs that have more pages, or as many and a lower number
#pragma unroll 1
      for (uint32_t i = 0; i < count; ++i) {
        const uint32_t other = __shfl_sync(~0u, pages, i);
        longer += other > pages || (other == pages && i < lane);
      }
      const uint32_t next = __ballot_sync(~0u, lane < count && longer == kAtOnce / 2 >> shift);
      const uint32_t end = __shfl_sync(~0u, pages, __ffs(static_cast<int>(next)) - 1);
      return most_pages - end < kLeastPages ? most_pages : end;
    }

    // The pairs that have tokens in a page: bit i for pair i.
    __device__ __forceinline__ uint32_t with_page(uint32_t page) const {
      const bool mine = lane_index() < count && cached - begin > page * kPageTokens;
      return __ballot_sync(~0u, mine);
    }
    // Tokens in a page of a pair.
    __device__ __forceinline__ uint32_t tokens_of(uint32_t pair, uint32_t page) const {
      const uint32_t all = __shfl_sync(~0u, cached - begin, pair), before = page * kPageTokens;
      return all > before ? min_of(kPageTokens, all - before) : 0;
    }
  };

  // Which warps process which pair. Lane i knows it of warp i % 8.
  struct Teams {
    uint32_t shift;       // 1 << shift warps have a pair
    uint32_t pair, part;  // kAtOnce: no pair

    __device__ __forceinline__ explicit Teams(uint32_t pairs) : shift(shift_for(pairs)) {
      const uint32_t warp = lane_index() % kAtOnce;
      pair = warp >> shift < pairs ? warp >> shift : kAtOnce;
      part = warp & (warps() - 1);
    }

    static __device__ __forceinline__ uint32_t shift_for(uint32_t pairs) {
      return pairs > 4 ? 0 : pairs > 2 ? 1 : pairs > 1 ? 2 : 3;
    }
    __device__ __forceinline__ uint32_t warps() const { return 1u << shift; }
    __device__ __forceinline__ uint32_t pair_of(uint32_t warp) const {
      return __shfl_sync(~0u, pair, warp);
    }
    __device__ __forceinline__ uint32_t part_of(uint32_t warp) const {
      return __shfl_sync(~0u, part, warp);
    }
    // The warps of a pair: bit i for warp i.
    __device__ __forceinline__ uint32_t warps_of(uint32_t number) const {
      return __ballot_sync(~0u, lane_index() < kAtOnce && pair == number);
    }

    // Only the pairs `left` (bit i for pair i) have more pages. Their warps stay with them, and all
    // others help them.
    __device__ __forceinline__ void help(uint32_t left) {
      const bool stays = left >> pair & 1;
      const uint32_t free = __ballot_sync(~0u, lane_index() < kAtOnce && !stays);
      const uint32_t before = warps();
      shift = shift_for(__popc(left));
      if (stays) return;
      const uint32_t number = __popc(free & ((1u << lane_index() % kAtOnce) - 1));
      const uint32_t more = warps() - before;  // for each pair
      pair = numbered_bit(left, number / more);
      part = before + number % more;
    }
  };

  // The place of a set bit, those below which are so many; kAtOnce if there is none.
  static __device__ __forceinline__ uint32_t numbered_bit(uint32_t bits, uint32_t number) {
#pragma unroll 1
    for (; number > 0; --number) bits &= bits - 1;
    return bits != 0 ? __ffs(static_cast<int>(bits)) - 1 : kAtOnce;
  }

  // Process up to 32 tokens, whose keys begin at `keys`.
  static __device__ __forceinline__ void attend(uint32_t keys, uint32_t tokens, float scale,
                                                State& state) {
    const uint32_t low = min_of(tokens, Warp::kWarpTokens);
    Warp::attend({keys, keys + Warp::kWarpTokens * Warp::kRowBytes},
                 {low, min_of(tokens - low, Warp::kWarpTokens)}, scale, state);
  }

  static __device__ __forceinline__ uint32_t state_at(uint32_t warp) {
    return scratch_at(4 * warp * Warp::kStateFloats);
  }

  // Merge the states of the warps `team` (bit i for warp i), and store the result. Their threads
  // divide it among them.
  static __device__ __forceinline__ void merge(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, uint32_t team, uint32_t thread) {
    constexpr uint32_t kGroup = Warp::kGroup;
#pragma unroll 1
    for (uint32_t pair = thread; pair < kGroup * kD / 2; pair += __popc(team) * kLanes) {
      const uint32_t h = pair / (kD / 2), e = pair % (kD / 2) * 2;
      const auto word = [&](uint32_t warp, uint32_t number) {
        return __uint_as_float(ptx::load_shared(state_at(warp) + 4 * number));
      };
      float highest = -kInfinity;
#pragma unroll 1
      for (uint32_t left = team; left != 0; left &= left - 1)
        highest = fmaxf(highest, word(__ffs(static_cast<int>(left)) - 1, kGroup * kD + h));
      float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 1
      for (uint32_t left = team; left != 0; left &= left - 1) {
        const uint32_t w = __ffs(static_cast<int>(left)) - 1;
        const float peak = word(w, kGroup * kD + h);
        const float factor = peak == -kInfinity ? 0.0f : ptx::exp2(peak - highest);
        total = fmaf(factor, word(w, kGroup * (kD + 1) + h), total);
        x = fmaf(factor, word(w, h * kD + e), x);
        y = fmaf(factor, word(w, h * kD + e + 1), y);
      }
      Warp::write(in, row, head, h, e, x, y, highest, total);
    }
  }
};

}  // namespace megavm
