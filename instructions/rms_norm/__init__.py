"""Root-mean-square normalisation of rows, where it is not fused into the instruction that reads them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.instructions.tiles import ranges, shapes
from megavm.vm.config import NONE
from megavm.vm.isa import Instruction
from megavm.vm.operands import integer, present, real, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole


class RmsNorm(Instruction):
    """out[r, :] := x[r, :] / sqrt(mean(x[r, :]^2) + eps) * gain

    for the live rows of [row_begin, row_end), in float32, rounded once (Zhang and Sennrich 2019,
    arXiv:1910.07467).
    """

    opcode = 4
    row_by_row = True

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    gain = tensor("gain [k]", F32, BF16)
    out = tensor("normalised rows [rows, k]", F32, BF16, tagged=True)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    eps = real("added to the mean square", least=0.0)

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        k = tensors[self.x].columns
        yield Region(self.x, (self.row_begin, self.row_end), (0, k))
        for handle in present(self.gain, self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (0, tensors[self.out].columns))

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        return 4 * (self.row_end - self.row_begin) * tensors[self.x].columns

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, out = tensors[self.x], tensors[self.out]
        yield from ranges(rows=(self.row_begin, self.row_end, min(x.rows, out.rows)))
        yield from shapes(
            tensors,
            gain=(self.gain, x.columns, 1),
            out=(self.out, None, x.columns),
            row_count=(self.row_count, 1, 1),
        )
        if self.x == self.out:
            yield "x and out are the same tensor, but a row is read twice while it is written"
        if self.gain == NONE:
            yield "gain is absent"
