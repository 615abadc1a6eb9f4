#pragma once

#include "instructions/product/products.cuh"

namespace megavm {

// A pair is the gate and the up row of one column. The thread of an even column stores its own
// result and the next thread's.
template <>
struct Epilogue<GateUp> : EpilogueBase<GateUp> {
  struct Early {
    PairPlace place;  // where both results go; kind kNone: each thread stores its own
    PairSums bias;
  };

  __device__ __forceinline__ explicit Epilogue(const Stage& stage) : EpilogueBase(stage) {}

  __device__ __forceinline__ Product product() const {
    return product_of(in.inst.column_begin, in.inst.column_end);
  }

  __device__ __forceinline__ void begin(uint32_t row, uint32_t column, Early& early) const {
    early.bias = load_bias(in, &GateUp::bias, column, in[&GateUp::weight].rows / 2 + column);
    early.place =
        place_of(in[&GateUp::out], row, column & ~1u, in.inst.column_begin, in.inst.column_end);
  }

  __device__ __forceinline__ void move(uint32_t, uint32_t, uint32_t rows, Early& early) const {
    early.place.move(in[&GateUp::out], rows);
  }

  __device__ __forceinline__ void finish(const PairAt& at, const PairSums& sums, const Early& early,
                                         Kept&) const {
    const float result = activated(sums.first + early.bias.first, sums.second + early.bias.second);
    const float next = __shfl_down_sync(~0u, result, at.apart);
    if (!at.active) return;
    if (early.place.kind == kNone)
      write_element(in[&GateUp::out], at.row, at.pair, result);
    else if (at.pair % 2 == 0)
      early.place.store(result, next);
  }

  // ---- Quads: two columns.

  static constexpr bool kQuads = gate_up::kOutKinds != 0;
  struct OfQuad {
    QuadSums bias;
    ColumnPlace<gate_up::kOutKinds> out;
  };
  using Result = PairSums;

  __device__ __forceinline__ bool takes_quads() const { return takes_fours(in[&GateUp::out]); }

  __device__ __forceinline__ void begin_quad(uint32_t column, OfQuad& quad) const {
    quad.bias = load_quad_bias(in, &GateUp::bias, column, in[&GateUp::weight].rows / 2 + column, 1);
    quad.out = {in[&GateUp::out], column};
  }

  __device__ __forceinline__ Result combine(const QuadSums& sums, const OfQuad& quad,
                                            const Asked&) const {
    const auto result = [&](uint32_t i) {
      return activated(sums.pair[i].first + quad.bias.pair[i].first,
                       sums.pair[i].second + quad.bias.pair[i].second);
    };
    return {result(0), result(1)};
  }

  __device__ __forceinline__ void store(const QuadAt& at, const OfRow&, const OfQuad& quad,
                                        const Result& result) const {
    quad.out.store_pair(at.row, 0, result.first, result.second, at.active);
  }

 private:
  static __device__ __forceinline__ float activated(float gate, float up) {
    return gate * ptx::reciprocal(1.0f + ptx::exp2(-kLog2E * gate)) * up;
  }
};

}  // namespace megavm
