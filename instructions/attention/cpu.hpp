#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

// State of one row and one KV head: the query heads that share the KV head, and their online
// softmax so far.
struct AttentionState {
  int heads;       // query heads per KV head
  int64_t d;       // elements of a head
  int64_t stride;  // stride of q and sums: d, rounded up to whole vectors
  int64_t slots;   // stride of scores: tokens of a KV block, rounded up to whole vectors
  float* q;        // [heads][stride], zeros after d
  float* scores;   // [heads][slots]: scores of a KV block, then their exponentials
  float* sums;     // [heads][stride]: weighted values
  float* highest;  // [heads]
  float* total;    // [heads]: sum of the weights
  float* rescale;  // [heads]: factor that adapts sums to a new highest score

  AttentionState(Worker& worker, int heads, int64_t d, int64_t block_size)
      : heads(heads), d(d), stride(ceil_to(d, kLanes)), slots(ceil_to(block_size, kLanes)) {
    q = worker.allocate<float>(heads * stride);
    scores = worker.allocate<float>(heads * slots);
    sums = worker.allocate<float>(heads * stride);
    highest = worker.allocate<float>(heads);
    total = worker.allocate<float>(heads);
    rescale = worker.allocate<float>(heads);
  }

  void start() const {
    for (int64_t i = 0; i < heads * stride; i += kLanes) store(sums + i, zero());
    for (int h = 0; h < heads; ++h) {
      highest[h] = -__builtin_inff();
      total[h] = 0.0f;
    }
  }
};

// Scores of kHeads query heads with all tokens of a KV block, kTokens at a time.
template <int kHeads, int kTokens, typename Element>
MEGAVM_INLINE void score_heads(const AttentionState& state, int head, const Element* keys,
                               int tokens, float scale) {
  static_assert(kHeads * kTokens <= kLanes);
  const float* q = state.q + head * state.stride;
  for (int begin = 0; begin < tokens; begin += kTokens) {
    Vec products[kLanes];
    MEGAVM_UNROLL
    for (int i = 0; i < kLanes; ++i) products[i] = zero();
    // A missing token repeats the last one; its score is not used.
    const Element* rows[kTokens];
    MEGAVM_UNROLL
    for (int t = 0; t < kTokens; ++t)
      rows[t] = keys + (begin + t < tokens ? begin + t : tokens - 1) * state.d;
    for (int64_t c = 0; c < state.d; c += kLanes) {
      const int count = lanes_at(c, state.d);
      Vec queries[kHeads];
      MEGAVM_UNROLL
      for (int h = 0; h < kHeads; ++h) queries[h] = load(q + h * state.stride + c);
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const Vec key = count == kLanes ? load(rows[t] + c) : load(rows[t] + c, count);
        MEGAVM_UNROLL
        for (int h = 0; h < kHeads; ++h)
          products[h * kTokens + t] = fma(queries[h], key, products[h * kTokens + t]);
      }
    }
    float result[kLanes];
    store(result, splat(scale) * sums<kHeads * kTokens>(products));
    const int count = tokens - begin < kTokens ? tokens - begin : kTokens;
    MEGAVM_UNROLL
    for (int h = 0; h < kHeads; ++h)
      std::memcpy(state.scores + (head + h) * state.slots + begin, result + h * kTokens,
                  sizeof(float) * count);
  }
}

// Turn a head's scores into weights relative to the highest score so far.
MEGAVM_INLINE void weigh(const AttentionState& state, int head, int tokens) {
  float* scores = state.scores + head * state.slots;
  const Vec lowest = splat(-__builtin_inff());
  const int64_t end = ceil_to(tokens, kLanes);
  for (int64_t t = tokens; t < end; ++t) scores[t] = -__builtin_inff();
  Vec peaks = lowest;
  for (int64_t t = 0; t < end; t += kLanes) peaks = max(load(scores + t), peaks);
  const float peak = largest(peaks);
  const float highest = peak > state.highest[head] ? peak : state.highest[head];
  state.rescale[head] = first_lane(exp(splat(state.highest[head] - highest)));
  state.highest[head] = highest;
  Vec weights = zero();
  for (int64_t t = 0; t < end; t += kLanes) {
    const Vec weight = exp(load(scores + t) - splat(highest));
    store(scores + t, weight);
    weights = weights + weight;
  }
  state.total[head] = state.total[head] * state.rescale[head] + sum(weights);
}

// Add the weighted values to kVectors vectors of the sums of kHeads heads, from column c on.
template <int kHeads, int kVectors, typename Element>
MEGAVM_INLINE void add_values(const AttentionState& state, int head, const Element* values,
                              int tokens, int64_t c, int count) {
  Vec out[kHeads][kVectors];
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) MEGAVM_UNROLL
  for (int v = 0; v < kVectors; ++v)
    out[h][v] = load(state.sums + (head + h) * state.stride + c + v * kLanes) *
                splat(state.rescale[head + h]);
  for (int t = 0; t < tokens; ++t) {
    const Element* row = values + t * state.d + c;
    Vec value[kVectors];
    MEGAVM_UNROLL
    for (int v = 0; v < kVectors; ++v)
      value[v] = count == kLanes ? load(row + v * kLanes) : load(row, count);
    MEGAVM_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const Vec weight = splat(state.scores[(head + h) * state.slots + t]);
      MEGAVM_UNROLL
      for (int v = 0; v < kVectors; ++v) out[h][v] = fma(weight, value[v], out[h][v]);
    }
  }
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) MEGAVM_UNROLL
  for (int v = 0; v < kVectors; ++v)
    store(state.sums + (head + h) * state.stride + c + v * kLanes, out[h][v]);
}

template <int kHeads, typename Element>
MEGAVM_INLINE void attend_heads(const AttentionState& state, int head, const Element* keys,
                                const Element* values, int tokens, float scale) {
  constexpr int kVectors = kNative == 16 ? 4 : 2;
  score_heads<kHeads, (kNative == 16 ? kLanes : 4) / kHeads>(state, head, keys, tokens, scale);
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) weigh(state, head + h, tokens);
  int64_t c = 0;
  for (; c + kVectors * kLanes <= state.d; c += kVectors * kLanes)
    add_values<kHeads, kVectors>(state, head, values, tokens, c, kLanes);
  for (; c < state.d; c += kLanes)
    add_values<kHeads, 1>(state, head, values, tokens, c, lanes_at(c, state.d));
}

template <typename Element>
struct AttentionTile {
  const Attention& inst;
  Worker& worker;
  const Tensor& k_cache;
  const Tensor& v_cache;
  // Space for a copy of the KV block that holds the row's own token; k_new and v_new complete it.
  Element* keys_of_last;
  Element* values_of_last;

  // The rows of one KV block and KV head in the cache of keys or values.
  const Element* block_of(const Tensor& cache, int64_t block, int64_t head) const {
    return static_cast<const Element*>(cache.data) +
           (block * cache.shape[1] + head) * cache.shape[2] * cache.shape[3];
  }

  // Copy `before` rows of a KV block to `room`, followed by the row's own key or value.
  const Element* with_newest(Element* room, const Element* block, int before, uint32_t newest,
                             int64_t row, int64_t kv_head) const {
    const int64_t d = k_cache.shape[3];
    std::memcpy(room, block, sizeof(Element) * before * d);
    for (int64_t c = 0; c < d; c += kLanes) {
      const int count = lanes_at(c, d);
      store(room + before * d + c, load_row(worker, newest, row, kv_head * d + c, count), count);
    }
    return room;
  }

  // Attend to tokens of a row's sequence, for the query heads of one KV head. `has_newest`: the
  // last token is the row's own, and is not read from the caches.
  void attend(const AttentionState& state, int64_t row, int64_t sequence, int64_t kv_head,
              const Range& tokens, bool has_newest) const {
    constexpr int kMany = kNative == 16 ? 4 : 2;
    const int64_t block_size = k_cache.shape[2];
    for (int64_t begin = tokens.begin; begin < tokens.end; begin += block_size) {
      const int64_t block =
          kv_block(worker, inst.block_table, sequence, begin / block_size, k_cache.shape[0]);
      const int count =
          static_cast<int>(tokens.end - begin < block_size ? tokens.end - begin : block_size);
      const Element* keys = block_of(k_cache, block, kv_head);
      const Element* values = block_of(v_cache, block, kv_head);
      if (has_newest && begin + count == tokens.end) {
        keys = with_newest(keys_of_last, keys, count - 1, inst.k_new, row, kv_head);
        values = with_newest(values_of_last, values, count - 1, inst.v_new, row, kv_head);
      }
      int head = 0;
      for (; head + kMany <= state.heads; head += kMany)
        attend_heads<kMany>(state, head, keys, values, count, inst.scale);
      for (; head < state.heads; ++head)
        attend_heads<1>(state, head, keys, values, count, inst.scale);
    }
  }

  void finish(const AttentionState& state, int64_t row, int64_t first_head) const {
    const int64_t d = state.d, all_heads = worker.tensor(inst.q).columns / d;
    for (int h = 0; h < state.heads; ++h) {
      const float* sums = state.sums + h * state.stride;
      if (inst.partial == kNone) {
        const Vec total = splat(state.total[h]);
        for (int64_t c = 0; c < d; c += kLanes)
          store_row(worker, inst.out, row, (first_head + h) * d + c, load(sums + c) / total,
                    lanes_at(c, d));
        continue;
      }
      const int64_t column = (inst.split * all_heads + first_head + h) * (d + 2);
      for (int64_t c = 0; c < d; c += kLanes)
        store_row(worker, inst.partial, row, column + c, load(sums + c), lanes_at(c, d));
      float pair[kLanes] = {state.highest[h], state.total[h]};
      store_row(worker, inst.partial, row, column + d, load(pair), 2);
    }
  }
};

template <typename Element>
inline void attention(const Attention& inst, Worker& worker) {
  const Tensor& k_cache = worker.tensor(inst.k_cache);
  const int64_t d = k_cache.shape[3], block_size = k_cache.shape[2];
  const int64_t room = inst.k_new == kNone ? 0 : block_size * d;
  const AttentionTile<Element> tile{inst,
                                    worker,
                                    k_cache,
                                    worker.tensor(inst.v_cache),
                                    worker.allocate<Element>(room),
                                    worker.allocate<Element>(room)};
  const int heads = static_cast<int>(worker.tensor(inst.q).columns / (tile.k_cache.shape[1] * d));
  const int64_t limit = worker.tensor(inst.block_table).columns * block_size;
  const AttentionState state(worker, heads, d, block_size);
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const int64_t sequence =
        sequence_of(worker, inst.row_sequence, row, inst.block_table, "block_table");
    const int64_t context = position_of(worker, inst.row_position, row, limit, "block_table") + 1;
    // The split's share of the chunks.
    const int64_t chunks = (context + inst.chunk - 1) / inst.chunk;
    const int64_t begin = inst.split * chunks / inst.num_splits * inst.chunk;
    const int64_t end = (int64_t{inst.split} + 1) * chunks / inst.num_splits * inst.chunk;
    const Range tokens{begin, end < context ? end : context};
    const bool has_newest = inst.k_new != kNone && tokens.end == context;
    for (int64_t kv_head = inst.head_begin; kv_head < inst.head_end; ++kv_head) {
      for (int h = 0; h < heads; ++h)
        for (int64_t c = 0; c < d; c += kLanes)
          store(state.q + h * state.stride + c,
                load_row(worker, inst.q, row, (kv_head * heads + h) * d + c, lanes_at(c, d)));
      state.start();
      tile.attend(state, row, sequence, kv_head, tokens, has_newest);
      tile.finish(state, row, kv_head * heads);
    }
  }
}

inline void execute(const Attention& inst, Worker& worker) {
  if (worker.tensor(inst.k_cache).dtype == DType::kBf16) return attention<Bf16>(inst, worker);
  attention<float>(inst, worker);
}

}  // namespace megavm::MEGAVM_LEVEL
