#pragma once

#include "instructions/sample/choice.hpp"

namespace megavm::MEGAVM_LEVEL {

// Adjusts the logits of one row in the columns of an instruction.
class LogitAdjuster {
 public:
  LogitAdjuster(const AdjustLogits& inst, Worker& worker, const Choice& choice)
      : inst_(inst),
        worker_(worker),
        choice_(choice),
        begin_(inst.column_begin),
        end_(inst.column_end),
        a_(worker.data<float>(inst.adjusted) + choice.row * worker.tensor(inst.logits).columns) {
    const int num_stop = choice.integers[sample::kNumStop];
    if (num_stop < 0 || num_stop > static_cast<int>(kMaxStopTokens))
      worker.fault("NUM_STOP of sequence %lld is %d", static_cast<long long>(choice.sequence),
                   num_stop);
    stops_ = choice.position + 1 < choice.integers[sample::kMinLength] ? num_stop : 0;
    if (choice.integers[sample::kMasked]) {
      check_mask();
      allowed_ = worker.data<const uint32_t>(inst.allowed) +
                 choice.sequence * worker.tensor(inst.allowed).columns;
    }
    if (choice.integers[sample::kBiased])
      bias_ =
          worker.data<const float>(inst.bias) + choice.sequence * worker.tensor(inst.bias).columns;
  }

  void run() {
    copy_logits();
    restrict();
    if (choice_.reals[sample::kRepetitionPenalty] != 1.0f ||
        choice_.reals[sample::kPresencePenalty] != 0.0f ||
        choice_.reals[sample::kFrequencyPenalty] != 0.0f)
      penalise();
    if (choice_.is_drawn()) {
      const float temperature = choice_.reals[sample::kTemperature];
      for (int64_t t = begin_; t < end_; ++t) a_[t] /= temperature;
    }
    summarise();
  }

 private:
  // The host writes all masks before a step of this machine.
  void check_mask() const {
    const uint32_t written = *worker_.data<const uint32_t>(inst_.masks_written);
    const uint32_t awaited = *worker_.data<const uint32_t>(inst_.masks_awaited);
    if (static_cast<int32_t>(written - awaited) < 0)
      worker_.fault("the host has not written mask %u, the last one is %u", awaited, written);
  }

  void copy_logits() const {
    bool unordered = false;
    for (int64_t t = begin_; t < end_; t += kLanes) {
      const int count = lanes_at(t, end_);
      store(a_ + t, load_row(worker_, inst_.logits, choice_.row, t, count), count);
      for (int i = 0; i < count; ++i) unordered |= a_[t + i] != a_[t + i];
    }
    if (unordered)
      worker_.fault("logits of row %lld hold NaN", static_cast<long long>(choice_.row));
  }

  bool is_allowed(int64_t token) const {
    return allowed_ == nullptr ||
           (allowed_[token / sample::kMaskBits] >> (token % sample::kMaskBits) & 1);
  }

  // Add the bias, and drop tokens that may not be chosen.
  void restrict() const {
    if (bias_ != nullptr)
      for (int64_t t = begin_; t < end_; ++t) a_[t] += bias_[t];
    if (allowed_ != nullptr)
      for (int64_t t = begin_; t < end_; ++t) a_[t] = is_allowed(t) ? a_[t] : -__builtin_inff();
    for (int i = 0; i < stops_; ++i) {
      const int64_t token = choice_.integers[sample::kStop + i];
      if (is_own(token)) a_[token] = -__builtin_inff();
    }
  }

  bool is_own(int64_t token) const { return token >= begin_ && token < end_; }

  // The logit of a token of the history, restricted and with the repetition penalty applied.
  float repeated(int64_t token) const {
    float a = first_lane(load_row(worker_, inst_.logits, choice_.row, token, 1));
    if (bias_ != nullptr) a += bias_[token];
    if (!is_allowed(token)) a = -__builtin_inff();
    for (int i = 0; i < stops_; ++i)
      if (choice_.integers[sample::kStop + i] == token) a = -__builtin_inff();
    const float penalty = choice_.reals[sample::kRepetitionPenalty];
    return a > 0.0f ? a / penalty : a * penalty;
  }

  void penalise() const {
    const size_t arena = worker_.arena_used;
    const int64_t words = (end_ - begin_ + 63) / 64;
    uint64_t* seen = worker_.allocate<uint64_t>(words);
    const auto first_time = [&](int64_t token) {
      const uint64_t bit = uint64_t{1} << ((token - begin_) & 63);
      uint64_t& word = seen[(token - begin_) >> 6];
      const bool is_new = !(word & bit);
      word |= bit;
      return is_new;
    };
    const int32_t* history = choice_.tokens;
    const int64_t vocabulary = worker_.tensor(inst_.logits).columns;
    for (int64_t i = 0; i <= choice_.position; ++i) {
      if (history[i] < 0 || history[i] >= vocabulary)
        worker_.fault(
            "token %d at position %lld of sequence %lld is outside the vocabulary of %lld",
            history[i], static_cast<long long>(i), static_cast<long long>(choice_.sequence),
            static_cast<long long>(vocabulary));
    }
    std::memset(seen, 0, words * sizeof(uint64_t));
    for (int64_t i = 0; i <= choice_.position; ++i)
      if (is_own(history[i]) && first_time(history[i])) a_[history[i]] = repeated(history[i]);
    // Count the produced tokens in place of their values, then replace the counts.
    const int64_t prompt = choice_.integers[sample::kPromptLength];
    const int64_t begin = prompt < 0 ? 0 : prompt;
    for (int64_t i = begin; i <= choice_.position; ++i)
      if (is_own(history[i])) a_[history[i]] = 0.0f;
    for (int64_t i = begin; i <= choice_.position; ++i)
      if (is_own(history[i])) a_[history[i]] += 1.0f;
    std::memset(seen, 0, words * sizeof(uint64_t));
    const float frequency = choice_.reals[sample::kFrequencyPenalty],
                presence = choice_.reals[sample::kPresencePenalty];
    for (int64_t i = begin; i <= choice_.position; ++i) {
      const int64_t token = history[i];
      if (is_own(token) && first_time(token))
        a_[token] = repeated(token) - (frequency * a_[token] + presence);
    }
    worker_.arena_used = arena;
  }

  // Write the segments.
  void summarise() const {
    float* segments = worker_.data<float>(inst_.segments) +
                      choice_.row * worker_.tensor(inst_.segments).columns +
                      begin_ / sample::kSegmentTokens * sample::kSegmentWords;
    const bool limited = choice_.is_limited(), drawn = choice_.is_drawn();
    float best[adjust_logits::kScores];
    int64_t token[adjust_logits::kScores] = {};
    for (float& score : best) score = -__builtin_inff();
    int64_t number = 0;
    for (int64_t first = begin_; first < end_; first += sample::kSegmentTokens, ++number) {
      const int64_t last = std::min(first + sample::kSegmentTokens, end_);
      float* words = segments + number * sample::kSegmentWords;
      words[0] = words[1] = 0.0f;
      words[2] = -__builtin_inff(), words[3] = 0.0f;
      if (limited) find_mass(first, last, words);
      const int64_t set = number % adjust_logits::kScores;
      for (int64_t t = first; t < last; ++t) {
        if (a_[t] == -__builtin_inff()) continue;
        float score = a_[t];
        if (drawn) {
          const double u = choice_.uniform(t);
          if (!choice_.may_win(a_[t], best[set], u)) continue;
          score = choice_.score(a_[t], u);
        }
        if (score > best[set]) best[set] = score, token[set] = t;
      }
    }
    for (int64_t set = 0; set < std::min<int64_t>(number, adjust_logits::kScores); ++set) {
      segments[set * sample::kSegmentWords + 2] = best[set];
      segments[set * sample::kSegmentWords + 3] = static_cast<float>(token[set]);
    }
  }

  void find_mass(int64_t first, int64_t last, float* words) const {
    float peak = -__builtin_inff(), mass = 0.0f;
    for (int64_t t = first; t < last; ++t) peak = a_[t] > peak ? a_[t] : peak;
    if (peak != -__builtin_inff())
      for (int64_t t = first; t < last; ++t) mass += std::exp(a_[t] - peak);
    words[0] = peak, words[1] = mass;
  }

  const AdjustLogits& inst_;
  Worker& worker_;
  const Choice& choice_;
  int64_t begin_, end_;
  float* a_;       // adjusted logits of the row
  int stops_ = 0;  // stop tokens that may not be chosen
  const uint32_t* allowed_ = nullptr;
  const float* bias_ = nullptr;
};

inline void execute(const AdjustLogits& inst, Worker& worker) {
  const Range live = live_rows(worker, inst.logit_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const Choice choice(inst, worker, row);
    if (choice.enabled) LogitAdjuster(inst, worker, choice).run();
  }
}

}  // namespace megavm::MEGAVM_LEVEL
