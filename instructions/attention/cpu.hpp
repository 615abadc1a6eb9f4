#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

using megavm::attention::kQueryElements;
using megavm::attention::kRowsAtOnce;
using megavm::attention::kRunTokens;

// The query heads that share one KV head, those of one row after those of another, and their online
// softmax so far. A *run* is the tokens, of several KV blocks, whose scores are weighed at a time.
// The result of a row depends neither on the rows beside it nor on their number.
struct AttentionState {
  int heads;       // query heads of all rows
  int64_t d;       // elements of a head
  int64_t run;     // tokens of a run
  int64_t stride;  // stride of q and sums: d, rounded up to whole vectors
  int64_t slots;   // stride of scores: run, rounded up to whole vectors
  float* q;        // [heads][stride], scaled
  float* scores;   // [heads][slots]: scores of a run, then their exponentials
  float* sums;     // [heads][stride]: weighted values
  float* highest;  // [heads]
  float* total;    // [heads]: sum of the weights
  float* keys;     // [d][16]: the keys of up to 16 tokens

  AttentionState(Worker& worker, int heads, int64_t d, int64_t run)
      : heads(heads), d(d), run(run), stride(ceil_to(d, kLanes)), slots(ceil_to(run, kLanes)) {
    q = worker.allocate<float>(heads * stride);
    scores = worker.allocate<float>(heads * slots);
    sums = worker.allocate<float>(heads * stride);
    highest = worker.allocate<float>(heads);
    total = worker.allocate<float>(heads);
    keys = worker.allocate<float>(stride * kLanes);
  }

  void start() const {
    for (int64_t i = 0; i < heads * stride; i += kLanes) store(sums + i, zero());
    for (int h = 0; h < heads; ++h) {
      highest[h] = -__builtin_inff();
      total[h] = 0.0f;
    }
  }
};

// Transpose the keys of up to 16 tokens into the state; missing tokens get zeros.
template <typename Element>
MEGAVM_INLINE void take_keys(const AttentionState& state, const Element* keys, int tokens) {
  for (int64_t c = 0; c < state.d; c += kLanes) {
    const int count = lanes_at(c, state.d);
    Vec rows[kLanes];
    for (int t = 0; t < kLanes; ++t)
      rows[t] = t >= tokens       ? zero()
                : count == kLanes ? load(keys + t * state.d + c)
                                  : load(keys + t * state.d + c, count);
    transpose(rows);
    for (int i = 0; i < kLanes; ++i) store(state.keys + (c + i) * kLanes, rows[i]);
  }
}

// Scores of kHeads query heads with the tokens whose keys were taken: tokens [at, at + 16) of the
// run. Even and odd elements of a head have sums of their own.
template <int kHeads>
MEGAVM_INLINE void score_heads(const AttentionState& state, int head, int64_t at) {
  const float* q = state.q + head * state.stride;
  Vec even[kHeads], odd[kHeads];
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) even[h] = odd[h] = zero();
  for (int64_t c = 0; c < state.stride; c += 2) {
    const Vec first = load(state.keys + c * kLanes), second = load(state.keys + (c + 1) * kLanes);
    MEGAVM_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      even[h] = fma(splat(q[h * state.stride + c]), first, even[h]);
      odd[h] = fma(splat(q[h * state.stride + c + 1]), second, odd[h]);
    }
  }
  const int count = lanes_at(at, state.slots);
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h)
    store(state.scores + (head + h) * state.slots + at, even[h] + odd[h], count);
}

// Turn a head's scores into weights relative to the highest score so far, and adapt its sums.
MEGAVM_INLINE void weigh(const AttentionState& state, int head, int64_t tokens) {
  float* scores = state.scores + head * state.slots;
  float* sums = state.sums + head * state.stride;
  const int64_t end = ceil_to(tokens, kLanes);
  for (int64_t t = tokens; t < end; ++t) scores[t] = -__builtin_inff();
  Vec peaks = splat(-__builtin_inff());
  for (int64_t t = 0; t < end; t += kLanes) peaks = max(load(scores + t), peaks);
  const float peak = largest(peaks);
  if (peak > state.highest[head]) {
    const Vec rescale = exp(splat(state.highest[head] - peak));
    for (int64_t c = 0; c < state.d; c += kLanes) store(sums + c, load(sums + c) * rescale);
    state.total[head] *= first_lane(rescale);
    state.highest[head] = peak;
  }
  Vec weights = zero();
  for (int64_t t = 0; t < end; t += kLanes) {
    const Vec weight = exp(load(scores + t) - splat(state.highest[head]));
    store(scores + t, weight);
    weights = weights + weight;
  }
  state.total[head] += sum(weights);
}

// Add the weighted values of tokens, the first of which is token `at` of the run, to kVectors
// vectors of the sums of kHeads heads, from column c on.
template <int kHeads, int kVectors>
MEGAVM_INLINE void add_columns(const AttentionState& state, int head, const float* values,
                               int64_t at, int64_t tokens, int64_t c, int count) {
  Vec out[kHeads][kVectors];
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) MEGAVM_UNROLL
  for (int v = 0; v < kVectors; ++v)
    out[h][v] = load(state.sums + (head + h) * state.stride + c + v * kLanes);
  const float* weights = state.scores + head * state.slots + at;
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = values + t * state.d + c;
    Vec value[kVectors];
    MEGAVM_UNROLL
    for (int v = 0; v < kVectors; ++v)
      value[v] = count == kLanes ? load(row + v * kLanes) : load(row, count);
    MEGAVM_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const Vec weight = splat(weights[h * state.slots + t]);
      MEGAVM_UNROLL
      for (int v = 0; v < kVectors; ++v) out[h][v] = fma(weight, value[v], out[h][v]);
    }
  }
  MEGAVM_UNROLL
  for (int h = 0; h < kHeads; ++h) MEGAVM_UNROLL
  for (int v = 0; v < kVectors; ++v)
    store(state.sums + (head + h) * state.stride + c + v * kLanes, out[h][v]);
}

template <int kHeads>
MEGAVM_INLINE void add_values(const AttentionState& state, int head, const float* values,
                              int64_t at, int64_t tokens) {
  constexpr int kVectors = kNative == 16 ? 4 : 2;
  int64_t c = 0;
  for (; c + kVectors * kLanes <= state.d; c += kVectors * kLanes)
    add_columns<kHeads, kVectors>(state, head, values, at, tokens, c, kLanes);
  for (; c < state.d; c += kLanes)
    add_columns<kHeads, 1>(state, head, values, at, tokens, c, lanes_at(c, state.d));
}

// Call `use` for the heads [head, end), several at a time: use<kHeads>(first head).
template <typename Use>
MEGAVM_INLINE void each_heads(int head, int end, Use use) {
  if constexpr (kNative == 16) {
    for (; head + 4 <= end; head += 4) use.template operator()<4>(head);
  } else {
    for (; head + 3 <= end && head + 4 != end; head += 3) use.template operator()<3>(head);
    for (; head + 2 <= end; head += 2) use.template operator()<2>(head);
  }
  for (; head < end; ++head) use.template operator()<1>(head);
}

// The tokens to which a row attends, in its sequence.
struct RowTokens {
  int64_t sequence;
  Range tokens;
  bool has_newest;  // the last of them is the row's own, from k_new and v_new
};

MEGAVM_INLINE RowTokens tokens_of(const Attention& inst, const Worker& worker, int64_t row,
                                  int64_t limit) {
  const int64_t sequence =
      sequence_of(worker, inst.row_sequence, row, inst.block_table, "block_table");
  const int64_t context = position_of(worker, inst.row_position, row, limit, "block_table") + 1;
  // The split's share of the chunks.
  const int64_t chunks = (context + inst.chunk - 1) / inst.chunk;
  const int64_t begin = inst.split * chunks / inst.num_splits * inst.chunk;
  const int64_t end = (int64_t{inst.split} + 1) * chunks / inst.num_splits * inst.chunk;
  const Range tokens{begin, end < context ? end : context};
  return {sequence, tokens, inst.k_new != kNone && tokens.end == context};
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
  float* wide_values;  // space for the values of a KV block as float32, if they are bfloat16

  // The rows of one KV block and KV head in the cache of keys or values.
  const Element* block_of(const Tensor& cache, int64_t block, int64_t head) const {
    return static_cast<const Element*>(cache.data) +
           (block * cache.shape[1] + head) * cache.shape[2] * cache.shape[3];
  }

  // Copy `before` rows of a KV block to `room`, followed by the row's own key or value.
  const Element* with_newest(Element* room, const Element* block, int64_t before, uint32_t newest,
                             int64_t row, int64_t kv_head) const {
    const int64_t d = k_cache.shape[3];
    std::memcpy(room, block, sizeof(Element) * before * d);
    for (int64_t c = 0; c < d; c += kLanes) {
      const int count = lanes_at(c, d);
      store(room + before * d + c, load_row(worker, newest, row, kv_head * d + c, count), count);
    }
    return room;
  }

  // Values of the first tokens of a KV block, as float32.
  const float* widened(const Element* values, int64_t tokens) const {
    if constexpr (sizeof(Element) == sizeof(float)) {
      return values;
    } else {
      const int64_t elements = tokens * v_cache.shape[3];
      for (int64_t i = 0; i < elements; i += kLanes) {
        const int count = lanes_at(i, elements);
        store(wide_values + i, load(values + i, count), count);
      }
      return wide_values;
    }
  }

  // All heads of the state attend to the tokens of their rows, which belong to one sequence and
  // begin at the same token. The first row is `row`; it has a k_new only if it is alone.
  void attend(const AttentionState& state, int64_t row, const RowTokens* rows, int count,
              int64_t kv_head) const {
    const int64_t block_size = k_cache.shape[2], d = state.d, run = state.run;
    const int heads = state.heads / count;
    int64_t end = 0;  // of the tokens that any row sees
    for (int i = 0; i < count; ++i) end = rows[i].tokens.end > end ? rows[i].tokens.end : end;
    // Call use(first token of a block, its block in the caches, tokens of it, whether it is the
    // last) for the blocks of a run.
    const auto each_block = [&](int64_t from, int64_t to, auto use) {
      for (int64_t at = from; at < to; at += block_size) {
        const int64_t block =
            kv_block(worker, inst.block_table, rows[0].sequence, at / block_size, k_cache.shape[0]);
        use(at, block, to - at < block_size ? to - at : block_size,
            rows[0].has_newest && at + block_size >= end);
      }
    };
    for (int64_t from = rows[0].tokens.begin; from < end; from += run) {
      const int64_t to = end - from < run ? end : from + run;
      // Tokens of [at, at + most) that row i sees.
      const auto seen = [&](int i, int64_t at, int64_t most) {
        const int64_t left = rows[i].tokens.end - at;
        return left < 0 ? 0 : left < most ? left : most;
      };
      each_block(from, to, [&](int64_t at, int64_t block, int64_t tokens, bool last) {
        const Element* keys = block_of(k_cache, block, kv_head);
        if (last) keys = with_newest(keys_of_last, keys, tokens - 1, inst.k_new, row, kv_head);
        for (int64_t t = 0; t < tokens; t += kLanes) {
          take_keys(state, keys + t * d, lanes_at(t, tokens));
          each_heads(0, state.heads, [&]<int kHeads>(int head) {
            score_heads<kHeads>(state, head, at - from + t);
          });
        }
      });
      for (int i = 0; i < count; ++i)
        if (const int64_t tokens = seen(i, from, run); tokens > 0)
          for (int h = i * heads; h < (i + 1) * heads; ++h) weigh(state, h, tokens);
      each_block(from, to, [&](int64_t at, int64_t block, int64_t tokens, bool last) {
        const Element* stored = block_of(v_cache, block, kv_head);
        if (last)
          stored = with_newest(values_of_last, stored, tokens - 1, inst.v_new, row, kv_head);
        const float* values = widened(stored, tokens);
        for (int i = 0, next = 0; i < count; i = next) {
          // Rows that see the same tokens of the block.
          const int64_t both = seen(i, at, tokens);
          for (next = i + 1; next < count && seen(next, at, tokens) == both;) ++next;
          each_heads(i * heads, next * heads, [&]<int kHeads>(int head) {
            add_values<kHeads>(state, head, values, at - from, both);
          });
        }
      });
    }
  }

  // Store the results of `heads` heads of the state, from `first` on: those of `row`, whose first
  // head is number `first_head` of q.
  void finish(const AttentionState& state, int first, int heads, int64_t row,
              int64_t first_head) const {
    const int64_t d = state.d, all_heads = worker.tensor(inst.q).columns / d;
    for (int h = 0; h < heads; ++h) {
      const float* sums = state.sums + (first + h) * state.stride;
      if (inst.partial == kNone) {
        const Vec total = splat(state.total[first + h]);
        for (int64_t c = 0; c < d; c += kLanes)
          store_row(worker, inst.out, row, (first_head + h) * d + c, load(sums + c) / total,
                    lanes_at(c, d));
        continue;
      }
      const int64_t column = (inst.split * all_heads + first_head + h) * (d + 2);
      for (int64_t c = 0; c < d; c += kLanes)
        store_row(worker, inst.partial, row, column + c, load(sums + c), lanes_at(c, d));
      float pair[kLanes] = {state.highest[first + h], state.total[first + h]};
      store_row(worker, inst.partial, row, column + d, load(pair), 2);
    }
  }
};

template <typename Element>
inline void attention(const Attention& inst, Worker& worker) {
  const Tensor& k_cache = worker.tensor(inst.k_cache);
  const int64_t d = k_cache.shape[3], block_size = k_cache.shape[2];
  const int64_t room = inst.k_new == kNone ? 0 : block_size * d;
  const AttentionTile<Element> tile{
      inst,
      worker,
      k_cache,
      worker.tensor(inst.v_cache),
      worker.allocate<Element>(room),
      worker.allocate<Element>(room),
      worker.allocate<float>(sizeof(Element) == sizeof(float) ? 0 : block_size * d)};
  const int heads = static_cast<int>(worker.tensor(inst.q).columns / (k_cache.shape[1] * d));
  const int64_t limit = worker.tensor(inst.block_table).columns * block_size;
  int most = static_cast<int>(kQueryElements / (heads * ceil_to(d, kLanes)));
  most = most < 1 ? 1 : most < int{kRowsAtOnce} ? most : int{kRowsAtOnce};
  if (inst.row_end - inst.row_begin < static_cast<uint32_t>(most))
    most = static_cast<int>(inst.row_end - inst.row_begin);
  const int64_t blocks = block_size < kRunTokens ? kRunTokens / block_size : 1;  // of a run
  AttentionState state(worker, most * heads, d, blocks * block_size);
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  int count = 0;
  for (int64_t row = live.begin; row < live.end; row += count) {
    // Rows of one sequence that begin at the same token read each KV block together.
    RowTokens rows[kRowsAtOnce];
    for (count = 0; count < most && row + count < live.end; ++count) {
      rows[count] = tokens_of(inst, worker, row + count, limit);
      if (count > 0 && (inst.k_new != kNone || rows[count].sequence != rows[0].sequence ||
                        rows[count].tokens.begin != rows[0].tokens.begin))
        break;
    }
    state.heads = count * heads;
    for (int64_t kv_head = inst.head_begin; kv_head < inst.head_end; ++kv_head) {
      const int64_t first_head = kv_head * heads;
      for (int h = 0; h < state.heads; ++h)
        for (int64_t c = 0; c < d; c += kLanes)
          store(state.q + h * state.stride + c,
                splat(inst.scale) * load_row(worker, inst.q, row + h / heads,
                                             (first_head + h % heads) * d + c, lanes_at(c, d)));
      state.start();
      tile.attend(state, row, rows, count, kv_head);
      for (int i = 0; i < count; ++i) tile.finish(state, i * heads, heads, row + i, first_head);
    }
  }
}

inline void execute(const Attention& inst, Worker& worker) {
  if (worker.tensor(inst.k_cache).dtype == DType::kBf16) return attention<Bf16>(inst, worker);
  attention<float>(inst, worker);
}

}  // namespace megavm::MEGAVM_LEVEL
