#pragma once

#include "instructions/sample/choice.hpp"

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

  // The largest of the `values` not below `lowest` such that the weights of all that are not below
  // it add up to at least `wanted`; the smallest one if there is none.
  template <typename Weigh>
  float threshold(const float* values, int64_t count, float lowest, double wanted,
                  Weigh weigh) const {
    uint32_t prefix = 0;
    double above = 0.0;  // weight of the keys above those that start with the prefix
    for (int pass = 0; pass < 3; ++pass) {
      const int shift = kShifts[pass], known = shift + kWidths[pass];
      const uint32_t size = 1u << kWidths[pass];
      for (uint32_t b = 0; b < size; ++b) bins[b] = 0.0;
      for (int64_t t = 0; t < count; ++t) {
        if (values[t] < lowest || values[t] == -__builtin_inff()) continue;
        const uint32_t key = sort_key(values[t]);
        if (pass > 0 && key >> known != prefix) continue;
        bins[key >> shift & (size - 1)] += weigh(values[t]);
      }
      uint32_t bin = size, last = 0;
      bool found = false;
      while (bin > 0 && !found) {
        --bin;
        if (bins[bin] == 0.0) continue;
        last = bin;
        if (above + bins[bin] >= wanted)
          found = true;
        else
          above += bins[bin];
      }
      // Rounding may leave the total below `wanted`: then keep everything.
      if (!found) above -= bins[last];
      prefix = prefix << kWidths[pass] | last;
    }
    return from_sort_key(prefix);
  }
};

// Chooses the next token of one sequence.
class Sampler {
 public:
  Sampler(const Sample& inst, Worker& worker, const Choice& choice)
      : inst_(inst), worker_(worker), choice_(choice) {}

  int64_t choose() const {
    const int64_t row = choice_.row;
    if (inst_.segments == kNone)
      return inst_.peaks == kNone ? largest_logit(row) : largest_pair(inst_.peaks, 2, 0);
    if (!choice_.is_limited()) return largest_pair(inst_.segments, sample::kSegmentWords, 2);
    return draw();
  }

 private:
  // Lowest index of the largest value that `value_at` loads.
  template <typename ValueAt>
  MEGAVM_INLINE int64_t first_largest(int64_t row, ValueAt value_at) const {
    const int64_t vocabulary = worker_.tensor(inst_.logits).columns;
    Vec peaks = splat(-__builtin_inff()), unordered = zero();
    for (int64_t t = 0; t < vocabulary; t += kLanes) {
      const int count = lanes_at(t, vocabulary);
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
    for (int64_t t = 0; t < vocabulary; t += kLanes) {
      const int count = lanes_at(t, vocabulary);
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

  // The token of the largest value; (value, token) are at `first` of every `stride` columns.
  int64_t largest_pair(uint32_t handle, int64_t stride, int64_t first) const {
    const int64_t columns = worker_.tensor(handle).columns;
    float largest = -__builtin_inff();
    int64_t token = 0;
    for (int64_t c = first; c < columns; c += stride) {
      float pair[kLanes];
      store(pair, load_row(worker_, handle, choice_.row, c, 2));
      if (pair[0] != pair[0])
        worker_.fault("logits of row %lld hold NaN", static_cast<long long>(choice_.row));
      const auto at = static_cast<int64_t>(pair[1]);
      if (pair[0] > largest || (pair[0] == largest && at < token)) {
        largest = pair[0];
        token = at;
      }
    }
    return token;
  }

  // The token of the largest score among those that min-p, top-k and top-p leave.
  int64_t draw() const {
    const int64_t vocabulary = worker_.tensor(inst_.adjusted).columns;
    const float* a = worker_.data<const float>(inst_.adjusted) + choice_.row * vocabulary;
    const float lowest = threshold(a, vocabulary);
    int64_t best_token = 0;
    float best = -__builtin_inff();
    for (int64_t t = 0; t < vocabulary; ++t) {
      if (a[t] < lowest || a[t] == -__builtin_inff()) continue;
      const double u = choice_.uniform(t);
      if (!choice_.may_win(a[t], best, u)) continue;
      const float score = choice_.score(a[t], u);
      if (score > best) best = score, best_token = t;
    }
    return best_token;
  }

  // The smallest adjusted logit that may be chosen.
  float threshold(const float* a, int64_t vocabulary) const {
    float peak = -__builtin_inff();
    for (int64_t t = 0; t < vocabulary; ++t) peak = a[t] > peak ? a[t] : peak;
    const float* reals = choice_.reals;
    const double min_p =
        reals[sample::kMinP] < 1e-30f ? 1e-30 : static_cast<double>(reals[sample::kMinP]);
    float lowest = peak + static_cast<float>(std::log(min_p));
    const size_t arena = worker_.arena_used;
    const Selection selection{worker_.allocate<double>(sample::kCpuBins)};
    const int64_t top_k = choice_.integers[sample::kTopK];
    if (top_k > 0 && top_k < vocabulary)
      lowest = selection.threshold(a, vocabulary, lowest, static_cast<double>(top_k),
                                   [](float) { return 1.0; });
    const double top_p = static_cast<double>(reals[sample::kTopP]);
    if (top_p < 1.0) {
      const auto weigh = [&](float value) { return static_cast<double>(std::exp(value - peak)); };
      double total = 0.0;
      for (int64_t t = 0; t < vocabulary; ++t)
        if (!(a[t] < lowest) && a[t] != -__builtin_inff()) total += weigh(a[t]);
      lowest = selection.threshold(a, vocabulary, lowest, top_p * total, weigh);
    }
    worker_.arena_used = arena;
    return lowest;
  }

  const Sample& inst_;
  Worker& worker_;
  const Choice& choice_;
};

inline void execute(const Sample& inst, Worker& worker) {
  const Range live = live_rows(worker, inst.logit_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const Choice choice(inst, worker, row);
    if (choice.enabled)
      choice.tokens[choice.position + 1] =
          static_cast<int32_t>(Sampler(inst, worker, choice).choose());
  }
}

}  // namespace megavm::MEGAVM_LEVEL
