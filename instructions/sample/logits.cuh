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

__device__ __forceinline__ uint64_t largest_of_warp(uint64_t value) {
#pragma unroll
  for (uint32_t offset = kLanes / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, value, offset);
    value = other > value ? other : value;
  }
  return value;
}

// The sequence of a logit row, and the parameters of its choice.
struct Choice {
  uint32_t row;
  uint32_t sequence;
  uint32_t position = 0;  // position of the sequence's last token
  uint32_t masked = 0;    // stop tokens that may not be chosen
  bool enabled;
  bool greedy = false;
  bool penalised = false;  // penalties, a mask or a bias change the logits
  const Operands<Sample>& in;

  __device__ __forceinline__ Choice(const Operands<Sample>& in, uint32_t row) : row(row), in(in) {
    const Tensor& tokens = in[&Sample::tokens];
    const Tensor& row_sequence = in[&Sample::row_sequence];
    const uint32_t step_row =
        static_cast<uint32_t>(constant_integer(in[&Sample::logit_row], row, 0));
    if (step_row >= row_sequence.rows)
      stop_instruction(Fault::kLogitRow, row, 0, step_row, row_sequence.rows);
    sequence = sequence_of(row_sequence, step_row, tokens);
    enabled = integer(sample::kEnabled) != 0;
    if (!enabled) return;
    // The next position, which receives the token, must exist as well.
    position = position_of(in[&Sample::row_position], step_row, in.step(), tokens.columns - 1);
    const int32_t stops = integer(sample::kNumStop);
    if (static_cast<uint32_t>(stops) > kMaxStopTokens)
      stop_instruction(Fault::kNumStop, sequence, 0, stops, kMaxStopTokens);
    masked = static_cast<int32_t>(position + 1) < integer(sample::kMinLength) ? stops : 0;
    greedy = real(sample::kTemperature) == 0.0f;
    penalised = real(sample::kRepetitionPenalty) != 1.0f ||
                real(sample::kPresencePenalty) != 0.0f || real(sample::kFrequencyPenalty) != 0.0f;
    if constexpr (sample::kAnyRestricted) penalised |= is_restricted();
  }

  __device__ __forceinline__ int32_t integer(uint32_t column) const {
    return constant_integer(in[&Sample::sampling_integer], sequence, column);
  }
  __device__ __forceinline__ float real(uint32_t column) const {
    return constant_element(in[&Sample::sampling_real], sequence, column);
  }
  __device__ __forceinline__ uint32_t history(uint32_t i) const {
    return ptx::load_relaxed1(element_at(in[&Sample::tokens], sequence, i));
  }
  __device__ __forceinline__ bool is_masked(uint32_t token) const {
    bool found = false;
#pragma unroll 1
    for (uint32_t i = 0; i < masked; ++i)
      found |= static_cast<uint32_t>(integer(sample::kStop + i)) == token;
    return found;
  }
  // Whether the sequence has a mask or a bias.
  __device__ __forceinline__ bool is_restricted() const {
    return in.has(&Sample::allowed) &&
           (integer(sample::kMasked) != 0 || integer(sample::kBiased) != 0);
  }
  // A logit of this row with the bias, or -inf if its token may not be chosen.
  __device__ __forceinline__ float restricted(float logit, uint32_t token) const {
    if (!in.has(&Sample::allowed)) return logit;
    if (integer(sample::kBiased) != 0)
      logit += constant_element(in[&Sample::bias], sequence, token);
    if (integer(sample::kMasked) == 0) return logit;
    // The host may have written it while the kernel ran.
    const uint32_t word =
        ptx::load_relaxed1(element_at(in[&Sample::allowed], sequence, token / sample::kMaskBits));
    return word >> token % sample::kMaskBits & 1 ? logit : -kInfinity;
  }
  // Wait until the host has written the mask. Its numbers wrap around, so compare by difference.
  __device__ __forceinline__ void await_mask() const {
    if (!in.has(&Sample::allowed) || integer(sample::kMasked) == 0) return;
    const uint32_t awaited =
        static_cast<uint32_t>(constant_integer(in[&Sample::masks_awaited], 0, 0));
    const uint64_t address = element_at(in[&Sample::masks_written], 0, 0);
    const auto* number = reinterpret_cast<const uint32_t*>(address);
    uint32_t written = ptx::load_acquire_system(number);
    while (static_cast<int32_t>(written - awaited) < 0) {
      if (__builtin_expect(is_stopping(), 0))
        stop_instruction(Fault::kMasks, row, 0, written, awaited);
      written = ptx::load_acquire_system(number);
    }
  }
  __device__ __forceinline__ void append(uint32_t token) const {
    ptx::store(element_at(in[&Sample::tokens], sequence, position + 1), token);
  }
};

// A row of float32 in global memory that all consumer threads traverse together.
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
    constexpr uint32_t kNothing = 0xff800000u;  // -inf
    ptx::Words4 raw = {kNothing, kNothing, kNothing, kNothing};
    if (token(vector, 0) < size) raw.x = ptx::load_relaxed1(at(token(vector, 0)));
    if (token(vector, 1) < size) raw.y = ptx::load_relaxed1(at(token(vector, 1)));
    if (token(vector, 2) < size) raw.z = ptx::load_relaxed1(at(token(vector, 2)));
    if (token(vector, 3) < size) raw.w = ptx::load_relaxed1(at(token(vector, 3)));
    return raw;
  }
};

}  // namespace megavm
