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
    const float gate = sums.first + early.bias.first, up = sums.second + early.bias.second;
    const float result = __fdividef(gate, 1.0f + __expf(-gate)) * up;
    const float next = __shfl_down_sync(~0u, result, at.apart);
    if (!at.active) return;
    if (early.place.kind == kNone)
      write_element(in[&GateUp::out], at.row, at.pair, result, in.out_tag());
    else if (at.pair % 2 == 0)
      early.place.store(result, next, in.out_tag());
  }
};

}  // namespace megavm
