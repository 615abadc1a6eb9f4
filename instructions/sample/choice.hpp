// The choice of a logit row: its sequence, and that sequence's sampling parameters.
#pragma once

#include <cmath>

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

struct Choice {
  bool enabled = false;
  int64_t row = 0;
  int64_t sequence = 0;
  int64_t position = 0;               // position of the sequence's last token
  int32_t* tokens = nullptr;          // all tokens of the sequence
  const int32_t* integers = nullptr;  // parameters of the sequence
  const float* reals = nullptr;

  // Of an AdjustLogits or a Sample. If it is not enabled, nothing else is known.
  template <class Instruction>
  Choice(const Instruction& inst, const Worker& worker, int64_t row) : row(row) {
    const int64_t step_row = worker.data<const int32_t>(inst.logit_row)[row];
    const int64_t rows = worker.tensor(inst.row_sequence).rows;
    if (step_row < 0 || step_row >= rows)
      worker.fault("logit_row of row %lld is %lld, the step has %lld rows",
                   static_cast<long long>(row), static_cast<long long>(step_row),
                   static_cast<long long>(rows));
    sequence = sequence_of(worker, inst.row_sequence, step_row, inst.tokens, "tokens");
    integers =
        worker.data<const int32_t>(inst.sampling_integer) + sequence * sample::kIntegerColumns;
    reals = worker.data<const float>(inst.sampling_real) + sequence * sample::kRealColumns;
    enabled = integers[sample::kEnabled] != 0;
    if (!enabled) return;
    const Tensor& all = worker.tensor(inst.tokens);
    // The next position, which receives the token, must exist as well.
    position = position_of(worker, inst.row_position, step_row, all.columns - 1,
                           "tokens, but for its last column,");
    tokens = static_cast<int32_t*>(all.data) + sequence * all.columns;
  }

  bool is_drawn() const { return reals[sample::kTemperature] != 0.0f; }
  // Whether only some tokens may be drawn.
  bool is_limited() const {
    return is_drawn() && (reals[sample::kMinP] > 0.0f || integers[sample::kTopK] > 0 ||
                          reals[sample::kTopP] < 1.0f);
  }

  // Whether the score of a token with this adjusted logit may be above `best`. Since
  // -log(u) >= 1 - u, the noise is at most -log(1 - u). So most tokens need no logarithm.
  bool may_win(float a, float best, double u) const {
    return !(1.0 - u > 1.001 * static_cast<double>(std::exp(a - best)));
  }
  float score(float a, double u) const { return a + static_cast<float>(-std::log(-std::log(u))); }
  // Uniform in (0, 1) from (seed, position, token).
  double uniform(int64_t token) const {
    const uint64_t seed = static_cast<uint32_t>(integers[sample::kSeedLow]) |
                          static_cast<uint64_t>(static_cast<uint32_t>(integers[sample::kSeedHigh]))
                              << 32;
    const auto where = static_cast<uint64_t>(position) << 32 | static_cast<uint64_t>(token);
    uint64_t z = seed + 0x9E3779B97F4A7C15u * (where + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    return (static_cast<double>(z >> 40) + 0.5) / (1 << 24);
  }
};

}  // namespace megavm::MEGAVM_LEVEL
