#pragma once

#include "instructions/product/products.cuh"
#include "instructions/squares.cuh"

namespace megavm {

// The largest result of a row, with the number of its column + 1; 0: none yet.
struct Peak {
  float value;
  uint32_t number;

  // Keep the larger of this result and that of a later column.
  __device__ __forceinline__ void raise(float other, uint32_t column) {
    if (value == value && !(other <= value)) *this = {other, column + 1};
  }

  // Make each of some peaks the largest that all lanes have. Their columns ascend. Several at a
  // time, as one waits for the other lanes again and again.
  template <uint32_t kCount>
  static __device__ __forceinline__ void merge_ascending(Peak (&peaks)[kCount]) {
    uint32_t key[kCount], highest[kCount];
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      // The order of merge: NaN, then values, then nothing. Zeros of both signs are equal.
      const float value = peaks[i].value + 0.0f;
      const uint32_t bits = __float_as_uint(value);
      key[i] = bits >> 31 ? ~bits : bits | 1u << 31;
      if (value != value) key[i] = ~0u;
      if (peaks[i].number == 0) key[i] = 0;
      highest[i] = key[i];
    }
#pragma unroll
    for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2)
#pragma unroll
      for (uint32_t& h : highest) h = max_of(h, __shfl_xor_sync(~0u, h, offset));
#pragma unroll
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t from = __ffs(__ballot_sync(~0u, key[i] == highest[i])) - 1;
      peaks[i] = {__shfl_sync(~0u, peaks[i].value, from), __shfl_sync(~0u, peaks[i].number, from)};
    }
  }

  // Keep the larger of two results, or the lower column if they are equal. NaN beats all values.
  __device__ __forceinline__ void merge(const Peak& other) {
    if (grows_by(other)) *this = other;
  }
  // Whether the other result is the larger one.
  __device__ __forceinline__ bool grows_by(const Peak& other) const {
    if (other.number == 0 || number == 0) return other.number != 0;
    if (value != value) return false;
    return other.value != other.value || other.value > value ||
           (other.value == value && other.number < number);
  }
};

// A pair is two neighbouring columns.
template <>
struct Epilogue<Matmul> : EpilogueBase<Matmul> {
  struct Early {
    PairPlace place, scaled_place;
    PairSums bias, residual, gain;
  };
  using Kept = Peak;
  static_assert(matmul::kPartColumns % kTileColumns == 0, "parts begin with tiles");

  __device__ __forceinline__ explicit Epilogue(const Stage& stage) : EpilogueBase(stage) {}

  __device__ __forceinline__ Product product() const {
    Product p = product_of(in.inst.column_begin / 2, ceil_div(in.inst.column_end, 2));
    p.row_index = word_if_there(&Matmul::row_index);
    p.x_rows = in.inst.x_rows;
    if constexpr (program::kAnyPartOfK) {
      p.first_k = in.inst.part * in.inst.part_k;
      p.tiling.k = min_of(in.inst.part_k, p.tiling.k - p.first_k);
      p.weights += p.first_k / kTileColumns * kTileBytes;
    }
    return p;
  }

  __device__ __forceinline__ void begin(uint32_t row, uint32_t pair, Early& early) const {
    const uint32_t column = 2 * pair, to = out_begin();
    const uint32_t begin = in.inst.column_begin, end = in.inst.column_end;
    early.bias = load_bias(in, &Matmul::bias, column, column + 1);
    early.place = place_of(in[&Matmul::out], row, to + column, to + begin, to + end);
    if (!is_scaled()) return;
    early.gain = load_pair(in[&Matmul::out_gain], column, column + 1);
    early.scaled_place = place_of(in[&Matmul::out_scaled], row, column, begin, end);
  }

  __device__ __forceinline__ void move(uint32_t, uint32_t, uint32_t rows, Early& early) const {
    early.place.move(in[&Matmul::out], rows);
    if (is_scaled()) early.scaled_place.move(in[&Matmul::out_scaled], rows);
  }

  __device__ __forceinline__ void await(uint32_t row, uint32_t pair, Early& early) const {
    if (!in.has(&Matmul::residual)) return;
    if constexpr (program::kMatrixRows > 0) {
      // NOTE: the words are not touched here, so that the loads of several rows are in flight.
      const Tensor& residual = in[&Matmul::residual];
      const uint64_t address = element_at(residual, row, 2 * pair);
      if (is_f32(residual) && !is_tagged(residual) && address % 8 == 0 &&
          2 * pair >= in.inst.column_begin && 2 * pair + 1 < in.inst.column_end) {
        const ptx::Words2 words = ptx::load_relaxed2(address);
        early.residual = {__uint_as_float(words.x), __uint_as_float(words.y)};
        return;
      }
    }
    add_columns(in[&Matmul::residual], in.word(&Matmul::residual), row, 2 * pair, 0,
                early.residual);
  }

  __device__ __forceinline__ bool completes() const {
    if (program::kMaxAddends == 0 || !in.has(&Matmul::addends)) return false;
    bool tags = is_tagged(in[&Matmul::out]) || (keeps() && is_tagged(in[&Matmul::peaks]));
    if (is_scaled())
      tags |= is_tagged(in[&Matmul::out_scaled]) || is_tagged(in[&Matmul::out_squares]);
    return tags;
  }
  __device__ __forceinline__ void complete(const PairAt& at, PairSums& sums) const {
    if constexpr (program::kMaxAddends > 0)
      if (at.active && in.has(&Matmul::addends)) add_parts(at.row, 2 * at.pair, sums);
  }

  __device__ __forceinline__ void finish(const PairAt& at, const PairSums& sums, const Early& early,
                                         Peak& peak) const {
    PairSums result = {sums.first + early.bias.first + early.residual.first,
                       sums.second + early.bias.second + early.residual.second};
    const uint32_t column = 2 * at.pair;
    const uint32_t begin = in.inst.column_begin, end = in.inst.column_end;
    if (is_scaled()) {
      // Store these first: readers of this row wait for them.
      if (at.active) {
        const float first = result.first * early.gain.first;
        const float second = result.second * early.gain.second;
        if (early.scaled_place.kind != kNone)
          early.scaled_place.store(first, second);
        else
          write_columns(in[&Matmul::out_scaled], at.row, column, begin, end, first, second);
      }
      store_squares(at, column, result);
    }
    if (!at.active) return;
    if (early.place.kind != kNone) {
      early.place.store(result.first, result.second);
    } else {
      const uint32_t to = out_begin();
      write_columns(in[&Matmul::out], at.row, to + column, to + begin, to + end, result.first,
                    result.second);
    }
    if (!keeps()) return;
    if (column >= begin) peak.merge({result.first, column + 1});
    if (column + 1 < end) peak.merge({result.second, column + 2});
  }

  // ---- Quads: four columns.

  static constexpr bool kQuads = matmul::kOutKinds != 0 && program::kMaxAddends == 0;
  struct OfQuad {
    QuadSums bias;
    Four gain;
    ColumnPlace<matmul::kOutKinds> out;
    ColumnPlace<matmul::kScaledKinds> scaled;
    ColumnPlace<matmul::kSquaresKinds> squares;
    ColumnPlace<> residual;
  };
  struct Asked {
    ptx::Words4 residual;
  };
  using Result = Four;

  __device__ __forceinline__ bool takes_quads() const {
    return takes_fours(in[&Matmul::out]) &&
           (!in.has(&Matmul::residual) || has_fours(in[&Matmul::residual])) &&
           (!is_scaled() || (takes_fours(in[&Matmul::out_scaled]) &&
                             FourConstants<>::can_load(in[&Matmul::out_gain]))) &&
           in.inst.column_end % kUnitRows == 0 && out_begin() % 4 == 0;
  }

  __device__ __forceinline__ void begin_quad(uint32_t pair, OfQuad& quad) const {
    const uint32_t column = 2 * pair;
    quad.bias = load_quad_bias(in, &Matmul::bias, column, column + 1, 2);
    quad.out = {in[&Matmul::out], out_begin() + column};
    if (in.has(&Matmul::residual)) quad.residual = {in[&Matmul::residual], column};
    if (!is_scaled()) return;
    quad.scaled = {in[&Matmul::out_scaled], column};
    quad.squares = {in[&Matmul::out_squares], column / unit_of_squares()};
    quad.gain = four_constants(in[&Matmul::out_gain], column);
  }

  __device__ __forceinline__ void ask(const QuadAt& at, const OfRow&, const OfQuad& quad,
                                      Asked& asked) const {
    quad.residual.load(at.row, 0, asked.residual, at.active && in.has(&Matmul::residual));
  }

  __device__ __forceinline__ Result combine(const QuadSums& sums, const OfQuad& quad,
                                            const Asked& asked) const {
    Result result;
#pragma unroll
    for (uint32_t i = 0; i < kQuadPairs; ++i) {
      result.value[2 * i] = sums.pair[i].first + quad.bias.pair[i].first;
      result.value[2 * i + 1] = sums.pair[i].second + quad.bias.pair[i].second;
    }
    if (in.has(&Matmul::residual)) add_four(result, asked.residual);
    return result;
  }

  __device__ __forceinline__ void store(const QuadAt& at, const OfRow&, const OfQuad& quad,
                                        const Result& result) const {
    const uint32_t column = 2 * at.pair;
    if constexpr (program::kAnyOutScaled) {
      // Store these first: readers of this row wait for them. Without a branch, as all stores here.
      const bool active = at.active && is_scaled();
      Four scaled;
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j) scaled.value[j] = result.value[j] * quad.gain.value[j];
      // In the order of pairs.
      const float (&v)[4] = result.value;
      float squares = fmaf(v[1], v[1], v[0] * v[0]) + fmaf(v[3], v[3], v[2] * v[2]);
      squares = add_neighbours(squares, unit_of_squares() / 4);
      quad.scaled.store(at.row, 0, scaled, active);
      quad.squares.store_one(at.row, 0, squares, active && column % unit_of_squares() == 0);
    }
    quad.out.store(at.row, 0, result, at.active);
  }

  __device__ __forceinline__ void keep(uint32_t pair, const Result& result, Peak& peak) const {
    const uint32_t column = 2 * pair;
    if (peak.number == 0) peak = {result.value[0], column + 1};
#pragma unroll
    for (uint32_t j = 0; j < 4; ++j) peak.raise(result.value[j], column + j);
  }

  // ---- Sums that are the results, such as those of parts of K.

  static constexpr bool kPlain = true;
  __device__ __forceinline__ bool is_plain() const {
    const Tensor& out = in[&Matmul::out];
    return is_f32(out) && !is_tagged(out) && !is_gathered(out) && !is_scaled() && !keeps() &&
           (program::kMaxAddends == 0 || !in.has(&Matmul::addends)) && !in.has(&Matmul::residual) &&
           !in.has(&Matmul::bias) && !in.has(&Matmul::x_squares);
  }
  __device__ __forceinline__ bool has_column(uint32_t column) const {
    return column >= in.inst.column_begin && column < in.inst.column_end;
  }
  __device__ __forceinline__ uint64_t plain_at(uint32_t row, uint32_t column) const {
    return element_at(in[&Matmul::out], row, out_begin() + column);
  }

  __device__ __forceinline__ bool keeps() const { return in.has(&Matmul::peaks); }

  __device__ __forceinline__ void end(uint32_t row, const Peak& peak) const {
    // If ranks gather the peaks, the column counts through those of all ranks.
    const Tensor& peaks = in[&Matmul::peaks];
    const uint32_t before = program::kRanks > 1 && is_gathered(peaks)
                                ? control().rank * own_columns(in[&Matmul::out])
                                : 0;
    if (lane_index() == 0)
      write_pair(peaks, row, 2 * in.inst.tile, peak.value,
                 static_cast<float>(before + peak.number - 1), true);
  }

 private:
  // The column of `out` that receives column 0: each part has its own columns, but the one that
  // adds the others up.
  __device__ __forceinline__ uint32_t out_begin() const {
    if (!program::kAnyPartOfK || (program::kMaxAddends > 0 && in.has(&Matmul::addends))) return 0;
    return in.inst.part * in[&Matmul::weight].rows;
  }

  __device__ __forceinline__ bool is_scaled() const {
    return program::kAnyOutScaled && in.has(&Matmul::out_scaled);
  }

  __device__ __forceinline__ uint32_t unit_of_squares() const {
    return squares_unit(in[&Matmul::out_scaled], in[&Matmul::out_squares]);
  }

  // Store the sum of squares of the four pairs of a unit, which are in lanes `apart` lanes apart.
  // Of a wide one, the warp has all pairs, as only matrix products have these.
  __device__ __forceinline__ void store_squares(const PairAt& at, uint32_t column,
                                                const PairSums& result) const {
    float sum = at.active && column < in.inst.column_end ? result.first * result.first : 0.0f;
    if (at.active && column + 1 < in.inst.column_end) sum = fmaf(result.second, result.second, sum);
    const uint32_t unit = unit_of_squares();
    if (unit == kWideSquares) {
      sum = add_neighbours(sum, kWideSquares / 2);
    } else {
      sum += __shfl_xor_sync(~0u, sum, at.apart);
      sum += __shfl_xor_sync(~0u, sum, 2 * at.apart);
    }
    if (at.active && column % unit == 0)
      write_element(in[&Matmul::out_squares], at.row, column / unit, sum);
  }

  using Columns = Loaded<true, 2>;  // two columns of a tensor that may be tagged

  // Add the elements of two neighbouring columns of a tensor, as far as they are the instruction's.
  // `skipped`: columns of the tensor before column 0 of the result. Waits for tagged words.
  __device__ __forceinline__ void add_columns(const Tensor& from, OperandWord word, uint32_t row,
                                              uint32_t column, uint32_t skipped,
                                              PairSums& sums) const {
    const uint32_t begin = in.inst.column_begin, end = in.inst.column_end;
    const uint32_t at = skipped + column;
    if (is_f32(from) && from.columns % 2 == 0 && at % 2 == 0 && column >= begin &&
        column + 1 < end) {
      Columns words[1];
      megavm::await(
          Columns::row_of(from, row, word), words, [](uint32_t) { return true; },
          [&](uint32_t) { return at; }, is_tagged(from));
      sums.first += words[0].value(0), sums.second += words[0].value(1);
      return;
    }
#pragma unroll 1
    for (uint32_t j = 0; j < 2; ++j)
      if (column + j >= begin && column + j < end)
        (j ? sums.second : sums.first) += read_element(from, row, at + j, word);
  }

  // Add the other parts of the product. They complete at about the same time as this one.
  __device__ __forceinline__ void add_parts(uint32_t row, uint32_t column, PairSums& sums) const {
    const Tensor& addends = in[&Matmul::addends];
    const OperandWord word = in.word(&Matmul::addends);
    const uint32_t size = in[&Matmul::weight].rows, parts = addends.columns / size;
    if (!is_tagged(addends) || size % 2 != 0 || column < in.inst.column_begin ||
        column + 1 >= in.inst.column_end) {
#pragma unroll 1
      for (uint32_t part = 0; part < parts; ++part)
        add_columns(addends, word, row, column, part * size, sums);
      return;
    }
    constexpr uint32_t kMost = max_of(1, program::kMaxAddends);
    Columns words[kMost];
    megavm::await(
        Columns::row_of(addends, row, word), words, [&](uint32_t part) { return part < parts; },
        [&](uint32_t part) { return part * size + column; }, true);
#pragma unroll
    for (uint32_t part = 0; part < kMost; ++part) {
      if (part >= parts) break;
      sums.first += words[part].value(0), sums.second += words[part].value(1);
    }
  }
};

}  // namespace megavm
