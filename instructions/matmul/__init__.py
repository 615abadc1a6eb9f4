"""Matrix product with optional row gather and normalisation before it, bias and residual after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.instructions.tiles import product_constants, product_resources, ranges, shapes
from megavm.vm.config import NONE
from megavm.vm.isa import (
    BF16,
    F32,
    I32,
    Instruction,
    Region,
    Resources,
    TensorSpec,
    integer,
    present,
    real,
    tensor,
    whole,
)

PART_COLUMNS = 32  # parts of the columns of x begin at multiples of this: of tiles of weights


class Matmul(Instruction):
    """out[r, out_begin + c] := norm(x[i(r), K]) . weight[c, K] + bias[c] + residual[r, c] + addends

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end). ``i(r)`` is
    ``row_index[r]``, or r without it. ``norm`` is RmsNorm with ``gain`` and ``eps``, or nothing without
    a gain. The input of the product is rounded to the weight's type, sums are float32, and the result is
    rounded once to the type of ``out``.

    K is [k_begin, k_end). A product of long rows may be split: one instruction for each part of the
    columns of x, of which all but one leave their results side by side in a tensor, and that one adds
    them up: ``addends`` is the sum of addends[r, j * columns + c] over all j, in their order. A part
    cannot be normalised.

    With ``peaks`` the instruction also writes the largest result of each row and where it is:
    peaks[r, 2 tile] := max out[r, c], or not-a-number if one of them is; peaks[r, 2 tile + 1] := the lowest c
    with out[r, c] equal to it (anything after not-a-number). Column numbers are exact in float32.
    """

    opcode = 5

    x = tensor("input [rows, k]", F32, BF16)
    weight = tensor("weight [columns, k]", F32, BF16)
    bias = tensor("bias [columns]", F32, BF16, optional=True)
    gain = tensor("gain of the normalisation [k]", F32, BF16, optional=True)
    residual = tensor("added to the product [rows, columns]", F32, BF16, optional=True)
    out = tensor("result [rows, columns]", F32, BF16)
    addends = tensor("other parts of the product [rows, parts * columns]", F32, optional=True)
    peaks = tensor("largest result and its column [rows, 2 * tiles]", F32, optional=True)
    row_index = tensor("row of x for each row of out [rows]", I32, optional=True)
    row_count = tensor("number of live rows of out [1]; all when absent", I32, optional=True)
    row_begin = integer("first row of out")
    row_end = integer("end of the rows")
    column_begin = integer("first column of out")
    column_end = integer("end of the columns")
    k_begin = integer("first column of x and weight")
    k_end = integer("end of those columns")
    out_begin = integer("column of out where column 0 goes")
    x_rows = integer("row_index stays below this; row_end without row_index")
    tile = integer("number of the column tile, in peaks; 0 without peaks")
    eps = real("added to the mean square")

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        k = (self.k_begin, self.k_end)
        x_rows = rows if self.row_index == NONE else (0, self.x_rows)
        yield Region(self.x, x_rows, k)
        yield Region(self.weight, columns, k)
        for handle in present(self.gain, self.row_count):
            yield whole(tensors, handle)
        for handle in present(self.bias):
            yield Region(handle, columns, (0, 1))
        for handle in present(self.residual):
            yield Region(handle, rows, columns)
        for handle in present(self.addends):
            size = tensors[self.weight].rows
            for part in range(tensors[handle].columns // size):
                yield Region(handle, rows, (part * size + columns[0], part * size + columns[1]))
        for handle in present(self.row_index):
            yield Region(handle, rows, (0, 1))

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows = (self.row_begin, self.row_end)
        begin = self.out_begin
        yield Region(self.out, rows, (begin + self.column_begin, begin + self.column_end))
        for handle in present(self.peaks):
            yield Region(handle, rows, (2 * self.tile, 2 * self.tile + 2))

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        return 2 * tile * (self.k_end - self.k_begin)

    def resources(self, tensors: Sequence[TensorSpec]) -> Resources:
        weight = tensors[self.weight]
        return product_resources(
            self.row_end - self.row_begin,
            self.column_end - self.column_begin,
            self.k_end - self.k_begin,
            weight.dtype.size,
        )

    def specialise(self, tensors: Sequence[TensorSpec]) -> dict[str, int]:
        """What device code must know at compile time."""
        weight = tensors[self.weight]
        parts = 0 if self.addends == NONE else tensors[self.addends].columns // weight.rows
        return {
            **product_constants(
                tensors,
                x=self.x,
                weight=self.weight,
                gain=self.gain,
                biases=(self.bias,),
                k=(self.k_begin, self.k_end),
            ),
            "max_addends": parts,
        }

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, weight, out = tensors[self.x], tensors[self.weight], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(
                self.column_begin,
                self.column_end,
                min(weight.rows, out.columns - self.out_begin),
            ),
            k=(self.k_begin, self.k_end, weight.columns),
            x_rows=(0, self.x_rows, x.rows),
        )
        yield from shapes(
            tensors,
            x=(self.x, None, weight.columns),
            bias=(self.bias, weight.rows, 1),
            gain=(self.gain, weight.columns, 1),
            residual=(self.residual, None, weight.rows),
            row_count=(self.row_count, 1, 1),
        )
        if self.k_end - self.k_begin < weight.columns:
            if self.gain != NONE:
                yield f"k [{self.k_begin}, {self.k_end}) is a part of x, which cannot be normalised"
            if self.k_begin % PART_COLUMNS:
                yield f"k_begin is {self.k_begin}, expected a multiple of {PART_COLUMNS}"
            if self.k_end < weight.columns and self.k_end % PART_COLUMNS:
                yield f"k_end is {self.k_end}, expected a multiple of {PART_COLUMNS} or all columns"
        if self.addends != NONE and tensors[self.addends].columns % weight.rows:
            yield (
                f"addends are {tensors[self.addends].columns} columns, "
                f"expected a multiple of {weight.rows}"
            )
        if self.row_index == NONE and self.x_rows != self.row_end:
            yield f"x_rows is {self.x_rows}, expected row_end {self.row_end} without row_index"
        if self.peaks == NONE and self.tile:
            yield f"tile is {self.tile}, expected 0 without peaks"
        if self.peaks != NONE and not self.may_have_peaks(out):
            yield (
                f"peaks are of {out.name}, {out.columns} columns of {out.dtype.name}: "
                "expected fewer than 2^24 of F32"
            )

    @staticmethod
    def may_have_peaks(out: TensorSpec) -> bool:
        """Whether float32 holds the results and the numbers of their columns exactly."""
        return out.dtype is F32 and out.columns < 1 << 24
