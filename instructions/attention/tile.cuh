// Attention of a run: several rows of one sequence, which see nearly the same tokens.
//
// The query rows of a tile are the heads of one KV head for each row of the run. A warp has 16 of
// them, or twice 16, and processes all tokens of every page for them, so the warps do not meet. The
// loops are those of FlashAttention-2 (Dao 2023, arXiv:2307.08691) with mma.m16n8k16: scores are
// the queries, in registers, times the keys; their weights, in registers, times the values are
// added to the sums.
#pragma once

#include "instructions/attention/span.cuh"

namespace megavm {

template <uint32_t kD, uint32_t kPageTokens>
struct AttentionTile {
  static constexpr uint32_t kGroup = attention::kGroup;
  static constexpr uint32_t kRowBytes = 2 * kD;
  static constexpr uint32_t kValuesAt = kPageTokens * kRowBytes;
  static constexpr uint32_t kMmaRows = 16;
  // A warp has two parts of 16 query rows, which share the keys and values that it reads from
  // shared memory; of long heads there is room for one.
  static constexpr uint32_t kParts = kMaxAttentionElements / (kNumConsumers * kMmaRows * kD);
  static constexpr uint32_t kRows = kMaxAttentionElements / (kD * kGroup);  // of a run, at most
  static constexpr uint32_t kChunkTokens = 32;  // whose scores are in registers
  static constexpr uint32_t kScoreTiles = kChunkTokens / 8;
  static constexpr uint32_t kValueTiles = kD / 8;
  static_assert(kPageTokens % kChunkTokens == 0 && kParts > 0 && kRows > 1);

  struct State {
    ptx::Words4 q[kParts][kD / 16];
    float sum[kParts][kValueTiles][4];
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

  // NOTE: read again where it is needed: values derived from it would occupy registers.
  static __device__ __forceinline__ uint32_t lane() { return ptx::thread_index() % kLanes; }

  // Number of a query row of this lane in the tile: row i of the run has numbers i * kGroup and on.
  __device__ __forceinline__ uint32_t number(uint32_t part, uint32_t half) const {
    return (part * kNumConsumers + warp) * kMmaRows + half * 8 + lane() / 4;
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
      for (uint32_t i = 0; i < kD / 16; ++i)
        state.q[part][i] = {ptx::load_relaxed1(from[0] + i * 32) ^ sign,
                            ptx::load_relaxed1(from[1] + i * 32) ^ sign,
                            ptx::load_relaxed1(from[0] + i * 32 + 16) ^ sign,
                            ptx::load_relaxed1(from[1] + i * 32 + 16) ^ sign};
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) state.sum[part][i][j] = __uint_as_float(ptx::zero());
    }
  }

  using Scores = float[kParts][kScoreTiles][4];

  // Scores, not scaled, of the kChunkTokens tokens whose keys begin at `keys`.
  static __device__ __forceinline__ void multiply_keys(uint32_t keys, const State& state,
                                                       Scores& score) {
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) score[part][n][j] = __uint_as_float(ptx::zero());
    const uint32_t token = lane() % 8, from = keys + token * kRowBytes;
#pragma unroll
    for (uint32_t i = 0; i < kD / 32; ++i) {
      __syncwarp();
      ptx::Words4 key[kScoreTiles];
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
        key[n] = ptx::load_matrices(from + n * 8 * kRowBytes + ((i * 4 + lane() / 8) ^ token) * 16);
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part)
          ptx::mma(score[part][n], state.q[part][2 * i], key[n].x, key[n].y);
#pragma unroll
      for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part)
          ptx::mma(score[part][n], state.q[part][2 * i + 1], key[n].z, key[n].w);
    }
  }

  // Give tokens that a query row does not see the score -inf. `first` is the token of score 0.
  __device__ __forceinline__ void mask(uint32_t first, Scores& score) const {
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t query = min_of(number(part, half), count() - 1);
        const TokenRange seen(in.inst, run.position + query / kGroup);
#pragma unroll
        for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
          for (uint32_t j = 0; j < 2; ++j) {
            const uint32_t token = first + n * 8 + lane() % 4 * 2 + j;
            if (token < seen.begin || token >= seen.end) score[part][n][2 * half + j] = -kInfinity;
          }
      }
  }

  // Turn scores into weights, relative to the highest score so far.
  __device__ __forceinline__ void weigh(Scores& score, State& state) const {
    float rescale[kParts][2];
    bool higher = false;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        float highest = state.highest[part][half];
#pragma unroll
        for (uint32_t n = 0; n < kScoreTiles; ++n)
          highest = fmaxf(highest, fmaxf(score[part][n][2 * half], score[part][n][2 * half + 1]));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
        // A query row may have seen no token yet.
        const float base = highest == -kInfinity ? 0.0f : highest * scale;
        rescale[part][half] = ptx::exp2(fmaf(state.highest[part][half], scale, -base));
        higher |= highest != state.highest[part][half];
        state.highest[part][half] = highest;
        float total = 0.0f;
#pragma unroll
        for (uint32_t n = 0; n < kScoreTiles; ++n)
#pragma unroll
          for (uint32_t j = 2 * half; j < 2 * half + 2; ++j) {
            score[part][n][j] = ptx::exp2(fmaf(score[part][n][j], scale, -base));
            total += score[part][n][j];
          }
        state.total[part][half] = fmaf(state.total[part][half], rescale[part][half], total);
      }
    // After the first pages this is rare.
    if (!__any_sync(~0u, higher)) return;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part)
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; ++i)
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) state.sum[part][i][j] *= rescale[part][j / 2];
  }

  // Add the values that begin at `values`, times their weights. The first `copied` of them are in
  // the page, a multiple of 8.
  static __device__ __forceinline__ void add_values(uint32_t values, uint32_t copied,
                                                    const Scores& weight, State& state) {
    const uint32_t token = lane() % 8;
#pragma unroll
    for (uint32_t n = 0; n < kScoreTiles; n += 2) {
      if (n * 8 >= copied) break;
      __syncwarp();
      ptx::Words4 weights[kParts];
#pragma unroll
      for (uint32_t part = 0; part < kParts; ++part) {
        const float (&low)[4] = weight[part][n];
        const float (&high)[4] = weight[part][n + 1];
        weights[part] = {ptx::pack_bf16(low[0], low[1]), ptx::pack_bf16(low[2], low[3]),
                         ptx::pack_bf16(high[0], high[1]), ptx::pack_bf16(high[2], high[3])};
      }
      // Rows that were not copied have weight 0, but may hold anything, NaN included: read the 8
      // rows before them instead.
      const uint32_t upper = n * 8 + 8 < copied ? lane() / 8 % 2 * 8 : 0;
      const uint32_t from = values + (n * 8 + upper + token) * kRowBytes;
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; i += 2) {
        if (i % 8 == 0) __syncwarp();
        const ptx::Words4 v =
            ptx::load_matrices_transposed(from + ((i + lane() / 16) ^ token) * 16);
#pragma unroll
        for (uint32_t part = 0; part < kParts; ++part) {
          ptx::mma(state.sum[part][i], weights[part], v.x, v.y);
          ptx::mma(state.sum[part][i + 1], weights[part], v.z, v.w);
        }
      }
    }
  }

  // Attend to the page at `page`, which holds `tokens` tokens from `first` on.
  __device__ __forceinline__ void attend(uint32_t page, uint32_t first, uint32_t tokens,
                                         State& state) const {
    // Whether some query row does not see the whole page.
    const bool masked = first + kPageTokens > TokenRange(in.inst, run.position).end ||
                        first < TokenRange(in.inst, run.position + run.rows - 1).begin;
#pragma unroll 1
    for (uint32_t at = 0; at < tokens; at += kChunkTokens) {
      Scores score;
      multiply_keys(page + at * kRowBytes, state, score);
      if (masked) mask(first + at, score);
      weigh(score, state);
      add_values(page + kValuesAt + at * kRowBytes, ceil_div(tokens - at, 8) * 8, score, state);
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
          place.after(i * 8).store(state.sum[part][i][2 * half] * factor,
                                   state.sum[part][i][2 * half + 1] * factor, in.out_tag());
        if (!whole && pair == 0)
          place.after(kD).store(state.highest[part][half] * scale * kLn2, total, in.out_tag());
      }
  }

  // All of it: read the pages of the run, `pages` in number.
  __device__ __forceinline__ void process(Consumer& consumer, uint32_t pages) const {
    State state;
    start(state);
    // The first token that none of this warp's query rows sees.
    const uint32_t last = min_of(((kParts - 1) * kNumConsumers + warp + 1) * kMmaRows, count()) - 1;
    const uint32_t end =
        warp * kMmaRows < count() ? TokenRange(in.inst, run.position + last / kGroup).end : 0;
#pragma unroll 1
    for (uint32_t page = 0, first = run.begin; page < pages; ++page, first += kPageTokens) {
      consumer.wait_pages(1);
      if (page == 0) consumer.note(in.stage, Event::kLoadArrived);
      if (first < end)
        attend(consumer.page.address(), first, min_of(kPageTokens, run.cached - first), state);
      consumer.finish_pages(1);
    }
    consumer.note(in.stage, Event::kComputed);
    finish(state);
  }
};

}  // namespace megavm
