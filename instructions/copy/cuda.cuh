#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

template <>
struct Kernel<Copy> : KernelDefaults {
  // Store two neighbouring elements, the first in an even column, as far as they lie in
  // [begin, end).
  static __device__ __forceinline__ void write(const Tensor& out, uint32_t row, uint32_t column,
                                               uint32_t begin, uint32_t end, float first,
                                               float second) {
    const bool with_first = column >= begin, with_second = column + 1 < end;
    if (with_first && with_second) return write_pair(out, row, column, first, second, true);
    if (is_tagged(out) && !is_f32(out)) {
      // A word of which one element is written keeps the other.
      const uint32_t old = written_word(out, word_at(out, row, column));
      if (!with_first) first = ptx::low_bf16(old);
      if (!with_second) second = ptx::high_bf16(old);
      return write_pair(out, row, column, first, second, true);
    }
    write_element(out, row, with_first ? column : column + 1, with_first ? first : second);
  }

  // Fours that a thread has in flight.
  static constexpr uint32_t kFours = 4;

  // The rows of x for rows of out.
  template <uint32_t kCount>
  static __device__ __forceinline__ void find(const Operands<Copy>& in,
                                              const uint32_t (&row)[kCount],
                                              uint32_t (&source)[kCount]) {
    const Copy& inst = in.inst;
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) source[i] = inst.x_row + row[i] - inst.row_begin;
    if constexpr (copy::kAnyIndex) {
      if (!in.has(&Copy::row_index)) return;
      // NOTE: nothing is between the loads: all of them are in flight together.
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i)
        source[i] = static_cast<uint32_t>(constant_integer(in[&Copy::row_index], row[i], 0));
#pragma unroll
      for (uint32_t i = 0; i < kCount; ++i) check_indexed_row(source[i], row[i], inst.x_rows);
    }
  }

  // A row of bf16 as one of float32 with half of the columns, which has the same bytes.
  static __device__ __forceinline__ Tensor as_words(Tensor t) {
    constexpr uint64_t kMask = uint64_t{0xf} << kDtypeShift;
    if (dtype_of(t) != DType::kBf16) return t;
    t.address = (t.address & ~kMask) | static_cast<uint64_t>(DType::kF32) << kDtypeShift;
    t.columns /= 2;
    return t;
  }

  // Whether the tile consists of fours of words that are copied as they are, loaded and stored at
  // once.
  static __device__ __forceinline__ bool has_all_fours(const Operands<Copy>& in) {
    const Copy& inst = in.inst;
    const Tensor &x = in[&Copy::x], &out = in[&Copy::out];
    const uint32_t per_four = 16 / element_bytes(x);
    return dtype_of(x) == dtype_of(out) && !is_tagged(x) && !is_tagged(out) &&
           (x.columns | out.columns | inst.x_column | inst.column_begin | inst.column_end) %
                   per_four ==
               0 &&
           (base_of(x) | base_of(out)) % 16 == 0;
  }

  static __device__ __forceinline__ void copy_fours(const Operands<Copy>& in, const Tensor& out,
                                                    uint32_t thread, uint32_t live) {
    constexpr uint32_t kF32 = 2;  // as a kind of ColumnPlace
    const Copy& inst = in.inst;
    const uint32_t per_word = 4 / element_bytes(out);
    const ColumnPlace<kF32> from(as_words(in[&Copy::x]), inst.x_column / per_word);
    const ColumnPlace<kF32> to(as_words(out), inst.column_begin / per_word);
    const uint32_t width = (inst.column_end - inst.column_begin) / (4 * per_word);
    const uint32_t all = (live - inst.row_begin) * width;
#pragma unroll 1
    for (uint32_t first = thread; first < all; first += kFours * kNumConsumerThreads) {
      ptx::Words4 words[kFours] = {};
      uint32_t row[kFours], source[kFours], number[kFours];
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        const uint32_t item = min_of(first + i * kNumConsumerThreads, all - 1);
        row[i] = inst.row_begin + item / width, number[i] = item % width;
      }
      find(in, row, source);
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i)
        from.load(source[i], number[i], words[i], first + i * kNumConsumerThreads < all);
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        const Four four = {{__uint_as_float(words[i].x), __uint_as_float(words[i].y),
                            __uint_as_float(words[i].z), __uint_as_float(words[i].w)}};
        to.store(row[i], number[i], four, first + i * kNumConsumerThreads < all);
      }
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Copy>& in, Consumer& consumer) {
    const Copy& inst = in.inst;
    const Tensor& x = in[&Copy::x];
    const Tensor out = written_on(in[&Copy::out], inst.only);
    const uint32_t live = live_end(in, &Copy::row_count, inst.row_begin, inst.row_end);
    if (has_all_fours(in)) {
      consumer.wait_ready();
      return copy_fours(in, out, consumer.thread(), live);
    }
    const uint32_t begin = inst.column_begin, end = inst.column_end;
    const uint32_t first = begin / 2, pairs = begin < end ? ceil_div(end, 2) - first : 0;
    const uint32_t items = (live - inst.row_begin) * pairs;
    consumer.wait_ready();
#pragma unroll 1
    for (uint32_t item = consumer.thread(); item < items; item += kNumConsumerThreads) {
      const uint32_t row[1] = {inst.row_begin + item / pairs};
      const uint32_t column = (first + item % pairs) * 2, from = inst.x_column - begin + column;
      uint32_t source[1];
      find(in, row, source);
      float value[2] = {0.0f, 0.0f};
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
        if (column + j >= begin && column + j < end)
          value[j] = read_element(x, source[0], from + j, in.word(&Copy::x));
      write(out, row[0], column, begin, end, value[0], value[1]);
    }
  }
};

}  // namespace megavm
