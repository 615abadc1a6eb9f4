// Products of bfloat16 rows with AMX tiles: of one row too, which takes as long as with dot
// products, so that a row's sums do not depend on the rows beside it. Weights are the A operand, in
// the order they have in memory; inputs are the B operand, packed for it.
#pragma once

#include "vm/cpu/panel.hpp"

namespace megavm::MEGAVM_LEVEL {

#if defined(__AMX_BF16__)

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The panel is [tile of 16 input rows][32 columns][16 pairs of columns][input row]: each [16][rows]
// of words is a B operand. The last tile holds only the remaining rows.
struct AmxPath {
  static constexpr int kDepth = kPanelColumns;  // columns of one multiplication

  AmxPath(Worker& worker, const Input& in, int64_t widest)
      : panel(worker.allocate<Bf16>(in.num_rows * ceil_to(widest, kDepth))),
        edge(worker.allocate<Bf16>(2 * kLanes * kDepth)) {}

  ~AmxPath() { _tile_release(); }

  void pack(const Worker& worker, const Input& in, int64_t begin, int64_t width) {
    depth = ceil_to(width, kDepth);
    with_rows(worker, in.x, [&](auto rows) {
      for (int first = 0; first < in.num_rows; first += kLanes) {
        const int count = in.num_rows - first < kLanes ? in.num_rows - first : kLanes;
        Bf16* to = panel + first * depth;
        for (int64_t c = 0; c < depth; c += kDepth, to += kDepth * count) {
          __m512i words[kLanes];
          for (int i = 0; i < kLanes; ++i) {
            if (i >= count) {
              words[i] = _mm512_setzero_si512();
              continue;
            }
            words[i] = load_pairs(in, rows, first + i, begin + c, width - c);
          }
          transpose(words);
          const __mmask16 mask = static_cast<__mmask16>((1u << count) - 1);
          for (int i = 0; i < kLanes; ++i)
            _mm512_mask_storeu_epi32(reinterpret_cast<uint32_t*>(to) + i * count, mask, words[i]);
        }
      }
    });
  }

  // 32 columns of an input row as words of two; only the first `left` exist, the others are zero.
  template <typename Rows>
  MEGAVM_INLINE static __m512i load_pairs(const Input& in, const Rows& rows, int i, int64_t column,
                                          int64_t left) {
    if constexpr (requires(const Bf16* p) { p = rows.data; }) {
      if (left >= kDepth) return _mm512_loadu_si512(rows.data + in.row[i] * rows.columns + column);
    }
    const int low = left < kLanes ? static_cast<int>(left) : kLanes;
    const int high = left >= kDepth ? kLanes : left > kLanes ? static_cast<int>(left) - kLanes : 0;
    const Vec a = load_input(in, rows, i, column, low);
    const Vec b = high ? load_input(in, rows, i, column + kLanes, high) : zero();
    return (__m512i)_mm512_cvtne2ps_pbh(b.part[0], a.part[0]);
  }

  // Multiply a block. Sums are [half][weight row][input row] until `finish` transposes them. At the
  // same time the weights of the next block are prefetched.
  void multiply(const Input& in, const Block<Bf16>& block, const Block<Bf16>& next, int64_t begin,
                int64_t width, float* sums, bool first) {
    // A single pass over the block is bound by memory, so it prefetches a little ahead in the block
    // itself. Several passes leave time to prefetch the whole next block.
    const bool ahead = in.num_rows > 2 * kLanes;
    Operand a{{block.half[0] + begin, block.half[1] + begin},
              {(ahead ? next : block).half[0] + begin, (ahead ? next : block).half[1] + begin},
              ahead ? 0 : kPrefetchBytes,
              in.k * int64_t{sizeof(Bf16)},
              width / kDepth};
    const int fetches = (in.num_rows + 2 * kLanes - 1) / (2 * kLanes);
    if (width % kDepth) pad_edge(in, block, begin + width / kDepth * kDepth, width % kDepth);
    for (int row = 0; row < in.num_rows; row += 2 * kLanes) {
      const int left = in.num_rows - row;
      const int rows[2] = {left < kLanes ? left : kLanes, left <= kLanes      ? 0
                                                          : left < 2 * kLanes ? left - kLanes
                                                                              : kLanes};
      configure(block.count, rows);
      const Bf16* b = panel + row * depth;
      float* to = sums_of(sums, row, 0);
      const Fetch fetch{row / (2 * kLanes), fetches, ahead ? next.count[0] : block.count[0]};
      if (block.count[1])
        rows[1] ? tiles<2, 2>(a, b, rows, to, first, fetch)
                : tiles<2, 1>(a, b, rows, to, first, fetch);
      else
        rows[1] ? tiles<1, 2>(a, b, rows, to, first, fetch)
                : tiles<1, 1>(a, b, rows, to, first, fetch);
    }
  }

  void finish(const Input& in, float* sums) const {
    for (int row = 0; row < in.num_rows; row += kLanes) {
      for (int half = 0; half < 2; ++half) {
        float* square = sums_of(sums, row, half);
        __m512i lines[kLanes];
        for (int i = 0; i < kLanes; ++i) lines[i] = _mm512_loadu_si512(square + i * kLanes);
        transpose(lines);
        for (int i = 0; i < kLanes; ++i) _mm512_storeu_si512(square + i * kLanes, lines[i]);
      }
    }
  }

 private:
  // The weights of a block: two halves of 16 rows, `steps` whole multiplications deep.
  struct Operand {
    const Bf16* half[2];
    const Bf16* next[2];
    int64_t next_bytes;
    int64_t stride;  // bytes
    int64_t steps;
  };

  // The weight rows that one pass over a block prefetches.
  struct Fetch {
    int first;
    int step;
    int end;
  };

  Bf16* panel;
  Bf16* edge;  // the last columns of a block's weights, padded with zeros
  int64_t depth = 0;
  uint64_t configured = 0;

  // Copy columns [column, column + width) of the weights to `edge`, padded with zeros to kDepth.
  void pad_edge(const Input& in, const Block<Bf16>& block, int64_t column, int64_t width) {
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < block.count[half]; ++i) {
        Bf16* to = edge + (half * kLanes + i) * kDepth;
        std::memset(to, 0, kDepth * sizeof(Bf16));
        std::memcpy(to, block.half[half] + i * in.k + column, width * sizeof(Bf16));
      }
    }
  }

  // Configure the AMX tiles. Tiles 0 to 3: sums of (half, tile of inputs); 4, 5: weights; 6, 7:
  // inputs.
  void configure(const int (&weights)[2], const int (&inputs)[2]) {
    const uint64_t key =
        uint64_t(weights[0]) << 24 | uint64_t(weights[1]) << 16 | inputs[0] << 8 | inputs[1];
    if (key == configured) return;
    configured = key;
    TileConfig config;
    for (int half = 0; half < 2; ++half) {
      const uint8_t rows = static_cast<uint8_t>(weights[half] ? weights[half] : kLanes);
      for (int t = 0; t < 2; ++t) {
        config.rows[2 * half + t] = rows;
        config.row_bytes[2 * half + t] =
            static_cast<uint16_t>(4 * (inputs[t] ? inputs[t] : kLanes));
      }
      config.rows[4 + half] = rows;
      config.row_bytes[4 + half] = 64;
      config.rows[6 + half] = kLanes;
      config.row_bytes[6 + half] =
          static_cast<uint16_t>(4 * (inputs[half] ? inputs[half] : kLanes));
    }
    _tile_loadconfig(&config);
  }

  template <int kHalves, int kTiles>
  MEGAVM_INLINE void tiles(const Operand& a, const Bf16* b, const int (&rows)[2], float* sums,
                           bool first, const Fetch& fetch) const {
    constexpr int64_t kSquare = kHalfSums;
    if (first) {
      _tile_zero(0);
      if constexpr (kTiles == 2) _tile_zero(1);
      if constexpr (kHalves == 2) _tile_zero(2);
      if constexpr (kHalves == 2 && kTiles == 2) _tile_zero(3);
    } else {
      _tile_loadd(0, sums, 64);
      if constexpr (kTiles == 2) _tile_loadd(1, sums + kTileSums, 64);
      if constexpr (kHalves == 2) _tile_loadd(2, sums + kSquare, 64);
      if constexpr (kHalves == 2 && kTiles == 2) _tile_loadd(3, sums + kTileSums + kSquare, 64);
    }
    const int64_t steps = depth / kDepth;
    const int64_t b_stride[2] = {4 * rows[0], 4 * rows[1]};
    const Bf16* second = b + kLanes * depth;
    for (int64_t s = 0; s < steps; ++s) {
      for (int r = fetch.first; r < fetch.end; r += fetch.step) {
        for (int half = 0; half < kHalves; ++half)
          _mm_prefetch(
              reinterpret_cast<const char*>(a.next[half]) + r * a.stride + s * 64 + a.next_bytes,
              _MM_HINT_T1);
      }
      const bool whole = s < a.steps;
      const Bf16* low = whole ? a.half[0] + s * kDepth : edge;
      const int64_t stride = whole ? a.stride : 64;
      _tile_loadd(4, low, stride);
      _tile_loadd(6, b + s * kDepth * rows[0], b_stride[0]);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (kTiles == 2) {
        _tile_loadd(7, second + s * kDepth * rows[1], b_stride[1]);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (kHalves == 2) {
        _tile_loadd(5, whole ? a.half[1] + s * kDepth : edge + kLanes * kDepth, stride);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (kTiles == 2) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, sums, 64);
    if constexpr (kTiles == 2) _tile_stored(1, sums + kTileSums, 64);
    if constexpr (kHalves == 2) _tile_stored(2, sums + kSquare, 64);
    if constexpr (kHalves == 2 && kTiles == 2) _tile_stored(3, sums + kTileSums + kSquare, 64);
  }
};

#endif

}  // namespace megavm::MEGAVM_LEVEL
