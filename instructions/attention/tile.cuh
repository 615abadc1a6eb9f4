// Attention of a run: several rows of one sequence, which see nearly the same tokens.
//
// The query rows of a tile are the heads of one KV head for each row of the run. A warpgroup has 64
// or 128 of them, and attends to 128 tokens in a turn. The loops are those of FlashAttention-2
// (Dao 2023, arXiv:2307.08691) with wgmma: scores are the queries times the keys; their weights, in
// registers, times the values are added to the sums. While a warpgroup weighs its scores, it adds
// the values of the turn before, and the other one multiplies too.
//
// The first 64 elements of the queries are in registers, or those of the first part; the others,
// for which there are no registers, are in the scratch. The keys of a turn lie in panels of 64
// elements of each token, [token][128 bytes], a page each; the values of 64 tokens lie in such
// panels behind each other. Rows of the caches are stored so that these have the 128-byte swizzle.
#pragma once

#include "cuda/ptx/wgmma.cuh"
#include "instructions/attention/span.cuh"

namespace megavm {

template <uint32_t kD>
struct AttentionTile {
  static constexpr uint32_t kGroup = attention::kGroup;
  static constexpr uint32_t kBlockSize = attention::kBlockSize;
  static constexpr uint32_t kWarps = 4;  // in a warpgroup
  static constexpr uint32_t kWarpRows = 16;
  // Parts of a warpgroup, of 64 query rows each; of long heads there is room for one.
  static constexpr uint32_t kParts = kMaxAttentionElements / (kNumConsumers * kWarpRows * kD);
  static constexpr uint32_t kTokens = 128;                        // attended to in a turn
  static constexpr uint32_t kBlock = kMaxBoxTokens;               // whose values are together
  static constexpr uint32_t kPiece = min_of(kBlockSize, kBlock);  // that one box holds
  static constexpr uint32_t kPanels = kD / kBoxColumns;
  static constexpr uint32_t kValuePanel = kBlock * kBoxRowBytes;
  static constexpr uint32_t kValueBlock = kPanels * kValuePanel;
  static constexpr uint32_t kBlocks = kTokens / kBlock;
  static constexpr uint32_t kPageBlocks = kPageBytes / kValueBlock;
  static constexpr uint32_t kMmaColumns = 16;  // of A that one wgmma multiplies
  static constexpr uint32_t kPanelMmas = kBoxColumns / kMmaColumns;
  static constexpr uint32_t kScoreTiles = kTokens / 8;
  static constexpr uint32_t kValueTiles = kD / 8;
  // Half of a warpgroup's queries, in bytes.
  static constexpr uint32_t kQueryPanel = kParts * kPanels * kWarps * kWarpRows * kBoxRowBytes / 2;
  // NOTE: all depend on kD: compilers check others even where there are no tiles.
  static_assert(kD % kBoxColumns == 0 && kParts * kPanels == 2 && kRunRows<kD> > 1 &&
                kLanes * kPiece % kTokens == 0 && kBlock % kPiece == 0);
  static_assert(kTokens * kBoxRowBytes == kPageBytes && kPageBytes % kValueBlock == 0);
  // A turn and the one before it are in the ring.
  static_assert(!attention::kRuns || 4 * kPanels <= kPages);
  static_assert(!attention::kRuns || kNumConsumers / kWarps * kQueryPanel <= kScratch);

  struct State {
    ptx::Words4 q[kPanelMmas];  // the first panel of the queries
    float sum[kParts][kD / 2];
    float highest[kParts][2];  // highest score of query row lane / 4, and of the eighth after it
    float total[kParts][2];    // this lane's share of the sum of weights
  };

  const Operands<Attention>& in;
  const AttentionRun& run;
  uint32_t row;   // first row of the run
  uint32_t head;  // KV head
  float scale;    // of the scores, times log2 e; positive: `start` turns queries round for another
  uint32_t warp;

  __device__ __forceinline__ AttentionTile(const Operands<Attention>& in, const AttentionRun& run,
                                           uint32_t row, uint32_t head, uint32_t warp)
      : in(in),
        run(run),
        row(row),
        head(head),
        // NOTE: never 0, because a masked score is -inf.
        scale(fmaxf(fabsf(in.inst.scale) * kLog2E, 1e-30f)),
        warp(warp) {}

  // ---- The loader's part.

  static __device__ __forceinline__ void load(const Operands<Attention>& in, Loader& loader,
                                              const AttentionRun& run, uint32_t head) {
    const Tensor& keys = in[&Attention::k_cache];
    const uint32_t heads = keys.columns / (kBlockSize * kD), lane = lane_index();
    const uint32_t tokens = run.cached - run.begin;
    const uint64_t key_map = map_of(in, loader, &Attention::k_cache);
    const uint64_t value_map = map_of(in, loader, &Attention::v_cache);
    uint32_t rows = 0;  // lane i: where piece i of the next kLanes pieces begins, as a row of heads
#pragma unroll 1
    for (uint32_t at = 0; at < tokens; at += kTokens) {
      if (at % (kLanes * kPiece) == 0) {
        const uint32_t token = run.begin + at + lane * kPiece;
        if (token < run.cached)
          rows =
              (kv_block(in[&Attention::block_table], run.sequence, token / kBlockSize, keys.rows) *
                   heads +
               head) *
                  kBlockSize +
              token % kBlockSize;
        end_together();
      }
      const uint32_t there = min_of(kTokens, tokens - at), pieces = ceil_div(there, kPiece);
      const uint32_t boxes = pieces * 2 * kPanels;
      const PageCursor first = loader.begin_pages(pages_of(there), boxes * kPiece * kBoxRowBytes);
#pragma unroll 1
      for (uint32_t begin = 0; begin < boxes; begin += kLanes) {
        const uint32_t box = begin + lane, piece = box / (2 * kPanels);
        const uint32_t panel = box % kPanels, token = piece * kPiece, block = token / kBlock;
        const bool values = box / kPanels % 2 != 0;
        const uint32_t from = __shfl_sync(~0u, rows, (at / kPiece + piece) % kLanes);
        PageCursor page = first;
        page.advance(values ? kPanels + block / kPageBlocks : panel);
        const uint32_t to = values ? block % kPageBlocks * kValueBlock + panel * kValuePanel +
                                         token % kBlock * kBoxRowBytes
                                   : token * kBoxRowBytes;
        if (box < boxes)
          loader.copy_box(first, page, to, values ? value_map : key_map, panel * kBoxColumns, from,
                          true);
      }
    }
  }
  static __device__ __forceinline__ uint64_t map_of(const Operands<Attention>& in, Loader& loader,
                                                    uint32_t Attention::* cache) {
    return loader.map_of(in.stage.words.operands[in.word(cache)], 0);
  }

  // Pages of a turn of so many tokens.
  static __device__ __forceinline__ uint32_t pages_of(uint32_t tokens) {
    return kPanels + ceil_div(tokens, kPageBlocks * kBlock);
  }

  // ---- The consumers' part.

  // NOTE: read again where it is needed: values derived from it would occupy registers.
  static __device__ __forceinline__ uint32_t lane() { return ptx::thread_index() % kLanes; }

  // Number of a query row of this lane in the tile: row i of the run has numbers i * kGroup and on.
  __device__ __forceinline__ uint32_t number(uint32_t part, uint32_t half) const {
    return (part * kNumConsumers + warp) * kWarpRows + half * 8 + lane() / 4;
  }
  __device__ __forceinline__ uint32_t count() const { return run.rows * kGroup; }

  // Where queries of this warpgroup are: those of the second panel, or of the second part.
  __device__ __forceinline__ uint32_t queries(const Consumer& consumer) const {
    return consumer.scratch(warp / kWarps * kQueryPanel);
  }

  // Load the queries, once they are ready, and clear the sums. Query rows beyond the last one
  // repeat it. A warp loads those of its own rows, whole lines of them, and passes them on through
  // the scratch.
  __device__ __forceinline__ void start(Consumer& consumer, State& state) const {
    constexpr uint32_t kChunks = kBoxRowBytes / 16, kRowsAtOnce = kLanes / kChunks;
    constexpr uint32_t kLoads = kWarpRows / kRowsAtOnce;
    const Tensor& q = in[&Attention::q];
    const uint32_t sign = in.inst.scale < 0.0f ? 0x80008000u : 0;
    const uint32_t chunk = lane() % kChunks;
    ptx::Words4 words[kParts * kPanels][kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kParts * kPanels; ++i)
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint32_t mine = (i / kPanels * kNumConsumers + warp) * kWarpRows + j * kRowsAtOnce;
        const uint32_t query = min_of(mine + lane() / kChunks, count() - 1);
        const uint32_t column = (head * kGroup + query % kGroup) * kD + i % kPanels * kBoxColumns;
        words[i][j] = ptx::load_relaxed4(element_at(q, row + query / kGroup, column + chunk * 8));
      }
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        state.highest[part][half] = -kInfinity;
        state.total[part][half] = 0.0f;
      }
#pragma unroll
      for (float& sum : state.sum[part]) sum = __uint_as_float(ptx::zero());
    }
    consumer.sync_alive();  // no warp multiplies queries that were there before
    const uint32_t at = queries(consumer) + warp % kWarps * kWarpRows * kBoxRowBytes;
    const auto put = [&](const ptx::Words4(&of)[kLoads]) {
#pragma unroll
      for (uint32_t j = 0; j < kLoads; ++j) {
        const uint32_t mine = j * kRowsAtOnce + lane() / kChunks;
        ptx::store_shared4(at + mine * kBoxRowBytes + (chunk ^ mine % 8) * 16,
                           {of[j].x ^ sign, of[j].y ^ sign, of[j].z ^ sign, of[j].w ^ sign});
      }
    };
    put(words[0]);
    __syncwarp();
    const uint32_t mine = lane() / 4, from = at + mine * kBoxRowBytes + lane() % 4 * 4;
#pragma unroll
    for (uint32_t i = 0; i < kPanelMmas; ++i) {
      const uint32_t first = (2 * i ^ mine) * 16, next = (2 * i + 1 ^ mine) * 16;
      state.q[i] = {
          ptx::load_shared(from + first), ptx::load_shared(from + 8 * kBoxRowBytes + first),
          ptx::load_shared(from + next), ptx::load_shared(from + 8 * kBoxRowBytes + next)};
    }
    __syncwarp();
    put(words[1]);
    ptx::fence_proxy_async_shared();
    ptx::sync_warpgroup(warp / kWarps);
  }

  // A lane's scores of a part: 4 * (eighth token) + 2 * (eighth row after) + (next token).
  using Scores = float[kTokens / 2];

  // Where the blocks of the values of a turn are.
  struct Values {
    uint32_t block[kBlocks];

    // Of a turn of so many tokens, whose pages begin with `page`. In place of a block that is not
    // there, the one before: no query row sees its tokens.
    __device__ __forceinline__ Values(PageCursor page, uint32_t tokens) {
      page.advance(kPanels);
#pragma unroll
      for (uint32_t i = 0; i < kBlocks; ++i) {
        if (i > 0 && i * kBlock >= tokens) {
          block[i] = block[i - 1];
          continue;
        }
        if (i > 0 && i % kPageBlocks == 0) page.advance();
        block[i] = ptx::uniform(page.address() + i % kPageBlocks * kValueBlock);
      }
    }
  };

  // Where the operands of a turn are; the keys in panels.
  struct Turn {
    uint32_t keys[kPanels], queries;
    Values values;
  };

  // Scores of a part, not scaled.
  static __device__ __forceinline__ void multiply_keys(const Turn& turn, uint32_t part,
                                                       const State& state, Scores& score) {
    using enum ptx::OperandSwizzle;
    constexpr uint32_t kStride = 8 * kBoxRowBytes;
#pragma unroll
    for (float& s : score) s = __uint_as_float(ptx::zero());
    ptx::settle(score);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kD / kMmaColumns; ++i) {
      const uint32_t panel = i / kPanelMmas, offset = i % kPanelMmas * kMmaColumns * 2;
      const uint64_t keys =
          ptx::operand_descriptor<k128Bytes>(ptx::operand_start(turn.keys[panel]), offset, kStride);
      if (part * kPanels + panel == 0)
        ptx::wgmma<kTokens, false>(score, state.q[i % kPanelMmas], keys);
      else
        ptx::wgmma<kTokens>(
            score,
            ptx::operand_descriptor<k128Bytes>(ptx::operand_start(turn.queries), offset, kStride),
            keys);
    }
    ptx::wgmma_commit();
  }

  // Give tokens that a query row does not see the score -inf. The turn begins with token `first`.
  __device__ __forceinline__ void mask(uint32_t first, uint32_t part, Scores& score) const {
    int32_t begin[2], end[2];  // the tokens that a query row sees, from that of score 0 on
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t query = min_of(number(part, half), count() - 1);
      const TokenRange seen(in.inst, run.position + query / kGroup);
      const int32_t mine = static_cast<int32_t>(first + lane() % 4 * 2);
      begin[half] = static_cast<int32_t>(seen.begin) - mine;
      end[half] = static_cast<int32_t>(seen.end) - mine;
    }
#pragma unroll
    for (int32_t i = 0; i < static_cast<int32_t>(kTokens / 2); ++i)
      if (i / 4 * 8 + i % 2 >= end[i / 2 % 2]) score[i] = -kInfinity;
    // Only the first turns of a split begin before some of its tokens.
    if (!__any_sync(~0u, begin[0] > 0 || begin[1] > 0)) return;
#pragma unroll
    for (int32_t i = 0; i < static_cast<int32_t>(kTokens / 2); ++i)
      if (i / 4 * 8 + i % 2 < begin[i / 2 % 2]) score[i] = -kInfinity;
  }

  // Turn scores into weights, relative to the highest score so far. True if the sums must be
  // rescaled: after the first turns this is rare.
  __device__ __forceinline__ bool weigh(uint32_t part, Scores& score, State& state,
                                        float (&rescale)[2]) const {
    bool higher = false;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      float highest = state.highest[part][half];
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
        highest = fmaxf(highest, fmaxf(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
      // A query row may have seen no token yet.
      const float base = highest == -kInfinity ? 0.0f : highest * scale;
      rescale[half] = ptx::exp2(fmaf(state.highest[part][half], scale, -base));
      higher |= highest != state.highest[part][half];
      state.highest[part][half] = highest;
      float total[2] = {0.0f, 0.0f};  // the sums of the even and of the odd tokens
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          float& s = score[4 * n + 2 * half + j];
          ptx::exp2_in_place(s, scale, -base);
          total[j] += s;
        }
      state.total[part][half] = fmaf(state.total[part][half], rescale[half], total[0] + total[1]);
    }
    return __any_sync(~0u, higher);
  }

  // Weights of a part and turn whose values have not been added yet.
  using Weights = ptx::Words4[kTokens / kMmaColumns];

  // Begin to add the values, times their weights.
  static __device__ __forceinline__ void add_values(const Weights& weights, const Values& values,
                                                    float (&sum)[kD / 2]) {
    using enum ptx::OperandSwizzle;
    ptx::settle(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kTokens / kMmaColumns; ++i)
      ptx::wgmma<kD, true>(
          sum, weights[i],
          ptx::operand_descriptor<k128Bytes>(
              ptx::operand_start(values.block[i * kMmaColumns / kBlock], kValuePanel),
              i * kMmaColumns % kBlock * kBoxRowBytes, 8 * kBoxRowBytes));
    ptx::wgmma_commit();
  }

  // Values that are not there, or of tokens beyond the run's, have weight 0 but may be anything,
  // NaN included: make them zeros. All consumers call it. False if the worker is stopping.
  static __device__ __forceinline__ bool clear_values(Consumer& consumer, uint32_t values,
                                                      uint32_t from) {
    constexpr uint32_t kChunk = 16;
    const uint32_t begin = from * kBoxRowBytes / kChunk, end = kValuePanel / kChunk;
#pragma unroll 1
    for (uint32_t panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
      for (uint32_t i = begin + consumer.thread(); i < end; i += kNumConsumerThreads)
        ptx::store_shared4(values + panel * kValuePanel + i * kChunk, {0, 0, 0, 0});
    ptx::fence_proxy_async_shared();
    return consumer.sync_unless_stopping();
  }

  // Attend to a turn, but for its last part's values. `mask` masks the scores of a part. `weights`
  // and `values` are those of the turn before; `finish` is called once it is over.
  template <class Mask, class Finish>
  __device__ __forceinline__ void attend(const Turn& turn, const Values& values, Weights& weights,
                                         State& state, Mask mask, Finish finish) const {
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      float (&sum)[kD / 2] = state.sum[(part + kParts - 1) % kParts];
      Scores score;
      multiply_keys(turn, part, state, score);
      add_values(weights, part == 0 ? values : turn.values, sum);
      ptx::wgmma_wait<1>();
      ptx::settle(score);
      mask(part, score);
      float rescale[2];
      // NOTE: the wait for the values is behind a branch, in two copies that compilers do not
      // unite: else ptxas waits for them before it computes the weights.
      if (weigh(part, score, state, rescale)) {
        ptx::wgmma_wait<0>();
        ptx::settle(sum);
#pragma unroll
        for (uint32_t i = 0; i < kD / 2; ++i) state.sum[part][i] *= rescale[i / 2 % 2];
      } else {
        ptx::wgmma_wait_too<0>();
        ptx::settle(sum);
      }
      if (part == 0) finish();
#pragma unroll
      for (uint32_t i = 0; i < kTokens / kMmaColumns; ++i) {
        const float* w = score + 8 * i;
        weights[i] = {ptx::pack_bf16(w[0], w[1]), ptx::pack_bf16(w[2], w[3]),
                      ptx::pack_bf16(w[4], w[5]), ptx::pack_bf16(w[6], w[7])};
      }
    }
  }

  // Add the values of the last turn.
  static __device__ __forceinline__ void drain(const Weights& weights, const Values& values,
                                               State& state) {
    add_values(weights, values, state.sum[kParts - 1]);
    ptx::wgmma_wait<0>();
    ptx::settle(state.sum[kParts - 1]);
  }

  // Store the results.
  __device__ __forceinline__ void finish(const State& state) const {
    const bool whole = in.inst.num_splits == 1;
    const Tensor& to = whole ? in[&Attention::out] : in[&Attention::partial];
    const uint32_t heads = in[&Attention::q].columns / kD;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        float total = state.total[part][half];
        total += __shfl_xor_sync(~0u, total, 1);
        total += __shfl_xor_sync(~0u, total, 2);
        const float factor = whole ? __fdividef(1.0f, total) : 1.0f;
        const uint32_t mine = number(part, half), pair = lane() % 4 * 2;
        if (mine >= count()) continue;
        const uint32_t query = head * kGroup + mine % kGroup;
        const uint32_t base = whole ? query * kD : (in.inst.split * heads + query) * (kD + 2);
        const PairPlace place(to, row + mine / kGroup, base + pair);
        float pairs[kValueTiles][2];
#pragma unroll
        for (uint32_t i = 0; i < kValueTiles; ++i)
#pragma unroll
          for (uint32_t j = 0; j < 2; ++j) pairs[i][j] = state.sum[part][4 * i + 2 * half + j];
        place.template store_all<8>(pairs, factor, in.out_tag());
        if (!whole && pair == 0)
          place.after(kD).store(state.highest[part][half] * scale * kLn2, total, in.out_tag());
      }
  }

  // Turns until one begins with this token or a later one.
  __device__ __forceinline__ uint32_t turns_to(uint32_t token) const {
    return ceil_div(max_of(token, run.begin) - run.begin, kTokens);
  }
  // Tokens of the last turn.
  __device__ __forceinline__ uint32_t last_tokens() const {
    return (run.cached - run.begin - 1) % kTokens + 1;
  }

  // All of it: read the tokens of the run.
  // NOTE: as in matrix products (matrix.cuh, multiply), no warp ends between wgmmas.
  // `first_run`: whether it is the first one of the instruction.
  __device__ __forceinline__ void process(Consumer& consumer, bool first_run) const {
    State state;
    start(consumer, state);
    if (first_run) consumer.note(in.stage, Event::kInputs);
    bool stops = false;
    // The first token that none of this warpgroup's query rows sees.
    const uint32_t group = warp / kWarps * kWarps;
    const uint32_t last =
        min_of(((kParts - 1) * kNumConsumers + group + kWarps) * kWarpRows, count()) - 1;
    const uint32_t end =
        group * kWarpRows < count() ? TokenRange(in.inst, run.position + last / kGroup).end : 0;
    // Tokens that all query rows see.
    const uint32_t seen_begin = TokenRange(in.inst, run.position + run.rows - 1).begin;
    const uint32_t seen_end = TokenRange(in.inst, run.position).end;
    // NOTE: what a turn must know are numbers of turns that are left, because no register is.
    // The last `idle` turns have no tokens for this warpgroup. Some query row does not see all
    // tokens of a turn if more than `seen` or at most `masked` are left.
    const uint32_t turns = turns_to(run.cached), idle = turns - turns_to(end);
    const uint32_t seen = turns - turns_to(seen_begin);
    const uint32_t masked = turns - (max_of(seen_end, run.begin) - run.begin) / kTokens;
    Weights weights;
#pragma unroll
    for (ptx::Words4& words : weights) words = {ptx::zero(), ptx::zero(), ptx::zero(), ptx::zero()};
    uint32_t unfinished = 0;  // pages of the turn before
    uint32_t left = turns;
    const auto operands_of = [&](const PageCursor& first, uint32_t tokens) {
      PageCursor page = first;
      Turn turn = {{}, ptx::uniform(queries(consumer)), Values(first, tokens)};
#pragma unroll
      for (uint32_t& panel : turn.keys) {
        panel = ptx::uniform(page.address());
        page.advance();
      }
      return turn;
    };
    const auto end_turn = [&] { consumer.finish_pages(unfinished, stops); };
#pragma unroll 1
    while (left > 0) {
      // Turns of which all query rows see all tokens, but for the last of all.
      uint32_t whole = 0;
      if (left <= seen) whole = left - min_of(left, max_of(masked, 1));
      left -= whole;
#pragma unroll 1
      for (; whole > 0; --whole) {
        PageCursor page = consumer.page;
        page.advance(unfinished);
        stops |= !consumer.has_step_arrived(page);
        const Turn turn = operands_of(page, kTokens);
        // Before the first turn there are no weights: its own values, times 0.
        attend(
            turn, Values(consumer.page, kTokens), weights, state, [](uint32_t, Scores&) {},
            end_turn);
        unfinished = pages_of(kTokens);
      }
      if (left == 0) break;
      const uint32_t tokens = left > 1 ? kTokens : last_tokens();
      PageCursor page = consumer.page;
      page.advance(unfinished);
      stops |= !consumer.has_step_arrived(page);
      if (left == 1) consumer.note(in.stage, Event::kLoadArrived);
      const Turn turn = operands_of(page, tokens);
      if (tokens % kBlock != 0)
        stops |= !clear_values(consumer, turn.values.block[kBlocks - 1], tokens % kBlock);
      const Values before(consumer.page, unfinished == 0 ? tokens : kTokens);
      if (left > idle) {
        attend(
            turn, before, weights, state,
            [&](uint32_t part, Scores& score) {
              mask(run.begin + (turns_to(run.cached) - left) * kTokens, part, score);
            },
            end_turn);
      } else {
        if (left == idle && unfinished != 0) drain(weights, before, state);
        end_turn();
      }
      unfinished = pages_of(tokens);
      --left;
    }
    if (idle == 0 && unfinished != 0) drain(weights, Values(consumer.page, last_tokens()), state);
    consumer.finish_pages(unfinished, stops);
    if (stops) page_arrived(consumer.page.slot).give_up(consumer.page.phase);
    consumer.note(in.stage, Event::kComputed);
    finish(state);
  }
};

}  // namespace megavm
