// Products of rows as dot products in vector registers, for any type and number of rows. Best for
// few rows.
#pragma once

#include "vm/cpu/panel.hpp"

namespace megavm::MEGAVM_LEVEL {

// Register tiles of the dot products are input rows (tokens) x weight rows. With 16 registers, of
// fewer than 16 lanes, tiles of 3 x 4 have their sums in registers for one part of the lanes only:
// they read a piece once for each part.
#if defined(__AVX512F__)
constexpr int kMaxTokens = 4;
#else
constexpr int kMaxTokens = 3;
#endif

constexpr int weight_rows_at_once(int tokens) {
#if defined(__AVX512F__)
  return tokens == 1 ? 16 : tokens == 2 ? 8 : 4;
#else
  return tokens == 2 ? 2 : 4;
#endif
}

// Pack columns [begin, begin + width) of the input rows, padded with zeros to whole steps.
template <typename Weight>
inline void pack_rows(const Worker& worker, const Input& in, int64_t begin, int64_t width,
                      const Panel<Weight>& panel) {
  with_rows(worker, in.x, [&](auto rows) {
    for (int i = 0; i < in.num_rows; ++i) {
      Weight* to = panel.data + i * panel.stride;
      for (int64_t c = 0; c < panel.stride; c += kLanes) {
        const int count = c < width ? lanes_at(c, width) : 0;
        store(to + c, count ? load_input(in, rows, i, begin + c, count) : zero());
      }
    }
  });
}

// out[t][w] := x[t] . weights[w] over `width` columns, a multiple of a step, lane by lane.
template <int kTokens, int kWeights, typename Weight>
MEGAVM_INLINE void dot_steps(Vec (&out)[kTokens][kWeights], const Weight* x, int64_t x_stride,
                             const Weight* const (&weights)[kWeights], int64_t width) {
  MEGAVM_UNROLL
  for (int t = 0; t < kTokens; ++t) MEGAVM_UNROLL
  for (int w = 0; w < kWeights; ++w) out[t][w] = zero();
  for (int64_t c = 0; c < width; c += kStep<Weight>) {
    decltype(load_step(x)) inputs[kTokens];
    MEGAVM_UNROLL
    for (int t = 0; t < kTokens; ++t) inputs[t] = load_step(x + t * x_stride + c);
    MEGAVM_UNROLL
    for (int w = 0; w < kWeights; ++w) {
      __builtin_prefetch(reinterpret_cast<const char*>(weights[w] + c) + kPrefetchBytes);
      const auto weight = load_step(weights[w] + c);
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t) accumulate(out[t][w], weight, inputs[t]);
    }
  }
}

// The same, one part of the lanes after the other: a tile has more sums than fit in the registers
// of all lanes. Every lane adds in the same order.
template <int kTokens, int kWeights, typename Weight>
MEGAVM_INLINE void dot_parts(Vec (&out)[kTokens][kWeights], const Weight* x, int64_t x_stride,
                             const Weight* const (&weights)[kWeights], int64_t width) {
  MEGAVM_UNROLL
  for (int part = 0; part < kParts; ++part) {
    NativeFloats sums[kTokens][kWeights] = {};
    for (int64_t c = part * kPartStep<Weight>; c < width; c += kStep<Weight>) {
      Terms<Weight> inputs[kTokens];
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        const Weight* input = x + t * x_stride + c;
        // The next tile begins with the rows behind these.
        if (part == kParts - 1) __builtin_prefetch(input + kTokens * x_stride);
        inputs[t] = load_terms(input);
      }
      MEGAVM_UNROLL
      for (int w = 0; w < kWeights; ++w) {
        const Terms<Weight> weight = load_terms(weights[w] + c);
        MEGAVM_UNROLL
        for (int t = 0; t < kTokens; ++t) accumulate(sums[t][w], weight, inputs[t]);
      }
    }
    MEGAVM_UNROLL
    for (int t = 0; t < kTokens; ++t) MEGAVM_UNROLL
    for (int w = 0; w < kWeights; ++w) out[t][w].part[part] = sums[t][w];
  }
}

// out[t][w] := x[t] . weights[w] over `width` columns, lane by lane.
template <int kTokens, int kWeights, typename Weight>
MEGAVM_INLINE void dot(Vec (&out)[kTokens][kWeights], const Weight* x, int64_t x_stride,
                       const Weight* const (&weights)[kWeights], int64_t width) {
  const int64_t whole = width / kStep<Weight> * kStep<Weight>;
  if constexpr (kParts > 1 && kTokens == kMaxTokens)
    dot_parts(out, x, x_stride, weights, whole);
  else
    dot_steps(out, x, x_stride, weights, whole);
  if (whole == width) return;
  MEGAVM_UNROLL
  for (int w = 0; w < kWeights; ++w) {
    const auto weight = load_step(weights[w] + whole, static_cast<int>(width - whole));
    MEGAVM_UNROLL
    for (int t = 0; t < kTokens; ++t)
      accumulate(out[t][w], weight, load_step(x + t * x_stride + whole));
  }
}

// Columns that are summed lane by lane before the lanes are added up: the same for every number of
// rows, as the order of additions determines the result bit for bit.
constexpr int64_t kPiece = kSplitColumns;

// Columns of the panel and of the weights that many rows multiply before they go on to the next,
// and weight rows that they share meanwhile: 16 KiB of weights and 8 KiB of inputs stay in the
// first-level cache.
template <typename Weight>
constexpr int64_t kCachedColumns = 2048 / sizeof(Weight);
constexpr int kCachedRows = 8;
static_assert(kCachedColumns<float> % kPiece == 0, "the same additions for every number of rows");
// Fewest rows for which weights are copied before they are multiplied. The rows of a matrix of 2048
// columns or so all lie in the same few sets of a cache and displace each other; a copy does not.
// The gain was measured without AVX-512 only; with it, weights are multiplied in place.
#if defined(__AVX512F__)
constexpr int kCopiedRows = 1 << 30;
#else
constexpr int kCopiedRows = 16;
#endif

// Add the products of kTokens panel rows with `count` weight rows, `stride` elements apart, to
// their sums.
template <int kTokens, typename Weight>
MEGAVM_INLINE void dot_half(const Panel<Weight>& panel, int row, const Weight* weight,
                            int64_t stride, int count, int64_t width, float* sums, int half,
                            bool first) {
  constexpr int kWeights = weight_rows_at_once(kTokens);
  for (int begin = 0; begin < count; begin += kWeights) {
    // A missing row repeats the last row; its sum is not used.
    const Weight* weights[kWeights];
    MEGAVM_UNROLL
    for (int w = 0; w < kWeights; ++w)
      weights[w] = weight + (begin + w < count ? begin + w : count - 1) * stride;
    for (int64_t c = 0; c < width; c += kPiece) {
      Vec lanes[kTokens][kWeights];
      dot(lanes, panel.data + row * panel.stride + c, panel.stride, weights,
          width - c < kPiece ? width - c : kPiece);
      Vec rows[kLanes];
      MEGAVM_UNROLL
      for (int i = 0; i < kLanes; ++i) rows[i] = zero();
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t) MEGAVM_UNROLL
      for (int w = 0; w < kWeights; ++w) rows[t * kWeights + w] = lanes[t][w];
      float result[kLanes];
      store(result, MEGAVM_LEVEL::sums<kTokens * kWeights>(rows));
      const bool fresh = first && c == 0;
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t) {
        float* to = sums_of(sums, row + t, half) + begin;
        MEGAVM_UNROLL
        for (int w = 0; w < kWeights; ++w)
          to[w] = fresh ? result[t * kWeights + w] : to[w] + result[t * kWeights + w];
      }
      MEGAVM_UNROLL
      for (int w = 0; w < kWeights; ++w) weights[w] += kPiece;
    }
  }
}

// The path of a product that uses dot products.
template <typename Weight>
struct DotPath {
  Panel<Weight> panel;
  Weight* copy;  // holds kCachedColumns columns of kCachedRows weight rows

  DotPath(Worker& worker, const Input& in, int64_t widest)
      : panel{worker.allocate<Weight>(in.num_rows * ceil_to(widest, kPanelColumns)), 0},
        copy(worker.allocate<Weight>(
            in.num_rows < kCopiedRows ? 0 : kCachedRows * kCachedColumns<Weight>)) {}

  MEGAVM_INLINE void pack(const Worker& worker, const Input& in, int64_t begin, int64_t width) {
    panel.stride = ceil_to(width, kPanelColumns);
    pack_rows(worker, in, begin, width, panel);
  }

  // Multiply the packed slice, whose first column is `begin`, with a block. `first`: store the
  // sums; otherwise add to them.
  MEGAVM_INLINE void multiply(const Input& in, const Block<Weight>& block, const Block<Weight>&,
                              int64_t begin, int64_t width, float* sums, bool first) {
    // With few rows, each weight row is read to its end. More rows share a piece of the weights
    // while it is in the cache.
    const int64_t piece = in.num_rows <= kMaxTokens ? width : kCachedColumns<Weight>;
    Panel<Weight> part = panel;
    for (int64_t c = 0; c < width; c += piece) {
      const int64_t columns = width - c < piece ? width - c : piece;
      for (int half = 0; half < 2; ++half)
        if (const int count = block.count[half])
          multiply_half(in, part, block.half[half] + begin + c, count, columns, sums, half,
                        first && c == 0);
      part.data += piece;
    }
  }

  MEGAVM_INLINE void finish(const Input&, float*) const {}

 private:
  // Add the products of the panel with `count` weight rows to their sums.
  void multiply_half(const Input& in, const Panel<Weight>& part, const Weight* weight, int count,
                     int64_t width, float* sums, int half, bool first) const {
    const int row = in.num_rows / kMaxTokens * kMaxTokens;  // the first of those that are left over
    const bool copied = in.num_rows >= kCopiedRows;
    for (int from = 0; from < count; from += kCachedRows) {
      const int rows = from + kCachedRows < count ? kCachedRows : count - from;
      const Weight* shared = weight + from * in.k;
      if (copied) {
        for (int w = 0; w < rows; ++w)
          std::memcpy(copy + w * kCachedColumns<Weight>, shared + w * in.k, sizeof(Weight) * width);
        shared = copy;
      }
      const int64_t stride = copied ? kCachedColumns<Weight> : in.k;
      for (int top = 0; top < row; top += kMaxTokens)
        dot_half<kMaxTokens>(part, top, shared, stride, rows, width, sums + from, half, first);
      if (copied)
        multiply_rest(in, part, row, shared, stride, rows, width, sums + from, half, first);
    }
    if (!copied) multiply_rest(in, part, row, weight, in.k, count, width, sums, half, first);
  }

  // The same for the panel's rows from `row` on, fewer than kMaxTokens; see dot_half.
  void multiply_rest(const Input& in, const Panel<Weight>& part, int row, const Weight* weight,
                     int64_t stride, int count, int64_t width, float* sums, int half,
                     bool first) const {
    switch (in.num_rows - row) {
      case 1:
        dot_half<1>(part, row, weight, stride, count, width, sums, half, first);
        break;
      case 2:
        dot_half<2>(part, row, weight, stride, count, width, sums, half, first);
        break;
      case 3:
        dot_half<3>(part, row, weight, stride, count, width, sums, half, first);
        break;
    }
  }
};

}  // namespace megavm::MEGAVM_LEVEL
