#pragma once

#include "vm/cpu/product.hpp"

namespace megavm::MEGAVM_LEVEL {

template <typename Weight>
inline void gate_up(const GateUp& inst, Worker& worker, const Input& in, int64_t first_row) {
  const int64_t up = worker.tensor(inst.weight).rows / 2;  // first row of up
  const int64_t columns = int64_t{inst.column_end} - inst.column_begin;
  const auto block_at = [&](int b) {
    const int64_t column = inst.column_begin + int64_t{b} * kLanes;
    const int count = lanes_at(column, inst.column_end);
    return Block<Weight>{{worker.weight_row<Weight>(inst.weight, column),
                          worker.weight_row<Weight>(inst.weight, up + column)},
                         {count, count}};
  };
  product<Weight>(worker, in, static_cast<int>((columns + kLanes - 1) / kLanes), block_at,
                  [&](int b, int i, Vec a, Vec u) {
                    const int64_t column = inst.column_begin + int64_t{b} * kLanes;
                    const int count = lanes_at(column, inst.column_end);
                    if (inst.bias != kNone) {
                      a = a + load_bias(worker, inst.bias, column, count);
                      u = u + load_bias(worker, inst.bias, up + column, count);
                    }
                    const Vec silu = a / (splat(1.0f) + exp(zero() - a));
                    store_row(worker, inst.out, first_row + i, column, silu * u, count);
                  });
}

inline void execute(const GateUp& inst, Worker& worker) {
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  if (live.begin == live.end) return;
  const Input in{inst.x,
                 inst.x_squares,
                 inst.eps,
                 worker.tensor(inst.weight).columns,
                 static_cast<int>(inst.row_end - inst.row_begin),
                 static_cast<int>(live.end - live.begin),
                 input_rows(worker, live, kNone, inst.row_end)};
  with_weight_type(worker, inst.weight, [&]<typename Weight>(const Weight*) {
    gate_up<Weight>(inst, worker, in, live.begin);
  });
}

}  // namespace megavm::MEGAVM_LEVEL
