"""Copies a rectangle from one tensor to another, converting the element type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.instructions.tiles import ranges
from megavm.vm.config import NONE
from megavm.vm.isa import Instruction
from megavm.vm.operands import integer, tensor
from megavm.vm.tensors import BF16, F32, Region, TensorSpec


class Copy(Instruction):
    """out[row_begin + i, column_begin + j] := x[x_row + i, x_column + j]

    for i < row_end - row_begin and j < column_end - column_begin; rounded once if ``out`` is narrower.

    If ranks gather ``out``, ``only`` may name the one rank that gets the tile. A rank that gives every rank
    another one *scatters*: the first half of a reduce-scatter.
    """

    opcode = 2
    row_by_row = True

    x = tensor("source", F32, BF16, tagged=True)
    out = tensor("destination", F32, BF16, tagged=True, gathered=True)
    x_row = integer("first source row")
    x_column = integer("first source column")
    row_begin = integer("first destination row")
    row_end = integer("end of the destination rows")
    column_begin = integer("first destination column")
    column_end = integer("end of the destination columns")
    only = integer("the one rank that gets the tile; all when absent", default=NONE)

    @property
    def only_rank(self) -> int | None:
        """The one rank that gets the tile; None: all ranks."""
        return None if self.only == NONE else self.only

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = self.row_end - self.row_begin, self.column_end - self.column_begin
        yield Region(
            self.x,
            (self.x_row, self.x_row + rows),
            (self.x_column, self.x_column + columns),
        )

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        yield Region(self.out, rows, columns, only=self.only_rank)

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        out = tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(self.column_begin, self.column_end, out.own_columns),
        )
