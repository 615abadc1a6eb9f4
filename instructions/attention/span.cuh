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

  __device__ __forceinline__ AttentionSpan(const Operands<Attention>& in, uint32_t row) {
    const Tensor& table = in[&Attention::block_table];
    sequence = sequence_of(in[&Attention::row_sequence], row, table);
    position = position_of(in[&Attention::row_position], row, in.step(),
                           table.columns * attention::kBlockSize);
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

// How many of the rows from `row` on, at most `most` <= 32 of those before `live`, are no part of a
// run of several rows that begins with them. Called by whole warps.
__device__ __forceinline__ uint32_t count_single_rows(const Operands<Attention>& in, uint32_t row,
                                                      uint32_t most, uint32_t live) {
  if (!may_form_runs(in)) return most;
  const Tensor& sequences = in[&Attention::row_sequence];
  const Tensor& positions = in[&Attention::row_position];
  const uint32_t mine = row + min_of(lane_index(), most - 1);
  const bool goes_on =
      mine + 1 < live &&
      constant_integer(sequences, mine, 0) == constant_integer(sequences, mine + 1, 0) &&
      constant_integer(positions, mine, 0) + 1 == constant_integer(positions, mine + 1, 0);
  const uint32_t others = __ballot_sync(~0u, goes_on);
  return others == 0 ? most : min_of(most, __ffs(static_cast<int>(others)) - 1);
}

// A run: rows of one sequence at consecutive positions, which attend together. Loader and consumers
// cut the rows of an instruction into the same runs. Position and newest are those of its first
// row; its tokens are those that any of its rows attends to.
struct AttentionRun : AttentionSpan {
  uint32_t rows;

  // The run that begins at `row`: at most `most` rows, before `live`. Called by whole warps.
  __device__ __forceinline__ AttentionRun(const Operands<Attention>& in, uint32_t row,
                                          uint32_t live, uint32_t most)
      : AttentionSpan(in, row), rows(count(in, row, min_of(most, live - row))) {
    if (rows > 1) cached = end = AttentionSpan(in, row + rows - 1).end;
  }

 private:
  static __device__ __forceinline__ uint32_t count(const Operands<Attention>& in, uint32_t row,
                                                   uint32_t most) {
    if (!may_form_runs(in)) return 1;
    const Tensor& sequences = in[&Attention::row_sequence];
    const Tensor& positions = in[&Attention::row_position];
    const int32_t sequence = constant_integer(sequences, row, 0);
    const int32_t position = constant_integer(positions, row, 0);
    for (uint32_t known = 0; known < most; known += kLanes) {
      const uint32_t i = known + ptx::thread_index() % kLanes;
      const bool belongs =
          i < most && constant_integer(sequences, row + i, 0) == sequence &&
          constant_integer(positions, row + i, 0) == position + static_cast<int32_t>(i);
      const uint32_t others = ~__ballot_sync(~0u, belongs);
      if (others != 0) return known + __ffs(static_cast<int>(others)) - 1;
    }
    return most;
  }
};

}  // namespace megavm
