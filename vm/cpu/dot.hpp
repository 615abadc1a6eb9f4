// Products of rows as dot products in vector registers, for any type and number of rows. Best for
// few rows.
#pragma once

#include "vm/cpu/panel.hpp"

namespace megavm::MEGAVM_LEVEL {

// Register tiles of the dot products are input rows (tokens) x weight rows.
#if defined(__AVX512F__)
constexpr int kMaxTokens = 4;
#else
constexpr int kMaxTokens = 2;
#endif

constexpr int weight_rows_at_once(int tokens) {
#if defined(__AVX512F__)
  return tokens == 1 ? 16 : tokens == 2 ? 8 : 4;
#else
  return tokens == 1 ? 4 : 2;
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

// out[t][w] := x[t] . weights[w] over `width` columns, lane by lane.
template <int kTokens, int kWeights, typename Weight>
MEGAVM_INLINE void dot(Vec (&out)[kTokens][kWeights], const Weight* x, int64_t x_stride,
                       const Weight* const (&weights)[kWeights], int64_t width) {
  MEGAVM_UNROLL
  for (int t = 0; t < kTokens; ++t) MEGAVM_UNROLL
  for (int w = 0; w < kWeights; ++w) out[t][w] = zero();
  int64_t c = 0;
  for (; c + kStep<Weight> <= width; c += kStep<Weight>) {
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
  if (c < width) {
    MEGAVM_UNROLL
    for (int w = 0; w < kWeights; ++w) {
      const auto weight = load_step(weights[w] + c, static_cast<int>(width - c));
      MEGAVM_UNROLL
      for (int t = 0; t < kTokens; ++t)
        accumulate(out[t][w], weight, load_step(x + t * x_stride + c));
    }
  }
}

// Columns that are summed lane by lane before the lanes are added up. For float32 this is fixed, as
// the order of additions determines the result bit for bit.
template <typename Weight>
constexpr int64_t kPiece = sizeof(Weight) == 4 ? int64_t{kSplitColumns} : int64_t{1} << 40;

// Columns of the panel and of the weights that many rows multiply before they go on to the next,
// and weight rows that they share meanwhile: 16 KiB of weights and 8 KiB of inputs stay in the
// first-level cache.
template <typename Weight>
constexpr int64_t kCachedColumns = 2048 / sizeof(Weight);
constexpr int kCachedRows = 8;
static_assert(kCachedColumns<float> % kPiece<float> == 0,
              "the same additions for every number of rows");

// Add the products of kTokens panel rows with the weight rows [begin, end) of a half to their sums.
template <int kTokens, typename Weight>
MEGAVM_INLINE void dot_half(const Panel<Weight>& panel, int row, const Weight* weight, int64_t k,
                            int begin, int end, int64_t width, float* sums, int half, bool first) {
  constexpr int kWeights = weight_rows_at_once(kTokens);
  for (; begin < end; begin += kWeights) {
    // A missing row repeats the last row; its sum is not used.
    const Weight* weights[kWeights];
    MEGAVM_UNROLL
    for (int w = 0; w < kWeights; ++w)
      weights[w] = weight + (begin + w < end ? begin + w : end - 1) * k;
    for (int64_t c = 0; c < width; c += kPiece<Weight>) {
      Vec lanes[kTokens][kWeights];
      dot(lanes, panel.data + row * panel.stride + c, panel.stride, weights,
          width - c < kPiece<Weight> ? width - c : kPiece<Weight>);
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
      for (int w = 0; w < kWeights; ++w) weights[w] += kPiece<Weight>;
    }
  }
}

// Add the products of the panel with a block of weights, columns [begin, begin + width), to the
// block's sums.
template <typename Weight>
inline void dot_block(const Input& in, const Panel<Weight>& panel, const Block<Weight>& block,
                      int64_t begin, int64_t width, float* sums, bool first) {
  for (int half = 0; half < 2; ++half) {
    const int count = block.count[half];
    if (count == 0) continue;
    const Weight* weight = block.half[half] + begin;
    const int row = in.num_rows / kMaxTokens * kMaxTokens;  // the first of those that are left over
    for (int from = 0; from < count; from += kCachedRows) {
      const int end = from + kCachedRows < count ? from + kCachedRows : count;
      for (int top = 0; top < row; top += kMaxTokens)
        dot_half<kMaxTokens>(panel, top, weight, in.k, from, end, width, sums, half, first);
    }
    switch (in.num_rows - row) {
      case 1:
        dot_half<1>(panel, row, weight, in.k, 0, count, width, sums, half, first);
        break;
      case 2:
        dot_half<kMaxTokens == 2 ? 1 : 2>(panel, row, weight, in.k, 0, count, width, sums, half,
                                          first);
        break;
      case 3:
        dot_half<kMaxTokens == 2 ? 1 : 3>(panel, row, weight, in.k, 0, count, width, sums, half,
                                          first);
        break;
    }
  }
}

// The path of a product that uses dot products.
template <typename Weight>
struct DotPath {
  Panel<Weight> panel;

  DotPath(Worker& worker, const Input& in, int64_t widest)
      : panel{worker.allocate<Weight>(in.num_rows * ceil_to(widest, kPanelColumns)), 0} {}

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
      dot_block(in, part, block, begin + c, width - c < piece ? width - c : piece, sums,
                first && c == 0);
      part.data += piece;
    }
  }

  MEGAVM_INLINE void finish(const Input&, float*) const {}
};

}  // namespace megavm::MEGAVM_LEVEL
