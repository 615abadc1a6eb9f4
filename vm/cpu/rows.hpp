// Access to rows of tensors: one interface for all element types, tagged or not.
#pragma once

#include <atomic>

#include "vm/cpu/simd.hpp"

namespace megavm::MEGAVM_LEVEL {

template <typename Element>
struct PlainRows {
  const Element* data;
  int64_t columns;

  MEGAVM_INLINE Vec load(int64_t row, int64_t column) const {
    return MEGAVM_LEVEL::load(data + row * columns + column);
  }
  MEGAVM_INLINE Vec load(int64_t row, int64_t column, int count) const {
    return MEGAVM_LEVEL::load(data + row * columns + column, count);
  }
};

MEGAVM_INLINE Word load_word(const Word* from) {
  const uint64_t bits = __atomic_load_n(reinterpret_cast<const uint64_t*>(from), __ATOMIC_ACQUIRE);
  Word word;
  std::memcpy(&word, &bits, sizeof(word));
  return word;
}

MEGAVM_INLINE void store_word(Word* to, Word word) {
  uint64_t bits;
  std::memcpy(&bits, &word, sizeof(bits));
  __atomic_store_n(reinterpret_cast<uint64_t*>(to), bits, __ATOMIC_RELEASE);
}

// Before a kernel runs, the interpreter has waited for the tagged words that the instruction
// declares. So each word that is read carries the epoch of the step.
template <typename Element>
struct TaggedRows {
  const Worker* worker;
  uint32_t handle;
  const Word* data;
  int64_t words;  // per row
  static constexpr int kPerWord = 4 / sizeof(Element);

  // `count` words from `word` on.
  MEGAVM_INLINE void read(uint32_t* values, int64_t row, int64_t word, int count) const {
    const Word* from = data + row * words + word;
    for (int i = 0; i < count; ++i) {
      const Word got = load_word(from + i);
      if (__builtin_expect(got.epoch != worker->epoch, 0))
        worker->undeclared_word(handle, row, word + i);
      values[i] = got.value;
    }
  }

  MEGAVM_INLINE Vec load(int64_t row, int64_t column) const {
#if defined(__AVX512F__)
    // NOTE: x86 reads an aligned eight-byte lane of a vector atomically, so value and epoch
    // belong to the same store.
    if constexpr (kPerWord == 1) {
      const Word* from = data + row * words + column;
      const __m512i epochs = _mm512_set1_epi32(static_cast<int>(worker->epoch));
      const __m512i low = _mm512_loadu_si512(from), high = _mm512_loadu_si512(from + 8);
      const __mmask16 good =
          _mm512_cmpeq_epi32_mask(low, epochs) & _mm512_cmpeq_epi32_mask(high, epochs);
      if (__builtin_expect((good & 0xaaaa) == 0xaaaa, 1)) {
        const __m512i evens =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        return {(NativeFloats)_mm512_permutex2var_epi32(low, evens, high)};
      }
    }
#endif
    return load(row, column, kLanes);
  }

  MEGAVM_INLINE Vec load(int64_t row, int64_t column, int count) const {
    if (count <= 0) return zero();
    // One word more, as the first element may be the second of its word.
    uint32_t values[kLanes + 1] = {};
    const int64_t first = column / kPerWord;
    read(values, row, first, static_cast<int>((column + count - 1) / kPerWord - first) + 1);
    const Element* elements = reinterpret_cast<const Element*>(values) + column % kPerWord;
    return MEGAVM_LEVEL::load(elements, count);
  }
};

// Call `use` with the rows of a tensor of floating-point type, as PlainRows or TaggedRows.
template <typename Use>
MEGAVM_INLINE decltype(auto) with_rows(const Worker& worker, uint32_t handle, Use use) {
  const Tensor& t = worker.tensor(handle);
  if (t.dtype == DType::kBf16) {
    if (t.tagged)
      return use(
          TaggedRows<Bf16>{&worker, handle, static_cast<const Word*>(t.data), t.columns / 2});
    return use(PlainRows<Bf16>{static_cast<const Bf16*>(t.data), t.columns});
  }
  if (t.tagged)
    return use(TaggedRows<float>{&worker, handle, static_cast<const Word*>(t.data), t.columns});
  return use(PlainRows<float>{static_cast<const float*>(t.data), t.columns});
}

// Load up to 16 elements of a row of any floating-point tensor.
MEGAVM_INLINE Vec load_row(const Worker& worker, uint32_t handle, int64_t row, int64_t column,
                           int count) {
  return with_rows(worker, handle, [&](auto rows) {
    return count == kLanes ? rows.load(row, column) : rows.load(row, column, count);
  });
}

// Load up to 16 elements of a bias, from `row` on; it may have parts, which they do not span.
MEGAVM_INLINE Vec load_bias(const Worker& worker, uint32_t handle, int64_t row, int count) {
  if (worker.tensor(handle).dtype == DType::kBf16)
    return load(worker.weight_row<Bf16>(handle, row), count);
  return load(worker.weight_row<float>(handle, row), count);
}

MEGAVM_INLINE void store_words(Word* to, const uint32_t* values, int count, uint32_t epoch) {
  for (int i = 0; i < count; ++i) store_word(to + i, {values[i], unpublished(epoch)});
}

// Round up to 16 elements to the tensor's type and store them in a row. The interpreter tags the
// words of a tagged tensor when the kernel has returned. `column` counts from the beginning of the
// rank's share.
MEGAVM_INLINE void store_row(const Worker& worker, const Tensor& t, int64_t row, int64_t column,
                             const Vec& value, int count) {
  column += t.share_begin;
  if (!t.tagged) {
    const int64_t offset = row * t.columns + column;
    if (t.dtype == DType::kF32) {
      if (count == kLanes) return store(static_cast<float*>(t.data) + offset, value);
      return store(static_cast<float*>(t.data) + offset, value, count);
    }
    return store(static_cast<Bf16*>(t.data) + offset, value, count);
  }
  Word* words = static_cast<Word*>(t.data);
  uint32_t values[kLanes + 1];
  if (t.dtype == DType::kF32) {
    std::memcpy(values, &value, sizeof(value));
    return store_words(words + row * t.columns + column, values, count, worker.epoch);
  }
  // A word of which this call writes one element keeps the other.
  words += row * (t.columns / 2) + column / 2;
  const int skip = static_cast<int>(column % 2);
  const int num_words = (skip + count + 1) / 2;
  values[0] = load_word(words).value;
  values[num_words - 1] = load_word(words + num_words - 1).value;
  Bf16 rounded[kLanes];
  round_to(rounded, value);
  std::memcpy(reinterpret_cast<Bf16*>(values) + skip, rounded, sizeof(Bf16) * count);
  store_words(words, values, num_words, worker.epoch);
}
MEGAVM_INLINE void store_row(const Worker& worker, uint32_t handle, int64_t row, int64_t column,
                             const Vec& value, int count) {
  store_row(worker, worker.tensor(handle), row, column, value, count);
}

// ---- Data that changes from step to step.

struct Range {
  int64_t begin;
  int64_t end;
};

// The live rows of [begin, end): all of them without a count.
MEGAVM_INLINE Range live_rows(Worker& worker, uint32_t row_count, int64_t begin, int64_t end) {
  if (row_count != kNone) {
    const int64_t live = *worker.data<const int32_t>(row_count);
    end = live < end ? live : end;
    worker.live_end = end;
  }
  return {begin, end < begin ? begin : end};
}

// `row_index[row]`, which must be below `x_rows`.
MEGAVM_INLINE int64_t indexed_row(const Worker& worker, uint32_t row_index, int64_t row,
                                  int64_t x_rows) {
  const int64_t found = worker.data<const int32_t>(row_index)[row];
  if (found < 0 || found >= x_rows)
    worker.fault("row_index of row %lld is %lld, expected below %lld", static_cast<long long>(row),
                 static_cast<long long>(found), static_cast<long long>(x_rows));
  return found;
}

// Position of a row in its sequence in this step, at most `limit` - 1.
MEGAVM_INLINE int64_t position_of(const Worker& worker, uint32_t row_position, int64_t row,
                                  int64_t limit, const char* limit_name) {
  const int64_t position = int64_t{worker.data<const int32_t>(row_position)[row]} + worker.step;
  if (position < 0 || position >= limit)
    worker.fault("row %lld is at position %lld, %s holds [0, %lld)", static_cast<long long>(row),
                 static_cast<long long>(position), limit_name, static_cast<long long>(limit));
  return position;
}

// Sequence of a row, an index of the first dimension of `table`.
MEGAVM_INLINE int64_t sequence_of(const Worker& worker, uint32_t row_sequence, int64_t row,
                                  uint32_t table, const char* table_name) {
  const int64_t sequence = worker.data<const int32_t>(row_sequence)[row];
  const int64_t sequences = worker.tensor(table).shape[0];
  if (sequence < 0 || sequence >= sequences)
    worker.fault("row_sequence of row %lld is %lld, %s has %lld sequences",
                 static_cast<long long>(row), static_cast<long long>(sequence), table_name,
                 static_cast<long long>(sequences));
  return sequence;
}

// The KV block that holds a sequence's tokens [index * block_size, (index + 1) * block_size).
MEGAVM_INLINE int64_t kv_block(const Worker& worker, uint32_t block_table, int64_t sequence,
                               int64_t index, int64_t num_blocks) {
  const Tensor& table = worker.tensor(block_table);
  const int64_t block = static_cast<const int32_t*>(table.data)[sequence * table.columns + index];
  if (block < 0 || block >= num_blocks)
    worker.fault("block table entry [%lld, %lld] is %lld, the KV cache has %lld blocks",
                 static_cast<long long>(sequence), static_cast<long long>(index),
                 static_cast<long long>(block), static_cast<long long>(num_blocks));
  return block;
}

MEGAVM_INLINE int64_t ceil_to(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Number of valid lanes of a vector at `column` of a row that ends at `end`.
MEGAVM_INLINE int lanes_at(int64_t column, int64_t end) {
  return end - column < kLanes ? static_cast<int>(end - column) : kLanes;
}

// If the instruction has out_scaled, store up to 16 elements of a result times the gain, and their
// sums of squares; see Matmul. `column` is a multiple of 8. The elements of a row come in order;
// `wide` is 0 at first, and keeps what they have added to a wide sum of squares.
template <typename Instruction>
MEGAVM_INLINE void store_scaled(const Instruction& inst, const Worker& worker, int64_t row,
                                int64_t column, const Vec& value, int count, float& wide) {
  if (inst.out_scaled == kNone) return;
  const Vec gain = load_row(worker, inst.out_gain, 0, column, count);
  store_row(worker, inst.out_scaled, row, column, value * gain, count);
  float values[kLanes], squares[kLanes] = {};
  store(values, value);
  const Tensor &scaled = worker.tensor(inst.out_scaled), &sums = worker.tensor(inst.out_squares);
  if (sums.own_columns * kWideSquares == scaled.own_columns) {
    for (int i = 0; i < count; ++i) wide += values[i] * values[i];
    if ((column + count) % kWideSquares != 0) return;
    squares[0] = wide;
    wide = 0;
    store_row(worker, inst.out_squares, row, column / kWideSquares, load(squares), 1);
    return;
  }
  for (int i = 0; i < count; ++i) squares[i / kUnitRows] += values[i] * values[i];
  store_row(worker, inst.out_squares, row, column / kUnitRows, load(squares),
            (count + kUnitRows - 1) / kUnitRows);
}

// 1 / sqrt(mean(x^2) + eps) of a row of x with k columns, from its stored sums of squares.
MEGAVM_INLINE float scale_of(const Worker& worker, uint32_t squares, int64_t row, int64_t k,
                             float eps) {
  const int64_t columns = worker.tensor(squares).columns;
  Vec sums = zero();
  for (int64_t c = 0; c < columns; c += kLanes)
    sums = sums + load_row(worker, squares, row, c, lanes_at(c, columns));
  return 1.0f / __builtin_sqrtf(sum(sums) / static_cast<float>(k) + eps);
}

// 1 / sqrt(mean(x^2) + eps) of a row, from its elements.
template <typename Rows>
MEGAVM_INLINE float rms_scale(const Rows& rows, int64_t row, int64_t columns, float eps) {
  Vec squares = zero();
  int64_t c = 0;
  for (; c + kLanes <= columns; c += kLanes) {
    const Vec x = rows.load(row, c);
    squares = fma(x, x, squares);
  }
  if (c < columns) {
    const Vec x = rows.load(row, c, static_cast<int>(columns - c));
    squares = fma(x, x, squares);
  }
  return 1.0f / __builtin_sqrtf(sum(squares) / static_cast<float>(columns) + eps);
}

}  // namespace megavm::MEGAVM_LEVEL
