#pragma once

#include "cuda/pipelines/plan.cuh"

namespace megavm {

// Units of gate and up alternate, so that both sums of a column belong to the same block.
struct GateUpPlan : ProductPlan<GateUp> {
  static constexpr uint32_t kPairs = 2;  // an item is two columns of gate and the same two of up
  static constexpr uint32_t kItemsPerUnit = kUnitRows / 2;  // per unit of gate with its unit of up
  static constexpr uint32_t kHalfItems = kItemsPerUnit;
  static_assert(kBlockUnits % 2 == 0);

  uint32_t first_unit;

  __device__ __forceinline__ explicit GateUpPlan(const Stage& stage)
      : ProductPlan(stage), first_unit(in.inst.column_begin / kUnitRows) {}

  __device__ __forceinline__ ProductInput input() const {
    return input_of(in[&GateUp::gate].columns,
                    2 * (ceil_div(in.inst.column_end, kUnitRows) - first_unit), kHalfItems);
  }
  __device__ __forceinline__ WeightRows weights() const {
    const uint64_t skipped = first_unit * unit_bytes(in[&GateUp::gate]);
    return {{base_of(in[&GateUp::gate]) + skipped, base_of(in[&GateUp::up]) + skipped, 0},
            {0, 0, 0},
            true,
            unit_bytes(in[&GateUp::gate])};
  }

  static __device__ __forceinline__ void place(uint32_t item, uint32_t pair, uint32_t& unit,
                                               uint32_t& column) {
    unit = item / kItemsPerUnit * 2 + pair;
    column = item % kItemsPerUnit * 2;
  }
  __device__ __forceinline__ uint32_t column_of(uint32_t item, uint32_t unit) const {
    return (first_unit + unit / 2) * kUnitRows + item * 2;
  }

  __device__ __forceinline__ void prefetch(uint32_t item, uint32_t unit, uint32_t row,
                                           Prefetched& out) const {
    const uint32_t column = column_of(item, unit);
    load_bias(in, &GateUp::gate_bias, column, out.value[0], out.value[1]);
    load_bias(in, &GateUp::up_bias, column, out.value[2], out.value[3]);
    out.set_place(
        place_of(in[&GateUp::out], row, column, in.inst.column_begin, in.inst.column_end));
  }

  __device__ __forceinline__ void finish(uint32_t item, uint32_t unit, uint32_t row,
                                         float (&values)[4], const Prefetched& early) {
    float result[2];
#pragma unroll
    for (uint32_t j = 0; j < 2; ++j) {
      const float gate = values[j] + early.value[j], up = values[2 + j] + early.value[2 + j];
      result[j] = __fdividef(gate, 1.0f + __expf(-gate)) * up;
    }
    if (early.kind != kNone) return early.place().store(result[0], result[1], in.out_tag());
    write_columns(in[&GateUp::out], row, column_of(item, unit), in.inst.column_begin,
                  in.inst.column_end, result[0], result[1], in.out_tag());
  }
};

template <>
struct Kernel<GateUp> : ProductKernel<GateUpPlan> {};

}  // namespace megavm
