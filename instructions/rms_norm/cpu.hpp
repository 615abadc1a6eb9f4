#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const RmsNorm& inst, Worker& worker) {
  const int64_t k = worker.tensor(inst.x).columns;
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  with_rows(worker, inst.x, [&](auto x) {
    for (int64_t row = live.begin; row < live.end; ++row) {
      const Vec scale = splat(rms_scale(x, row, k, inst.eps));
      for (int64_t c = 0; c < k; c += kLanes) {
        const int count = lanes_at(c, k);
        const Vec value = count == kLanes ? x.load(row, c) : x.load(row, c, count);
        store_row(worker, inst.out, row, c,
                  value * scale * load_row(worker, inst.gain, 0, c, count), count);
      }
    }
  });
}

}  // namespace megavm::MEGAVM_LEVEL
