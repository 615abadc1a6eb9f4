"""Adds up parts of rows, such as the sums of all ranks, with optional bias and residual, before RMSNorm."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from megavm.instructions.tiles import (
    check_scaled,
    kinds,
    ranges,
    round_up,
    scaled_writes,
    shapes,
    squares_units,
    unit_of,
)
from megavm.vm.config import MIN_GROUP_ROWS, NONE, NUM_CONSUMER_WARPS
from megavm.vm.constants import Constant, union
from megavm.vm.isa import Instruction, StepShape, TagOrder
from megavm.vm.operands import integer, present, tensor
from megavm.vm.tensors import BF16, F32, I32, Region, TensorSpec, whole


class Reduce(Instruction):
    """out[r, c] := parts[r, c] + parts[r, columns + c] + ... + bias[c] + residual[r, c]

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end). Parts are added
    in order, then bias and residual, in float32; the result is rounded once. ``out_scaled`` and
    ``out_squares`` are as in Matmul.

    If ranks gather ``parts``, this is the second half of an all-reduce: the order is that of the ranks, so
    all ranks get the same bits.
    """

    opcode = 11
    row_by_row = True

    parts = tensor("parts side by side [rows, parts * columns]", F32, tagged=True)
    bias = tensor("bias [columns]", F32, BF16, optional=True)
    residual = tensor("added to the sum [rows, columns]", F32, BF16, optional=True, tagged=True)
    out = tensor("result [rows, columns]", F32, BF16, tagged=True, gathered=True)
    out_gain = tensor("gain of the normalisation of out [columns]", F32, BF16, optional=True)
    out_scaled = tensor(
        "out times its gain [rows, columns]", F32, BF16, optional=True, tagged=True, gathered=True
    )
    out_squares = tensor(
        "squares of out [rows, ceil(columns / 8) or columns / 64]",
        F32,
        optional=True,
        tagged=True,
        gathered=True,
    )
    row_count = tensor("number of live rows [1]; all when absent", I32, optional=True)
    row_begin = integer("first row")
    row_end = integer("end of the rows")
    column_begin = integer("first column of out")
    column_end = integer("end of the columns")

    def num_parts(self, tensors: Sequence[TensorSpec]) -> int:
        """Number of parts."""
        return tensors[self.parts].columns // tensors[self.out].own_columns

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, (begin, end) = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        size = tensors[self.out].own_columns
        for part in range(self.num_parts(tensors)):
            yield Region(self.parts, rows, (part * size + begin, part * size + end))
        for handle in present(self.bias, self.out_gain):
            yield Region(handle, (begin, end), (0, 1))
        for handle in present(self.residual):
            yield Region(handle, rows, (begin, end))
        for handle in present(self.row_count):
            yield whole(tensors, handle)

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        yield Region(self.out, (self.row_begin, self.row_end), (self.column_begin, self.column_end))
        yield from scaled_writes(tensors, self)

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return tile * self.num_parts(tensors)

    @classmethod
    def prefers_words(cls, operand: str, operands: Collection[str], shape: StepShape) -> bool:
        # One worker reads each word, but of many rows the storer would have to handle the words.
        return shape.rows <= MIN_GROUP_ROWS

    def constants(self, tensors: Sequence[TensorSpec]) -> dict[str, Constant]:
        results = self.out, self.out_scaled, self.out_squares
        quads = self.bias == NONE and not any(tensors[h].tagged for h in present(*results))
        return {
            "squares_units": squares_units(tensors, self),
            "bare": union(quads and NONE in (self.residual, self.out_scaled)),
            "out_kinds": kinds(tensors, *(results[:1] if quads else ())),
            "scaled_kinds": kinds(tensors, *(results[1:2] if quads else ())),
            "gain_kinds": kinds(tensors, *((self.out_gain,) if quads else ())),
        }

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        # A thread adds a pair of columns. If none has more than one, the kernel synchronises between
        # all reads and all stores.
        pairs = round_up(
            -(-(self.column_end - self.column_begin) // 2), unit_of(tensors, self) // 2
        )
        if (self.row_end - self.row_begin) * pairs <= 32 * NUM_CONSUMER_WARPS:
            return TagOrder.KEPT
        if any(tensors[h].tagged for h in present(self.parts, self.residual)):
            return TagOrder.BY_MACHINE
        return TagOrder.READS_LATE

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        parts, out = tensors[self.parts], tensors[self.out]
        size = out.own_columns
        yield from ranges(
            rows=(self.row_begin, self.row_end, min(parts.rows, out.rows)),
            columns=(self.column_begin, self.column_end, size),
        )
        if self.column_begin % 2 or (self.column_end % 2 and self.column_end < size):
            yield (
                f"columns [{self.column_begin}, {self.column_end}) of {size} do not begin and end at "
                "even numbers"
            )
        if parts.columns % size:
            yield f"parts are {parts.columns} columns, expected a multiple of {size}"
        yield from shapes(
            tensors,
            bias=(self.bias, size, 1),
            residual=(self.residual, None, size),
            row_count=(self.row_count, 1, 1),
        )
        yield from check_scaled(tensors, self, size)
        if self.parts in present(self.out, self.out_scaled, self.out_squares):
            yield f"parts and results are {parts.name}, but parts of other columns are read later"
