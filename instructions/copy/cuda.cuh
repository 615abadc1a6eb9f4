#pragma once

#include "cuda/kernel.cuh"

namespace megavm {

template <>
struct Kernel<Copy> : KernelDefaults {
  // Store two neighbouring elements, the first in an even column, as far as they lie in
  // [begin, end).
  static __device__ __forceinline__ void write(const Tensor& out, uint32_t row, uint32_t column,
                                               uint32_t begin, uint32_t end, float first,
                                               float second, uint32_t tag) {
    const bool with_first = column >= begin, with_second = column + 1 < end;
    if (with_first && with_second) return write_pair(out, row, column, first, second, true, tag);
    if (is_tagged(out) && !is_f32(out)) {
      // A word of which one element is written keeps the other.
      const uint32_t old = written_word(out, word_at(out, row, column));
      if (!with_first) first = ptx::low_bf16(old);
      if (!with_second) second = ptx::high_bf16(old);
      return write_pair(out, row, column, first, second, true, tag);
    }
    write_element(out, row, with_first ? column : column + 1, with_first ? first : second, tag);
  }

  // Fours that a thread has in flight.
  static constexpr uint32_t kFours = 4;

  // Whether the tile consists of fours of float32, which are loaded and stored at once.
  static __device__ __forceinline__ bool has_all_fours(const Operands<Copy>& in) {
    const Copy& inst = in.inst;
    const Tensor& out = in[&Copy::out];
    return has_fours(in[&Copy::x]) && takes_fours(out) && is_f32(out) && !is_tagged(out) &&
           (inst.x_column | inst.column_begin | inst.column_end) % 4 == 0;
  }

  static __device__ __forceinline__ void copy_fours(const Operands<Copy>& in, const Tensor& out,
                                                    uint32_t thread) {
    constexpr uint32_t kF32 = 2;  // as a kind of ColumnPlace
    const Copy& inst = in.inst;
    const ColumnPlace<kF32> from(in[&Copy::x], inst.x_column), to(out, inst.column_begin);
    const uint32_t width = (inst.column_end - inst.column_begin) / 4;
    const uint32_t all = (inst.row_end - inst.row_begin) * width;
#pragma unroll 1
    for (uint32_t first = thread; first < all; first += kFours * kNumConsumerThreads) {
      ptx::Words4 words[kFours] = {};
      uint32_t row[kFours], number[kFours];
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        const uint32_t item = first + i * kNumConsumerThreads;
        row[i] = item / width, number[i] = item % width;
        from.load(inst.x_row + row[i], number[i], words[i], item < all);
      }
#pragma unroll
      for (uint32_t i = 0; i < kFours; ++i) {
        const Four four = {{__uint_as_float(words[i].x), __uint_as_float(words[i].y),
                            __uint_as_float(words[i].z), __uint_as_float(words[i].w)}};
        to.store(inst.row_begin + row[i], number[i], four, 0,
                 first + i * kNumConsumerThreads < all);
      }
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Copy>& in, Consumer& consumer) {
    const Copy& inst = in.inst;
    const Tensor& x = in[&Copy::x];
    const Tensor out = written_on(in[&Copy::out], inst.only);
    if (has_all_fours(in)) {
      consumer.wait_ready();
      return copy_fours(in, out, consumer.thread());
    }
    const uint32_t begin = inst.column_begin, end = inst.column_end;
    const uint32_t first = begin / 2, pairs = begin < end ? ceil_div(end, 2) - first : 0;
    const uint32_t items = (inst.row_end - inst.row_begin) * pairs;
    consumer.wait_ready();
#pragma unroll 1
    for (uint32_t item = consumer.thread(); item < items; item += kNumConsumerThreads) {
      const uint32_t i = item / pairs, column = (first + item % pairs) * 2;
      const uint32_t from = inst.x_column - begin + column;
      float value[2] = {0.0f, 0.0f};
#pragma unroll
      for (uint32_t j = 0; j < 2; ++j)
        if (column + j >= begin && column + j < end)
          value[j] = read_element(x, inst.x_row + i, from + j, in.tag(), in.word(&Copy::x));
      write(out, inst.row_begin + i, column, begin, end, value[0], value[1], in.out_tag());
    }
  }
};

}  // namespace megavm
