// The fast attention: bf16, heads of 64 or 128 elements, up to 8 query heads for a KV head.
//
// Several rows of a sequence attend together (tile.cuh). In steps of more than 8 rows, a warp may
// have a row of its own (pairs.cuh). The rest of this file is for one row that all warps process. A
// page holds 64 (or 32) tokens, their keys, then their values, and a warp takes 16 of them at a
// time. It computes scores by mma.m16n8k16 with the query heads as rows of A and the keys as B,
// then sums with the softmax weights as A and the values as B. Rows of the caches are stored
// swizzled, so shared loads have no bank conflicts. The online softmax follows FlashAttention-2
// (Dao 2023, arXiv:2307.08691).
#pragma once

#include "instructions/attention/pairs.cuh"
#include "instructions/attention/tile.cuh"

namespace megavm {

template <uint32_t kD>
struct FastAttention : AttentionWarp<kD> {
  using Warp = AttentionWarp<kD>;
  using typename Warp::State;
  using Warp::kGroup, Warp::kRowBytes, Warp::kPageTokens, Warp::kValuesAt, Warp::kWarpTokens;
  using Warp::kStateFloats, Warp::kValueTiles;
  static constexpr uint32_t kBlockSize = attention::kBlockSize;
  static constexpr uint32_t kWarpsPerPage = kPageTokens / kWarpTokens;
  static constexpr uint32_t kPagesPerRound = kNumConsumers / kWarpsPerPage;
  static constexpr uint32_t kRounds = 2 * kPagesPerRound <= kPages ? 2 : 1;  // waited for together
  static_assert(kPagesPerRound <= kPages);
  static constexpr uint32_t kPiece = min_of(kBlockSize, kPageTokens);  // tokens in one copy
  using Tile = AttentionTile<kD>;
  using Pairs = AttentionPairs<kD>;

  using Ahead = RowsAhead<kRunRows<kD>>;

  static __device__ __forceinline__ uint32_t num_pages(const AttentionRun& run) {
    return run.cached > run.begin ? ceil_div(run.cached - run.begin, kPageTokens) : 0;
  }

  // Number of tokens in a page of the run.
  static __device__ __forceinline__ uint32_t tokens_of(const AttentionRun& run, uint32_t page) {
    return min_of(kPageTokens, run.cached - run.begin - page * kPageTokens);
  }

  static __device__ __forceinline__ void load(const Operands<Attention>& in, Loader& loader) {
    const Attention& inst = in.inst;
    const uint32_t lane = lane_index();
    Ahead ahead(in, inst.row_begin);
    const uint32_t live = live_end(in, &Attention::row_count, inst.row_begin, inst.row_end);
    const Tensor& keys = in[&Attention::k_cache];
    const Tensor& values = in[&Attention::v_cache];
    const Tensor& table = in[&Attention::block_table];
    const uint32_t heads = keys.columns / (kBlockSize * kD);
    bool ready = false;
    while (ahead.row < live) {
      const uint32_t row = ahead.row, single = Pairs::single_rows(in, ahead, live);
      if (single > 0) {
        Pairs::load(in, loader, row, single, ready);
        ahead = Ahead(in, row + single);
        continue;
      }
      const AttentionRun run(in, ahead, live);
      ahead = Ahead(in, row + run.rows);
      if (num_pages(run) == 0) continue;
      if (!ready) wait_caches(in, loader);
      ready = true;
      for (uint32_t head = inst.head_begin; head < inst.head_end; ++head) {
        if (attention::kRuns && run.rows > 1) {
          Tile::load(in, loader, run, head);
          continue;
        }
        uint32_t blocks = 0, known = 0;  // lane i: the KV block of piece known + i
        const uint32_t pieces = ceil_div(run.cached - run.begin, kPiece);
        for (uint32_t piece = 0; piece < pieces; ++piece) {
          if (piece % kLanes == 0) {
            known = piece;
            const uint32_t token = run.begin + (piece + lane) * kPiece;
            if (piece + lane < pieces)
              blocks = kv_block(table, run.sequence, token / kBlockSize, keys.rows);
            end_together();
          }
          const uint32_t token = run.begin + piece * kPiece;
          const uint32_t in_page = piece * kPiece % kPageTokens;
          if (in_page == 0) {
            // Copy multiples of 8 tokens: matrix loads read 8 rows at a time.
            const uint32_t tokens = tokens_of(run, piece * kPiece / kPageTokens);
            loader.begin_page(2 * ceil_div(tokens, 8) * 8 * kRowBytes);
          }
          const uint32_t block = __shfl_sync(~0u, blocks, piece - known);
          const uint64_t from =
              ((uint64_t{block} * heads + head) * kBlockSize + token % kBlockSize) * kRowBytes;
          const uint32_t bytes = min_of(kPiece, ceil_div(run.cached - token, 8) * 8) * kRowBytes;
          loader.copy(in_page * kRowBytes, base_of(keys) + from, bytes);
          loader.copy(kValuesAt + in_page * kRowBytes, base_of(values) + from, bytes);
        }
      }
    }
  }

  // Address of a warp's state in the scratch: [head][kD] sums, then [head] highest, [head] total.
  static __device__ __forceinline__ uint32_t state_at(const Consumer& consumer, uint32_t warp) {
    return consumer.scratch(4 * warp * kStateFloats);
  }

  // Merge the warps' states and store the result.
  static __device__ __forceinline__ void finish(const Operands<Attention>& in, Consumer& consumer,
                                                uint32_t row, uint32_t head, State& state) {
    Warp::join(state);
    Warp::put(state, state_at(consumer, consumer.warp()));
    consumer.sync();
    // Two threads share two neighbouring elements: each adds up the states of half the warps.
    const uint32_t half = consumer.thread() % 2;
#pragma unroll 1
    for (uint32_t pair = consumer.thread() / 2; pair < kGroup * kD / 2;
         pair += kNumConsumerThreads / 2) {
      const uint32_t h = pair / (kD / 2), e = pair % (kD / 2) * 2;
      constexpr uint32_t kStates = kNumConsumers / 2;
      const uint32_t from = state_at(consumer, half * kStates);
      float peaks[kStates], highest = -kInfinity;
#pragma unroll
      for (uint32_t w = 0; w < kStates; ++w) {
        peaks[w] =
            __uint_as_float(ptx::load_shared(from + 4 * (w * kStateFloats + kGroup * kD + h)));
        highest = fmaxf(highest, peaks[w]);
      }
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      float total = 0.0f, x = 0.0f, y = 0.0f;
#pragma unroll
      for (uint32_t w = 0; w < kStates; ++w) {
        const float factor = peaks[w] == -kInfinity ? 0.0f : ptx::exp2(peaks[w] - highest);
        const uint32_t state = from + 4 * w * kStateFloats;
        total = fmaf(factor, __uint_as_float(ptx::load_shared(state + 4 * (kGroup * (kD + 1) + h))),
                     total);
        const ptx::Words2 sums = ptx::load_shared2(state + 4 * (h * kD + e));
        x = fmaf(factor, __uint_as_float(sums.x), x);
        y = fmaf(factor, __uint_as_float(sums.y), y);
      }
      total += __shfl_xor_sync(~0u, total, 1);
      x += __shfl_xor_sync(~0u, x, 1);
      y += __shfl_xor_sync(~0u, y, 1);
      if (half != 0) continue;
      Warp::write(in, row, head, h, e, x, y, highest, total);
    }
    consumer.sync();
  }

  // Attend with all warps to the tokens of one row.
  static __device__ __forceinline__ void consume_row(const Operands<Attention>& in,
                                                     Consumer& consumer, uint32_t row,
                                                     const AttentionRun& run, bool ready) {
    const Attention& inst = in.inst;
    const uint32_t warp = consumer.warp(), pages = num_pages(run);
#pragma unroll 1
    for (uint32_t head = inst.head_begin; head < inst.head_end; ++head) {
      if (!ready) consumer.wait_ready();
      State state;
      Warp::start(in, row, head, run.newest && warp == 0, state);
      if (!ready) consumer.note(in.stage, Event::kInputs);
      ready = true;
#pragma unroll 1
      for (uint32_t begin = 0; begin < pages; begin += kRounds * kPagesPerRound) {
        const uint32_t count = min_of(kRounds * kPagesPerRound, pages - begin);
        consumer.wait_pages(count);
        consumer.note(in.stage, Event::kLoadArrived);
        const uint32_t first = warp % kWarpsPerPage * kWarpTokens;
        PageCursor cursor = consumer.page;
        cursor.advance(warp / kWarpsPerPage);
        uint32_t addresses[2], tokens[2];
#pragma unroll
        for (uint32_t p = 0; p < 2; ++p) {
          const uint32_t page = p * kPagesPerRound + warp / kWarpsPerPage;
          const uint32_t there = page < count ? tokens_of(run, begin + page) : 0;
          addresses[p] = cursor.address() + first * kRowBytes;
          tokens[p] = there > first ? min_of(kWarpTokens, there - first) : 0;
          cursor.advance(kPagesPerRound);
        }
        if (tokens[0] > 0) Warp::attend(addresses, tokens, inst.scale * kLog2E, state);
        consumer.finish_pages(count);
      }
      consumer.note(in.stage, Event::kComputed);
      finish(in, consumer, row, head, state);
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Attention>& in,
                                                 Consumer& consumer) {
    const Attention& inst = in.inst;
    Ahead ahead(in, inst.row_begin);
    const uint32_t live = live_end(in, &Attention::row_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    while (ahead.row < live) {
      const uint32_t row = ahead.row, single = Pairs::single_rows(in, ahead, live);
      if (single > 0) {
        Pairs::consume(in, consumer, row, single, ready);
        ahead = Ahead(in, row + single);
        continue;
      }
      const AttentionRun run(in, ahead, live);
      if (attention::kRuns && run.rows > 1) {
        const bool first = !ready;
        if (first) {
          consumer.wait_ready();
          if (program::kMatrixRows > 0) consumer.end_waiting();
        }
#pragma unroll 1
        for (uint32_t head = inst.head_begin; head < inst.head_end; ++head)
          Tile(in, run, row, head, consumer.warp())
              .process(consumer, first && head == inst.head_begin);
        // A warpgroup without rows may be two turns ahead of the other one, which multiplies
        // queries in the scratch. Single rows and products of few rows (rows.cuh) would overwrite
        // them.
        consumer.sync();
      } else {
        consume_row(in, consumer, row, run, ready);
      }
      ready = true;
      ahead = Ahead(in, row + run.rows);
    }
    if (!ready) consumer.wait_ready();
  }
};

}  // namespace megavm
