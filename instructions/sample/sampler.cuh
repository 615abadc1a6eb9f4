// The choice from adjusted logits if min-p, top-k or top-p limit it.
#pragma once

#include "instructions/sample/logits.cuh"

namespace megavm {

// Finds the lowest adjusted logit that may be chosen, and draws among those that are not below it.
// All consumers work on one row.
//
// Few tokens matter, as a rule: AdjustLogits has left the largest value and the probability of
// every segment of tokens, which bounds the threshold from below. The tokens that are not below the
// bound are candidates. If the scratch holds them, they decide; else all tokens of the row are gone
// through.
class Sampler {
 public:
  using Row = Choice<Sample>;

  static constexpr uint32_t kScratchBytes = 8 * (sample::kBins + sample::kCandidates) + 128;

  __device__ __forceinline__ Sampler(const Row& row, Consumer& consumer)
      : row_(row), consumer_(consumer), scores_(row) {
    const Tensor& adjusted = row.in[&Sample::adjusted];
    adjusted_ = {element_at(adjusted, row.row, 0), adjusted.columns};
    segments_ = ceil_div(adjusted.columns, sample::kSegmentTokens);
    const int32_t top_k = row.integer(sample::kTopK);
    top_k_ = top_k > 0 && static_cast<uint32_t>(top_k) < adjusted.columns ? top_k : 0;
    top_p_ = row.real(sample::kTopP), min_p_ = row.real(sample::kMinP);
    limited_ = row.is_limited(row.real(sample::kTemperature));
  }

  __device__ __forceinline__ void run() {
    const uint64_t best = look_at_segments();
    const uint32_t token = token_of(limited_ ? choose(token_of(best)) : best);
    if (consumer_.thread() == 0)
      ptx::store(element_at(row_.in[&Sample::tokens], row_.sequence, row_.position + 1), token);
  }

 private:
  // Scratch: a histogram of weights by the next digit of the values' keys, candidates, then values
  // that warps exchange. The bins are 64-bit integers with low and high words in separate arrays,
  // as 32-bit atomics are much faster.
  static constexpr uint32_t kHighAt = sample::kBins * 4;
  static constexpr uint32_t kValuesAt = sample::kBins * 8;
  static constexpr uint32_t kTokensAt = kValuesAt + sample::kCandidates * 4;
  static constexpr uint32_t kTotalsAt = kTokensAt + sample::kCandidates * 4;
  static constexpr uint32_t kFoundAt = kTotalsAt + kNumConsumers * 8;
  static constexpr uint32_t kCountAt = kFoundAt + 16;
  static_assert(kCountAt + 4 <= kScratchBytes);
  static_assert(sample::kBins == 2 * kNumConsumerThreads, "two bins for each thread");
  static constexpr uint32_t kDigitBits = 9;
  static_assert(sample::kBins == 1u << kDigitBits);

  // ---- Exchange between warps through the scratch.

  __device__ __forceinline__ void tell(uint32_t offset, uint64_t value) const {
    ptx::store_shared2(consumer_.scratch(offset), static_cast<uint32_t>(value),
                       static_cast<uint32_t>(value >> 32));
  }
  __device__ __forceinline__ uint64_t hear(uint32_t offset) const {
    const ptx::Words2 words = ptx::load_shared2(consumer_.scratch(offset));
    return static_cast<uint64_t>(words.y) << 32 | words.x;
  }

  // The value of all consumers, of which each warp has its part. Synchronises them before and
  // after.
  template <class Join>
  __device__ __forceinline__ uint64_t join_warps(uint64_t value, Join&& join) const {
    consumer_.sync();
    if (lane_index() == 0) tell(kTotalsAt + consumer_.warp() * 8, value);
    consumer_.sync();
    value = hear(kTotalsAt);
#pragma unroll
    for (uint32_t w = 1; w < kNumConsumers; ++w) value = join(value, hear(kTotalsAt + w * 8));
    consumer_.sync();
    return value;
  }
  __device__ __forceinline__ uint64_t largest_of_all(uint64_t value) const {
    return join_warps(largest_of_warp(value), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
  }
  __device__ __forceinline__ uint64_t sum_of_all(uint64_t value) const {
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2)
      value += __shfl_xor_sync(~0u, value, offset);
    return join_warps(value, [](uint64_t a, uint64_t b) { return a + b; });
  }

  // ---- Segments.

  static constexpr uint32_t kSegmentsEach = sample::kCandidates / kNumConsumerThreads;

  __device__ __forceinline__ ptx::Words4 segment(uint32_t number) const {
    return ptx::load_relaxed4(
        element_at(row_.in[&Sample::segments], row_.row, number * sample::kSegmentWords));
  }

  // The best candidate of the row. If the choice is limited, finds the peak and the total weight
  // too, and lists the segments' peaks if the scratch holds them.
  __device__ __forceinline__ uint64_t look_at_segments() {
    uint64_t best = 0;
    float peak = -kInfinity;
    const bool listed = limited_ && segments_ <= sample::kCandidates;
#pragma unroll 1
    for (uint32_t first = consumer_.thread(); first < segments_;
         first += kSegmentsEach * kNumConsumerThreads) {
      ptx::Words4 found[kSegmentsEach];
#pragma unroll
      for (uint32_t i = 0; i < kSegmentsEach; ++i)
        found[i] = segment(min_of(first + i * kNumConsumerThreads, segments_ - 1));
#pragma unroll
      for (uint32_t i = 0; i < kSegmentsEach; ++i) {
        const uint32_t number = first + i * kNumConsumerThreads;
        const uint64_t other = candidate(__uint_as_float(found[i].z),
                                         static_cast<uint32_t>(__uint_as_float(found[i].w)));
        best = other > best ? other : best;
        peak = fmaxf(peak, __uint_as_float(found[i].x));
        if (listed && number < segments_) put(number, __uint_as_float(found[i].x), number);
      }
    }
    best = largest_of_all(best);
    if (!limited_) return best;
    peak_ = score_of(largest_of_all(candidate(peak, 0)));
    uint64_t total = 0;
#pragma unroll 1
    for (uint32_t i = consumer_.thread(); i < segments_; i += kNumConsumerThreads) {
      const ptx::Words4 found = segment(i);
      const float share = __uint_as_float(found.y) * fraction(__uint_as_float(found.x));
      total += __float2ull_rn(share * kUnit);
    }
    total_ = sum_of_all(total);
    return best;
  }

  // ---- Candidates: values with tokens, or with segments, in the scratch.

  __device__ __forceinline__ void put(uint32_t i, float value, uint32_t token) const {
    ptx::store_shared(consumer_.scratch(kValuesAt + i * 4), __float_as_uint(value));
    ptx::store_shared(consumer_.scratch(kTokensAt + i * 4), token);
  }
  __device__ __forceinline__ float listed_value(uint32_t i) const {
    return __uint_as_float(ptx::load_shared(consumer_.scratch(kValuesAt + i * 4)));
  }
  __device__ __forceinline__ uint32_t listed_token(uint32_t i) const {
    return ptx::load_shared(consumer_.scratch(kTokensAt + i * 4));
  }
  static __device__ __forceinline__ uint32_t* count() {
    return reinterpret_cast<uint32_t*>(shared_memory + kScratchAt + kCountAt);
  }

  // Values of which `threshold` finds one: the first ones in the scratch, or the whole row.
  struct Values {
    uint32_t listed;
    bool whole;
  };
  template <class Use>
  __device__ __forceinline__ void each(const Values& values, Use&& use) const {
    if (values.whole) {
      adjusted_.each<4>(consumer_.thread(), [&](uint32_t, const float (&four)[4]) {
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) use(four[j]);
      });
      return;
    }
#pragma unroll 1
    for (uint32_t i = consumer_.thread(); i < values.listed; i += kNumConsumerThreads)
      use(listed_value(i));
  }

  // List the tokens that are not below `lowest`, of segments whose peak is not; how many there are.
  // More than kCandidates: the list is not complete, and the number too small.
  __device__ __forceinline__ uint32_t list(float lowest) const {
    consumer_.sync();
    if (consumer_.thread() == 0) *count() = 0;
    consumer_.sync();
    // A warp looks at 32 segments at once, one a lane, then goes through those that have
    // candidates.
#pragma unroll 1
    for (uint32_t first = consumer_.warp() * kLanes; first < segments_;
         first += kNumConsumerThreads) {
      const uint32_t mine = min_of(first + lane_index(), segments_ - 1);
      const float peak = __uint_as_float(segment(mine).x);
      uint32_t left = __ballot_sync(~0u, !(peak < lowest) && first + lane_index() < segments_);
#pragma unroll 1
      while (left != 0 && __shfl_sync(~0u, *count(), 0) <= sample::kCandidates) {
        constexpr uint32_t kBatch = 2;  // segments in flight
        constexpr uint32_t kFours = sample::kSegmentTokens / (4 * kLanes);
        uint32_t tokens[kBatch][kFours];
        ptx::Words4 found[kBatch][kFours];
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b) {
          const bool exists = left != 0;
          const uint32_t number = first + (exists ? __ffs(left) - 1 : 0);
          left &= left - 1;
#pragma unroll
          for (uint32_t i = 0; i < kFours; ++i) {
            tokens[b][i] = number * sample::kSegmentTokens + (i * kLanes + lane_index()) * 4;
            // Past the row all values are -inf.
            found[b][i] = adjusted_.four(exists ? tokens[b][i] : adjusted_.size);
          }
        }
#pragma unroll
        for (uint32_t b = 0; b < kBatch; ++b)
#pragma unroll
          for (uint32_t i = 0; i < kFours; ++i) {
            const uint32_t words[4] = {found[b][i].x, found[b][i].y, found[b][i].z, found[b][i].w};
#pragma unroll
            for (uint32_t j = 0; j < 4; ++j) {
              const float value = __uint_as_float(words[j]);
              if (!is_left(value, lowest)) continue;
              const uint32_t at = atomicAdd(count(), 1u);
              if (at < sample::kCandidates) put(at, value, tokens[b][i] + j);
            }
          }
        __syncwarp();
      }
    }
    consumer_.sync();
    const uint32_t found = *count();
    consumer_.sync();
    return found;
  }

  // ---- The choice.

  // The best candidate among the tokens that are left. `first` has the largest score of all.
  __device__ __forceinline__ uint64_t choose(uint32_t first) const {
    float lowest = peak_ + static_cast<float>(log(fmax(static_cast<double>(min_p_), 1e-30)));
    const float value = adjusted_.value(first);
    const bool by_min_p = min_p_ > 0.0f, by_top_p = top_p_ < 1.0f;
    if (top_k_ == 0 && !by_top_p && is_left(value, lowest)) return candidate(0.0f, first);
    // Top-p's share is that of all tokens, or of those that the others leave.
    const bool of_all = top_k_ == 0 && !by_min_p;
    const bool listed = segments_ <= sample::kCandidates && peak_ > -kInfinity;
    Values values{segments_, false};  // in the scratch, at first the segments' peaks
    // NOTE: one loop, in which the code of `threshold` is there once.
    enum Step : uint32_t { kBound, kTopK, kTopP, kEnd };
#pragma unroll 1
    for (uint32_t step = kBound; step < kEnd; ++step) {
      bool asked = step == kTopK ? top_k_ > 0 : by_top_p;
      // So many segments have a token that is not below the bound, or these have so much weight.
      if (step == kBound) asked = listed && (top_k_ > 0 ? top_k_ <= segments_ : of_all && by_top_p);
      const bool weighed = step == kTopP || (step == kBound && top_k_ == 0);
      const float before = lowest;
      if (asked) {
        uint64_t wanted = top_k_;
        if (weighed) wanted = top_p_of(of_all ? total_ : weight_of(values, lowest));
        lowest = threshold(values, weighed, lowest, wanted);
      }
      if (step != kBound) continue;
      const bool hopeful =
          listed && (!by_top_p || !of_all || lowest > before) && (top_k_ == 0 || asked);
      const uint32_t found = hopeful ? list(lowest) : sample::kCandidates + 1;
      values = {found, found > sample::kCandidates};
      // If the others cannot have pushed it out, the first one it is: as a rule, if many are left.
      if (values.whole && of_all && by_top_p && weight_above(value) < top_p_of(total_))
        return candidate(0.0f, first);
    }
    return values.whole ? draw(lowest) : draw_listed(values.listed, lowest);
  }

  static __device__ __forceinline__ bool is_left(float a, float lowest) {
    return !(a < lowest) && a != -kInfinity;
  }

  // Probability relative to the peak's, in units of 2^-40. Sums of integers do not depend on order.
  static constexpr float kUnit = 1099511627776.0f;
  __device__ __forceinline__ float fraction(float a) const {
    return a == peak_ ? 1.0f : expf(a - peak_);
  }
  __device__ __forceinline__ uint64_t weight(float a) const {
    return __float2ull_rn(fraction(a) * kUnit);
  }
  // The weight that top-p asks for, of so much.
  __device__ __forceinline__ uint64_t top_p_of(uint64_t total) const {
    const double share = static_cast<double>(top_p_) * static_cast<double>(total);
    const uint64_t weight = static_cast<uint64_t>(ceil(share));
    return weight == 0 ? 1 : weight;
  }

  // The weight of the values that are not below `lowest`; of the row's values above `value`.
  __device__ __forceinline__ uint64_t weight_of(const Values& values, float lowest) const {
    uint64_t sum = 0;
    each(values, [&](float a) { sum += is_left(a, lowest) ? weight(a) : 0; });
    return sum_of_all(sum);
  }
  __device__ __forceinline__ uint64_t weight_above(float value) const {
    const float above = from_sort_key(sort_key(value) + 1);
    return weight_of(Values{0, true}, above);
  }

  static __device__ __forceinline__ uint32_t* bins() {
    return reinterpret_cast<uint32_t*>(shared_memory + kScratchAt);
  }

  static __device__ __forceinline__ void add(uint32_t bin, uint64_t weight) {
    const uint32_t low = static_cast<uint32_t>(weight);
    uint32_t high = static_cast<uint32_t>(weight >> 32);
    const uint32_t before = atomicAdd(bins() + bin, low);
    high += before + low < before;
    if (high != 0) atomicAdd(bins() + sample::kBins + bin, high);
  }

  // The largest threshold such that the values that are not below it reach the wanted number or,
  // if `weighed`, the wanted weight; `lowest` if there is none. A radix select: by the digits of
  // the values' keys, most significant first.
  __device__ __forceinline__ float threshold(const Values& values, bool weighed, float lowest,
                                             uint64_t wanted) const {
    const uint32_t thread = consumer_.thread(), lane = lane_index();
    const uint32_t mine = (kNumConsumerThreads - 1 - thread) * 2;  // the highest bins come first
    uint64_t above = 0;  // weight of the keys above those that start with the prefix
    uint32_t prefix = 0, known = 32;
    consumer_.sync();
    ptx::store_shared2(consumer_.scratch(mine * 4), 0, 0);
    ptx::store_shared2(consumer_.scratch(kHighAt + mine * 4), 0, 0);
    consumer_.sync();
#pragma unroll 1
    while (known > 0) {
      const uint32_t shift = known >= kDigitBits ? known - kDigitBits : 0;
      const uint32_t size = 1u << (known - shift);
      each(values, [&](float a) {
        if (!is_left(a, lowest)) return;
        const uint32_t key = sort_key(a);
        if (known < 32 && key >> known != prefix) return;
        add(key >> shift & (size - 1), weighed ? weight(a) : 1);
      });
      consumer_.sync();
      // Prefix sums, from the highest bin down.
      const ptx::Words2 low = ptx::load_shared2(consumer_.scratch(mine * 4));
      const ptx::Words2 high = ptx::load_shared2(consumer_.scratch(kHighAt + mine * 4));
      ptx::store_shared2(consumer_.scratch(mine * 4), 0, 0);
      ptx::store_shared2(consumer_.scratch(kHighAt + mine * 4), 0, 0);
      const uint64_t bin[2] = {static_cast<uint64_t>(high.y) << 32 | low.y,
                               static_cast<uint64_t>(high.x) << 32 | low.x};
      uint64_t until = bin[0] + bin[1];
#pragma unroll
      for (uint32_t offset = 1; offset < kLanes; offset *= 2) {
        const uint64_t other = __shfl_up_sync(~0u, until, offset);
        if (lane >= offset) until += other;
      }
      if (lane == kLanes - 1) tell(kTotalsAt + consumer_.warp() * 8, until);
      consumer_.sync();
      uint64_t total = above;
      until += above;
#pragma unroll
      for (uint32_t w = 0; w < kNumConsumers; ++w) {
        const uint64_t other = hear(kTotalsAt + w * 8);
        total += other;
        if (w < consumer_.warp()) until += other;
      }
      if (total < wanted) return lowest;
      // One thread finds the bin in which the sum reaches `wanted`.
      uint64_t before = until - (bin[0] + bin[1]);
      if (before < wanted && wanted <= until) {
        const bool second = before + bin[0] < wanted;
        tell(kFoundAt, second ? before + bin[0] : before);
        ptx::store_shared(consumer_.scratch(kFoundAt + 8), mine + (second ? 0 : 1));
      }
      consumer_.sync();
      above = hear(kFoundAt);
      prefix = prefix << (known - shift) | ptx::load_shared(consumer_.scratch(kFoundAt + 8));
      known = shift;
    }
    return from_sort_key(prefix);
  }

  // ---- The draw.

  // Raise `best` if this token's score is above it.
  __device__ __forceinline__ void consider(float a, uint32_t token, uint64_t& best) const {
    const uint64_t other = candidate(Scores::score(a, scores_.bits(token)), token);
    best = other > best ? other : best;
  }
  __device__ __forceinline__ bool may_win(float a, uint32_t token, float reached) const {
    return Scores::bound(a, scores_.bits(token)) + Scores::margin(a) >= reached;
  }

  // The best of the candidates in the scratch that are not below `lowest`.
  __device__ __forceinline__ uint64_t draw_listed(uint32_t listed, float lowest) const {
    uint64_t best = candidate(-kInfinity, 0);
#pragma unroll 1
    for (uint32_t i = consumer_.thread(); i < listed; i += kNumConsumerThreads) {
      const float a = listed_value(i);
      const uint32_t token = listed_token(i);
      if (is_left(a, lowest) && may_win(a, token, score_of(best))) consider(a, token, best);
    }
    return largest_of_all(best);
  }

  // The best of the row's tokens that are not below `lowest`.
  __device__ __forceinline__ uint64_t draw(float lowest) const {
    constexpr uint32_t kBatch = 4;
    uint64_t best = candidate(-kInfinity, 0);
    float reached = -kInfinity;  // by some lane of the warp
    const uint32_t vectors = ceil_div(adjusted_.skew() + adjusted_.size, 4);
#pragma unroll 1
    for (uint32_t start = 0; start < vectors; start += kBatch * kNumConsumerThreads) {
      const uint32_t first = start + consumer_.thread();
      ptx::Words4 raw[kBatch];
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i)
        raw[i] = adjusted_.load(first + i * kNumConsumerThreads);
      uint32_t open = 0;  // bit 4 i + j: element j of vector i may win
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (uint32_t j = 0; j < 4; ++j) {
          const float a = __uint_as_float(words[j]);
          const uint32_t token = adjusted_.token(first + i * kNumConsumerThreads, j);
          if (is_left(a, lowest) && may_win(a, token, reached)) open |= 1u << (4 * i + j);
        }
      }
#pragma unroll 1
      while (open != 0) {
        const uint32_t k = __ffs(open) - 1;
        open &= open - 1;
        const uint32_t token = adjusted_.token(first + k / 4 * kNumConsumerThreads, k % 4);
        const float a = adjusted_.value(token);
        if (may_win(a, token, score_of(best))) consider(a, token, best);
      }
      __syncwarp();
      reached = largest_of_warp(score_of(best));
    }
    return largest_of_all(best);
  }

  const Row& row_;
  Consumer& consumer_;
  Scores scores_;
  LogitRow adjusted_;
  uint32_t segments_, top_k_;
  float top_p_, min_p_;
  bool limited_;
  float peak_ = 0.0f;
  uint64_t total_ = 0;  // weight of all tokens
};

}  // namespace megavm
