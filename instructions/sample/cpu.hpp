#pragma once

#include <cmath>

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

// An unsigned key in the order of the floats.
MEGAVM_INLINE uint32_t sort_key(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

MEGAVM_INLINE float from_sort_key(uint32_t key) {
  const uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// A radix select: sums weights by the next bits of the values' keys, most significant first. Three
// passes find the threshold.
struct Selection {
  static constexpr int kShifts[3] = {21, 10, 0};
  static constexpr int kWidths[3] = {11, 11, 10};
  static_assert(sample::kCpuBins == 1 << kWidths[0]);

  double* bins;

  // The largest key of `values` such that the weights of all keys >= it add up to at least
  // `wanted`; the smallest key if there is none.
  template <typename Weigh>
  uint32_t threshold(const float* values, int64_t count, double wanted, Weigh weigh) const {
    uint32_t prefix = 0;
    double above = 0.0;  // weight of the keys above those that start with the prefix
    for (int pass = 0; pass < 3; ++pass) {
      const int shift = kShifts[pass], known = shift + kWidths[pass];
      const uint32_t size = 1u << kWidths[pass];
      for (uint32_t b = 0; b < size; ++b) bins[b] = 0.0;
      for (int64_t t = 0; t < count; ++t) {
        if (values[t] == -__builtin_inff()) continue;
        const uint32_t key = sort_key(values[t]);
        if (pass > 0 && key >> known != prefix) continue;
        bins[key >> shift & (size - 1)] += weigh(values[t]);
      }
      uint32_t bin = size, lowest = 0;
      bool found = false;
      while (bin > 0 && !found) {
        --bin;
        if (bins[bin] == 0.0) continue;
        lowest = bin;
        if (above + bins[bin] >= wanted)
          found = true;
        else
          above += bins[bin];
      }
      // Rounding may leave the total below `wanted`: then keep everything.
      if (!found) above -= bins[lowest];
      prefix = prefix << kWidths[pass] | lowest;
    }
    return prefix;
  }
};

// Chooses the next token of one sequence.
class Sampler {
 public:
  Sampler(const Sample& inst, Worker& worker)
      : inst_(inst), worker_(worker), vocabulary_(worker.tensor(inst.logits).columns) {
    if (worker.tensor(inst.adjusted).tagged) worker.fault("adjusted is tagged");
  }

  void run(int64_t row) {
    const size_t arena = worker_.arena_used;
    if (choose_sequence(row)) {
      const Tensor& tokens = worker_.tensor(inst_.tokens);
      int32_t* history = static_cast<int32_t*>(tokens.data) + sequence_ * tokens.columns;
      history_ = history;
      history[position_ + 1] = static_cast<int32_t>(choose(row));
    }
    worker_.arena_used = arena;
  }

 private:
  // Find the row's sequence and parameters; false if sampling is disabled for it.
  bool choose_sequence(int64_t row) {
    const int64_t step_row = worker_.data<const int32_t>(inst_.logit_row)[row];
    const int64_t rows = worker_.tensor(inst_.row_sequence).rows;
    if (step_row < 0 || step_row >= rows)
      worker_.fault("logit_row of row %lld is %lld, the step has %lld rows",
                    static_cast<long long>(row), static_cast<long long>(step_row),
                    static_cast<long long>(rows));
    sequence_ = sequence_of(worker_, inst_.row_sequence, step_row, inst_.tokens, "tokens");
    integers_ =
        worker_.data<const int32_t>(inst_.sampling_integer) + sequence_ * sample::kIntegerColumns;
    reals_ = worker_.data<const float>(inst_.sampling_real) + sequence_ * sample::kRealColumns;
    if (!integers_[sample::kEnabled]) return false;
    // The next position, which receives the token, must exist as well.
    position_ =
        position_of(worker_, inst_.row_position, step_row, worker_.tensor(inst_.tokens).columns - 1,
                    "tokens, but for its last column,");
    return true;
  }

  int64_t choose(int64_t row) {
    const int num_stop = integers_[sample::kNumStop];
    if (num_stop < 0 || num_stop > static_cast<int>(kMaxStopTokens))
      worker_.fault("NUM_STOP of sequence %lld is %d", static_cast<long long>(sequence_), num_stop);
    masked_ = position_ + 1 < integers_[sample::kMinLength] ? num_stop : 0;
    const bool penalised = reals_[sample::kRepetitionPenalty] != 1.0f ||
                           reals_[sample::kPresencePenalty] != 0.0f ||
                           reals_[sample::kFrequencyPenalty] != 0.0f;
    const bool greedy = reals_[sample::kTemperature] == 0.0f;
    find_restrictions();
    if (greedy && !penalised && masked_ == 0 && allowed_ == nullptr && bias_ == nullptr)
      return inst_.peaks == kNone ? largest_logit(row) : largest_peak(row);
    a_ = worker_.data<float>(inst_.adjusted) + row * vocabulary_;
    copy_logits(row);
    restrict();
    if (penalised) penalise(row);
    if (greedy) return largest_adjusted();
    const float temperature = reals_[sample::kTemperature];
    for (int64_t t = 0; t < vocabulary_; ++t) a_[t] /= temperature;
    restrict_choice();
    return draw();
  }

  // Lowest index of the largest value that `value_at` loads.
  template <typename ValueAt>
  MEGAVM_INLINE int64_t first_largest(int64_t row, ValueAt value_at) const {
    Vec peaks = splat(-__builtin_inff()), unordered = zero();
    for (int64_t t = 0; t < vocabulary_; t += kLanes) {
      const int count = lanes_at(t, vocabulary_);
      Vec values = value_at(t, count);
      // Detect NaN by comparison: value - value is not zero for an infinity either.
      MEGAVM_EACH_PART {
        const NativeInts ordered = values.part[i_] == values.part[i_];
        unordered.part[i_] = ordered ? unordered.part[i_] : NativeFloats{} + 1.0f;
      }
      if (count < kLanes) {
        float padded[kLanes];
        store(padded, values);
        for (int i = count; i < kLanes; ++i) padded[i] = -__builtin_inff();
        values = load(padded);
      }
      peaks = max(values, peaks);
    }
    if (largest(unordered) != 0.0f)
      worker_.fault("logits of row %lld hold NaN", static_cast<long long>(row));
    const float peak = largest(peaks);
    for (int64_t t = 0; t < vocabulary_; t += kLanes) {
      const int count = lanes_at(t, vocabulary_);
      float values[kLanes];
      store(values, value_at(t, count));
      for (int i = 0; i < count; ++i)
        if (values[i] == peak) return t + i;
    }
    return 0;
  }

  int64_t largest_logit(int64_t row) const {
    return with_rows(worker_, inst_.logits, [&](auto logits) {
      return first_largest(row, [&](int64_t t, int count) {
        return count == kLanes ? logits.load(row, t) : logits.load(row, t, count);
      });
    });
  }

  int64_t largest_peak(int64_t row) const {
    const int64_t columns = worker_.tensor(inst_.peaks).columns;
    float largest = -__builtin_inff();
    int64_t token = vocabulary_;
    for (int64_t c = 0; c < columns; c += 2) {
      float pair[kLanes];
      store(pair, load_row(worker_, inst_.peaks, row, c, 2));
      if (pair[0] != pair[0])
        worker_.fault("logits of row %lld hold NaN", static_cast<long long>(row));
      const auto at = static_cast<int64_t>(pair[1]);
      if (pair[0] > largest || (pair[0] == largest && at < token)) {
        largest = pair[0];
        token = at;
      }
    }
    return token;
  }

  int64_t largest_adjusted() const {
    int64_t best = 0;
    for (int64_t t = 1; t < vocabulary_; ++t)
      if (a_[t] > a_[best]) best = t;
    return best;
  }

  void copy_logits(int64_t row) const {
    bool unordered = false;
    for (int64_t t = 0; t < vocabulary_; t += kLanes) {
      const int count = lanes_at(t, vocabulary_);
      store(a_ + t, load_row(worker_, inst_.logits, row, t, count), count);
      for (int i = 0; i < count; ++i) unordered |= a_[t + i] != a_[t + i];
    }
    if (unordered) worker_.fault("logits of row %lld hold NaN", static_cast<long long>(row));
  }

  // The sequence's rows of `allowed` and `bias`; nullptr where it has none.
  void find_restrictions() {
    allowed_ = nullptr;
    bias_ = nullptr;
    if (inst_.allowed == kNone) return;
    if (integers_[sample::kMasked]) {
      check_mask();
      allowed_ = worker_.data<const uint32_t>(inst_.allowed) +
                 sequence_ * worker_.tensor(inst_.allowed).columns;
    }
    if (integers_[sample::kBiased])
      bias_ = worker_.data<const float>(inst_.bias) + sequence_ * vocabulary_;
  }

  // The host writes all masks before a step of this machine.
  void check_mask() const {
    const uint32_t written = *worker_.data<const uint32_t>(inst_.masks_written);
    const uint32_t awaited = *worker_.data<const uint32_t>(inst_.masks_awaited);
    if (static_cast<int32_t>(written - awaited) < 0)
      worker_.fault("the host has not written mask %u, the last one is %u", awaited, written);
  }

  bool is_allowed(int64_t token) const {
    return allowed_ == nullptr ||
           (allowed_[token / sample::kMaskBits] >> (token % sample::kMaskBits) & 1);
  }

  // Add the bias to the adjusted logits, and drop tokens that may not be chosen.
  void restrict() const {
    if (bias_ != nullptr)
      for (int64_t t = 0; t < vocabulary_; ++t) a_[t] += bias_[t];
    if (allowed_ != nullptr)
      for (int64_t t = 0; t < vocabulary_; ++t) a_[t] = is_allowed(t) ? a_[t] : -__builtin_inff();
    for (int i = 0; i < masked_; ++i) {
      const int64_t token = integers_[sample::kStop + i];
      if (token >= 0 && token < vocabulary_) a_[token] = -__builtin_inff();
    }
  }

  // The logit of a token of the history, restricted and with the repetition penalty applied.
  float repeated(int64_t row, int64_t token) const {
    float a = first_lane(load_row(worker_, inst_.logits, row, token, 1));
    if (bias_ != nullptr) a += bias_[token];
    if (!is_allowed(token)) a = -__builtin_inff();
    for (int i = 0; i < masked_; ++i)
      if (integers_[sample::kStop + i] == token) a = -__builtin_inff();
    const float penalty = reals_[sample::kRepetitionPenalty];
    return a > 0.0f ? a / penalty : a * penalty;
  }

  void penalise(int64_t row) const {
    const int64_t bitmap_words = (vocabulary_ + 63) / 64;
    uint64_t* seen = worker_.allocate<uint64_t>(bitmap_words);
    const auto first_time = [&](int64_t token) {
      const uint64_t bit = uint64_t{1} << (token & 63);
      const bool is_new = !(seen[token >> 6] & bit);
      seen[token >> 6] |= bit;
      return is_new;
    };
    for (int64_t i = 0; i <= position_; ++i) {
      if (history_[i] < 0 || history_[i] >= vocabulary_)
        worker_.fault(
            "token %d at position %lld of sequence %lld is outside the vocabulary of %lld",
            history_[i], static_cast<long long>(i), static_cast<long long>(sequence_),
            static_cast<long long>(vocabulary_));
    }
    std::memset(seen, 0, bitmap_words * sizeof(uint64_t));
    for (int64_t i = 0; i <= position_; ++i)
      if (first_time(history_[i])) a_[history_[i]] = repeated(row, history_[i]);
    // Count the produced tokens in place of their values, then replace the counts.
    const int64_t begin =
        integers_[sample::kPromptLength] < 0 ? 0 : integers_[sample::kPromptLength];
    for (int64_t i = begin; i <= position_; ++i) a_[history_[i]] = 0.0f;
    for (int64_t i = begin; i <= position_; ++i) a_[history_[i]] += 1.0f;
    std::memset(seen, 0, bitmap_words * sizeof(uint64_t));
    const float frequency = reals_[sample::kFrequencyPenalty],
                presence = reals_[sample::kPresencePenalty];
    for (int64_t i = begin; i <= position_; ++i) {
      const int64_t token = history_[i];
      if (first_time(token)) a_[token] = repeated(row, token) - (frequency * a_[token] + presence);
    }
  }

  void drop_below(float threshold) const {
    for (int64_t t = 0; t < vocabulary_; ++t) a_[t] = a_[t] < threshold ? -__builtin_inff() : a_[t];
  }

  // Apply min-p, top-k and top-p.
  void restrict_choice() {
    peak_ = -__builtin_inff();
    for (int64_t t = 0; t < vocabulary_; ++t) peak_ = a_[t] > peak_ ? a_[t] : peak_;
    const double min_p =
        reals_[sample::kMinP] < 1e-30f ? 1e-30 : static_cast<double>(reals_[sample::kMinP]);
    drop_below(peak_ + static_cast<float>(std::log(min_p)));
    const Selection selection{worker_.allocate<double>(sample::kCpuBins)};
    const int64_t top_k = integers_[sample::kTopK];
    if (top_k > 0 && top_k < vocabulary_)
      drop_below(from_sort_key(selection.threshold(a_, vocabulary_, static_cast<double>(top_k),
                                                   [](float) { return 1.0; })));
    const double top_p = static_cast<double>(reals_[sample::kTopP]);
    if (top_p >= 1.0) return;
    const auto weigh = [&](float a) { return static_cast<double>(std::exp(a - peak_)); };
    double total = 0.0;
    for (int64_t t = 0; t < vocabulary_; ++t)
      if (a_[t] != -__builtin_inff()) total += weigh(a_[t]);
    drop_below(from_sort_key(selection.threshold(a_, vocabulary_, top_p * total, weigh)));
  }

  // Uniform in (0, 1) from (seed, position, token).
  static double uniform(uint64_t seed, uint64_t position, uint64_t token) {
    uint64_t z = seed + 0x9E3779B97F4A7C15u * ((position << 32 | token) + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (static_cast<double>(z >> 40) + 0.5) / (1 << 24);
  }

  // The argmax of a_t - log(-log(u_t)): the Gumbel-max trick.
  int64_t draw() const {
    const uint64_t seed = static_cast<uint32_t>(integers_[sample::kSeedLow]) |
                          static_cast<uint64_t>(static_cast<uint32_t>(integers_[sample::kSeedHigh]))
                              << 32;
    int64_t best_token = 0;
    float best = -__builtin_inff();
    for (int64_t t = 0; t < vocabulary_; ++t) {
      if (a_[t] == -__builtin_inff()) continue;
      const double u = uniform(seed, static_cast<uint64_t>(position_), static_cast<uint64_t>(t));
      // Since -log(u) >= 1 - u, the noise is at most -log(1 - u). So most tokens need no logarithm.
      if (1.0 - u > 1.001 * static_cast<double>(std::exp(a_[t] - best))) continue;
      const float score = a_[t] + static_cast<float>(-std::log(-std::log(u)));
      if (score > best) {
        best = score;
        best_token = t;
      }
    }
    return best_token;
  }

  const Sample& inst_;
  Worker& worker_;
  int64_t vocabulary_;
  int64_t sequence_ = 0;
  int64_t position_ = 0;
  const int32_t* history_ = nullptr;   // tokens of the sequence
  const int32_t* integers_ = nullptr;  // parameters of the sequence
  const float* reals_ = nullptr;
  int masked_ = 0;  // stop tokens that may not be chosen
  const uint32_t* allowed_ = nullptr;
  const float* bias_ = nullptr;
  float* a_ = nullptr;  // adjusted logits
  float peak_ = 0.0f;
};

inline void execute(const Sample& inst, Worker& worker) {
  Sampler sampler(inst, worker);
  const Range live = live_rows(worker, inst.logit_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) sampler.run(row);
}

}  // namespace megavm::MEGAVM_LEVEL
