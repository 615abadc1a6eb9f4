// AdjustLogits on the GPU: a warp takes segments of a row, eight tokens a lane.
#pragma once

#include "instructions/sample/logits.cuh"

namespace megavm {

// Adjusts the logits of one row in the columns of an instruction. All consumers work on it.
class LogitAdjuster {
 public:
  using Row = Choice<AdjustLogits>;

  __device__ __forceinline__ LogitAdjuster(const Row& row, Consumer& consumer)
      : row_(row), consumer_(consumer) {
    const Operands<AdjustLogits>& in = row.in;
    const uint32_t size = in[&AdjustLogits::logits].columns;
    logits_ = {element_at(in[&AdjustLogits::logits], row.row, 0), size};
    adjusted_ = {element_at(in[&AdjustLogits::adjusted], row.row, 0), size};
    begin_ = in.inst.column_begin, end_ = in.inst.column_end;
    const int32_t stops = row.integer(sample::kNumStop);
    if (static_cast<uint32_t>(stops) > kMaxStopTokens)
      stop_instruction(Fault::kNumStop, row.sequence, 0, stops, kMaxStopTokens);
    const bool hidden = static_cast<int32_t>(row.position + 1) < row.integer(sample::kMinLength);
    stops_ = hidden ? stops : 0;
    masked_ = row.integer(sample::kMasked) != 0, biased_ = row.integer(sample::kBiased) != 0;
    temperature_ = row.real(sample::kTemperature);
    repetition_ = row.real(sample::kRepetitionPenalty);
    presence_ = row.real(sample::kPresencePenalty);
    frequency_ = row.real(sample::kFrequencyPenalty);
    limited_ = row.is_limited(temperature_);
  }

  __device__ __forceinline__ void run() const {
    if (masked_) await_mask();
    const bool penalised = repetition_ != 1.0f || presence_ != 0.0f || frequency_ != 0.0f;
    if (penalised) {
      restrict_all();
      consumer_.sync();
      penalise();
      consumer_.sync();
    }
    // NOTE: no pointer to one of two rows, for which all that this object refers to would be in
    // memory.
    LogitRow source = logits_;
    if (penalised) source.address = adjusted_.address;
    const Scores scores(row_);
    const uint32_t segments = ceil_div(end_ - begin_, sample::kSegmentTokens),
                   warp = consumer_.warp();
    if (warp >= segments) return;
    uint64_t best = candidate(-kInfinity, 0);
    float first_peak = 0.0f, first_mass = 0.0f;
    Segment next = load(source, warp);
#pragma unroll 1
    for (uint32_t segment = warp; segment < segments; segment += kNumConsumers) {
      Segment a = next;
      if (segment + kNumConsumers < segments) next = load(source, segment + kNumConsumers);
      if (!penalised) restrict_segment(a, segment);
      if (temperature_ != 0.0f)
#pragma unroll
        for (float& value : a.values) value /= temperature_;
      float peak = 0.0f, mass = 0.0f;
      if (limited_) {
        store(a, segment);
        find_mass(a, peak, mass);
      }
      if (temperature_ == 0.0f)
        take_largest(a, segment, best);
      else
        draw(a, segment, scores, best);
      if (segment == warp)
        first_peak = peak, first_mass = mass;
      else
        store_segment(segment, peak, mass, candidate(-kInfinity, 0));
    }
    store_segment(warp, first_peak, first_mass, largest_of_warp(best));
  }

 private:
  static constexpr uint32_t kFours = sample::kSegmentTokens / (4 * kLanes);
  static constexpr uint32_t kEach = 4 * kFours;  // tokens of a lane
  static_assert(kFours * 4 * kLanes == sample::kSegmentTokens);
  static_assert(adjust_logits::kScores == kNumConsumers);

  struct Segment {
    float values[kEach];
  };

  // The first of the neighbouring tokens that a lane has from four number i.
  __device__ __forceinline__ uint32_t first_token(uint32_t segment, uint32_t i) const {
    return begin_ + segment * sample::kSegmentTokens + (i * kLanes + lane_index()) * 4;
  }
  __device__ __forceinline__ uint32_t token(uint32_t segment, uint32_t i) const {
    return first_token(segment, i / 4) + i % 4;
  }

  __device__ __forceinline__ Segment load(const LogitRow& from, uint32_t segment) const {
    Segment a;
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const ptx::Words4 four = from.four(first_token(segment, i));
      const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) a.values[4 * i + j] = __uint_as_float(words[j]);
    }
    return a;
  }

  __device__ __forceinline__ void store(const Segment& a, uint32_t segment) const {
#pragma unroll
    for (uint32_t i = 0; i < kFours; ++i) {
      const uint32_t first = first_token(segment, i);
      const float* from = a.values + 4 * i;
      if (adjusted_.at(first) % 16 == 0 && first + 4 <= adjusted_.size) {
        ptx::store4(adjusted_.at(first), {__float_as_uint(from[0]), __float_as_uint(from[1]),
                                          __float_as_uint(from[2]), __float_as_uint(from[3])});
        continue;
      }
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        if (first + j < adjusted_.size)
          ptx::store(adjusted_.at(first + j), __float_as_uint(from[j]));
    }
  }

  // Wait until the host has written the mask. Its numbers wrap around, so compare by difference.
  __device__ __forceinline__ void await_mask() const {
    const Operands<AdjustLogits>& in = row_.in;
    const uint32_t awaited =
        static_cast<uint32_t>(constant_integer(in[&AdjustLogits::masks_awaited], 0, 0));
    const uint64_t address = element_at(in[&AdjustLogits::masks_written], 0, 0);
    const auto* number = reinterpret_cast<const uint32_t*>(address);
    uint32_t written = ptx::load_acquire_system(number);
    while (static_cast<int32_t>(written - awaited) < 0) {
      if (__builtin_expect(is_stopping(), 0))
        stop_instruction(Fault::kMasks, row_.row, 0, written, awaited);
      written = ptx::load_acquire_system(number);
    }
  }

  __device__ __forceinline__ void stop_if(bool unordered) const {
    if (unordered) stop_instruction(Fault::kNanLogits, row_.row, 0, 0, 0);
  }

  // The word of the mask that has a token's bit. The host may have written it while the kernel ran.
  __device__ __forceinline__ uint32_t mask_word(uint32_t token) const {
    return ptx::load_relaxed1(
        element_at(row_.in[&AdjustLogits::allowed], row_.sequence, token / sample::kMaskBits));
  }

  // Bias, mask and hidden stop tokens, for the logits of a segment; checks them.
  __device__ __forceinline__ void restrict_segment(Segment& a, uint32_t segment) const {
    bool unordered = false;
#pragma unroll
    for (const float value : a.values) unordered |= value != value;
    stop_if(unordered);
    if (biased_)
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
        if (token(segment, i) < end_)
          a.values[i] +=
              constant_element(row_.in[&AdjustLogits::bias], row_.sequence, token(segment, i));
    if (masked_)
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        const uint32_t first = first_token(segment, i);  // the four are in one word
        const uint32_t bits = first < end_ ? mask_word(first) >> first % sample::kMaskBits : 0;
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j)
          if (!(bits >> j & 1)) a.values[4 * i + j] = -kInfinity;
      }
#pragma unroll 1
    for (uint32_t s = 0; s < stops_; ++s) {
      const uint32_t stop = static_cast<uint32_t>(row_.integer(sample::kStop + s));
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i)
        if (token(segment, i) == stop) a.values[i] = -kInfinity;
    }
  }

  // Store the restricted logits to `adjusted`, where penalties change them.
  __device__ __forceinline__ void restrict_all() const {
    const uint32_t segments = ceil_div(end_ - begin_, sample::kSegmentTokens);
#pragma unroll 1
    for (uint32_t segment = consumer_.warp(); segment < segments; segment += kNumConsumers) {
      Segment a = load(logits_, segment);
      restrict_segment(a, segment);
      store(a, segment);
    }
  }

  __device__ __forceinline__ bool is_own(uint32_t token) const {
    return token >= begin_ && token < end_;
  }

  // Call use(token) for the sequence's tokens at positions from `first` on that are own ones.
  template <class Use>
  __device__ __forceinline__ void each_own(uint32_t first, Use&& use) const {
    constexpr uint32_t kBatch = 8;  // loads in flight
    const uint32_t end = row_.position + 1;
    const Tensor& tokens = row_.in[&AdjustLogits::tokens];
#pragma unroll 1
    for (uint32_t at = first + consumer_.thread(); at < end; at += kBatch * kNumConsumerThreads) {
      uint32_t found[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i)
        found[i] = ptx::load_relaxed1(
            element_at(tokens, row_.sequence, min_of(at + i * kNumConsumerThreads, end - 1)));
#pragma unroll 1
      for (uint32_t i = 0; i < kBatch; ++i) {
        uint32_t token = found[0];
#pragma unroll
        for (uint32_t j = 1; j < kBatch; ++j) token = i == j ? found[j] : token;
        const uint32_t where = at + i * kNumConsumerThreads;
        if (where >= end) break;
        if (token >= logits_.size)
          stop_instruction(Fault::kToken, row_.sequence, where, token, logits_.size);
        if (is_own(token)) use(token);
      }
    }
  }

  // The logit of a token of the history, restricted and with the repetition penalty applied.
  __device__ __forceinline__ float repeated(uint32_t token) const {
    float a = logits_.value(token);
    if (biased_) a += constant_element(row_.in[&AdjustLogits::bias], row_.sequence, token);
    if (masked_ && !(mask_word(token) >> token % sample::kMaskBits & 1)) a = -kInfinity;
#pragma unroll 1
    for (uint32_t s = 0; s < stops_; ++s)
      if (static_cast<uint32_t>(row_.integer(sample::kStop + s)) == token) a = -kInfinity;
    return a > 0.0f ? a / repetition_ : a * repetition_;
  }

  // Apply the penalties in `adjusted`. Threads that find the same token store the same value.
  __device__ __forceinline__ void penalise() const {
    each_own(0, [&](uint32_t token) {
      ptx::store(adjusted_.at(token), __float_as_uint(repeated(token)));
    });
    if (frequency_ == 0.0f && presence_ == 0.0f) return;
    // Count the produced tokens in place of their values, then replace the counts. A count is
    // stored as a NaN that arithmetic does not produce.
    constexpr uint32_t kCount = 0xffc00000u;
    const int32_t prompt = row_.integer(sample::kPromptLength);
    const uint32_t begin = prompt < 0 ? 0 : prompt;
    consumer_.sync();
    each_own(begin, [&](uint32_t token) { ptx::store(adjusted_.at(token), kCount); });
    consumer_.sync();
    each_own(begin, [&](uint32_t token) {
      atomicAdd(reinterpret_cast<uint32_t*>(adjusted_.at(token)), 1u);
    });
    consumer_.sync();
    each_own(begin, [&](uint32_t token) {
      const uint32_t count = ptx::load_relaxed1(adjusted_.at(token));
      if (count < kCount) return;  // another thread has replaced the count
      const float times = static_cast<float>(count - kCount);
      ptx::store(adjusted_.at(token),
                 __float_as_uint(repeated(token) - (frequency_ * times + presence_)));
    });
  }

  // The largest value of a segment, and the sum of exp(value - peak).
  __device__ __forceinline__ void find_mass(const Segment& a, float& peak, float& mass) const {
    peak = a.values[0];
#pragma unroll
    for (const float value : a.values) peak = fmaxf(peak, value);
    peak = largest_of_warp(peak);
    mass = 0.0f;
    if (peak == -kInfinity) return;
#pragma unroll
    for (const float value : a.values) mass += expf(value - peak);
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2)
      mass += __shfl_xor_sync(~0u, mass, offset);
  }

  // Lanes keep their best token in `best`.
  __device__ __forceinline__ void take_largest(const Segment& a, uint32_t segment,
                                               uint64_t& best) const {
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      if (!(a.values[i] > -kInfinity)) continue;
      const uint64_t other = candidate(a.values[i], token(segment, i));
      best = other > best ? other : best;
    }
  }

  // The same for scores. Lanes share the best score, and find out only those that may exceed it.
  __device__ __forceinline__ void draw(const Segment& a, uint32_t segment, const Scores& scores,
                                       uint64_t& best) const {
    // No noise is above 25 log(2).
    constexpr float kMostNoise = 17.4f;
    float reached = largest_of_warp(score_of(best)), peak = -kInfinity;
#pragma unroll
    for (const float value : a.values) peak = fmaxf(peak, value);
    const float limit = reached - kMostNoise;
    if (!__any_sync(~0u, peak + Scores::margin(peak) >= limit && peak > -kInfinity)) return;
    float bound[kEach];
    uint32_t open = 0;  // bit i: token i may win
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      bound[i] = Scores::bound(a.values[i], scores.bits(token(segment, i)));
      if (a.values[i] > -kInfinity) open |= 1u << i;
    }
    while (true) {
      uint32_t chosen = kEach;
      float highest = -kInfinity, value = 0.0f;
#pragma unroll
      for (uint32_t i = 0; i < kEach; ++i) {
        if (!(bound[i] + Scores::margin(a.values[i]) >= reached)) open &= ~(1u << i);
        const bool better = (open >> i & 1) && (chosen == kEach || bound[i] > highest);
        chosen = better ? i : chosen;
        highest = better ? bound[i] : highest;
        value = better ? a.values[i] : value;
      }
      if (!__any_sync(~0u, open != 0)) return;
      if (open != 0) {
        open &= ~(1u << chosen);
        const uint32_t t = token(segment, chosen);
        const uint64_t other = candidate(Scores::score(value, scores.bits(t)), t);
        best = other > best ? other : best;
      }
      __syncwarp();
      reached = largest_of_warp(score_of(best));
    }
  }

  __device__ __forceinline__ void store_segment(uint32_t segment, float peak, float mass,
                                                uint64_t best) const {
    if (lane_index() != 0) return;
    const uint32_t column = (begin_ / sample::kSegmentTokens + segment) * sample::kSegmentWords;
    ptx::store4(element_at(row_.in[&AdjustLogits::segments], row_.row, column),
                {__float_as_uint(peak), __float_as_uint(mass), __float_as_uint(score_of(best)),
                 __float_as_uint(static_cast<float>(token_of(best)))});
  }

  const Row& row_;
  Consumer& consumer_;
  LogitRow logits_, adjusted_;
  uint32_t begin_, end_;
  uint32_t stops_;  // stop tokens that may not be chosen
  bool masked_, biased_, limited_;
  float temperature_, repetition_, presence_, frequency_;
};

template <>
struct Kernel<AdjustLogits> : KernelDefaults {
  static __device__ __forceinline__ void consume(const Operands<AdjustLogits>& in,
                                                 Consumer& consumer) {
    const AdjustLogits& inst = in.inst;
    const uint32_t live = live_end(in, &AdjustLogits::logit_count, inst.row_begin, inst.row_end);
    bool ready = false;
#pragma unroll 1
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const Choice<AdjustLogits> choice(in, row);
      if (!choice.enabled) continue;
      const LogitAdjuster adjuster(choice, consumer);
      if (!ready) consumer.wait_ready();
      ready = true;
      adjuster.run();
    }
    if (!ready) consumer.wait_ready();
  }
};

}  // namespace megavm
