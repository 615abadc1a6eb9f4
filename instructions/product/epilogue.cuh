// Epilogues: what an instruction does with the sums of a matrix product.
//
// A product multiplies pairs of neighbouring stored rows of the weight with x. An epilogue sees one
// row of x, one pair, and its two sums; it knows nothing of tiles, fragments or warps. The layout
// of the weight decides which rows are neighbours. Pair p is columns 2 p and 2 p + 1 in matmul,
// gate and up of column p in gate_up, and the two elements of rotation pair p in qkv_rope.
//
// instructions/<name>/cuda.cuh specialises Epilogue<Instruction>, derives it from EpilogueBase, and
// declares
//   struct Early;   what a thread looks up for its pair while the weights stream
//   struct Kept;    what a thread keeps from pair to pair: 8 bytes, or nothing. Zeros mean that
//                   nothing is kept, and merge(other) adds what another thread kept of the same
//                   row; grows_by(other) says whether that changes anything.
//                   merge_ascending(kepts), static, gives each of some rows what all lanes kept of
//                   it, whose pairs ascend
//   Product product() const;                      the product, see product.cuh
//   void begin(row, pair, Early&) const;          look up constants and destinations. The
//                                                 instruction's waits may not be over. Several
//                                                 threads may look up a pair, one finishes it
//   void move(row, pair, rows, Early&) const;     go on to a row that is so many rows further, a
//                                                 multiple of kMoveRows
//   void await(row, pair, Early&) const;          fetch what other instructions store, and wait for
//                                                 it. The instruction's waits are over
//   void complete(at, PairSums&) const;           add to the sums what completes when they do, and
//                                                 wait for it
//   bool completes() const;                       whether all threads do that before any of them
//                                                 stores results
//   void finish(at, sums, early, Kept&) const;    store the results of a pair. All lanes of a warp
//                                                 call it together
//   bool keeps() const;                           whether `end` has work
//   void end(row, kept) const;                    when all pairs of a row are finished: store what
//                                                 their threads kept. One warp calls it
// In matrix products a thread finishes whole *quads*, two pairs of a row of which the first is
// even, if an epilogue has kQuads and takes_quads() says that all sums of the instruction can be
// finished so. Then it also declares what follows. None of it may wait for other workers or end its
// warp: the other warps of its warpgroup would wait for ever (matrix_quads.cuh).
//   struct OfQuad;  what is the same for all rows
//   struct OfRow;   what is the same for all pairs: 8 bytes, or nothing
//   struct Asked;   what a row needs, in flight while the rows before it are finished
//   struct Result;  what is stored
//   void begin_quad(pair, OfQuad&) const;
//   OfRow look_up(row) const;                     the instruction's waits may not be over
//   void ask(at, of_row, of_quad, Asked&) const;  the instruction's waits are over
//   Result combine(sums, of_quad, asked) const;   also called where there is no row: `sums` and
//                                                 `asked` mean nothing then
//   void store(at, of_row, of_quad, result) const;  all lanes of a warp call it together. Sixteen
//                                                 neighbouring lanes have a row
//   void keep(pair, result, Kept&) const;         keep what there is to keep of this result, which
//                                                 is four words. Pairs ascend
// If an epilogue has kPlain, is_plain() says that the sums themselves are the results, as float32.
// Then it also declares
//   bool has_column(column) const;                whether the instruction stores this column
//   uint64_t plain_at(row, column) const;         where it is stored
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

template <class Instruction>
struct Epilogue;

// Where the threads of a warp stand when they finish their pairs.
struct PairAt {
  uint32_t row;
  uint32_t pair;
  bool active;     // whether this thread finishes a pair; if not, row and pair mean nothing
  uint32_t apart;  // pair p is `apart` lanes before pair p + 1, within four pairs that begin at a
                   // multiple of four
};

// The sums of a quad and a row, and where their thread stands.
constexpr uint32_t kQuadPairs = 2;
struct QuadSums {
  PairSums pair[kQuadPairs];
};
struct QuadAt {
  uint32_t row;
  uint32_t pair;  // the first one
  bool active;    // whether this thread stores them; if not, row and pair mean nothing
};

struct Nothing {
  __device__ __forceinline__ void merge(const Nothing&) {}
};

// Stores of so many rows further are aligned alike, whatever the columns.
constexpr uint32_t kMoveRows = 4;

template <class Instruction>
struct EpilogueBase {
  using Kept = Nothing;
  using OfRow = Nothing;
  using Asked = Nothing;
  // Pairs that a thread of a matrix product looks up together, before it finishes them.
  static constexpr uint32_t kAtOnce = 2;
  static constexpr bool kQuads = false;
  static constexpr bool kPlain = false;
  const Operands<Instruction> in;

  __device__ __forceinline__ explicit EpilogueBase(const Stage& stage) : in(stage) {}
  __device__ __forceinline__ bool completes() const { return false; }
  __device__ __forceinline__ void complete(const PairAt&, PairSums&) const {}

  __device__ __forceinline__ OperandWord word_if_there(uint32_t Instruction::* operand) const {
    return in.has(operand) ? in.word(operand) : kNone;
  }

  // The product of pairs [pair_begin, pair_end) of the instruction's weight with its rows of x.
  __device__ __forceinline__ Product product_of(uint32_t pair_begin, uint32_t pair_end) const {
    const Tensor& weight = in[&Instruction::weight];
    const uint32_t first_unit = pair_begin / kUnitPairs;
    Product p = {};
    p.tiling = {weight.columns, ceil_div(pair_end, kUnitPairs) - first_unit};
    p.weights = base_of(weight) + first_unit * unit_bytes(weight);
    p.unit_bytes = unit_bytes(weight);
    p.pair_begin = pair_begin;
    p.pair_end = pair_end;
    p.weight = in.word(&Instruction::weight);
    p.x = in.word(&Instruction::x);
    p.x_squares = word_if_there(&Instruction::x_squares);
    p.row_index = kNone;
    p.row_count = word_if_there(&Instruction::row_count);
    p.x_rows = p.row_end = in.inst.row_end;
    p.row_begin = in.inst.row_begin;
    p.eps = in.inst.eps;
    p.matrix = in.inst.matrix;
    return p;
  }

  // The default of `move`: begin anew.
  template <class Early>
  __device__ __forceinline__ void move(uint32_t row, uint32_t pair, uint32_t rows,
                                       Early& early) const {
    if (rows == 0) return;
    early = {};
    static_cast<const Epilogue<Instruction>&>(*this).begin(row, pair, early);
  }

  // Defaults of epilogues that read nothing of other instructions, and keep nothing.
  template <class Early>
  __device__ __forceinline__ void await(uint32_t, uint32_t, Early&) const {}
  __device__ __forceinline__ bool keeps() const { return false; }
  __device__ __forceinline__ void end(uint32_t, const Nothing&) const {}
  template <class OfRow, class OfQuad>
  __device__ __forceinline__ void ask(const QuadAt&, const OfRow&, const OfQuad&, Nothing&) const {}
};

// Size of a type in words; 0 if it is empty.
template <class T>
constexpr uint32_t words_of() {
  static_assert(__is_empty(T) || sizeof(T) % 4 == 0, "whole words travel in registers");
  return __is_empty(T) ? 0 : sizeof(T) / 4;
}
template <class T>
constexpr uint32_t kWordsOf = words_of<T>();

template <class T>
struct alignas(T) ImageOf {
  uint32_t word[max_of(1, kWordsOf<T>)];
};

// The merged Kept of a warp, whatever pairs its lanes have.
template <class Kept>
__device__ __forceinline__ Kept merge_lanes(Kept kept) {
  if constexpr (kWordsOf<Kept> > 0) {
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) {
      auto image = __builtin_bit_cast(ImageOf<Kept>, kept);
#pragma unroll
      for (uint32_t& word : image.word) word = __shfl_xor_sync(~0u, word, offset);
      kept.merge(__builtin_bit_cast(Kept, image));
    }
  }
  return kept;
}

// Objects of different types in the same registers. The code that all products share carries an
// epilogue's `Early` and `Kept` from place to place in them, without knowing their types.
template <class... Types>
class SharedRegisters {
 public:
  // NOTE: all words are written, by instructions that the compiler cannot remove. So they are not
  // live before this point.
  __device__ __forceinline__ SharedRegisters() {
#pragma unroll
    for (uint32_t& word : words_) word = ptx::zero();
  }

  template <class T>
  __device__ __forceinline__ T get() const {
    if constexpr (kWordsOf<T> == 0) {
      return {};
    } else {
      ImageOf<T> image;
#pragma unroll
      for (uint32_t i = 0; i < kWordsOf<T>; ++i) image.word[i] = words_[i];
      return __builtin_bit_cast(T, image);
    }
  }

  template <class T>
  __device__ __forceinline__ void set(const T& value) {
    if constexpr (kWordsOf<T> > 0) {
      const auto image = __builtin_bit_cast(ImageOf<T>, value);
#pragma unroll
      for (uint32_t i = 0; i < kWordsOf<T>; ++i) words_[i] = image.word[i];
    }
  }

 private:
  uint32_t words_[max_of(1, largest_of(kWordsOf<Types>...))];
};

// Elements of a vector that no instruction writes; 0 where it has no such element.
__device__ __forceinline__ PairSums load_pair(const Tensor& vector, uint32_t first,
                                              uint32_t second) {
  return {first < vector.rows ? constant_element(vector, first, 0) : 0.0f,
          second < vector.rows ? constant_element(vector, second, 0) : 0.0f};
}

// Biases of the two rows of a pair; 0 if the instruction has no bias.
template <class Instruction>
__device__ __forceinline__ PairSums load_bias(const Operands<Instruction>& in,
                                              uint32_t Instruction::* bias, uint32_t first,
                                              uint32_t second) {
  if (!program::kAnyBias || !in.has(bias)) return {0.0f, 0.0f};
  return load_pair(in[bias], first, second);
}

// The biases of a quad's pairs. Pair i adds elements first + step * i and second + step * i.
template <class Instruction>
__device__ __forceinline__ QuadSums load_quad_bias(const Operands<Instruction>& in,
                                                   uint32_t Instruction::* bias, uint32_t first,
                                                   uint32_t second, uint32_t step) {
  return {{load_bias(in, bias, first, second), load_bias(in, bias, first + step, second + step)}};
}

// The place of two neighbouring columns. Its kind is kNone unless both lie in [begin, end) and one
// store can write both.
__device__ __forceinline__ PairPlace place_of(const Tensor& out, uint32_t row, uint32_t column,
                                              uint32_t begin, uint32_t end) {
  if (column < begin || column + 1 >= end) return {};
  return {out, row, column};
}

// Store two neighbouring columns, the first of them even, as far as they lie in [begin, end).
__device__ __forceinline__ void write_columns(const Tensor& out, uint32_t row, uint32_t column,
                                              uint32_t begin, uint32_t end, float first,
                                              float second) {
  if (column >= begin && column + 1 < end)
    write_pair(out, row, column, first, second, true);
  else if (column >= begin && column < end)
    write_element(out, row, column, first);
  else if (column + 1 >= begin && column + 1 < end)
    write_element(out, row, column + 1, second);
}

}  // namespace megavm
