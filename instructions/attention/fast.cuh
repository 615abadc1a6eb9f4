// The fast attention: bf16, heads of 64 or 128 elements, up to 8 query heads for a KV head.
//
// A page holds 64 (or 32) tokens: their keys, then their values. Several rows of a sequence read it
// together (tile.cuh); the rest of this file is for a single row. A warp processes 16 tokens of a
// page at a time. It computes scores by mma.m16n8k16 with the query heads as rows of A and the keys
// as B, then sums with the softmax weights as A and the values as B. Rows of the caches are stored
// swizzled, so shared loads have no bank conflicts. The online softmax follows FlashAttention-2
// (Dao 2023, arXiv:2307.08691).
#pragma once

#include "instructions/attention/tile.cuh"

namespace megavm {

template <uint32_t kD>
struct FastAttention {
  static constexpr uint32_t kGroup = attention::kGroup;
  static constexpr uint32_t kBlockSize = attention::kBlockSize;
  static constexpr uint32_t kRowBytes = 2 * kD;
  static constexpr uint32_t kPageTokens = kPageBytes / (2 * kRowBytes);
  static constexpr uint32_t kValuesAt = kPageTokens * kRowBytes;
  static constexpr uint32_t kWarpTokens = 16;
  static constexpr uint32_t kWarpsPerPage = kPageTokens / kWarpTokens;
  static constexpr uint32_t kPagesPerRound = kNumConsumers / kWarpsPerPage;
  static constexpr uint32_t kRounds = 2 * kPagesPerRound <= kPages ? 2 : 1;  // waited for together
  static_assert(kPagesPerRound <= kPages);
  static constexpr uint32_t kKeyChunks = kD / 32;  // 16-byte loads of a lane per key
  static constexpr uint32_t kValueTiles = kD / 8;
  static constexpr uint32_t kPiece = min_of(kBlockSize, kPageTokens);  // tokens in one copy
  static constexpr uint32_t kStateFloats = kGroup * (kD + 2);
  static_assert(4 * kNumConsumers * kStateFloats <= program::kMaxScratch);
  using Tile = AttentionTile<kD, kPageTokens>;

  static __device__ __forceinline__ AttentionRun run_at(const Operands<Attention>& in, uint32_t row,
                                                        uint32_t end) {
    return AttentionRun(in, row, end, Tile::kRows);
  }

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
    const uint32_t live = live_end(in, &Attention::row_count, inst.row_begin, inst.row_end);
    const Tensor& keys = in[&Attention::k_cache];
    const Tensor& values = in[&Attention::v_cache];
    const Tensor& table = in[&Attention::block_table];
    const uint32_t heads = keys.columns / (kBlockSize * kD);
    bool ready = false;
    for (uint32_t row = inst.row_begin; row < live;) {
      const AttentionRun run = run_at(in, row, live);
      row += run.rows;
      if (num_pages(run) == 0) continue;
      if (!ready) loader.wait_ready();
      ready = true;
      for (uint32_t head = inst.head_begin; head < inst.head_end; ++head) {
        uint32_t blocks = 0, known = 0;  // lane i: the KV block of piece known + i
        const uint32_t pieces = ceil_div(run.cached - run.begin, kPiece);
        for (uint32_t piece = 0; piece < pieces; ++piece) {
          if (piece % kLanes == 0) {
            known = piece;
            const uint32_t token = run.begin + (piece + lane) * kPiece;
            if (piece + lane < pieces)
              blocks = kv_block(table, run.sequence, token / kBlockSize, keys.rows);
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

  // A warp's state of the online softmax for a row's query heads. A lane holds head lane / 4: its
  // share of q and, of every 8 elements of the sum, elements 2 (lane % 4) and the next.
  struct State {
    ptx::Words4 q[kKeyChunks];
    float sum[kValueTiles][2];
    float highest;  // highest score, times log2 e
    float total;    // this lane's share of the sum of weights
  };

  // Neighbouring elements of a query, key or value, as loaded from memory.
  using Eight = Loaded<false, true, 8>;
  using Pair = Loaded<false, true, 2>;

  // Words 0, 2, 1, 3: the order of operand A, see instructions/product/product.cuh.
  static __device__ __forceinline__ ptx::Words4 operand(const Eight& eight, bool tagged) {
    return {eight.word(0, tagged), eight.word(2, tagged), eight.word(1, tagged),
            eight.word(3, tagged)};
  }

  // Load the queries and initialise the state; with `newest` (one warp), with the newest token. All
  // loads are issued before any tag is checked, and repeated until all words have arrived.
  static __device__ __forceinline__ void start(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, bool newest, State& state) {
    const uint32_t lane = lane_index(), chunk = lane % 4 * 8, tag = in.tag();
    const uint32_t query = head * kGroup + min_of(lane / 4, kGroup - 1);
    const bool tagged = is_tagged(in[&Attention::q]);
    const bool new_tagged = newest && is_tagged(in[&Attention::k_new]);
    Eight queries[kKeyChunks], key[kKeyChunks];
    Pair value[kValueTiles];
#pragma unroll
    for (uint32_t i = 0; i < kKeyChunks; ++i)
      key[i].raw[0] = key[i].raw[1] = {ptx::zero(), tag, ptx::zero(), tag};
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i)
      value[i].raw[0].x = ptx::zero(), value[i].raw[0].y = tag;
    // Load words from column `column` on, kStep columns apart.
    // NOTE: the branch is around the loads. With a predicate for each of them, ptxas checks some
    // tags between the loads.
    const auto load = [&]<uint32_t kStep>(auto& loaded, uint32_t Attention::* operand, bool tagged,
                                          uint32_t column) {
      const auto load_all = [&](bool tagged) {
        const SourceRow from = Eight::row_of(in[operand], row, tag, in.word(operand), tagged);
        const uint32_t bytes = Eight::column_bytes(tagged);
#pragma unroll
        for (uint32_t i = 0; i < sizeof(loaded) / sizeof(loaded[0]); ++i)
          loaded[i].load(from.address + uint64_t{column} * bytes + i * kStep * bytes, tagged);
      };
      if (tagged)
        load_all(true);
      else
        load_all(false);
    };
    // Whether all words of `loaded` have arrived.
    const auto has = [&](const auto& loaded, bool tagged) {
      bool complete = true;
#pragma unroll
      for (const auto& words : loaded) complete &= !tagged || words.has(tag);
      return complete;
    };
    const auto load_value = [&] {
      load.template operator()<8>(value, &Attention::v_new, new_tagged, head * kD + lane % 4 * 2);
    };
    const auto find = [&](uint32_t) { find_missing(in, row, head, newest); };
    // Long heads have too many words to be in flight all at once: load the value after the keys.
    constexpr bool kValueLater = kD > 64;
    await(
        [&] {
          load.template operator()<32>(queries, &Attention::q, tagged, query * kD + chunk);
          if (!newest) return;
          load.template operator()<32>(key, &Attention::k_new, new_tagged, head * kD + chunk);
          if constexpr (!kValueLater) load_value();
        },
        [&] {
          bool complete = kValueLater || has(value, new_tagged);
          complete &= has(key, new_tagged);
          complete &= has(queries, tagged);
          return complete ? kNone : 0;
        },
        find);
#pragma unroll
    for (uint32_t i = 0; i < kKeyChunks; ++i) state.q[i] = operand(queries[i], tagged);
    state.highest = -kInfinity;
    state.total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i) state.sum[i][0] = state.sum[i][1] = 0.0f;
    if (!newest) return;
    float score = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kKeyChunks; ++i) {
      const ptx::Words4 other = operand(key[i], new_tagged);
      const uint32_t words[4] = {state.q[i].x, state.q[i].y, state.q[i].z, state.q[i].w};
      const uint32_t k[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        score += ptx::low_bf16(words[j]) * ptx::low_bf16(k[j]) +
                 ptx::high_bf16(words[j]) * ptx::high_bf16(k[j]);
    }
    score += __shfl_xor_sync(~0u, score, 1);
    score += __shfl_xor_sync(~0u, score, 2);
    if constexpr (kValueLater)
      await(load_value, [&] { return has(value, new_tagged) ? kNone : 0; }, find);
    state.highest = score * in.inst.scale * kLog2E;
    state.total = lane % 4 == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i) {
      state.sum[i][0] = value[i].value(0);
      state.sum[i][1] = value[i].value(1);
    }
  }

  // Called when the worker is stopping: stop at a word that is missing.
  static __device__ __forceinline__ void find_missing(const Operands<Attention>& in, uint32_t row,
                                                      uint32_t head, bool newest) {
#pragma unroll 1
    for (uint32_t operand = 0; operand < 3; ++operand) {
      if (operand > 0 && !newest) break;
      const OperandWord word = in.word(operand == 0   ? &Attention::q
                                       : operand == 1 ? &Attention::k_new
                                                      : &Attention::v_new);
      if (!is_tagged(in.stage.tensors[word])) continue;
      const uint32_t width = (operand == 0 ? kGroup : 1) * kD;
      const SourceRow from = Pair::row_of(in.stage.tensors[word], row, in.tag(), word);
#pragma unroll 1
      for (uint32_t c = head * width; c < (head + 1) * width; c += 2) Pair::find_missing(from, c);
    }
  }

  // Process 16 tokens of each of two pages, from `first` on; the first `tokens` of them are valid.
  static __device__ __forceinline__ void attend(const uint32_t (&pages)[2], uint32_t first,
                                                const uint32_t (&tokens)[2], float scale,
                                                State& state) {
    // NOTE: read again here: values derived from it would occupy registers in the whole kernel.
    const uint32_t lane = ptx::thread_index() % kLanes;
    // Scores, 8 tokens at a time, twice for each page.
    float score[2][2][2];
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p)
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n) {
        score[p][n][0] = score[p][n][1] = 0.0f;
        if (n * 8 >= tokens[p]) continue;
        const uint32_t token = first + n * 8 + lane / 4;
        const uint32_t row = pages[p] + token * kRowBytes;
        ptx::Words4 key[kKeyChunks];
#pragma unroll
        for (uint32_t i = 0; i < kKeyChunks; ++i)
          key[i] = ptx::load_shared4(row + ((i * 4 + lane % 4) ^ (token & 7)) * 16);
        float upper[4] = {}, lower[4] = {};
#pragma unroll
        for (uint32_t i = 0; i < kKeyChunks; ++i) {
          ptx::mma(upper, state.q[i], key[i].x, key[i].y);
          ptx::mma(lower, state.q[i], key[i].z, key[i].w);
        }
        score[p][n][0] = upper[0] + lower[2], score[p][n][1] = upper[1] + lower[3];
      }
    // Weights, relative to the highest score so far.
    float highest = -kInfinity;
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p)
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          const uint32_t token = n * 8 + lane % 4 * 2 + j;
          score[p][n][j] = token < tokens[p] ? score[p][n][j] * scale : -kInfinity;
          highest = fmaxf(highest, score[p][n][j]);
        }
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
    highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
    highest = fmaxf(highest, state.highest);
    const float rescale = ptx::exp2(state.highest - highest);
    state.highest = highest;
    state.total *= rescale;
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i)
      state.sum[i][0] *= rescale, state.sum[i][1] *= rescale;
#pragma unroll
    for (uint32_t p = 0; p < 2; ++p) {
      if (tokens[p] == 0) continue;
#pragma unroll
      for (uint32_t n = 0; n < 2; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) score[p][n][j] = ptx::exp2(score[p][n][j] - highest);
      state.total += (score[p][0][0] + score[p][0][1]) + (score[p][1][0] + score[p][1][1]);
      const uint32_t low = ptx::pack_bf16(score[p][0][0], score[p][0][1]);
      const uint32_t high = ptx::pack_bf16(score[p][1][0], score[p][1][1]);
      // Values. Rows that were not copied have weight 0, but may hold anything, NaN included: read
      // one of the first 8 rows instead.
      const uint32_t wanted = lane % 8 + lane / 8 % 2 * 8;
      const uint32_t mine = first + (wanted < ceil_div(tokens[p], 8) * 8 ? wanted : lane % 8);
      const uint32_t row = pages[p] + kValuesAt + mine * kRowBytes;
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; i += 2) {
        const ptx::Words4 v =
            ptx::load_matrices_transposed(row + ((i + lane / 16) ^ (mine & 7)) * 16);
        ptx::mma_8_rows(state.sum[i], low, high, v.x, v.y);
        ptx::mma_8_rows(state.sum[i + 1], low, high, v.z, v.w);
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
    const uint32_t lane = ptx::thread_index() % kLanes;
    state.total += __shfl_xor_sync(~0u, state.total, 1);
    state.total += __shfl_xor_sync(~0u, state.total, 2);
    const uint32_t mine = state_at(consumer, consumer.warp());
    const uint32_t query = lane / 4;
    if (query < kGroup) {
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; ++i)
        ptx::store_shared2(mine + 4 * (query * kD + i * 8 + lane % 4 * 2),
                           __float_as_uint(state.sum[i][0]), __float_as_uint(state.sum[i][1]));
      if (lane % 4 == 0) {
        ptx::store_shared(mine + 4 * (kGroup * kD + query), __float_as_uint(state.highest));
        ptx::store_shared(mine + 4 * (kGroup * kD + kGroup + query), __float_as_uint(state.total));
      }
    }
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
      const uint32_t number = head * kGroup + h;
      if (in.inst.num_splits == 1) {
        write_pair(in[&Attention::out], row, number * kD + e, __fdividef(x, total),
                   __fdividef(y, total), true, in.out_tag());
      } else {
        const uint32_t heads = in[&Attention::q].columns / kD;
        const Tensor& partial = in[&Attention::partial];
        const uint32_t base = (in.inst.split * heads + number) * (kD + 2);
        write_pair(partial, row, base + e, x, y, true, in.out_tag());
        if (e == 0) write_pair(partial, row, base + kD, highest * kLn2, total, true, in.out_tag());
      }
    }
    consumer.sync();
  }

  static __device__ __forceinline__ void consume(const Operands<Attention>& in,
                                                 Consumer& consumer) {
    const Attention& inst = in.inst;
    const uint32_t warp = consumer.warp();
    const uint32_t live = live_end(in, &Attention::row_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const AttentionRun run = run_at(in, row, live);
      const uint32_t pages = num_pages(run);
      if constexpr (!kSingleRow)
        if (run.rows > 1) {
          if (!ready) consumer.wait_ready();
          ready = true;
#pragma unroll 1
          for (uint32_t head = inst.head_begin; head < inst.head_end; ++head)
            Tile(in, run, row, head, warp).process(consumer, pages);
          row += run.rows - 1;
          continue;
        }
#pragma unroll 1
      for (uint32_t head = inst.head_begin; head < inst.head_end; ++head) {
        if (!ready) consumer.wait_ready();
        State state;
        start(in, row, head, run.newest && warp == 0, state);
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
            addresses[p] = cursor.address();
            tokens[p] = there > first ? min_of(kWarpTokens, there - first) : 0;
            cursor.advance(kPagesPerRound);
          }
          if (tokens[0] > 0) attend(addresses, first, tokens, inst.scale * kLog2E, state);
          consumer.finish_pages(count);
        }
        consumer.note(in.stage, Event::kComputed);
        finish(in, consumer, row, head, state);
      }
    }
    if (!ready) consumer.wait_ready();
  }
};

}  // namespace megavm
