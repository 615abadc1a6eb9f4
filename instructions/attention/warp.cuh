// One warp's part of the attention of a row: the softmax of some tokens for the query heads of a KV
// head.
#pragma once

#include "instructions/attention/span.cuh"

namespace megavm {

template <uint32_t kD>
struct AttentionWarp {
  static constexpr uint32_t kGroup = attention::kGroup;
  static constexpr uint32_t kRowBytes = 2 * kD;
  static constexpr uint32_t kPageTokens = kPageBytes / (2 * kRowBytes);
  static constexpr uint32_t kValuesAt = kPageTokens * kRowBytes;
  static constexpr uint32_t kWarpTokens = 16;
  static constexpr uint32_t kKeyChunks = kD / 32;  // 16-byte loads of a lane per key
  static constexpr uint32_t kValueTiles = kD / 8;
  static constexpr uint32_t kStateFloats = kGroup * (kD + 2);
  static_assert(4 * kNumConsumers * kStateFloats <= program::kMaxScratch);

  // A warp's state of the online softmax for a row's query heads. A lane holds head lane / 4: its
  // share of q and, of every 8 elements of the sum, elements 2 (lane % 4) and the next.
  struct State {
    ptx::Words4 q[kKeyChunks];
    float sum[kValueTiles][2];
    float highest;  // highest score, times log2 e
    float total;    // this lane's share of the sum of weights
  };

  // Neighbouring elements of a query, key or value, as loaded from memory.
  using Eight = Loaded<false, 8>;
  using Pair = Loaded<false, 2>;

  // Words 0, 2, 1, 3: the order of operand A, see instructions/product/product.cuh.
  static __device__ __forceinline__ ptx::Words4 operand(const Eight& eight) {
    return {eight.word(0), eight.word(2), eight.word(1), eight.word(3)};
  }

  // Load the queries and initialise the state; with `newest` (one warp), with the newest token. All
  // loads are issued before any word is checked, and repeated until all words have arrived.
  static __device__ __forceinline__ void start(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, bool newest, State& state) {
    const uint32_t lane = lane_index(), chunk = lane % 4 * 8;
    const uint32_t query = head * kGroup + min_of(lane / 4, kGroup - 1);
    const bool tagged = is_tagged(in[&Attention::q]);
    const bool new_tagged = newest && is_tagged(in[&Attention::k_new]);
    Eight queries[kKeyChunks], key[kKeyChunks];
    Pair value[kValueTiles];
#pragma unroll
    for (uint32_t i = 0; i < kKeyChunks; ++i) key[i].raw[0] = ptx::zero4();
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i) value[i].raw[0].x = ptx::zero();
    // Load words from column `column` on, kStep columns apart.
    const auto load = [&]<uint32_t kStep>(auto& loaded, uint32_t Attention::* operand,
                                          uint32_t column) {
      const SourceRow from = Eight::row_of(in[operand], row, in.word(operand));
      constexpr uint32_t kBytes = Eight::kColumnBytes;
#pragma unroll
      for (uint32_t i = 0; i < sizeof(loaded) / sizeof(loaded[0]); ++i)
        loaded[i].load(from.address + uint64_t{column} * kBytes + i * kStep * kBytes);
    };
    // Whether all words of `loaded` have arrived.
    const auto has = [&](const auto& loaded, bool tagged) {
      bool complete = true;
#pragma unroll
      for (const auto& words : loaded) complete &= !tagged || words.is_there();
      return complete;
    };
    const auto load_value = [&] {
      load.template operator()<8>(value, &Attention::v_new, head * kD + lane % 4 * 2);
    };
    const auto find = [&](uint32_t) { find_missing(in, row, head, newest); };
    // Long heads have too many words to be in flight all at once: load the value after the keys.
    constexpr bool kValueLater = kD > 64;
    await(
        [&] {
          load.template operator()<32>(queries, &Attention::q, query * kD + chunk);
          if (!newest) return;
          load.template operator()<32>(key, &Attention::k_new, head * kD + chunk);
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
    for (uint32_t i = 0; i < kKeyChunks; ++i) state.q[i] = operand(queries[i]);
    state.highest = -kInfinity;
    state.total = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i) state.sum[i][0] = state.sum[i][1] = 0.0f;
    if (!newest) return;
    float score = 0.0f;
#pragma unroll
    for (uint32_t i = 0; i < kKeyChunks; ++i) {
      const ptx::Words4 other = operand(key[i]);
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
      const SourceRow from = Pair::row_of(in.stage.tensors[word], row, word);
#pragma unroll 1
      for (uint32_t c = head * width; c < (head + 1) * width; c += 2) Pair::find_missing(from, c);
    }
  }

  // Process twice 16 tokens, whose keys begin at these addresses; the first `tokens` of them are
  // valid. Tokens of a page that begin at a multiple of 16 are swizzled alike.
  static __device__ __forceinline__ void attend(const uint32_t (&keys)[2],
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
        const uint32_t token = n * 8 + lane / 4;
        const uint32_t row = keys[p] + token * kRowBytes;
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
      // Values. Rows of other tokens have weight 0, but may hold anything, NaN included: read the
      // first row instead.
      const uint32_t wanted = lane % 8 + lane / 8 % 2 * 8;
      const uint32_t mine = wanted < tokens[p] ? wanted : 0;
      const uint32_t row = keys[p] + kValuesAt + mine * kRowBytes;
#pragma unroll
      for (uint32_t i = 0; i < kValueTiles; i += 2) {
        const ptx::Words4 v =
            ptx::load_matrices_transposed(row + ((i + lane / 16) ^ (mine & 7)) * 16);
        ptx::mma_8_rows(state.sum[i], low, high, v.x, v.y);
        ptx::mma_8_rows(state.sum[i + 1], low, high, v.z, v.w);
      }
    }
  }

  // Add up the totals of the lanes of each head.
  static __device__ __forceinline__ void join(State& state) {
    state.total += __shfl_xor_sync(~0u, state.total, 1);
    state.total += __shfl_xor_sync(~0u, state.total, 2);
  }

  // Store the result of a warp that has processed all tokens of the row.
  static __device__ __forceinline__ void store(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, State& state) {
    join(state);
    const uint32_t lane = ptx::thread_index() % kLanes, pair = lane % 4 * 2;
    if (lane / 4 >= kGroup) return;
    const bool whole = in.inst.num_splits == 1;
    const uint32_t number = head * kGroup + lane / 4;
    const uint32_t heads = in[&Attention::q].columns / kD;
    const uint32_t base = whole ? number * kD : (in.inst.split * heads + number) * (kD + 2);
    const PairPlace place(whole ? in[&Attention::out] : in[&Attention::partial], row, base + pair);
    place.template store_all<8>(state.sum, whole ? __fdividef(1.0f, state.total) : 1.0f);
    if (!whole && pair == 0) place.after(kD).store(state.highest * kLn2, state.total);
  }

  // Put the state into shared memory: [query][kD] sums, then [query] highest, [query] total.
  static __device__ __forceinline__ void put(const State& state, uint32_t to) {
    const uint32_t lane = ptx::thread_index() % kLanes, query = lane / 4;
    if (query >= kGroup) return;
#pragma unroll
    for (uint32_t i = 0; i < kValueTiles; ++i)
      ptx::store_shared2(to + 4 * (query * kD + i * 8 + lane % 4 * 2),
                         __float_as_uint(state.sum[i][0]), __float_as_uint(state.sum[i][1]));
    if (lane % 4 != 0) return;
    ptx::store_shared(to + 4 * (kGroup * kD + query), __float_as_uint(state.highest));
    ptx::store_shared(to + 4 * (kGroup * kD + kGroup + query), __float_as_uint(state.total));
  }

  // Store elements `element` (even) and the next of a query's result.
  static __device__ __forceinline__ void write(const Operands<Attention>& in, uint32_t row,
                                               uint32_t head, uint32_t query, uint32_t element,
                                               float x, float y, float highest, float total) {
    const uint32_t number = head * kGroup + query;
    if (in.inst.num_splits == 1) {
      write_pair(in[&Attention::out], row, number * kD + element, __fdividef(x, total),
                 __fdividef(y, total), true);
      return;
    }
    const uint32_t heads = in[&Attention::q].columns / kD;
    const Tensor& partial = in[&Attention::partial];
    const uint32_t base = (in.inst.split * heads + number) * (kD + 2);
    write_pair(partial, row, base + element, x, y, true);
    if (element == 0) write_pair(partial, row, base + kD, highest * kLn2, total, true);
  }
};

}  // namespace megavm
