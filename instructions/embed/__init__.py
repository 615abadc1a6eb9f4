"""Looks up the embeddings of the step's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.instructions.tiles import ranges
from megavm.vm.isa import BF16, F32, I32, Instruction, Region, TensorSpec, integer, tensor, whole


class Embed(Instruction):
    """out[r, :] := table[tokens[row_sequence[r], row_position[r] + s], :]

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end); ``s`` is the
    number of the step within its launch, so that a decode launch of many steps needs no help of the host.
    """

    opcode = 3

    table = tensor("embeddings [vocabulary, hidden]", F32, BF16)
    tokens = tensor("token ids of every sequence [sequences, max length]", I32)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    row_count = tensor("number of live rows [1]", I32)
    out = tensor("hidden state [rows, hidden]", F32, BF16)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    column_begin = integer("first column")
    column_end = integer("end of the columns")

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        table = tensors[self.table]
        yield Region(self.table, (0, table.rows), (self.column_begin, self.column_end))
        yield whole(tensors, self.tokens)
        yield Region(self.row_sequence, rows, (0, 1))
        yield Region(self.row_position, rows, (0, 1))
        yield whole(tensors, self.row_count)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (self.column_begin, self.column_end))

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        elements = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return elements * (tensors[self.table].dtype.size + tensors[self.out].dtype.size)

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        table, out = tensors[self.table], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(self.column_begin, self.column_end, out.columns),
        )
        if table.columns != out.columns:
            yield f"table {table.name} has {table.columns} columns, out {out.name} {out.columns}"
