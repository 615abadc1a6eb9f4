#pragma once

#include "cuda/pipelines/rows.cuh"

namespace megavm {

// An unsigned key in the order of the floats. Both zeros have the same key.
__device__ __forceinline__ uint32_t sort_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_sort_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A candidate as one integer: larger means a higher score or, at equal scores, a lower token.
__device__ __forceinline__ uint64_t candidate(float score, uint32_t token) {
  return static_cast<uint64_t>(sort_key(score)) << 32 | static_cast<uint32_t>(~token);
}
__device__ __forceinline__ uint32_t token_of(uint64_t candidate) {
  return ~static_cast<uint32_t>(candidate);
}

__device__ __forceinline__ uint64_t largest_of_warp(uint64_t value) {
#pragma unroll
  for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// The sequence of a logit row, and the parameters of its choice.
struct Choice {
  uint32_t row;
  uint32_t sequence;
  uint32_t position = 0;  // position of the sequence's last token
  uint32_t masked = 0;    // stop tokens that may not be chosen
  bool enabled;
  bool greedy = false;
  bool penalised = false;
  const Operands<Sample>& in;

  __device__ __forceinline__ Choice(const Operands<Sample>& in, uint32_t row) : row(row), in(in) {
    const Tensor& tokens = in[&Sample::tokens];
    const Tensor& row_sequence = in[&Sample::row_sequence];
    const uint32_t step_row =
        static_cast<uint32_t>(constant_integer(in[&Sample::logit_row], row, 0));
    if (step_row >= row_sequence.rows)
      stop_instruction(Fault::kLogitRow, row, 0, step_row, row_sequence.rows);
    sequence = sequence_of(row_sequence, step_row, tokens);
    enabled = integer(sample::kEnabled) != 0;
    if (!enabled) return;
    // The next position, which receives the token, must exist as well.
    position = position_of(in[&Sample::row_position], step_row, in.step(), tokens.columns - 1);
    const int32_t stops = integer(sample::kNumStop);
    if (static_cast<uint32_t>(stops) > kMaxStopTokens)
      stop_instruction(Fault::kNumStop, sequence, 0, stops, kMaxStopTokens);
    masked = static_cast<int32_t>(position + 1) < integer(sample::kMinLength) ? stops : 0;
    greedy = real(sample::kTemperature) == 0.0f;
    penalised = real(sample::kRepetitionPenalty) != 1.0f ||
                real(sample::kPresencePenalty) != 0.0f || real(sample::kFrequencyPenalty) != 0.0f;
  }

  __device__ __forceinline__ int32_t integer(uint32_t column) const {
    return constant_integer(in[&Sample::sampling_integer], sequence, column);
  }
  __device__ __forceinline__ float real(uint32_t column) const {
    return constant_element(in[&Sample::sampling_real], sequence, column);
  }
  __device__ __forceinline__ uint32_t history(uint32_t i) const {
    return ptx::load_relaxed1(element_at(in[&Sample::tokens], sequence, i));
  }
  __device__ __forceinline__ bool is_masked(uint32_t token) const {
    bool found = false;
#pragma unroll 1
    for (uint32_t i = 0; i < masked; ++i)
      found |= static_cast<uint32_t>(integer(sample::kStop + i)) == token;
    return found;
  }
  __device__ __forceinline__ void append(uint32_t token) const {
    ptx::store(element_at(in[&Sample::tokens], sequence, position + 1), token);
  }
};

// A row of float32 in global memory that all consumer threads traverse together.
struct LogitRow {
  uint64_t address;
  uint32_t size;

  // Call use(vector, values) for every aligned 16 bytes of this thread, in ascending order, with
  // kBatch loads in flight. Element j of a vector is token(vector, j); a token that is not below
  // `size` is outside the row, and its value is -inf.
  template <uint32_t kBatch, class Use>
  __device__ __forceinline__ void each(uint32_t thread, Use&& use) const {
    const uint32_t vectors = ceil_div(skew() + size, 4);
#pragma unroll 1
    for (uint32_t first = thread; first < vectors; first += kBatch * kNumConsumerThreads) {
      ptx::Words4 raw[kBatch] = {};
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) raw[i] = load(first + i * kNumConsumerThreads);
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const float values[4] = {__uint_as_float(raw[i].x), __uint_as_float(raw[i].y),
                                 __uint_as_float(raw[i].z), __uint_as_float(raw[i].w)};
        use(first + i * kNumConsumerThreads, values);
      }
    }
  }

  __device__ __forceinline__ uint32_t skew() const {
    return static_cast<uint32_t>(address) / 4 % 4;
  }
  __device__ __forceinline__ uint32_t token(uint32_t vector, uint32_t j) const {
    return vector * 4 + j - skew();
  }
  __device__ __forceinline__ bool is_whole(uint32_t vector) const {
    return token(vector, 0) < size && token(vector, 3) < size;
  }
  __device__ __forceinline__ uint64_t at(uint32_t token) const {
    return address + uint64_t{token} * 4;
  }
  __device__ __forceinline__ float value(uint32_t token) const {
    return __uint_as_float(ptx::load_relaxed1(at(token)));
  }

  __device__ __forceinline__ ptx::Words4 load(uint32_t vector) const {
    if (is_whole(vector)) return ptx::load_relaxed4(at(token(vector, 0)));
    constexpr uint32_t kNothing = 0xff800000u;  // -inf
    ptx::Words4 raw = {kNothing, kNothing, kNothing, kNothing};
    if (token(vector, 0) < size) raw.x = ptx::load_relaxed1(at(token(vector, 0)));
    if (token(vector, 1) < size) raw.y = ptx::load_relaxed1(at(token(vector, 1)));
    if (token(vector, 2) < size) raw.z = ptx::load_relaxed1(at(token(vector, 2)));
    if (token(vector, 3) < size) raw.w = ptx::load_relaxed1(at(token(vector, 3)));
    return raw;
  }
};

// Chooses a token from all logits, where `peaks` are not enough. All consumers work on one row.
struct Sampler {
  // Scratch: a histogram of weights by the next digit of the values' keys, then values that warps
  // exchange. The bins are 64-bit integers with low and high words in separate arrays, as 32-bit
  // atomics are much faster.
  static constexpr uint32_t kBins = 1024;
  static constexpr uint32_t kHighAt = kBins * 4;
  static constexpr uint32_t kTotalsAt = kBins * 8;
  static constexpr uint32_t kFoundAt = kTotalsAt + kNumConsumers * 8;
  static constexpr uint32_t kScratchBytes = kFoundAt + 16;
  static_assert(kBins == 4 * kNumConsumerThreads, "four bins for each thread");

  const Choice& choice;
  Consumer& consumer;
  LogitRow logits;
  LogitRow adjusted;

  __device__ __forceinline__ Sampler(const Choice& choice, Consumer& consumer)
      : choice(choice), consumer(consumer) {
    const Tensor& t = choice.in[&Sample::logits];
    const Tensor& workspace = choice.in[&Sample::adjusted];
    if (is_tagged(workspace)) stop_instruction(Fault::kUnsupported, choice.row, 0, 0, 0);
    logits = {element_at(t, choice.row, 0), t.columns};
    adjusted = {element_at(workspace, choice.row, 0), t.columns};
  }

  __device__ __forceinline__ void run() const {
    const bool changed =
        choice.penalised || choice.masked > 0 || is_tagged(choice.in[&Sample::logits]);
    if (changed) {
      copy_logits();
      consumer.sync();
      if (choice.masked > 0) {
        mask();
        consumer.sync();
      }
      if (choice.penalised) penalise();
    }
    LogitRow source = logits;
    if (changed) source.address = adjusted.address;
    uint64_t best;
    if (choice.greedy) {
      best = largest(source);
    } else {
      const float peak = scale(source);
      const double min_p = fmax(static_cast<double>(choice.real(sample::kMinP)), 1e-30);
      float lowest = peak + static_cast<float>(log(min_p));
      const int32_t top_k = choice.integer(sample::kTopK);
      if (top_k > 0 && static_cast<uint32_t>(top_k) < adjusted.size)
        lowest = threshold<false>(lowest, peak, static_cast<float>(top_k));
      const float top_p = choice.real(sample::kTopP);
      if (top_p < 1.0f) lowest = threshold<true>(lowest, peak, top_p);
      best = draw(lowest);
    }
    best = largest_of_all(best);
    if (consumer.thread() == 0) choice.append(token_of(best));
  }

  // ---- Exchange between warps through the scratch.

  __device__ __forceinline__ void tell(uint32_t offset, uint64_t value) const {
    ptx::store_shared2(consumer.scratch(offset), static_cast<uint32_t>(value),
                       static_cast<uint32_t>(value >> 32));
  }
  __device__ __forceinline__ uint64_t hear(uint32_t offset) const {
    const ptx::Words2 words = ptx::load_shared2(consumer.scratch(offset));
    return static_cast<uint64_t>(words.y) << 32 | words.x;
  }

  // The largest value of all consumers. Synchronises them before and after.
  __device__ __forceinline__ uint64_t largest_of_all(uint64_t value) const {
    value = largest_of_warp(value);
    consumer.sync();
    if (lane_index() == 0) tell(kTotalsAt + consumer.warp() * 8, value);
    consumer.sync();
#pragma unroll
    for (uint32_t w = 0; w < kNumConsumers; ++w) {
      const uint64_t other = hear(kTotalsAt + w * 8);
      value = other > value ? other : value;
    }
    consumer.sync();
    return value;
  }

  // ---- Adjusted logits.

  __device__ __forceinline__ void stop_if(bool unordered) const {
    if (unordered) stop_instruction(Fault::kNanLogits, choice.row, 0, 0, 0);
  }

  __device__ __forceinline__ float logit(uint32_t token) const {
    const Operands<Sample>& in = choice.in;
    return read_element(in[&Sample::logits], choice.row, token, in.tag(), in.word(&Sample::logits));
  }

  __device__ __forceinline__ void copy_logits() const {
    bool unordered = false;
#pragma unroll 4
    for (uint32_t t = consumer.thread(); t < adjusted.size; t += kNumConsumerThreads) {
      const float value = logit(t);
      unordered |= value != value;
      ptx::store(adjusted.at(t), __float_as_uint(value));
    }
    stop_if(unordered);
  }

  __device__ __forceinline__ void mask() const {
    if (consumer.thread() >= choice.masked) return;
    const uint32_t token = choice.integer(sample::kStop + consumer.thread());
    if (token < adjusted.size) ptx::store(adjusted.at(token), 0xff800000u);
  }

  // The logit of a token of the history, with stop tokens masked and the repetition penalty
  // applied.
  __device__ __forceinline__ float repeated(uint32_t token) const {
    const float a = choice.is_masked(token) ? -kInfinity : logit(token);
    const float penalty = choice.real(sample::kRepetitionPenalty);
    return a > 0.0f ? a / penalty : a * penalty;
  }

  // Apply the penalties in `adjusted`. Threads that find the same token store the same value.
  __device__ __forceinline__ void penalise() const {
    const uint32_t end = choice.position + 1, vocabulary = adjusted.size;
#pragma unroll 1
    for (uint32_t i = consumer.thread(); i < end; i += kNumConsumerThreads) {
      const uint32_t token = choice.history(i);
      if (token >= vocabulary)
        stop_instruction(Fault::kToken, choice.sequence, i, token, vocabulary);
      ptx::store(adjusted.at(token), __float_as_uint(repeated(token)));
    }
    consumer.sync();
    const float frequency = choice.real(sample::kFrequencyPenalty);
    const float presence = choice.real(sample::kPresencePenalty);
    if (frequency == 0.0f && presence == 0.0f) return;
    // Count the produced tokens in place of their values, then replace the counts. A count is
    // stored as a NaN that arithmetic does not produce.
    constexpr uint32_t kCount = 0xffc00000u;
    const int32_t prompt = choice.integer(sample::kPromptLength);
    const uint32_t begin = consumer.thread() + (prompt < 0 ? 0 : prompt);
#pragma unroll 1
    for (uint32_t i = begin; i < end; i += kNumConsumerThreads)
      ptx::store(adjusted.at(choice.history(i)), kCount);
    consumer.sync();
#pragma unroll 1
    for (uint32_t i = begin; i < end; i += kNumConsumerThreads)
      atomicAdd(reinterpret_cast<uint32_t*>(adjusted.at(choice.history(i))), 1u);
    consumer.sync();
#pragma unroll 1
    for (uint32_t i = begin; i < end; i += kNumConsumerThreads) {
      const uint32_t token = choice.history(i);
      const uint32_t count = ptx::load_relaxed1(adjusted.at(token));
      if (count < kCount) continue;  // another thread has replaced the count
      const float times = static_cast<float>(count - kCount);
      ptx::store(adjusted.at(token),
                 __float_as_uint(repeated(token) - (frequency * times + presence)));
    }
    consumer.sync();
  }

  // This thread's largest value, and its token.
  __device__ __forceinline__ uint64_t largest(const LogitRow& row) const {
    float best = -kInfinity;
    uint32_t best_token = kNone;
    bool unordered = false;
    row.each<4>(consumer.thread(), [&](uint32_t vector, const float (&values)[4]) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        unordered |= values[j] != values[j];
        if (values[j] > best) best = values[j], best_token = row.token(vector, j);
      }
    });
    // Check the logits only: adjusted values were checked when they were copied, and penalties may
    // have made them NaN since.
    stop_if(unordered && row.address == logits.address);
    // If all values are -inf, choose the first token.
    return candidate(best, best_token == kNone ? 0 : best_token);
  }

  // Store the logits divided by the temperature to `adjusted`; returns the largest value.
  __device__ __forceinline__ float scale(const LogitRow& from) const {
    const float temperature = choice.real(sample::kTemperature);
    const bool together = from.skew() == adjusted.skew();
    float peak = -kInfinity;
    bool unordered = false;
    from.each<4>(consumer.thread(), [&](uint32_t vector, const float (&values)[4]) {
      uint32_t to[4];
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) {
        const float value = values[j] / temperature;
        unordered |= values[j] != values[j];
        peak = fmaxf(peak, value);
        to[j] = __float_as_uint(value);
      }
      const uint32_t token = from.token(vector, 0);
      if (together && from.is_whole(vector)) {
        ptx::store2(adjusted.at(token), to[0], to[1]);
        ptx::store2(adjusted.at(token + 2), to[2], to[3]);
        return;
      }
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        if (token + j < from.size) ptx::store(adjusted.at(token + j), to[j]);
    });
    stop_if(unordered && from.address == logits.address);
    return from_sort_key(static_cast<uint32_t>(largest_of_all(candidate(peak, 0)) >> 32));
  }

  // ---- Tokens that may be chosen: those whose adjusted logits are not below `lowest`.

  static __device__ __forceinline__ bool is_left(float a, float lowest) {
    return !(a < lowest) && a != -kInfinity;
  }

  static __device__ __forceinline__ uint32_t* bins() {
    return reinterpret_cast<uint32_t*>(shared_memory + kScratchAt);
  }

  // Probability relative to the peak's, in units of 2^-40. Sums of integers do not depend on order.
  static __device__ __forceinline__ uint64_t weight(float a, float peak) {
    return __float2ull_rn((a == peak ? 1.0f : expf(a - peak)) * 1099511627776.0f);
  }

  static __device__ __forceinline__ void add(uint32_t bin, uint64_t weight) {
    const uint32_t low = static_cast<uint32_t>(weight);
    uint32_t high = static_cast<uint32_t>(weight >> 32);
    const uint32_t before = atomicAdd(bins() + bin, low);
    high += before + low < before;
    if (high != 0) atomicAdd(bins() + kBins + bin, high);
  }

  // The largest threshold such that the remaining values that are not below it reach the wanted
  // number of tokens or, with kMass, the wanted share of the probability. A radix select: by the
  // digits of the values' keys, most significant first.
  template <bool kMass>
  __device__ __forceinline__ float threshold(float lowest, float peak, float wanted_part) const {
    const uint32_t thread = consumer.thread(), lane = lane_index();
    const uint32_t mine = (kNumConsumerThreads - 1 - thread) * 4;  // the highest bins come first
    const ptx::Words4 zeros = {0, 0, 0, 0};
    uint64_t wanted = kMass ? 0 : static_cast<uint64_t>(wanted_part);
    uint64_t above = 0;  // weight of the keys above those that start with the prefix
    uint32_t prefix = 0, known = 32;
    consumer.sync();
    ptx::store_shared4(consumer.scratch(mine * 4), zeros);
    ptx::store_shared4(consumer.scratch(kHighAt + mine * 4), zeros);
    consumer.sync();
#pragma unroll 1
    while (known > 0) {
      const uint32_t shift = known >= 10 ? known - 10 : 0, size = 1u << (known - shift);
      adjusted.each<4>(thread, [&](uint32_t, const float (&values)[4]) {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          if (!is_left(values[j], lowest)) continue;
          const uint32_t key = sort_key(values[j]);
          if (known < 32 && key >> known != prefix) continue;
          add(key >> shift & (size - 1), kMass ? weight(values[j], peak) : 1);
        }
      });
      consumer.sync();
      // Prefix sums, from the highest bin down.
      const ptx::Words4 low = ptx::load_shared4(consumer.scratch(mine * 4));
      const ptx::Words4 high = ptx::load_shared4(consumer.scratch(kHighAt + mine * 4));
      ptx::store_shared4(consumer.scratch(mine * 4), zeros);
      ptx::store_shared4(consumer.scratch(kHighAt + mine * 4), zeros);
      const uint64_t bin[4] = {
          static_cast<uint64_t>(high.w) << 32 | low.w, static_cast<uint64_t>(high.z) << 32 | low.z,
          static_cast<uint64_t>(high.y) << 32 | low.y, static_cast<uint64_t>(high.x) << 32 | low.x};
      uint64_t until = bin[0] + bin[1] + bin[2] + bin[3];
#pragma unroll
      for (uint32_t offset = 1; offset < kLanes; offset *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, until, offset);
        if (lane >= offset) until += other;
      }
      if (lane == kLanes - 1) tell(kTotalsAt + consumer.warp() * 8, until);
      consumer.sync();
      uint64_t total = above;
      until += above;
#pragma unroll
      for (uint32_t w = 0; w < kNumConsumers; ++w) {
        const uint64_t other = hear(kTotalsAt + w * 8);
        total += other;
        if (w < consumer.warp()) until += other;
      }
      if (kMass && known == 32) {
        wanted = static_cast<uint64_t>(
            ceil(static_cast<double>(wanted_part) * static_cast<double>(total)));
        wanted = wanted == 0 ? 1 : wanted;
      }
      if (total < wanted) return lowest;  // fewer tokens remain than wanted: keep all
      // One thread finds the bin in which the sum reaches `wanted`.
      uint64_t before = until - (bin[0] + bin[1] + bin[2] + bin[3]);
      if (before < wanted && wanted <= until) {
        bool found = false;
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          if (!found && before + bin[j] >= wanted) {
            found = true;
            tell(kFoundAt, before);
            ptx::store_shared(consumer.scratch(kFoundAt + 8), mine + 3 - j);
          }
          before += bin[j];
        }
      }
      consumer.sync();
      above = hear(kFoundAt);
      prefix = prefix << (known - shift) | ptx::load_shared(consumer.scratch(kFoundAt + 8));
      known = shift;
    }
    return from_sort_key(prefix);
  }

  // ---- The draw.

  // 24 random bits n from (seed, position, token); the uniform number is (n + 0.5) / 2^24.
  static __device__ __forceinline__ uint32_t uniform(uint64_t seed, uint32_t position,
                                                     uint32_t token) {
    uint64_t z =
        seed + 0x9E3779B97F4A7C15ull * ((static_cast<uint64_t>(position) << 32 | token) + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return static_cast<uint32_t>(z >> 40);
  }

  // This thread's argmax of a_t - log(-log(u_t)): the Gumbel-max trick.
  __device__ __forceinline__ uint64_t draw(float lowest) const {
    constexpr uint32_t kBatch = 4;
    const uint64_t seed =
        static_cast<uint64_t>(static_cast<uint32_t>(choice.integer(sample::kSeedHigh))) << 32 |
        static_cast<uint32_t>(choice.integer(sample::kSeedLow));
    uint64_t best = candidate(-kInfinity, 0);
    float bound = -kInfinity;  // a score that was reached: tokens that stay below it cannot win
    const auto consider = [&](uint32_t token, float a) {
      const uint32_t n = uniform(seed, choice.position, token);
      const double u = (static_cast<double>(n) + 0.5) / (1 << 24);
      const float score = a + static_cast<float>(-log(-log(u)));
      const uint64_t other = candidate(score, token);
      best = other > best ? other : best;
      bound = fmaxf(bound, score);
    };
    const uint32_t vectors = ceil_div(adjusted.skew() + adjusted.size, 4);
#pragma unroll 1
    for (uint32_t start = 0; start < vectors; start += kBatch * kNumConsumerThreads) {
      const uint32_t first = start + consumer.thread();
      ptx::Words4 raw[kBatch] = {};
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) raw[i] = adjusted.load(first + i * kNumConsumerThreads);
      uint32_t open = 0;  // bit 4 i + j: element j of vector i may win
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const float a = __uint_as_float(words[j]);
          if (!is_left(a, lowest)) continue;
          const uint32_t token = adjusted.token(first + i * kNumConsumerThreads, j);
          // Since -log(u) >= 1 - u, the noise is at most -log(1 - u). So most tokens need no
          // logarithm.
          const uint32_t n = uniform(seed, choice.position, token);
          const float rest = (static_cast<float>((1u << 24) - n) - 0.5f) * 0x1p-24f;
          if (rest > 1.001f * ptx::exp2((a - bound) * kLog2E)) continue;
          open |= 1u << (4 * i + j);
        }
      }
#pragma unroll 1
      while (open != 0) {
        const uint32_t k = __ffs(open) - 1;
        open &= open - 1;
        const uint32_t token = adjusted.token(first + k / 4 * kNumConsumerThreads, k % 4);
        consider(token, adjusted.value(token));
      }
      // Share the bound, which saves logarithms in the other lanes.
      bound = from_sort_key(__reduce_max_sync(~0u, sort_key(bound)));
    }
    return best;
  }
};
static_assert(Sampler::kScratchBytes <= kScratch, "kMaxScratch must have room for it");

template <>
struct Kernel<Sample> : NoPages {
  static constexpr uint32_t kBatch = 8;  // pairs that a lane has in flight

  // One warp chooses the token of a row: the largest of `peaks`.
  static __device__ __forceinline__ void take_largest(const Choice& choice) {
    const Operands<Sample>& in = choice.in;
    const Tensor& peaks = in[&Sample::peaks];
    const OperandWord operand = in.word(&Sample::peaks);
    const uint32_t pairs = peaks.columns / 2, lane = lane_index(), tag = in.tag();
    const bool tagged = is_tagged(peaks);
    uint64_t best = 0;
#pragma unroll 1
    for (uint32_t first = lane; first < pairs; first += kBatch * kLanes) {
      ptx::Words4 raw[kBatch] = {};  // value, its tag, column, its tag
      while (true) {
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          const uint32_t column = (first + i * kLanes) * 2;
          if (first + i * kLanes >= pairs) continue;
          if (tagged) {
            raw[i] = ptx::load_relaxed_tagged2(word_at(peaks, choice.row, column));
          } else {
            raw[i].x = ptx::load_relaxed1(element_at(peaks, choice.row, column));
            raw[i].z = ptx::load_relaxed1(element_at(peaks, choice.row, column + 1));
          }
        }
        if (!tagged) break;
        uint32_t found = tag, wrong = 0;
#pragma unroll
        for (uint32_t i = 0; i < kBatch; ++i) {
          if (first + i * kLanes >= pairs || (raw[i].y == tag && raw[i].w == tag)) continue;
          found = raw[i].y != tag ? raw[i].y : raw[i].w;
          wrong = (first + i * kLanes) * 2;
        }
        if (found == tag) break;
        if (is_stopping()) stop_at_tag(operand, choice.row, wrong, found, tag);
      }
      bool unordered = false;
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        if (first + i * kLanes >= pairs) continue;
        const float value = __uint_as_float(raw[i].x);
        unordered |= value != value;
        const uint64_t other = candidate(value, static_cast<uint32_t>(__uint_as_float(raw[i].z)));
        best = other > best ? other : best;
      }
      if (unordered) stop_instruction(Fault::kNanLogits, choice.row, 0, 0, 0);
    }
    best = largest_of_warp(best);
    if (lane == 0) choice.append(token_of(best));
  }

  static __device__ __forceinline__ void consume(const Operands<Sample>& in, Consumer& consumer) {
    const Sample& inst = in.inst;
    const uint32_t live = live_end(in, &Sample::logit_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const Choice choice(in, row);
      if (!choice.enabled) continue;
      if (!ready) consumer.wait_ready();
      ready = true;
      if (in.has(&Sample::peaks) && choice.greedy && !choice.penalised && choice.masked == 0) {
        if ((row - inst.row_begin) % kNumConsumers == consumer.warp()) take_largest(choice);
      } else {
        Sampler(choice, consumer).run();
      }
    }
    if (!ready) consumer.wait_ready();
  }
};

}  // namespace megavm
