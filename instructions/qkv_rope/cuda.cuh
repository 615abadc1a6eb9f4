#pragma once

#include "cuda/pipelines/plan.cuh"

namespace megavm {

// Weights are stored with the two rows of a rotation pair next to each other (layout kUnits with
// halves), so a unit of 8 rows is 4 rotation pairs of one of the three weights.
struct QkvRopePlan : ProductPlan<QkvRope> {
  static constexpr uint32_t kPairs = 2;  // an item is two rotation pairs
  static constexpr uint32_t kPairsPerUnit = kUnitRows / 2;
  static constexpr uint32_t kItemsPerUnit = kPairsPerUnit / 2;
  static constexpr uint32_t kHalfItems = 2 * kItemsPerUnit;

  __device__ __forceinline__ explicit QkvRopePlan(const Stage& stage) : ProductPlan(stage) {}

  // The instruction's share of the query (0), key (1) or value (2) weight.
  struct Part {
    uint32_t begin, end;  // rotation pairs
    uint32_t first_unit;  // the unit that holds pair `begin`
    uint32_t units;
  };
  __device__ __forceinline__ Part part(uint32_t number) const {
    const uint32_t q = in[&QkvRope::q_weight].rows / 2, k = in[&QkvRope::k_weight].rows / 2;
    const uint32_t first = number == 0 ? 0 : number == 1 ? q : q + k;
    const uint32_t pairs = number == 0 ? q : k;
    const uint32_t lowest = max_of(in.inst.pair_begin, first);
    const uint32_t highest = min_of(in.inst.pair_end, first + pairs);
    if (lowest >= highest) return {0, 0, 0, 0};
    Part p = {lowest - first, highest - first, (lowest - first) / kPairsPerUnit, 0};
    p.units = ceil_div(p.end, kPairsPerUnit) - p.first_unit;
    return p;
  }

  __device__ __forceinline__ uint32_t half() const { return in[&QkvRope::rope].columns / 2; }
  __device__ __forceinline__ const Tensor& weight(uint32_t part) const {
    return in.stage.tensors[in.word(&QkvRope::q_weight) + part];
  }

  // The weight that a unit belongs to, the unit's number in it, and the instruction's pairs of it.
  struct Unit {
    uint32_t part, number, begin, end;
  };
  __device__ __forceinline__ Unit unit_of(uint32_t unit) const {
    Unit found = {0, 0, 0, 0};
    uint32_t before = 0;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      const Part p = part(i);
      if (unit >= before && unit < before + p.units)
        found = {i, p.first_unit + unit - before, p.begin, p.end};
      before += p.units;
    }
    return found;
  }

  __device__ __forceinline__ ProductInput input() const {
    return input_of(weight(0).columns, part(0).units + part(1).units + part(2).units, kHalfItems);
  }
  __device__ __forceinline__ WeightRows weights() const {
    WeightRows rows = {};
    rows.unit_bytes = unit_bytes(weight(0));
    uint32_t units = 0;
#pragma unroll
    for (uint32_t i = 0; i < 3; ++i) {
      const Part p = part(i);
      rows.from[i] = base_of(weight(i)) + p.first_unit * unit_bytes(weight(i));
      rows.upto[i] = units += p.units;
    }
    return rows;
  }

  static __device__ __forceinline__ void place(uint32_t item, uint32_t pair, uint32_t& unit,
                                               uint32_t& column) {
    unit = item / kItemsPerUnit;
    column = item % kItemsPerUnit * 4 + 2 * pair;
  }
  // First rotation pair of an item, within its weight.
  static __device__ __forceinline__ uint32_t first_pair(const Unit& u, uint32_t item) {
    return u.number * kPairsPerUnit + item % kItemsPerUnit * 2;
  }

  // Fetch cosines, sines and biases of both rotation pairs, and the row's KV block and slot.
  __device__ __forceinline__ void prefetch(uint32_t item, uint32_t unit, uint32_t row,
                                           Prefetched& out) const {
    const Unit u = unit_of(unit + item / kItemsPerUnit);
    const uint32_t pair = first_pair(u, item), half = this->half();
    const Tensor& rope = in[&QkvRope::rope];
    const Tensor& table = in[&QkvRope::block_table];
    const uint32_t limit = min_of(rope.rows, table.columns * qkv_rope::kBlockSize);
    const uint32_t position = position_of(in[&QkvRope::row_position], row, in.step(), limit);
    const uint32_t sequence = sequence_of(in[&QkvRope::row_sequence], row, table);
    out.number[0] =
        kv_block(table, sequence, position / qkv_rope::kBlockSize, in[&QkvRope::k_cache].rows);
    out.number[1] = position % qkv_rope::kBlockSize;
#pragma unroll
    for (uint32_t m = 0; m < 2; ++m) {
      const uint32_t j = (pair + m) % half;
      out.value[m] = 1.0f;
      out.value[2 + m] = 0.0f;
      if (u.part < 2 && pair + m < u.end) {
        out.value[m] = constant_element(rope, position, j);
        out.value[2 + m] = constant_element(rope, position, half + j);
      }
      out.value[4 + m] = out.value[6 + m] = 0.0f;
      if (program::kAnyBias && (&in.inst.q_bias)[u.part] != kNone && pair + m < u.end) {
        const Tensor& bias = in.stage.tensors[in.word(&QkvRope::q_bias) + u.part];
        const uint32_t at = (pair + m) / half * 2 * half + j;
        out.value[4 + m] = constant_element(bias, at, 0);
        out.value[6 + m] = constant_element(bias, at + half, 0);
      }
    }
    // Places of both rotation pairs: elements j, j + 1 and half + j, half + j + 1 of a head.
    out.kind = kNone;
    out.to[1] = 0;
    if (half % 2 != 0 || pair < u.begin || pair + 1 >= u.end) return;
    const uint32_t head = pair / half, j = pair % half, d = 2 * half;
    if (u.part == 0) {
      out.set_place({in[&QkvRope::q], row, head * d + j});
      return;
    }
    const Tensor& cache = in.stage.tensors[in.word(&QkvRope::k_cache) + u.part - 1];
    if (dtype_of(cache) != DType::kBf16) return;
    if ((&in.inst.k_new)[u.part - 1] != kNone)
      out.set_place({in.stage.tensors[in.word(&QkvRope::k_new) + u.part - 1], row, head * d + j});
    if ((&in.inst.k_new)[u.part - 1] != kNone && out.kind == kNone) return;
    const bool swizzled = layout_of(cache) == Layout::kSwizzled;
    const uint32_t base = (head * qkv_rope::kBlockSize + out.number[1]) * d;
    out.to[1] =
        element_at(cache, out.number[0], base + swizzled_element(swizzled, out.number[1], j));
    out.to[2] = element_at(cache, out.number[0],
                           base + swizzled_element(swizzled, out.number[1], half + j));
  }

  // Store element e and, with `both`, e + 1 of a head.
  __device__ __forceinline__ void put(uint32_t part, uint32_t row, uint32_t head, uint32_t e,
                                      float first, float second, bool both,
                                      const Prefetched& early) const {
    const uint32_t d = 2 * half();
    if (part == 0)
      return write_pair(in[&QkvRope::q], row, head * d + e, first, second, both, in.out_tag());
    const uint32_t block = early.number[0], slot = early.number[1];
    if ((&in.inst.k_new)[part - 1] != kNone)
      write_pair(in.stage.tensors[in.word(&QkvRope::k_new) + part - 1], row, head * d + e, first,
                 second, both, in.out_tag());
    const Tensor& cache = in.stage.tensors[in.word(&QkvRope::k_cache) + part - 1];
    const uint32_t at = swizzled_element(layout_of(cache) == Layout::kSwizzled, slot, e);
    write_pair(cache, block, (head * qkv_rope::kBlockSize + slot) * d + at, first, second, both, 0);
  }

  __device__ __forceinline__ void finish(uint32_t item, uint32_t unit, uint32_t row,
                                         float (&values)[4], const Prefetched& early) {
    float low[2], high[2];
#pragma unroll
    for (uint32_t m = 0; m < 2; ++m) {
      const float a = values[2 * m] + early.value[4 + m];
      const float b = values[2 * m + 1] + early.value[6 + m];
      low[m] = a * early.value[m] - b * early.value[2 + m];
      high[m] = b * early.value[m] + a * early.value[2 + m];
    }
    if (early.kind != kNone) {
      const PairPlace place = early.place();
      place.store(low[0], low[1], in.out_tag());
      place.after(half()).store(high[0], high[1], in.out_tag());
    }
    if (early.to[1] != 0) {
      ptx::store(early.to[1], ptx::pack_bf16(low[0], low[1]));
      ptx::store(early.to[2], ptx::pack_bf16(high[0], high[1]));
    }
    if (early.kind != kNone || early.to[1] != 0) return;
    const Unit u = unit_of(unit + item / kItemsPerUnit);
    const uint32_t pair = first_pair(u, item), half = this->half();
    if (half % 2 == 0 && pair >= u.begin && pair + 1 < u.end) {
      const uint32_t head = pair / half, j = pair % half;
#pragma unroll 1
      for (uint32_t side = 0; side < 2; ++side)
        put(u.part, row, head, side * half + j, side ? high[0] : low[0], side ? high[1] : low[1],
            true, early);
      return;
    }
#pragma unroll 1
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t at = pair + i / 2, side = i % 2;
      const float value = i == 0 ? low[0] : i == 1 ? high[0] : i == 2 ? low[1] : high[1];
      if (at >= u.begin && at < u.end)
        put(u.part, row, at / half, side * half + at % half, value, 0.0f, false, early);
    }
  }
};

template <>
struct Kernel<QkvRope> : ProductKernel<QkvRopePlan> {};

}  // namespace megavm
