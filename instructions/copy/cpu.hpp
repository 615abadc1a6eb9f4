#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const Copy& inst, Worker& worker) {
  const int64_t columns = int64_t{inst.column_end} - inst.column_begin;
  const bool gathers = inst.row_index != kNone;
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  const Tensor out = worker.written(inst.out, inst.only);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const int64_t from = gathers ? indexed_row(worker, inst.row_index, row, inst.x_rows)
                                 : inst.x_row + row - inst.row_begin;
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int count = lanes_at(j, columns);
      const Vec value = load_row(worker, inst.x, from, inst.x_column + j, count);
      store_row(worker, out, row, inst.column_begin + j, value, count);
    }
  }
}

}  // namespace megavm::MEGAVM_LEVEL
