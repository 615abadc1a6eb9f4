"""Looks up the embeddings of the step's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.step_rows import TOKEN_FAULT, row_faults
from megavm.instructions.tiles import check_scaled, ranges, scaled_writes, squares_units
from megavm.vm.config import NONE, NUM_CONSUMER_WARPS
from megavm.vm.constants import Constant, union
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.layout import ROWS, Layout, units
from megavm.vm.operands import integer, present, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole


class Embed(Instruction):
    """out[r, :] := table[tokens[row_sequence[r], row_position[r] + s], :]

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end); ``s`` is the
    number of the step within its launch, so a decode launch of many steps does not need the host.
    ``out_scaled`` and ``out_squares`` are as in Matmul.
    """

    opcode = 3
    faults = row_faults("tokens") | TOKEN_FAULT

    table = tensor("embeddings [vocabulary, hidden]", F32, BF16)
    tokens = tensor("token ids of every sequence [sequences, max length]", I32, produced=True)
    row_sequence = tensor("sequence of each row [rows]", I32)
    row_position = tensor("position of each row in its sequence [rows]", I32)
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    out = tensor("hidden state [rows, hidden]", F32, BF16, tagged=True, gathered=True)
    out_gain = tensor("gain of the normalisation of out [hidden]", F32, BF16, optional=True)
    out_scaled = tensor(
        "out times its gain [rows, hidden]", F32, BF16, optional=True, tagged=True, gathered=True
    )
    out_squares = tensor(
        "squares of out [rows, ceil(hidden / 8) or hidden / 64]",
        F32,
        optional=True,
        tagged=True,
        gathered=True,
    )
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
        for handle in present(self.row_count):
            yield whole(tensors, handle)
        for handle in present(self.out_gain):
            yield Region(handle, (self.column_begin, self.column_end), (0, 1))

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (self.column_begin, self.column_end))
        yield from scaled_writes(tensors, self)

    def bytes(self, tensors: Sequence[TensorSpec]) -> int:
        elements = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        written = sum(tensors[h].dtype.size for h in (self.out, *present(self.out_scaled)))
        return elements * (tensors[self.table].dtype.size + written)

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        return {
            "any_scaled": union(self.out_scaled != NONE),
            "squares_units": squares_units(tensors, self),
        }

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        return {"table": (ROWS, units())}

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        # If each warp has at most one row, all warps read before any warp stores.
        once = self.row_end - self.row_begin <= NUM_CONSUMER_WARPS
        return TagOrder.KEPT if once else TagOrder.READS_LATE

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        table, out = tensors[self.table], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(self.column_begin, self.column_end, out.own_columns),
        )
        if table.columns != out.own_columns:
            yield (
                f"table {table.name} has {table.columns} columns, out {out.name} {out.own_columns}"
            )
        yield from check_scaled(tensors, self, out.own_columns)
