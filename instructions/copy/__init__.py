"""Copies a rectangle from one tensor to another, converting the element type, or rows that an index names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.step_rows import ROW_INDEX_FAULT
from megavm.instructions.tiles import ranges, shapes
from megavm.vm.config import NONE
from megavm.vm.constants import Constant, union
from megavm.vm.isa import Instruction
from megavm.vm.operands import integer, present, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole


class Copy(Instruction):
    """out[row_begin + i, column_begin + j] := x[x_row + i, x_column + j]

    for i < row_end - row_begin and j < column_end - column_begin; rounded once if ``out`` is narrower.

    With ``row_index`` it takes the rows that this names: out[r, column_begin + j] := x[row_index[r], x_column
    + j] for the live rows r of [row_begin, row_end).

    If ranks gather ``out``, ``only`` may name the one rank that gets the tile. A rank that gives every rank
    another one *scatters*: the first half of a reduce-scatter.
    """

    opcode = 2
    row_by_row = True  # without a row_index
    faults = ROW_INDEX_FAULT

    x = tensor("source", F32, BF16, tagged=True)
    out = tensor("destination", F32, BF16, tagged=True, gathered=True)
    x_row = integer("first source row; 0 with row_index")
    x_column = integer("first source column")
    row_begin = integer("first destination row")
    row_end = integer("end of the destination rows")
    column_begin = integer("first destination column")
    column_end = integer("end of the destination columns")
    only = integer("the one rank that gets the tile; all when absent", default=NONE)
    row_index = tensor("row of x for each row of out [rows]", I32, optional=True)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    x_rows = integer("row_index stays below this; NONE without row_index", default=NONE)

    @property
    def only_rank(self) -> int | None:
        """The one rank that gets the tile; None: all ranks."""
        return None if self.only == NONE else self.only

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        columns = self.x_column, self.x_column + self.column_end - self.column_begin
        rows = self.x_row, self.x_row + self.row_end - self.row_begin
        yield Region(self.x, rows if self.row_index == NONE else (0, self.x_rows), columns)
        for handle in present(self.row_index):
            yield Region(handle, (self.row_begin, self.row_end), (0, 1))
        for handle in present(self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        yield Region(self.out, rows, columns, only=self.only_rank)

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        elements = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return elements * (tensors[self.x].dtype.size + tensors[self.out].dtype.size)

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        return {"any_index": union(self.row_index != NONE)}

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, out = tensors[self.x], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(self.column_begin, self.column_end, out.own_columns),
        )
        yield from shapes(tensors, row_count=(self.row_count, 1, 1))
        if self.row_index == NONE and (self.row_count != NONE or self.x_rows != NONE):
            yield "row_count and x_rows are of copies with row_index"
        if self.row_index != NONE:
            yield from ranges(x_rows=(0, self.x_rows, x.rows))
            if self.x_row:
                yield f"x_row is {self.x_row}, expected 0 with row_index"
            for name, spec in (("x", x), ("out", out)):
                if spec.tagged:
                    yield f"{name} is {spec.name}, which is tagged, but there is a row_index"
            if self.x == self.out:
                yield f"x and out are {x.name}, but row_index names rows of x in any order"
