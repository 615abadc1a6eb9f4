#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const AttentionMerge& inst, Worker& worker) {
  const int64_t d = inst.head_dim, width = d + 2;
  const int64_t heads = worker.tensor(inst.out).own_columns / d;
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  float* sum = worker.allocate<float>(ceil_to(d, kLanes));
  for (int64_t row = live.begin; row < live.end; ++row) {
    for (int64_t head = inst.head_begin; head < inst.head_end; ++head) {
      const auto at = [&](int64_t split, int64_t element, int count) {
        return load_row(worker, inst.partial, row, (split * heads + head) * width + element, count);
      };
      // The largest score of all splits.
      float highest = -__builtin_inff();
      for (int64_t split = 0; split < inst.num_splits; ++split) {
        const float m = first_lane(at(split, d, 1));
        highest = m > highest ? m : highest;
      }
      // The weighted sums.
      for (int64_t c = 0; c < d; c += kLanes) store(sum + c, zero());
      float total = 0.0f;
      for (int64_t split = 0; split < inst.num_splits; ++split) {
        float pair[kLanes];
        store(pair, at(split, d, 2));
        const float factor = first_lane(exp(splat(pair[0] - highest)));
        total += factor * pair[1];
        for (int64_t c = 0; c < d; c += kLanes)
          store(sum + c, fma(splat(factor), at(split, c, lanes_at(c, d)), load(sum + c)));
      }
      for (int64_t c = 0; c < d; c += kLanes)
        store_row(worker, inst.out, row, head * d + c, load(sum + c) / splat(total),
                  lanes_at(c, d));
    }
  }
}

}  // namespace megavm::MEGAVM_LEVEL
