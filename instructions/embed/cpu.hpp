#pragma once

#include "vm/cpu/rows.hpp"

namespace megavm::MEGAVM_LEVEL {

inline void execute(const Embed& inst, Worker& worker) {
  const int64_t vocabulary = worker.tensor(inst.table).rows;
  const Tensor& tokens = worker.tensor(inst.tokens);
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  for (int64_t row = live.begin; row < live.end; ++row) {
    const int64_t sequence = sequence_of(worker, inst.row_sequence, row, inst.tokens, "tokens");
    const int64_t position = position_of(worker, inst.row_position, row, tokens.columns, "tokens");
    const int64_t token =
        static_cast<const int32_t*>(tokens.data)[sequence * tokens.columns + position];
    if (token < 0 || token >= vocabulary)
      worker.fault("token %lld at position %lld of sequence %lld is outside the vocabulary of %lld",
                   static_cast<long long>(token), static_cast<long long>(position),
                   static_cast<long long>(sequence), static_cast<long long>(vocabulary));
    float squares = 0;
    for (int64_t c = inst.column_begin; c < inst.column_end; c += kLanes) {
      const int count = lanes_at(c, inst.column_end);
      const Vec value = load_row(worker, inst.table, token, c, count);
      store_row(worker, inst.out, row, c, value, count);
      store_scaled(inst, worker, row, c, value, count, squares);
    }
  }
}

}  // namespace megavm::MEGAVM_LEVEL
