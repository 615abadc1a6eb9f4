// One warpgroup's part of the attention of a run: the softmax of 128 tokens for 64 or 128 query
// rows, which are the heads of one KV head for each row of the run.
//
// The loops are those of FlashAttention-2 (Dao 2023, arXiv:2307.08691) with wgmma: scores are the
// queries times the keys; their weights, in registers, times the values are added to the sums.
// While a warpgroup weighs its scores, it adds the values of the turn before, and the other one
// multiplies too.
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
struct AttentionWarpgroup {
  static constexpr uint32_t kGroup = attention::kGroup;
  static constexpr uint32_t kWarps = 4;  // in a warpgroup
  static constexpr uint32_t kWarpRows = 16;
  // Parts of a warpgroup, of 64 query rows each; of long heads there is room for one.
  static constexpr uint32_t kParts = kMaxAttentionElements / (kNumConsumers * kWarpRows * kD);
  static constexpr uint32_t kTokens = 128;           // attended to in a turn
  static constexpr uint32_t kBlock = kMaxBoxTokens;  // whose values are together
  static constexpr uint32_t kPanels = kD / kBoxColumns;
  static constexpr uint32_t kValuePanel = kBlock * kBoxRowBytes;
  static constexpr uint32_t kValueBlock = kPanels * kValuePanel;
  static constexpr uint32_t kBlocks = kTokens / kBlock;
  static constexpr uint32_t kPageBlocks = kPageBytes / kValueBlock;
  static constexpr uint32_t kMmaColumns = 16;  // columns of A that one wgmma multiplies
  static constexpr uint32_t kPanelMmas = kBoxColumns / kMmaColumns;
  static constexpr uint32_t kScoreTiles = kTokens / 8;
  static constexpr uint32_t kValueTiles = kD / 8;
  // NOTE: depends on kD: compilers check others even where there are no tiles.
  static_assert(kD % kBoxColumns == 0 && kParts * kPanels == 2 && kRunRows<kD> > 1 &&
                kTokens * kBoxRowBytes == kPageBytes && kPageBytes % kValueBlock == 0);

  struct State {
    ptx::Words4 q[kPanelMmas];  // the first panel of the queries
    float sum[kParts][kD / 2];
    float highest[kParts][2];  // highest score of query row lane / 4, and of the eighth after it
    float total[kParts][2];    // this lane's share of the sum of weights
  };

  const Operands<Attention>& in;
  const AttentionRun& run;
  float scale;  // multiplies scores, includes log2 e, is positive
  uint32_t warp;

  __device__ __forceinline__ AttentionWarpgroup(const Operands<Attention>& in,
                                                const AttentionRun& run, uint32_t warp)
      : in(in),
        run(run),
        // NOTE: never 0, because a masked score is -inf.
        scale(fmaxf(fabsf(in.inst.scale) * kLog2E, 1e-30f)),
        warp(warp) {}

  // NOTE: read again where it is needed: values derived from it would occupy registers.
  static __device__ __forceinline__ uint32_t lane() { return ptx::thread_index() % kLanes; }

  // Number of a query row of this lane in the tile: row i of the run has numbers i * kGroup and on.
  __device__ __forceinline__ uint32_t number(uint32_t part, uint32_t half) const {
    return (part * kNumConsumers + warp) * kWarpRows + half * 8 + lane() / 4;
  }
  __device__ __forceinline__ uint32_t count() const { return run.rows * kGroup; }

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

  // Turn scores into weights, relative to the highest score so far. True if sums of the warpgroup
  // must be rescaled: after the first turns this is rare.
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
    return ptx::any_of_warpgroup(warp / kWarps, higher);
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
      // unite: else ptxas waits for them before it computes the weights. A wait for wgmma is one
      // instruction of the warpgroup (PTX ISA, "wgmma.wait_group"), so its warps choose the same
      // copy.
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
};

}  // namespace megavm
