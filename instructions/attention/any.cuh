// Attention for any shape and type. A warp computes one query head at a time. Its lanes share the
// tokens to compute scores, then the elements of the head to add up values.
#pragma once

#include "instructions/attention/span.cuh"

namespace megavm {

struct AnyAttention {
  static constexpr uint32_t kElements = ceil_div(attention::kHeadDim, kLanes);  // per lane

  static __device__ __forceinline__ void load(const Operands<Attention>&, Loader&) {}

  static __device__ __forceinline__ float cached(const Tensor& cache, uint32_t block, uint32_t head,
                                                 uint32_t slot, uint32_t e) {
    const bool swizzled = layout_of(cache) == Layout::kSwizzled;
    const uint32_t column = (head * attention::kBlockSize + slot) * attention::kHeadDim +
                            swizzled_element(swizzled, slot, e);
    const uint64_t address = element_at(cache, block, column);
    if (is_f32(cache)) return __uint_as_float(ptx::load_relaxed1(address));
    return ptx::from_bf16(ptx::load_relaxed_half(address));
  }

  static __device__ __forceinline__ void attend(const Operands<Attention>& in, uint32_t row,
                                                const AttentionSpan& span, uint32_t query) {
    constexpr uint32_t d = attention::kHeadDim;
    const Attention& inst = in.inst;
    const Tensor& keys = in[&Attention::k_cache];
    const Tensor& values = in[&Attention::v_cache];
    const Tensor& table = in[&Attention::block_table];
    const uint32_t lane = lane_index(), head = query / attention::kGroup;
    float highest = -kInfinity, total = 0.0f, sum[kElements];
#pragma unroll
    for (float& s : sum) s = 0.0f;
    // NOTE: an empty split waits for its queries too. Otherwise it could run a step ahead, and
    // overwrite its partial result before the merge of this step has read it.
    for (uint32_t e = lane; e < d; e += kLanes)
      read_element(in[&Attention::q], row, query * d + e, in.word(&Attention::q));
    __syncwarp();
    for (uint32_t first = span.begin; first < span.end; first += kLanes) {
      const uint32_t token = first + lane;
      const bool own = span.newest && token == span.end - 1;
      float score = -kInfinity;
      uint32_t block = 0;
      if (token < span.end) {
        if (!own) block = kv_block(table, span.sequence, token / attention::kBlockSize, keys.rows);
        score = 0.0f;
        for (uint32_t e = 0; e < d; ++e) {
          const float q =
              read_element(in[&Attention::q], row, query * d + e, in.word(&Attention::q));
          const float k = own ? read_element(in[&Attention::k_new], row, head * d + e,
                                             in.word(&Attention::k_new))
                              : cached(keys, block, head, token % attention::kBlockSize, e);
          score = fmaf(q, k, score);
        }
        score *= inst.scale;
      }
      end_together();
      float peak = score;
      for (uint32_t offset = 16; offset > 0; offset /= 2)
        peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, offset));
      peak = fmaxf(peak, highest);
      const float rescale = expf(highest - peak);
      const float weight = expf(score - peak);
      highest = peak;
      total = total * rescale + weight;
#pragma unroll
      for (float& s : sum) s *= rescale;
      for (uint32_t i = 0; i < kLanes && first + i < span.end; ++i) {
        const float w = __shfl_sync(~0u, weight, i);
        const uint32_t from = __shfl_sync(~0u, block, i),
                       slot = (first + i) % attention::kBlockSize;
#pragma unroll
        for (uint32_t j = 0; j < kElements; ++j) {
          const uint32_t e = j * kLanes + lane;
          if (e >= d) continue;
          const float v = span.newest && first + i == span.end - 1
                              ? read_element(in[&Attention::v_new], row, head * d + e,
                                             in.word(&Attention::v_new))
                              : cached(values, from, head, slot, e);
          sum[j] = fmaf(w, v, sum[j]);
        }
      }
    }
    for (uint32_t offset = 16; offset > 0; offset /= 2)
      total += __shfl_xor_sync(~0u, total, offset);
    store(in, row, query, sum, highest, total);
  }

  static __device__ __forceinline__ void store(const Operands<Attention>& in, uint32_t row,
                                               uint32_t query, const float (&sum)[kElements],
                                               float highest, float total) {
    constexpr uint32_t d = attention::kHeadDim;
    const uint32_t lane = lane_index();
    const bool whole = in.inst.num_splits == 1;
    const Tensor& to = whole ? in[&Attention::out] : in[&Attention::partial];
    const uint32_t heads = in[&Attention::q].columns / d;
    const uint32_t base = whole ? query * d : (in.inst.split * heads + query) * (d + 2);
#pragma unroll
    for (uint32_t j = 0; j < kElements; ++j) {
      const uint32_t e = j * kLanes + lane;
      const float value = whole ? __fdividef(sum[j], total) : sum[j];
      // The lane of the first element stores a tagged word of two bf16.
      const float next = __shfl_down_sync(~0u, value, 1);
      if (e >= d) continue;
      if (is_f32(to) || !is_tagged(to))
        write_element(to, row, base + e, value);
      else if (e % 2 == 0)
        write_pair(to, row, base + e, value, next, true);
    }
    if (!whole && lane == 0) {
      write_element(to, row, base + d, highest);
      write_element(to, row, base + d + 1, total);
    }
  }

  static __device__ __forceinline__ void consume(const Operands<Attention>& in,
                                                 Consumer& consumer) {
    const Attention& inst = in.inst;
    const uint32_t live = live_end(in, &Attention::row_count, inst.row_begin, inst.row_end);
    consumer.wait_ready();
    for (uint32_t row = inst.row_begin; row < live; ++row) {
      const AttentionSpan span(in, row);
      const uint32_t end = inst.head_end * attention::kGroup;
      for (uint32_t query = inst.head_begin * attention::kGroup + consumer.warp(); query < end;
           query += kNumConsumers)
        attend(in, row, span, query);
    }
  }
};

}  // namespace megavm
