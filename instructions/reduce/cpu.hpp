#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const Reduce& inst, Worker& worker) {
  const int64_t size = worker.tensor(inst.out).own_columns;
  const int64_t all = worker.tensor(inst.parts).columns;
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) {
    float squares = 0;
    for (int64_t c = inst.column_begin; c < inst.column_end; c += kLanes) {
      const int count = lanes_at(c, inst.column_end);
      Vec sum = load_row(worker, inst.parts, row, c, count);
      for (int64_t part = size; part < all; part += size)
        sum = sum + load_row(worker, inst.parts, row, part + c, count);
      if (inst.bias != kNone) sum = sum + load_row(worker, inst.bias, 0, c, count);
      if (inst.residual != kNone) sum = sum + load_row(worker, inst.residual, row, c, count);
      store_row(worker, inst.out, row, c, sum, count);
      store_scaled(inst, worker, row, c, sum, count, squares);
    }
  }
}

}  // namespace megavm::MEGAVM_LEVEL
