// Attention of a run: several rows of one sequence, which see nearly the same tokens.
//
// The query rows of a tile are the heads of one KV head for each row of the run. A warpgroup has 64
// or 128 of them, and attends to 64 tokens in a step. The loops are those of FlashAttention-2
// (Dao 2023, arXiv:2307.08691) with wgmma: scores are the queries, in registers, times the keys;
// their weights, in registers, times the values are added to the sums. While one warpgroup weighs
// its scores, the other one multiplies.
//
// The keys of a step, and its values, lie in panels of 64 elements of each token, [token][128
// bytes]. Rows of the caches are stored so that these have the 128-byte swizzle.
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
  static constexpr uint32_t kRows = kMaxAttentionElements / (kD * kGroup);  // of a run, at most
  static constexpr uint32_t kTokens = kMaxBoxTokens;               // that a step attends to
  static constexpr uint32_t kPiece = min_of(kBlockSize, kTokens);  // of them that one box holds
  static constexpr uint32_t kPanels = kD / kBoxColumns;
  static constexpr uint32_t kPanel = kTokens * kBoxRowBytes;
  static constexpr uint32_t kOperand = kPanels * kPanel;  // the keys of a step, or the values
  static constexpr uint32_t kStepPages = 2 * kOperand / kPageBytes;
  static constexpr uint32_t kMmaColumns = 16;  // of A that one wgmma multiplies
  static constexpr uint32_t kScoreTiles = kTokens / 8;
  static constexpr uint32_t kValueTiles = kD / 8;
  // NOTE: one that depends on kD: compilers check others even where there are no tiles.
  static_assert(kD % kBoxColumns == 0 && kParts > 0 && kRows > 1 &&
                kLanes * kPiece % kTokens == 0 && kTokens % kPiece == 0);
  static_assert(kStepPages * kPageBytes == 2 * kOperand && kStepPages <= 2);

  struct State {
    ptx::Words4 q[kParts][kD / kMmaColumns];
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
      }
      const uint32_t pieces = ceil_div(min_of(kTokens, tokens - at), kPiece);
      const uint32_t bytes = pieces * kPiece * kPanels * kBoxRowBytes;
#pragma unroll
      for (uint32_t operand = 0; operand < 2; ++operand) {
        if (operand * kOperand % kPageBytes == 0)
          loader.begin_page(kStepPages == 2 ? bytes : 2 * bytes);
        const uint64_t map = loader.map_of(
            in.stage.words.operands[in.word(operand ? &Attention::v_cache : &Attention::k_cache)],
            0);
#pragma unroll 1
        for (uint32_t piece = 0; piece < pieces; ++piece) {
          const uint32_t from = __shfl_sync(~0u, rows, (at / kPiece + piece) % kLanes);
          const uint32_t to = operand * kOperand % kPageBytes + piece * kPiece * kBoxRowBytes;
#pragma unroll
          for (uint32_t panel = 0; panel < kPanels; ++panel)
            loader.copy_box(to + panel * kPanel, map, panel * kBoxColumns, from);
        }
      }
    }
  }

  // ---- The consumers' part.

  // NOTE: read again where it is needed: values derived from it would occupy registers.
  static __device__ __forceinline__ uint32_t lane() { return ptx::thread_index() % kLanes; }

  // Number of a query row of this lane in the tile: row i of the run has numbers i * kGroup and on.
  __device__ __forceinline__ uint32_t number(uint32_t part, uint32_t half) const {
    return (part * kNumConsumers + warp) * kWarpRows + half * 8 + lane() / 4;
  }
  __device__ __forceinline__ uint32_t count() const { return run.rows * kGroup; }

  // Load the queries, once they are ready, and clear the sums. Query rows beyond the last one
  // repeat it.
  __device__ __forceinline__ void start(State& state) const {
    const Tensor& q = in[&Attention::q];
    const uint32_t sign = in.inst.scale < 0.0f ? 0x80008000u : 0;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      uint64_t from[2];
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t query = min_of(number(part, half), count() - 1);
        from[half] = element_at(q, row + query / kGroup,
                                (head * kGroup + query % kGroup) * kD + lane() % 4 * 2);
        state.highest[part][half] = -kInfinity;
        state.total[part][half] = 0.0f;
      }
#pragma unroll
      for (uint32_t i = 0; i < kD / kMmaColumns; ++i)
        state.q[part][i] = {ptx::load_relaxed1(from[0] + i * 32) ^ sign,
                            ptx::load_relaxed1(from[1] + i * 32) ^ sign,
                            ptx::load_relaxed1(from[0] + i * 32 + 16) ^ sign,
                            ptx::load_relaxed1(from[1] + i * 32 + 16) ^ sign};
#pragma unroll
      for (float& sum : state.sum[part]) sum = __uint_as_float(ptx::zero());
    }
  }

  // A lane's scores of a part: 4 * (eighth token) + 2 * (eighth row after) + (next token).
  using Scores = float[kTokens / 2];

  // Scores of a part, not scaled, of the tokens whose keys begin at `keys`.
  static __device__ __forceinline__ void multiply_keys(uint32_t keys,
                                                       const ptx::Words4 (&q)[kD / kMmaColumns],
                                                       Scores& score) {
    using enum ptx::OperandSwizzle;
    const uint32_t start = ptx::operand_start(keys);
#pragma unroll
    for (float& s : score) s = __uint_as_float(ptx::zero());
    ptx::settle(score);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kD / kMmaColumns; ++i)
      ptx::wgmma<kTokens, false>(
          score, q[i],
          ptx::operand_descriptor<k128Bytes>(start, i / 4 * kPanel + i % 4 * kMmaColumns * 2,
                                             8 * kBoxRowBytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(score);
  }

  // Give tokens that a query row does not see the score -inf. `first` is the token of score 0.
  __device__ __forceinline__ void mask(uint32_t first, uint32_t part, Scores& score) const {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t query = min_of(number(part, half), count() - 1);
      const TokenRange seen(in.inst, run.position + query / kGroup);
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          const uint32_t token = first + n * 8 + lane() % 4 * 2 + j;
          if (token < seen.begin || token >= seen.end) score[4 * n + 2 * half + j] = -kInfinity;
        }
    }
  }

  // Turn scores into weights, relative to the highest score so far.
  __device__ __forceinline__ void weigh(uint32_t part, Scores& score, State& state) const {
    float rescale[2];
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
      float total = 0.0f;
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 2; ++j) {
          float& s = score[4 * n + 2 * half + j];
          ptx::exp2_in_place(s, scale, -base);
          total += s;
        }
      state.total[part][half] = fmaf(state.total[part][half], rescale[half], total);
    }
    // After the first steps this is rare.
    if (!__any_sync(~0u, higher)) return;
#pragma unroll
    for (uint32_t i = 0; i < kD / 2; ++i) state.sum[part][i] *= rescale[i / 2 % 2];
  }

  // Add the values that begin at `values`, times their weights.
  static __device__ __forceinline__ void add_values(uint32_t values, const Scores& weight,
                                                    float (&sum)[kD / 2]) {
    using enum ptx::OperandSwizzle;
    const uint32_t start = ptx::operand_start(values, kPanel);
    ptx::Words4 weights[kTokens / kMmaColumns];
#pragma unroll
    for (uint32_t i = 0; i < kTokens / kMmaColumns; ++i) {
      const float* w = weight + 8 * i;
      weights[i] = {ptx::pack_bf16(w[0], w[1]), ptx::pack_bf16(w[2], w[3]),
                    ptx::pack_bf16(w[4], w[5]), ptx::pack_bf16(w[6], w[7])};
    }
    ptx::settle(sum);
    ptx::wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < kTokens / kMmaColumns; ++i)
      ptx::wgmma<kD, true>(sum, weights[i],
                           ptx::operand_descriptor<k128Bytes>(start, i * kMmaColumns * kBoxRowBytes,
                                                              8 * kBoxRowBytes));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::settle(sum);
  }

  // Values that are not there, or of tokens beyond the run's, have weight 0 but may be anything,
  // NaN included: make them zeros. All consumers call it. False if the worker is stopping.
  static __device__ __forceinline__ bool clear_values(Consumer& consumer, uint32_t values,
                                                      uint32_t from) {
    constexpr uint32_t kChunk = 16;
    const uint32_t begin = from * kBoxRowBytes / kChunk, end = kPanel / kChunk;
#pragma unroll 1
    for (uint32_t panel = 0; panel < kPanels; ++panel)
#pragma unroll 1
      for (uint32_t i = begin + consumer.thread(); i < end; i += kNumConsumerThreads)
        ptx::store_shared4(values + panel * kPanel + i * kChunk, {0, 0, 0, 0});
    ptx::fence_proxy_async_shared();
    return consumer.sync_unless_stopping();
  }

  // Attend to the step whose operands these are, which begins with token `first`. `masked`: whether
  // some query row does not see all tokens.
  __device__ __forceinline__ void attend(uint32_t keys, uint32_t values, uint32_t first,
                                         bool masked, State& state) const {
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
      Scores score;
      multiply_keys(keys, state.q[part], score);
      if (masked) mask(first, part, score);
      weigh(part, score, state);
      add_values(values, score, state.sum[part]);
    }
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
#pragma unroll
        for (uint32_t i = 0; i < kValueTiles; ++i)
          place.after(i * 8).store(state.sum[part][4 * i + 2 * half] * factor,
                                   state.sum[part][4 * i + 2 * half + 1] * factor, in.out_tag());
        if (!whole && pair == 0)
          place.after(kD).store(state.highest[part][half] * scale * kLn2, total, in.out_tag());
      }
  }

  // All of it: read the tokens of the run.
  // NOTE: as in matrix products (matrix.cuh, multiply), no warp ends between wgmmas.
  __device__ __forceinline__ void process(Consumer& consumer) const {
    State state;
    start(state);
    consumer.sync_alive();
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
#pragma unroll 1
    for (uint32_t first = run.begin; first < run.cached; first += kTokens) {
      stops |= !consumer.have_arrived(consumer.page, kStepPages);
      if (first + kTokens >= run.cached) consumer.note(in.stage, Event::kLoadArrived);
      PageCursor last_page = consumer.page;
      last_page.advance(kStepPages - 1);
      const uint32_t values = last_page.address() + kOperand % kPageBytes;
      if (run.cached - first < kTokens)
        stops |= !clear_values(consumer, values, run.cached - first);
      const bool masked = first < seen_begin || first + kTokens > seen_end;
      if (first < end)
        attend(ptx::uniform(consumer.page.address()), ptx::uniform(values), first, masked, state);
      consumer.finish_pages(kStepPages, stops);
    }
    if (stops) page_arrived(consumer.page.slot).give_up(consumer.page.phase);
    consumer.note(in.stage, Event::kComputed);
    finish(state);
  }
};

}  // namespace megavm
