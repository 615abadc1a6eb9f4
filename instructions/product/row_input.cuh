// The input of products of one row: its loads in flight (RowInput), and the panel in shared memory.
#pragma once

#include "instructions/product/product.cuh"

namespace megavm {

constexpr uint32_t kLaneColumns = kTileColumns / 8;  // columns of a tile that a lane converts

// The columns of a tile that a lane converts, as loaded from memory.
template <bool kF32>
using RawInput = Loaded<kF32, kLaneColumns>;

// The *panel*: the row of x, or a chunk of it, in shared memory. It has the element type of the
// weights, and the order of operand A (see product.cuh).
struct Panel {
  const Stage& stage;
  const Product& input;
  const Consumer& consumer;
  uint32_t tile;     // the tile of every page that this lane converts
  uint32_t in_tile;  // the first byte of the tile that this lane stores
  uint32_t column;   // the lane's first column in page 0

  __device__ __forceinline__ Panel(const Stage& stage, const Product& input,
                                   const Consumer& consumer)
      : stage(stage), input(input), consumer(consumer) {
    // NOTE: read again here: values derived from it would occupy registers in the whole kernel.
    const uint32_t lane = ptx::thread_index() % kLanes;
    tile = lane / 8 * kNumConsumers + consumer.warp();
    in_tile = kF32Weights ? lane % 8 * 8 : lane % 8 / 2 * 16 + lane % 2 * 4;
    column = tile * kTileColumns + lane % 8 * kLaneColumns;
  }

  __device__ __forceinline__ const Tensor& x() const { return stage.tensors[input.x]; }

  __device__ __forceinline__ uint32_t address(uint32_t page) const {
    return scratch_at() + (page * kTilesPerPage + tile) * kTileRowBytes + in_tile;
  }

  __device__ __forceinline__ void put(uint32_t page, const float (&value)[kLaneColumns]) const {
    if constexpr (kF32Weights)
      ptx::store_shared2(address(page), __float_as_uint(value[0]), __float_as_uint(value[1]));
    else
      put(page, ptx::pack_bf16(value[0], value[1]),
          ptx::pack_bf16(value[kLaneColumns - 2], value[kLaneColumns - 1]));
  }
  // The same for packed bfloat16.
  __device__ __forceinline__ void put(uint32_t page, uint32_t first, uint32_t second) const {
    ptx::store_shared(address(page), first);
    ptx::store_shared(address(page) ^ 8, second);
  }

  // Fill the panel with a row that does not consist of whole tiles, element by element.
  __device__ __forceinline__ void fill_ragged(uint32_t row, uint32_t chunk) const {
#pragma unroll 1
    for (uint32_t page = 0; page < input.tiling.pages_of(chunk); ++page) {
      float value[kLaneColumns];
      read_ragged(stage, input, row, column + (chunk * kChunkPages + page) * kPageColumns, value);
      put(page, value);
    }
  }
};

// The row of x on its way to the panel: a lane's loads in flight, which are not yet checked.
class RowInput {
 public:
  __device__ __forceinline__ RowInput(const Panel& panel, const Product& input, bool live)
      : panel_(panel), input_(input) {
    row_ = input.row_index == kNone ? input.row_begin
           : live                   ? x_row(panel.stage, input, input.row_begin)
                                    : 0;
    forget();
  }

  // Load the first batch of the row if it is tagged and has likely been stored.
  __device__ __forceinline__ void ask(bool likely) {
    if constexpr (program::kAnyRaggedK) return;
    with_kind([&]<bool kF32, bool kTagged>() {
      if constexpr (kTagged)
        if (likely) load_missing<kF32, kTagged>(0);
    });
  }

  // Wait for the columns of the chunk and fill the panel. Chunks are filled in order; after the
  // last one the row begins again.
  __device__ __forceinline__ void fill(uint32_t chunk) {
    // Every lane of this warp must be done with the panel's old contents.
    __syncwarp();
    if constexpr (program::kAnyRaggedK)
      panel_.fill_ragged(row_, chunk);
    else
      with_kind([&]<bool kF32, bool kTagged>() { fill<kF32, kTagged>(chunk); });
    __syncwarp();
  }

 private:
  static constexpr uint32_t kBatch = 8;  // pages of which a lane has its columns in flight

  // Call the visitor for the kind of x. Only kinds that the program has are compiled.
  template <class Visitor>
  __device__ __forceinline__ void with_kind(Visitor&& visitor) const {
    const uint32_t kind = 1u << (2 * is_f32(panel_.x()) + is_tagged(panel_.x()));
    if (program::kAnyInputs & kind & 8) visitor.template operator()<true, true>();
    if (program::kAnyInputs & kind & 4) visitor.template operator()<true, false>();
    if (program::kAnyInputs & kind & 2) visitor.template operator()<false, true>();
    if (program::kAnyInputs & kind & 1) visitor.template operator()<false, false>();
  }

  // Number of pages in which this lane's columns exist.
  __device__ __forceinline__ uint32_t pages() const {
    const uint32_t pages = input_.tiling.pages();
    if constexpr (!program::kAnyPartialPages) return pages;
    const uint32_t k = input_.tiling.k;
    return panel_.column >= k ? 0 : min_of(pages, ceil_div(k - panel_.column, kPageColumns));
  }

  template <bool kF32>
  __device__ __forceinline__ RawInput<kF32> raw(uint32_t i) const {
    static_assert(RawInput<kF32>::kFours == 1);
    return {{words_[i]}};
  }

  // Make all words empty.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (ptx::Words4& words : words_) {
      Loaded<true, 4> all;
      all.forget();
      words = all.raw[0];
    }
  }

  // Load the missing words of the batch that begins at this page.
  template <bool kF32, bool kTagged>
  __device__ __forceinline__ void load_missing(uint32_t begin) {
    constexpr uint32_t kBytes = RawInput<kF32>::kColumnBytes, kStride = kPageColumns * kBytes;
    const Tensor& x = panel_.x();
    const uint64_t from =
        base_of(x) +
        (static_cast<uint64_t>(row_) * x.columns + input_.first_column() + panel_.column) * kBytes;
    const uint32_t pages = this->pages();
#pragma unroll
    for (uint32_t i = 0; i < kBatch; ++i) {
      RawInput<kF32> now = raw<kF32>(i);
      if (begin + i < pages && (!kTagged || !now.is_there())) {
        now.load(from + begin * kStride + i * kStride);
        words_[i] = now.raw[0];
      }
    }
  }

  // Wait for all words of the batch that begins at this page.
  template <bool kF32, bool kTagged>
  __device__ __forceinline__ void wait(uint32_t begin) {
    const uint32_t pages = this->pages();
    await([&] { load_missing<kF32, kTagged>(begin); },
          [&] {
            uint32_t missing = kNone;
#pragma unroll
            for (uint32_t i = 0; i < kBatch; ++i)
              if (kTagged && begin + i < pages && !raw<kF32>(i).is_there()) missing = i;
            return missing;
          },
          [&](uint32_t missing) {
            using Raw = RawInput<kF32>;
            Raw::find_missing(
                Raw::row_of(panel_.x(), row_, input_.x),
                input_.first_column() + panel_.column + (begin + missing) * kPageColumns);
          });
  }

  template <bool kF32, bool kTagged>
  __device__ __forceinline__ void fill(uint32_t chunk) {
    static_assert(kBatch % kRowChunkPages == 0);
    constexpr uint32_t kChunks = kBatch / kRowChunkPages;  // chunks in a batch
    const uint32_t begin = chunk * kRowChunkPages;
    if (chunk % kChunks == 0) {
      if (!kOneChunk && asked_) forget();
      asked_ = true;
      wait<kF32, kTagged>(begin);
    }
    if (kChunks == 1 || chunk % 2 == 0)
      put<kF32, 0>(begin);
    else
      put<kF32, kRowChunkPages>(begin);
  }

  // Store the words from number `kFirst` on to the panel, as the chunk that begins at this page:
  // whole pages, with zeros beyond the last column.
  template <bool kF32, uint32_t kFirst>
  __device__ __forceinline__ void put(uint32_t begin) {
    const uint32_t pages = input_.tiling.pages();
#pragma unroll
    for (uint32_t i = 0; i < kChunkPages; ++i) {
      if (begin + i >= pages) break;
      RawInput<kF32> now = raw<kF32>((kFirst + i) % kBatch);
      if (program::kAnyPartialPages && begin + i >= this->pages()) now = {};
      if constexpr (!kF32 && !kF32Weights) {
        panel_.put(i, now.word(0), now.word(1));
      } else {
        float value[kLaneColumns];
#pragma unroll
        for (uint32_t j = 0; j < kLaneColumns; ++j) value[j] = now.value(j);
        panel_.put(i, value);
      }
    }
  }

  const Panel& panel_;
  const Product& input_;
  uint32_t row_;
  bool asked_ = false;  // whether words_ holds a batch that was waited for
  ptx::Words4 words_[kBatch];
};

}  // namespace megavm
