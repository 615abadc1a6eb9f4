"""First half of Llama's MLP: two products of the same input, joined by SiLU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.tiles import (
    product_constants,
    product_tag_order,
    product_working_bytes,
    ranges,
    shapes,
    squares_of,
    units_of,
)
from megavm.vm.isa import (
    BF16,
    F32,
    I32,
    Constant,
    Instruction,
    Region,
    TagOrder,
    TensorSpec,
    integer,
    present,
    real,
    tensor,
    whole,
)
from megavm.vm.layout import Layout, units


class GateUp(Instruction):
    """out[r, c] := silu(s[r] * (x[r] . gate[c]) + gate_bias[c]) * (s[r] * (x[r] . up[c]) + up_bias[c])

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end); silu(a) is
    a / (1 + exp(-a)). The scale s[r], from ``x_squares``, and the rounding are as in Matmul. (SwiGLU: Shazeer
    2020, arXiv:2002.05202.)
    """

    opcode = 6

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    gate = tensor("gate weight [columns, k]", F32, BF16)
    up = tensor("up weight [columns, k]", F32, BF16)
    gate_bias = tensor("gate bias [columns]", F32, BF16, optional=True)
    up_bias = tensor("up bias [columns]", F32, BF16, optional=True)
    x_squares = tensor(
        "squares of x before its gain [rows, ceil(k / 8)]", F32, optional=True, tagged=True
    )
    out = tensor("result [rows, columns]", F32, BF16, tagged=True)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    column_begin = integer("first column")
    column_end = integer("end of the columns")
    eps = real("added to the mean square of x_squares", least=0.0)

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        k = tensors[self.gate].columns
        yield Region(self.x, rows, (0, k))
        yield Region(self.gate, columns, (0, k))
        yield Region(self.up, columns, (0, k))
        for handle in present(self.x_squares):
            yield Region(handle, rows, (0, tensors[handle].columns))
        for handle in present(self.row_count):
            yield whole(tensors, handle)
        for handle in present(self.gate_bias, self.up_bias):
            yield Region(handle, columns, (0, 1))

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (self.column_begin, self.column_end))

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return tile * (4 * tensors[self.gate].columns + 5)

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        gate = tensors[self.gate]
        return product_working_bytes(
            self.row_end - self.row_begin,
            2 * (self.column_end - self.column_begin),
            gate.columns,
            gate.dtype.size,
        )

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        return product_constants(
            tensors,
            x=self.x,
            weight=self.gate,
            x_squares=self.x_squares,
            biases=(self.gate_bias, self.up_bias),
        )

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        return {"gate": (units(),), "up": (units(),)}

    def tag_order(self, tensors: Sequence[TensorSpec], single_row: bool) -> TagOrder:
        gate = tensors[self.gate]
        return product_tag_order(
            tensors,
            rows=self.row_end - self.row_begin,
            units=2 * units_of(self.column_begin, self.column_end),
            k=gate.columns,
            itemsize=gate.dtype.size,
            inputs=(self.x, self.x_squares),
            single_row=single_row,
        )

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, gate, out = tensors[self.x], tensors[self.gate], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(x.rows, out.rows)),
            columns=(self.column_begin, self.column_end, min(gate.rows, out.columns)),
        )
        yield from shapes(
            tensors,
            x=(self.x, None, gate.columns),
            x_squares=(self.x_squares, None, squares_of(gate.columns)),
            up=(self.up, gate.rows, gate.columns),
            gate_bias=(self.gate_bias, gate.rows, 1),
            up_bias=(self.up_bias, gate.rows, 1),
            row_count=(self.row_count, 1, 1),
        )
        if tensors[self.up].dtype is not gate.dtype:
            yield f"up holds {tensors[self.up].dtype.name}, gate {gate.dtype.name}"
