"""Joins the splits of Attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.instructions.attention import check_partial
from megavm.instructions.tiles import aligned, ranges, round_up
from megavm.vm.config import CPU_LANES
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.operands import integer, present, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole

ITEM_ELEMENTS = 32  # elements of a head (an item) that a warp of the GPU merges at a time
MAX_ITEMS = 32  # most items of an instruction that stores only after all its warps have read


class AttentionMerge(Instruction):
    """out[r, h] := sum_i w_i acc_i / sum_i w_i l_i with w_i = exp(m_i - max m)

    over the splits i < num_splits of ``partial[r, i, h]`` = (acc_i [d], m_i, l_i), for the live rows of
    [row_begin, row_end) and the query heads [head_begin, head_end).
    """

    opcode = 9

    partial = tensor("[rows, splits, heads, d + 2]", F32, tagged=True)
    out = tensor("result [rows, heads * d]", F32, BF16, tagged=True, gathered=True)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    head_begin = integer("first query head")
    head_end = integer("end of the query heads")
    head_dim = integer("d")
    num_splits = integer("splits to join")

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        heads, width = tensors[self.out].own_columns // self.head_dim, self.head_dim + 2
        for split in range(self.num_splits):
            first, last = split * heads + self.head_begin, split * heads + self.head_end
            yield Region(
                self.partial, (self.row_begin, self.row_end), (first * width, last * width)
            )
        for handle in present(self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(
            self.out,
            (self.row_begin, self.row_end),
            (self.head_begin * self.head_dim, self.head_end * self.head_dim),
        )

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        heads = self.head_end - self.head_begin
        return 2 * (self.row_end - self.row_begin) * heads * self.num_splits * self.head_dim

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        return aligned(4 * round_up(self.head_dim, CPU_LANES))

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        items = (self.row_end - self.row_begin) * (self.head_end - self.head_begin)
        items *= -(-self.head_dim // ITEM_ELEMENTS)
        if self.head_dim % 2 == 0 and items <= MAX_ITEMS:
            return TagOrder.KEPT
        return TagOrder.BY_MACHINE if tensors[self.partial].tagged else TagOrder.READS_LATE

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        out, partial = tensors[self.out], tensors[self.partial]
        if self.head_dim == 0 or out.own_columns % self.head_dim:
            yield f"out {out.name} has {out.own_columns} columns, not a multiple of {self.head_dim}"
            return
        heads = out.own_columns // self.head_dim
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(out.rows, partial.rows)),
            heads=(self.head_begin, self.head_end, heads),
            splits=(0, self.num_splits, partial.columns // (heads * (self.head_dim + 2))),
        )
        yield from check_partial(partial, self.head_dim)
