"""First half of Llama's MLP: two products of the same input, joined by SiLU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.product import Product
from megavm.instructions.tiles import ranges, whole_groups
from megavm.vm.constants import Constant
from megavm.vm.layout import Layout, units
from megavm.vm.operands import integer, present, real, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole


class GateUp(Product):
    """out[r, c] := silu(s[r] * (x[r] . weight[c]) + bias[c]) * (s[r] * (x[r] . weight[C + c]) + bias[C + c])

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end); C is half of the
    weight's rows, and silu(a) is a / (1 + exp(-a)). The scale s[r], from ``x_squares``, and the rounding are
    as in Matmul. (SwiGLU: Shazeer 2020, arXiv:2002.05202.)
    """

    opcode = 6

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    weight = tensor("gate rows, then up rows [2 * columns, k]", F32, BF16, parts=True)
    bias = tensor("bias of these rows [2 * columns]", F32, BF16, optional=True, parts=True)
    x_squares = tensor(
        "squares of x before its gain [rows, ceil(k / 8) or k / 64]",
        F32,
        optional=True,
        tagged=True,
    )
    out = tensor("result [rows, columns]", F32, BF16, tagged=True, gathered=True)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    column_begin = integer("first column")
    column_end = integer("end of the columns")
    eps = real("added to the mean square of x_squares", least=0.0)
    matrix = integer("1: a GPU multiplies the rows as a matrix; 0: in groups", default=0)

    def weight_rows(self) -> tuple[int, int]:
        return 2 * self.column_begin, 2 * self.column_end

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, weight = (self.row_begin, self.row_end), tensors[self.weight]
        yield Region(self.x, rows, (0, weight.columns))
        for first in (0, weight.rows // 2):
            columns = (first + self.column_begin, first + self.column_end)
            yield Region(self.weight, columns, (0, weight.columns))
            for handle in present(self.bias):
                yield Region(handle, columns, (0, 1))
        for handle in present(self.x_squares):
            yield Region(handle, rows, (0, tensors[handle].columns))
        for handle in present(self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (self.column_begin, self.column_end))

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return tile * (4 * tensors[self.weight].columns + 5)

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        return {**super().constants(tensors), "out_kinds": self.kinds(tensors, self.out)}

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        return {"weight": (units(tensors[self.weight].rows // 2),)}

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, weight, out = tensors[self.x], tensors[self.weight], tensors[self.out]
        if weight.rows % 2:
            yield f"weight is {weight.name} of {weight.rows} rows: gate and up have equally many"
            return
        columns = weight.rows // 2
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(x.rows, out.rows)),
            columns=(self.column_begin, self.column_end, min(columns, out.own_columns)),
        )
        yield from super().check(tensors)
        yield from whole_groups(tensors, columns, weight=self.weight, bias=self.bias)
