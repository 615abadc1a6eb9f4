// The choice from all logits of a row: penalties, temperature, top-k, top-p, min-p and the draw.
#pragma once

#include "instructions/sample/logits.cuh"

namespace megavm {

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
    if constexpr (sample::kAnyRestricted) choice.await_mask();
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
      float value = logit(t);
      unordered |= value != value;
      if constexpr (sample::kAnyRestricted) value = choice.restricted(value, t);
      ptx::store(adjusted.at(t), __float_as_uint(value));
    }
    stop_if(unordered);
  }

  __device__ __forceinline__ void mask() const {
    if (consumer.thread() >= choice.masked) return;
    const uint32_t token = choice.integer(sample::kStop + consumer.thread());
    if (token < adjusted.size) ptx::store(adjusted.at(token), 0xff800000u);
  }

  // The logit of a token of the history, restricted and with the repetition penalty applied.
  __device__ __forceinline__ float repeated(uint32_t token) const {
    float a = choice.is_masked(token) ? -kInfinity : logit(token);
    if constexpr (sample::kAnyRestricted) a = choice.restricted(a, token);
    const float penalty = choice.real(sample::kRepetitionPenalty);
    return a > 0.0f ? a / penalty : a * penalty;
  }

  // Apply the penalties in `adjusted`. Threads that find the same token store the same value.
  __device__ __forceinline__ void penalise() const {
    if constexpr (sample::kAnyRestricted)
      if (choice.real(sample::kRepetitionPenalty) == 1.0f &&
          choice.real(sample::kPresencePenalty) == 0.0f &&
          choice.real(sample::kFrequencyPenalty) == 0.0f) {
        return;
      }
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

}  // namespace megavm
