// Attention of rows of different sequences in steps of more than 8 rows. A *pair* is a row and a KV
// head. A worker takes up to eight pairs at a time, and their pages come in turn: page 0 of each
// pair, page 1 of each, ... With more than four pairs, each has a warp of its own and the warps do
// not meet; of fewer pairs, each has two, four or eight warps.
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
  static constexpr uint32_t kKnownPages = max_of(1, kLanes / (kAtOnce * kPagePieces));
  static constexpr uint32_t kUnitTokens = 2 * Warp::kWarpTokens;
  // Lanes look up all pieces of a page of each pair at once, and the ring holds a page of each
  // pair. The warps of a pair depend on how heads and rows are cut, and so does the order of sums.
  static constexpr bool kUsed = attention::kPairs && kAtOnce * kPagePieces <= kLanes &&
                                kAtOnce <= kPages && !program::kFixedOrder;

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
      // Lane i looks up piece i / 8 of the next kKnownPages pages of pair i % 8, and asks for the
      // pieces after these.
      const uint32_t mine = pairs.begin + lane_index() / kAtOnce * kPiece;
      const auto ask = [&](uint32_t page) {
        const uint32_t token = mine + page * kPageTokens;
        return token < pairs.cached ? unchecked_kv_block(table, pairs.sequence, token / kBlockSize)
                                    : 0;
      };
      uint32_t next = ask(0), block = 0, token = 0;
#pragma unroll 1
      for (uint32_t page = 0; page < pairs.most_pages; ++page) {
        if (page % kKnownPages == 0) {
          block = next;
          token = mine + page * kPageTokens;
          check_kv_block(block, pairs.sequence, token / kBlockSize, keys.rows);
          end_together();
          next = ask(page + kKnownPages);
        }
        if (!ready) wait_caches(in, loader);
        ready = true;
#pragma unroll 1
        for (uint32_t pair = 0; pair < pairs.count; ++pair) {
          const uint32_t tokens = pairs.tokens_of(pair, page);
          if (tokens == 0) continue;
          // Copy multiples of 8 tokens: matrix loads read 8 rows at a time.
          loader.begin_page(2 * ceil_div(tokens, 8) * 8 * Warp::kRowBytes);
          const uint32_t head = __shfl_sync(~0u, pairs.head, pair);
#pragma unroll 1
          for (uint32_t piece = 0; piece * kPiece < tokens; ++piece) {
            const uint32_t lane = (page % kKnownPages * kPagePieces + piece) * kAtOnce + pair;
            const uint32_t begin = __shfl_sync(~0u, token, lane) % kBlockSize;
            const uint64_t from =
                ((uint64_t{__shfl_sync(~0u, block, lane)} * kv_heads + head) * kBlockSize + begin) *
                Warp::kRowBytes;
            const uint32_t at = piece * kPiece * Warp::kRowBytes;
            const uint32_t bytes =
                min_of(kPiece, ceil_div(tokens - piece * kPiece, 8) * 8) * Warp::kRowBytes;
            loader.copy(at, base_of(keys) + from, bytes);
            loader.copy(Warp::kValuesAt + at, base_of(values) + from, bytes);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Attention>& in, Consumer& consumer,
                                                 uint32_t row, uint32_t rows, bool& ready) {
#pragma unroll 1
    for (uint32_t first = 0; first < rows * heads_of(in); first += kAtOnce) {
      const Pairs pairs(in, row, rows, first);
      const uint32_t warps = pairs.count > 4 ? 1 : pairs.count > 2 ? 2 : pairs.count > 1 ? 4 : 8;
      const uint32_t mine = min_of(consumer.warp() / warps, pairs.count - 1);
      const uint32_t part = consumer.warp() % warps;
      const uint32_t my_row = __shfl_sync(~0u, pairs.row, mine);
      const uint32_t my_head = __shfl_sync(~0u, pairs.head, mine);
      const bool newest = __shfl_sync(~0u, pairs.newest, mine) && part == 0;
      // Until this warp has its queries, the loader copies one page at a time.
      if (program::kMatrixRows > 0 && !ready) consumer.begin_waiting();
      if (!ready) consumer.wait_ready();
      State state;
      Warp::start(in, my_row, my_head, newest, state);
      if (program::kMatrixRows > 0 && !ready) consumer.end_waiting();
      if (!ready) consumer.note(in.stage, Event::kInputs);
      ready = true;
      const uint32_t processed = consumer.warp() / warps;
#pragma unroll 1
      for (uint32_t page = 0; page < pairs.most_pages; ++page) {
        // Every warp waits for all pages of this round and finishes them, those before its own page
        // before it processes that.
        const uint32_t with_page = pairs.with_page(page);
        const uint32_t before = __popc(with_page & ((1u << processed) - 1));
        const bool reads = with_page >> processed & 1;
        consumer.wait_pages(before + reads);
        consumer.note(in.stage, Event::kLoadArrived);
        consumer.finish_pages(before);
        const uint32_t left = __popc(with_page) - before;
        if (reads) {
          const uint32_t tokens = pairs.tokens_of(processed, page);
          // Of the units of 32 tokens of a pair, each warp has every `warps`-th.
          const uint32_t unit = page * kPageTokens / kUnitTokens;
#pragma unroll 1
          for (uint32_t i = 0; i * kUnitTokens < tokens; ++i)
            if ((unit + i) % warps == part)
              attend(consumer.page.address() + i * kUnitTokens * Warp::kRowBytes,
                     tokens - i * kUnitTokens, in.inst.scale * kLog2E, state);
        }
        consumer.wait_pages(left);
        consumer.finish_pages(left);
      }
      consumer.note(in.stage, Event::kComputed);
      if (warps == 1) {
        if (processed < pairs.count) Warp::store(in, my_row, my_head, state);
        continue;
      }
      Warp::join(state);
      Warp::put(state, state_at(consumer.warp()));
      consumer.sync();
      if (processed < pairs.count)
        merge(in, my_row, my_head, consumer.warp() - part, warps, part * kLanes + lane_index());
      consumer.sync();
    }
  }

 private:
  static __device__ __forceinline__ uint32_t heads_of(const Operands<Attention>& in) {
    return in.inst.head_end - in.inst.head_begin;
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

  // Merge the states of `warps` warps from `first` on, and store the result. Their threads divide
  // it among them.
  static __device__ __forceinline__ void merge(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, uint32_t first, uint32_t warps,
                                               uint32_t thread) {
    constexpr uint32_t kGroup = Warp::kGroup;
#pragma unroll 1
    for (uint32_t pair = thread; pair < kGroup * kD / 2; pair += warps * kLanes) {
      const uint32_t h = pair / (kD / 2), e = pair % (kD / 2) * 2;
      const auto word = [&](uint32_t warp, uint32_t number) {
        return __uint_as_float(ptx::load_shared(state_at(first + warp) + 4 * number));
      };
      float highest = -kInfinity;
#pragma unroll 1
      for (uint32_t w = 0; w < warps; ++w) highest = fmaxf(highest, word(w, kGroup * kD + h));
      float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll 1
      for (uint32_t w = 0; w < warps; ++w) {
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
