#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const Copy& inst, Worker& worker) {
  const int64_t rows = int64_t{inst.row_end} - inst.row_begin;
  const int64_t columns = int64_t{inst.column_end} - inst.column_begin;
  const Tensor out = worker.written(inst.out, inst.only);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; j += kLanes) {
      const int count = lanes_at(j, columns);
      const Vec value = load_row(worker, inst.x, inst.x_row + i, inst.x_column + j, count);
      store_row(worker, out, inst.row_begin + i, inst.column_begin + j, value, count);
    }
  }
}

}  // namespace megavm::MEGAVM_LEVEL
