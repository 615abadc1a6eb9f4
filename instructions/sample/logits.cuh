// A row of logits, its order and its sequence: what a choice of a token works with.
#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

// An unsigned key in the order of the floats. Both zeros have the same key.
__device__ __forceinline__ uint32_t sort_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_sort_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// A candidate as one integer: larger means a higher score or, at equal scores, a lower token.
__device__ __forceinline__ uint64_t candidate(float score, uint32_t token) {
  return static_cast<uint64_t>(sort_key(score)) << 32 | static_cast<uint32_t>(~token);
}
__device__ __forceinline__ uint32_t token_of(uint64_t candidate) {
  return ~static_cast<uint32_t>(candidate);
}
__device__ __forceinline__ float score_of(uint64_t candidate) {
  return from_sort_key(static_cast<uint32_t>(candidate >> 32));
}

__device__ __forceinline__ uint64_t largest_of_warp(uint64_t value) {
#pragma unroll
  for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  return value;
}
__device__ __forceinline__ float largest_of_warp(float value) {
  return from_sort_key(__reduce_max_sync(~0u, sort_key(value)));
}

// The sequence of a logit row and the parameters of its choice, for AdjustLogits and Sample.
template <class Instruction>
struct Choice {
  uint32_t row;
  uint32_t sequence;
  uint32_t position = 0;  // position of the sequence's last token
  bool enabled;
  const Operands<Instruction>& in;

  __device__ __forceinline__ Choice(const Operands<Instruction>& in, uint32_t row)
      : row(row), in(in) {
    const Tensor& tokens = in[&Instruction::tokens];
    const Tensor& row_sequence = in[&Instruction::row_sequence];
    const uint32_t step_row =
        static_cast<uint32_t>(constant_integer(in[&Instruction::logit_row], row, 0));
    if (step_row >= row_sequence.rows)
      stop_instruction(Fault::kLogitRow, row, 0, step_row, row_sequence.rows);
    sequence = sequence_of(row_sequence, step_row, tokens);
    enabled = integer(sample::kEnabled) != 0;
    if (!enabled) return;
    // The next position, which receives the token, must exist as well.
    position = position_of(in[&Instruction::row_position], step_row, in.step(), tokens.columns - 1);
  }

  __device__ __forceinline__ int32_t integer(uint32_t column) const {
    return constant_integer(in[&Instruction::sampling_integer], sequence, column);
  }
  __device__ __forceinline__ float real(uint32_t column) const {
    return constant_element(in[&Instruction::sampling_real], sequence, column);
  }

  // Whether only some tokens may be drawn.
  __device__ __forceinline__ bool is_limited(float temperature) const {
    const bool limits =
        integer(sample::kTopK) > 0 || real(sample::kTopP) < 1.0f || real(sample::kMinP) > 0.0f;
    return temperature != 0.0f && limits;
  }
};

// Scores of a sequence's tokens: a_t - log(-log(u_t)).
struct Scores {
  uint64_t seed;
  uint32_t position;

  template <class Instruction>
  __device__ __forceinline__ explicit Scores(const Choice<Instruction>& choice)
      : seed(static_cast<uint64_t>(static_cast<uint32_t>(choice.integer(sample::kSeedHigh))) << 32 |
             static_cast<uint32_t>(choice.integer(sample::kSeedLow))),
        position(choice.position) {}

  // 24 random bits n from (seed, position, token); u is (n + 0.5) / 2^24.
  __device__ __forceinline__ uint32_t bits(uint32_t token) const {
    uint64_t z =
        seed + 0x9E3779B97F4A7C15ull * ((static_cast<uint64_t>(position) << 32 | token) + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    z ^= z >> 31;
    return static_cast<uint32_t>(z >> 40);
  }

  // A number that the score exceeds by `margin` at most: since -log(u) >= 1 - u, the noise is at
  // most -log(1 - u). So most tokens need no logarithms of doubles.
  static __device__ __forceinline__ float bound(float a, uint32_t n) {
    const float rest = (static_cast<float>((1u << 24) - n) - 0.5f) * 0x1p-24f;
    return a - ptx::log2(rest) * (1.0f / kLog2E);
  }
  static __device__ __forceinline__ float margin(float a) { return 1e-3f + 1e-6f * fabsf(a); }

  static __device__ __forceinline__ float score(float a, uint32_t n) {
    const double u = (static_cast<double>(n) + 0.5) / (1 << 24);
    return a + static_cast<float>(-log(-log(u)));
  }
};

// A row of float32 in global memory, read by aligned 16 bytes.
struct LogitRow {
  uint64_t address;
  uint32_t size;

  // Call use(vector, values) for every aligned 16 bytes of this thread, in ascending order, with
  // kBatch loads in flight. Element j of a vector is token(vector, j); a token that is not below
  // `size` is outside the row, and its value is -inf.
  template <uint32_t kBatch, class Use>
  __device__ __forceinline__ void each(uint32_t thread, Use&& use) const {
    const uint32_t vectors = ceil_div(skew() + size, 4);
#pragma unroll 1
    for (uint32_t first = thread; first < vectors; first += kBatch * kNumConsumerThreads) {
      ptx::Words4 raw[kBatch] = {};
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) raw[i] = load(first + i * kNumConsumerThreads);
#pragma unroll
      for (uint32_t i = 0; i < kBatch; ++i) {
        const float values[4] = {__uint_as_float(raw[i].x), __uint_as_float(raw[i].y),
                                 __uint_as_float(raw[i].z), __uint_as_float(raw[i].w)};
        use(first + i * kNumConsumerThreads, values);
      }
    }
  }

  __device__ __forceinline__ uint32_t skew() const {
    return static_cast<uint32_t>(address) / 4 % 4;
  }
  __device__ __forceinline__ uint32_t token(uint32_t vector, uint32_t j) const {
    return vector * 4 + j - skew();
  }
  __device__ __forceinline__ bool is_whole(uint32_t vector) const {
    return token(vector, 0) < size && token(vector, 3) < size;
  }
  __device__ __forceinline__ uint64_t at(uint32_t token) const {
    return address + uint64_t{token} * 4;
  }
  __device__ __forceinline__ float value(uint32_t token) const {
    return __uint_as_float(ptx::load_relaxed1(at(token)));
  }

  __device__ __forceinline__ ptx::Words4 load(uint32_t vector) const {
    if (is_whole(vector)) return ptx::load_relaxed4(at(token(vector, 0)));
    return {word(token(vector, 0)), word(token(vector, 1)), word(token(vector, 2)),
            word(token(vector, 3))};
  }
  // Four neighbouring tokens from `first` on.
  __device__ __forceinline__ ptx::Words4 four(uint32_t first) const {
    if (at(first) % 16 == 0 && first + 4 <= size) return ptx::load_relaxed4(at(first));
    return {word(first), word(first + 1), word(first + 2), word(first + 3)};
  }
  // The bits of a value; those of -inf outside the row.
  __device__ __forceinline__ uint32_t word(uint32_t token) const {
    return token < size ? ptx::load_relaxed1(at(token)) : 0xff800000u;
  }
};

}  // namespace megavm
