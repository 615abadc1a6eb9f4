#pragma once

#include "instructions/step_rows.cuh"

namespace megavm {

// The tokens that an attention instruction attends to for one row.
struct AttentionSpan {
  uint32_t begin, end;  // tokens of the split
  uint32_t cached;      // tokens [begin, cached) are read from the caches
  bool newest;          // whether the row's own token comes from k_new and v_new, in this split
  uint32_t sequence;

  __device__ __forceinline__ AttentionSpan(const Operands<Attention>& in, uint32_t row) {
    const Tensor& table = in[&Attention::block_table];
    sequence = sequence_of(in[&Attention::row_sequence], row, table);
    const uint32_t position = position_of(in[&Attention::row_position], row, in.step(),
                                          table.columns * attention::kBlockSize);
    const Attention& inst = in.inst;
    const uint32_t tokens = position + 1;
    const uint32_t chunks = ceil_div(tokens, inst.chunk);
    begin = inst.split * chunks / inst.num_splits * inst.chunk;
    end = min_of((inst.split + 1) * chunks / inst.num_splits * inst.chunk, tokens);
    begin = min_of(begin, end);
    newest = in.has(&Attention::k_new) && begin <= position && position < end;
    cached = newest ? position : end;
  }
};

}  // namespace megavm
