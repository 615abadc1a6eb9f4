#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

// Tokens [begin, end) of a sequence.
struct TokenRange {
  uint32_t begin, end;

  // The tokens that a row at this position sees in the instruction's split.
  __device__ __forceinline__ TokenRange(const Attention& inst, uint32_t position)
      : begin(0), end(position + 1) {
    if (inst.num_splits == 1) return;
    const uint32_t tokens = position + 1, chunks = ceil_div(tokens, inst.chunk);
    end = min_of((inst.split + 1) * chunks / inst.num_splits * inst.chunk, tokens);
    begin = min_of(inst.split * chunks / inst.num_splits * inst.chunk, end);
  }
};

// The tokens that an attention instruction attends to for one row.
struct AttentionSpan {
  uint32_t sequence, position;
  uint32_t begin, end;  // tokens of the split
  uint32_t cached;      // tokens [begin, cached) are read from the caches
  bool newest;          // whether the row's own token comes from k_new and v_new, in this split

  __device__ __forceinline__ AttentionSpan(const Operands<Attention>& in, uint32_t row)
      : sequence(sequence_of(in[&Attention::row_sequence], row, in[&Attention::block_table])),
        position(position_of(in[&Attention::row_position], row, in.step(),
                             most_tokens_of_sequence(in))) {
    see(in);
  }

  // The same of a row whose sequence and position are known, but not checked.
  __device__ __forceinline__ AttentionSpan(const Operands<Attention>& in, uint32_t row,
                                           uint32_t sequence, uint32_t position)
      : sequence(sequence), position(position) {
    check_sequence(sequence, row, in[&Attention::block_table]);
    check_position(position, row, most_tokens_of_sequence(in));
    see(in);
  }

 protected:
  static __device__ __forceinline__ uint32_t
  most_tokens_of_sequence(const Operands<Attention>& in) {
    return in[&Attention::block_table].columns * attention::kBlockSize;
  }

 private:
  __device__ __forceinline__ void see(const Operands<Attention>& in) {
    const TokenRange seen(in.inst, position);
    begin = seen.begin;
    end = seen.end;
    newest = in.has(&Attention::k_new) && begin <= position && position < end;
    cached = newest ? position : end;
  }
};

// Whether the rows of an instruction may form runs. A row with k_new has a sequence of its own.
// Tagged queries are waited for row by row.
__device__ __forceinline__ bool may_form_runs(const Operands<Attention>& in) {
  return attention::kRuns && !in.has(&Attention::k_new) && !is_tagged(in[&Attention::q]);
}

// Wait until the loader may read the caches. With k_new these are rows of earlier steps, which need
// not wait for queries.
__device__ __forceinline__ void wait_caches(const Operands<Attention>& in, Loader& loader) {
  if (kCopiesAhead && in.has(&Attention::k_new))
    loader.wait_earlier();
  else
    loader.wait_ready();
}

// Rows of a run, at most.
template <uint32_t kD>
constexpr uint32_t kRunRows = kMaxAttentionElements / (kD * attention::kGroup);

// The rows of an instruction from `row` on, as many as may attend together: at most kMost. Whole
// warps look up all of them at once: every one of these loads, after another, would take about
// 0.7 us.
template <uint32_t kMost>
struct RowsAhead {
  static constexpr uint32_t kLoads = attention::kRuns ? ceil_div(kMost, kLanes) : 1;

  uint32_t row;
  uint32_t sequence[kLoads], position[kLoads];  // lane i: of row i, i + kLanes, ...; not checked

  __device__ __forceinline__ RowsAhead(const Operands<Attention>& in, uint32_t row) : row(row) {
    if constexpr (attention::kRuns) {
#pragma unroll
      for (uint32_t i = 0; i < kLoads; ++i) {
        const uint32_t mine = min_of(row + number(i), in.inst.row_end - 1);
        sequence[i] =
            static_cast<uint32_t>(constant_integer(in[&Attention::row_sequence], mine, 0));
        position[i] =
            static_cast<uint32_t>(constant_integer(in[&Attention::row_position], mine, 0));
      }
    }
  }

  // How many of the rows, at most `most` <= 31 of those before `live`, are no part of a run of
  // several rows that begins with them.
  __device__ __forceinline__ uint32_t single(const Operands<Attention>& in, uint32_t most,
                                             uint32_t live) const {
    most = min_of(most, live - row);
    if (!may_form_runs(in)) return most;
    const uint32_t next_sequence = __shfl_down_sync(~0u, sequence[0], 1);
    const uint32_t next_position = __shfl_down_sync(~0u, position[0], 1);
    const bool goes_on = number(0) < most && row + number(0) + 1 < live &&
                         sequence[0] == next_sequence && position[0] + 1 == next_position;
    const uint32_t others = __ballot_sync(~0u, goes_on);
    return others == 0 ? most : min_of(most, __ffs(static_cast<int>(others)) - 1);
  }

  // How many of the rows, before `live`, are the run that begins with the first.
  __device__ __forceinline__ uint32_t run(const Operands<Attention>& in, uint32_t live) const {
    if (!may_form_runs(in)) return 1;
    const uint32_t most = min_of(kMost, live - row);
    const uint32_t first_sequence = __shfl_sync(~0u, sequence[0], 0);
    const uint32_t first_position = __shfl_sync(~0u, position[0], 0);
    uint32_t rows = 0;
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      const bool belongs = number(i) < most && sequence[i] == first_sequence &&
                           position[i] == first_position + number(i);
      const uint32_t others = ~__ballot_sync(~0u, belongs);
      const uint32_t more = others == 0 ? kLanes : __ffs(static_cast<int>(others)) - 1;
      if (rows == i * kLanes) rows += more;
    }
    return rows;
  }

 private:
  static __device__ __forceinline__ uint32_t number(uint32_t load) {
    return load * kLanes + ptx::thread_index() % kLanes;
  }
};

// A run: rows of one sequence at consecutive positions, which attend together. Loader and consumers
// cut the rows of an instruction into the same runs. Position and newest are those of its first
// row; its tokens are those that any of its rows attends to.
struct AttentionRun : AttentionSpan {
  uint32_t rows;

  // The run that begins with `ahead`, before `live`. Called by whole warps.
  template <uint32_t kMost>
  __device__ __forceinline__ AttentionRun(const Operands<Attention>& in,
                                          const RowsAhead<kMost>& ahead, uint32_t live)
      : AttentionSpan(first(in, ahead)), rows(ahead.run(in, live)) {
    if (rows == 1) return;
    const uint32_t last = position + rows - 1;
    check_position(last, ahead.row + rows - 1, most_tokens_of_sequence(in));
    cached = end = TokenRange(in.inst, last).end;
  }

 private:
  template <uint32_t kMost>
  static __device__ __forceinline__ AttentionSpan first(const Operands<Attention>& in,
                                                        const RowsAhead<kMost>& ahead) {
    if constexpr (!attention::kRuns) return AttentionSpan(in, ahead.row);
    return AttentionSpan(in, ahead.row, __shfl_sync(~0u, ahead.sequence[0], 0),
                         __shfl_sync(~0u, ahead.position[0], 0) + in.step());
  }
};

}  // namespace megavm
