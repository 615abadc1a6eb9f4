#pragma once

#include "vm/cpu/product.hpp"

namespace megavm::MEGAVM_LEVEL {

// The largest element of a row so far, and the lowest column that holds it.
struct Peak {
  float value;
  int64_t column;

  // NaN replaces any value, and only another NaN replaces it.
  void update(float candidate, int64_t at) {
    if (candidate > value || candidate != candidate || (candidate == value && at < column))
      *this = {candidate, at};
  }
};

template <typename Weight>
inline void matmul(const Matmul& inst, Worker& worker, const Input& in, int64_t first_row) {
  const Weight* weight = worker.data<const Weight>(inst.weight);
  constexpr int64_t kWidth = 2 * kLanes;
  const int64_t columns = int64_t{inst.column_end} - inst.column_begin;
  const int64_t size = worker.tensor(inst.weight).rows;
  const int64_t out_begin = inst.addends == kNone ? inst.part * size : 0;
  const auto block_at = [&](int b) {
    const Weight* rows = weight + (inst.column_begin + b * kWidth) * in.k;
    const int64_t left = columns - b * kWidth;
    const int second = left > kLanes ? lanes_at(kLanes, left) : 0;
    return Block<Weight>{{rows, rows + (second ? kLanes * in.k : 0)}, {lanes_at(0, left), second}};
  };
  Peak* peaks = nullptr;  // one per live row
  if (inst.peaks != kNone) {
    peaks = worker.allocate<Peak>(in.num_rows);
    for (int i = 0; i < in.num_rows; ++i) peaks[i] = {-__builtin_inff(), inst.column_begin};
  }
  float* squares = nullptr;  // sums of squares of each live row so far, see store_scaled
  if (inst.out_scaled != kNone) {
    squares = worker.allocate<float>(in.num_rows);
    for (int i = 0; i < in.num_rows; ++i) squares[i] = 0;
  }
  const auto finish = [&](int64_t row, int64_t column, Vec value) {
    if (column >= inst.column_end) return;
    const int count = lanes_at(column, inst.column_end);
    if (inst.bias != kNone) value = value + load_row(worker, inst.bias, 0, column, count);
    if (inst.residual != kNone) value = value + load_row(worker, inst.residual, row, column, count);
    for (int64_t at = column; inst.addends != kNone && at < worker.tensor(inst.addends).columns;
         at += size)
      value = value + load_row(worker, inst.addends, row, at, count);
    store_row(worker, inst.out, row, out_begin + column, value, count);
    if (squares) store_scaled(inst, worker, row, column, value, count, squares[row - first_row]);
    if (!peaks) return;
    float values[kLanes];
    store(values, value);
    for (int i = 0; i < count; ++i) peaks[row - first_row].update(values[i], column + i);
  };
  product<Weight>(worker, in, static_cast<int>((columns + kWidth - 1) / kWidth), block_at,
                  [&](int b, int i, const Vec& low, const Vec& high) {
                    const int64_t column = inst.column_begin + b * kWidth;
                    finish(first_row + i, column, low);
                    finish(first_row + i, column + kLanes, high);
                  });
  for (int i = 0; peaks && i < in.num_rows; ++i) {
    // If ranks gather the peaks, the column counts through those of all ranks.
    const int64_t rank = worker.tensor(inst.peaks).rank_of_share();
    const int64_t column = rank * worker.tensor(inst.out).own_columns + peaks[i].column;
    const float pair[kLanes] = {peaks[i].value, static_cast<float>(column)};
    store_row(worker, inst.peaks, first_row + i, 2 * int64_t{inst.tile}, load(pair), 2);
  }
}

inline void execute(const Matmul& inst, Worker& worker) {
  const Range live = live_rows(worker, inst.row_count, inst.row_begin, inst.row_end);
  if (live.begin == live.end) return;
  const int64_t k = worker.tensor(inst.weight).columns;
  const int64_t begin = int64_t{inst.part} * inst.part_k, end = begin + inst.part_k;
  const Input in{inst.x,
                 inst.x_squares,
                 inst.eps,
                 k,
                 static_cast<int>(inst.row_end - inst.row_begin),
                 static_cast<int>(live.end - live.begin),
                 input_rows(worker, live, inst.row_index, inst.x_rows),
                 begin,
                 end < k ? end : k};
  with_weight_type(worker, inst.weight, [&]<typename Weight>(const Weight*) {
    matmul<Weight>(inst, worker, in, live.begin);
  });
}

}  // namespace megavm::MEGAVM_LEVEL
