#pragma once

#include "instructions/product/products.cuh"
#include "instructions/step_rows.cuh"

namespace megavm {

// A pair is a rotation pair: elements j and j + d / 2 of a head. Heads are numbered over queries,
// keys and values. A thread with an even j stores the first elements of its pair and of the next
// one, its neighbour the second elements of both.
template <>
struct Epilogue<QkvRope> : EpilogueBase<QkvRope> {
  struct Early {
    PairPlace place;  // where two elements go in q, k_new or v_new
    uint64_t cached;  // where they go in the cache; 0: nowhere
    uint32_t alone;   // 1: every element is stored alone
    PairSums bias;
    float cosine, sine;
  };

  static constexpr uint32_t kAtOnce = 1;

  __device__ __forceinline__ explicit Epilogue(const Stage& stage) : EpilogueBase(stage) {}

  __device__ __forceinline__ Product product() const {
    return product_of(in.inst.pair_begin, in.inst.pair_end);
  }

  // Where a rotation pair belongs.
  struct Head {
    uint32_t part;    // 0: query, 1: key, 2: value
    uint32_t number;  // among the heads of its part
    uint32_t j;       // first element
    uint32_t half;    // the second element is this much further

    Head() = default;
    __device__ __forceinline__ Head(const Operands<QkvRope>& in, uint32_t pair) {
      half = in[&QkvRope::rope].columns / 2;
      // Pairs of all queries, and of all keys. Whole heads, so that one division is enough: it
      // takes more code than the rest.
      const uint32_t queries = in[&QkvRope::q].columns / 2;
      const uint32_t keys = (in[&QkvRope::weight].rows / 2 - queries) / 2;
      part = 0;
      if (pair >= queries) {
        part = 1;
        pair -= queries;
        if (pair >= keys) {
          part = 2;
          pair -= keys;
        }
      }
      number = pair / half;
      j = pair - number * half;
    }
    // Column of element e of the head in q, k_new and v_new.
    __device__ __forceinline__ uint32_t column(uint32_t e) const { return number * 2 * half + e; }
  };

  // The slot of a row in the KV cache.
  struct Slot {
    uint32_t block, position;

    __device__ __forceinline__ uint32_t number() const { return position % qkv_rope::kBlockSize; }
  };
  __device__ __forceinline__ Slot slot_of(uint32_t row) const {
    const Tensor& table = in[&QkvRope::block_table];
    const uint32_t limit = min_of(in[&QkvRope::rope].rows, table.columns * qkv_rope::kBlockSize);
    const uint32_t position = position_of(in[&QkvRope::row_position], row, in.step(), limit);
    const uint32_t sequence = sequence_of(in[&QkvRope::row_sequence], row, table);
    return {kv_block(table, sequence, position / qkv_rope::kBlockSize, in[&QkvRope::k_cache].rows),
            position};
  }

  // Column of an element of a head in the row of a cache that holds a block.
  static __device__ __forceinline__ uint32_t cache_column(const Tensor& cache, const Head& head,
                                                          uint32_t slot, uint32_t e) {
    const bool swizzled = layout_of(cache) == Layout::kSwizzled;
    return (head.number * qkv_rope::kBlockSize + slot) * 2 * head.half +
           swizzled_element(swizzled, slot, e);
  }

  __device__ __forceinline__ void begin(uint32_t row, uint32_t pair, Early& early) const {
    const Head head(in, pair);
    const Slot slot = slot_of(row);
    const uint32_t half = head.half;
    early.cosine = 1.0f;
    early.sine = 0.0f;
    if (head.part < 2) {
      early.cosine = constant_element(in[&QkvRope::rope], slot.position, head.j);
      early.sine = constant_element(in[&QkvRope::rope], slot.position, half + head.j);
    }
    const uint32_t weight_row = 2 * pair - head.j;
    early.bias = load_bias(in, &QkvRope::bias, weight_row, weight_row + half);
    early.alone = 1;
    const uint32_t first = pair & ~1u;
    if (half % 2 != 0 || first < in.inst.pair_begin || first + 1 >= in.inst.pair_end) return;
    const uint32_t e = (head.j & ~1u) + pair % 2 * half;
    const OperandWord copy = copy_of(head);
    if (copy != kNone) {
      early.place = PairPlace(in.stage.tensors[copy], row, head.column(e));
      if (early.place.kind == kNone) return;
    }
    if (head.part > 0) {
      const Tensor& cache = cache_of(head);
      if (dtype_of(cache) != DType::kBf16) return;
      early.cached = element_at(cache, slot.block, cache_column(cache, head, slot.number(), e));
    }
    early.alone = 0;
  }

  __device__ __forceinline__ void finish(const PairAt& at, const PairSums& sums, const Early& early,
                                         Kept&) const {
    const auto [low, high] = rotated(sums, early.bias, early.cosine, early.sine);
    // An even pair passes its second element on, and gets the first element of the odd one.
    const bool even = at.pair % 2 == 0;
    const float other = __shfl_xor_sync(~0u, even ? high : low, at.apart);
    if (!at.active) return;
    if (early.alone) return store_alone(at.row, at.pair, low, high);
    const float first = even ? low : other, second = even ? other : high;
    if (early.place.kind != kNone) early.place.store(first, second);
    if (early.cached != 0) ptx::store(early.cached, ptx::pack_bf16(first, second));
  }

  // ---- Quads: two rotation pairs of a head.

  static constexpr bool kQuads = qkv_rope::kCopyKinds != 0;
  struct OfQuad {
    Head head;
    QuadSums bias;
    ColumnPlace<qkv_rope::kCopyKinds> copy;  // where q, k_new or v_new has the first elements
  };
  struct Asked {
    ptx::Words2 cosine, sine;
  };
  struct Result {
    PairSums side[2];  // the first elements of both pairs, and the second ones
  };

  __device__ __forceinline__ bool takes_quads() const {
    const Tensor& rope = in[&QkvRope::rope];
    bool all = rope.columns % 4 == 0 && is_f32(rope) && base_of(rope) % 16 == 0 &&
               takes_fours(in[&QkvRope::q]);
    for (const OperandWord copy : {word_if_there(&QkvRope::k_new), word_if_there(&QkvRope::v_new)})
      all &= copy == kNone || takes_fours(in.stage.tensors[copy]);
    for (const auto cache : {&QkvRope::k_cache, &QkvRope::v_cache})
      all &= dtype_of(in[cache]) == DType::kBf16 && takes_fours(in[cache]);
    return all;
  }

  __device__ __forceinline__ void begin_quad(uint32_t pair, OfQuad& quad) const {
    quad.head = Head(in, pair);
    const uint32_t half = quad.head.half, weight_row = 2 * pair - quad.head.j;
    quad.bias = load_quad_bias(in, &QkvRope::bias, weight_row, weight_row + half, 1);
    const OperandWord copy = copy_of(quad.head);
    if (copy != kNone) quad.copy = {in.stage.tensors[copy], quad.head.column(quad.head.j)};
  }

  using OfRow = Slot;
  __device__ __forceinline__ OfRow look_up(uint32_t row) const { return slot_of(row); }

  __device__ __forceinline__ void ask(const QuadAt& at, const OfRow& of_row, const OfQuad& quad,
                                      Asked& asked) const {
    const Head& head = quad.head;
    const uint64_t from = element_at(in[&QkvRope::rope], of_row.position, head.j);
    const bool active = at.active && head.part < 2;
    ptx::load_constant2(from, asked.cosine, active);
    ptx::load_constant2(from + 4 * head.half, asked.sine, active);
  }

  __device__ __forceinline__ Result combine(const QuadSums& sums, const OfQuad& quad,
                                            const Asked& asked) const {
    const uint32_t cosine[2] = {asked.cosine.x, asked.cosine.y};
    const uint32_t sine[2] = {asked.sine.x, asked.sine.y};
    PairSums of_pair[kQuadPairs];
#pragma unroll
    for (uint32_t i = 0; i < kQuadPairs; ++i) {
      const float c = quad.head.part < 2 ? __uint_as_float(cosine[i]) : 1.0f;
      const float s = quad.head.part < 2 ? __uint_as_float(sine[i]) : 0.0f;
      of_pair[i] = rotated(sums.pair[i], quad.bias.pair[i], c, s);
    }
    return {{{of_pair[0].first, of_pair[1].first}, {of_pair[0].second, of_pair[1].second}}};
  }

  __device__ __forceinline__ void store(const QuadAt& at, const OfRow& of_row, const OfQuad& quad,
                                        const Result& result) const {
    const Head& head = quad.head;
    const Tensor& cache = cache_of(head);
#pragma unroll
    for (uint32_t side = 0; side < 2; ++side) {
      const PairSums& v = result.side[side];
      const uint32_t further = side * head.half;
      quad.copy.store_pair(at.row, further, v.first, v.second, at.active && quad.copy.address != 0);
      const uint32_t column = cache_column(cache, head, of_row.number(), head.j + further);
      ptx::store(element_at(cache, of_row.block, column), ptx::pack_bf16(v.first, v.second),
                 at.active && head.part > 0);
    }
  }

 private:
  // The elements of a rotation pair, rotated.
  static __device__ __forceinline__ PairSums rotated(const PairSums& sums, const PairSums& bias,
                                                     float cosine, float sine) {
    const float a = sums.first + bias.first, b = sums.second + bias.second;
    return {a * cosine - b * sine, b * cosine + a * sine};
  }

  // Operand word of the tensor beside the cache that a head is stored in; kNone: there is none.
  __device__ __forceinline__ OperandWord copy_of(const Head& head) const {
    if (head.part == 0) return in.word(&QkvRope::q);
    return word_if_there(head.part == 1 ? &QkvRope::k_new : &QkvRope::v_new);
  }
  __device__ __forceinline__ const Tensor& cache_of(const Head& head) const {
    return in[head.part == 1 ? &QkvRope::k_cache : &QkvRope::v_cache];
  }

  // Store both elements of a pair, each alone.
  __device__ __forceinline__ void store_alone(uint32_t row, uint32_t pair, float low,
                                              float high) const {
    const Head head(in, pair);
    const Slot slot = slot_of(row);
#pragma unroll 1
    for (uint32_t side = 0; side < 2; ++side) {
      const uint32_t e = head.j + side * head.half;
      const float value = side ? high : low;
      const OperandWord copy = copy_of(head);
      if (copy != kNone) write_element(in.stage.tensors[copy], row, head.column(e), value);
      if (head.part > 0)
        write_element(cache_of(head), slot.block,
                      cache_column(cache_of(head), head, slot.number(), e), value);
    }
  }
};

}  // namespace megavm
