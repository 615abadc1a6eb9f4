"""Matrix product with optional row gather before it, bias and residual after it, and RMSNorm around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from megavm.instructions.product import Product, group_rows
from megavm.instructions.step_rows import ROW_INDEX_FAULT
from megavm.instructions.tiles import (
    check_scaled,
    ranges,
    scaled_writes,
    shapes,
    squares_units,
    unit_of,
)
from megavm.vm.config import BOX_COLUMNS, NONE, WIDE_SQUARES
from megavm.vm.constants import Constant, largest, union
from megavm.vm.isa import TagOrder
from megavm.vm.layout import Layout, units
from megavm.vm.operands import integer, present, real, tensor
from megavm.vm.tensors import BF16, F32, I32, DType, Region, TensorSpec, whole

PART_COLUMNS = BOX_COLUMNS  # a part of the columns of x begins at a multiple of this


class Matmul(Product):
    """out[r, c] := scale(i(r)) * (x[i(r), K] . weight[c, K]) + bias[c] + residual[r, c] + addends

    for the live rows of [row_begin, row_end) and the columns [column_begin, column_end). ``i(r)`` is
    ``row_index[r]``, or r without it. ``matrix`` must be 0 with it. The input of the product is rounded
    to the weight's type, sums are float32, and the result is rounded once to the type of ``out``.

    RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467), h / sqrt(mean(h^2) + eps) * gain, is fused into
    the instructions before and after it, without a pass of its own. The instruction that makes h also
    writes h times the gain, rounded once, and sums of squares, each over n columns of the unrounded
    result::

        out_scaled[r, c] := out[r, c] * out_gain[c]
        out_squares[r, j] := sum of out[r, c]^2 for the c of [n j, n (j + 1))

    n is 64 if out_squares has as many columns as that needs, else 8. With 64, readers of many rows have less
    to add up; on a GPU, ``matrix`` must be 1.

    The instruction that reads them as x and ``x_squares`` multiplies by the factor that all columns share:
    scale(i) is 1 / sqrt(sum(x_squares[i]) / k + eps), or 1 without ``x_squares``; x has k columns.

    K is the columns [part * part_k, (part + 1) * part_k) of x that exist. A product of long rows may be
    split into one instruction for each part of the columns. Parts write their results side by side into
    one tensor, where ``out`` above begins at column part * columns. A later instruction adds them: a
    Reduce, or one of the parts. That one has ``addends``, the sum of addends[r, j * columns + c] over all
    j, in order of j, and its result begins at column 0. A part cannot have ``x_squares``.

    With ``peaks`` the instruction also writes the largest result of each row and its column:
    peaks[r, 2 tile] := max out[r, c], or not-a-number if one of them is; peaks[r, 2 tile + 1] := the lowest c
    with out[r, c] equal to it (anything after not-a-number). Column numbers are exact in float32. If ranks
    gather ``peaks``, they count through the columns of all ranks, whether ``out`` is gathered or not: on rank
    q they begin with q times the columns that a rank writes of ``out``.
    """

    opcode = 5
    faults = ROW_INDEX_FAULT

    x = tensor("input [rows, k]", F32, BF16, tagged=True)
    weight = tensor("weight [columns, k]", F32, BF16)
    bias = tensor("bias [columns]", F32, BF16, optional=True)
    x_squares = tensor(
        "squares of x before its gain [rows, ceil(k / 8) or k / 64]",
        F32,
        optional=True,
        tagged=True,
    )
    residual = tensor("added to the product [rows, columns]", F32, BF16, optional=True, tagged=True)
    out = tensor("result [rows, columns]", F32, BF16, tagged=True, gathered=True)
    addends = tensor(
        "other parts of the product [rows, parts * columns]", F32, optional=True, tagged=True
    )
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
    peaks = tensor(
        "largest result and its column [rows, 2 * tiles]",
        F32,
        optional=True,
        tagged=True,
        gathered=True,
    )
    row_index = tensor("row of x for each row of out [rows]", I32, optional=True)
    row_count = tensor("number of live rows of out [1]; all when absent", I32, optional=True)
    row_begin = integer("first row of out")
    row_end = integer("end of the rows")
    column_begin = integer("first column of out")
    column_end = integer("end of the columns")
    part = integer("which part of the columns of x and weight")
    part_k = integer("columns of a part; the last may have fewer")
    x_rows = integer("row_index stays below this; row_end without row_index")
    tile = integer("number of the column tile, in peaks; 0 without peaks")
    eps = real("added to the mean square of x_squares", least=0.0)
    matrix = integer("1: a GPU multiplies the rows as a matrix; 0: in groups", default=0)

    def weight_rows(self) -> tuple[int, int]:
        return self.column_begin, self.column_end

    def k(self, tensors: Sequence[TensorSpec]) -> tuple[int, int]:
        begin = self.part * self.part_k
        return begin, min(begin + self.part_k, tensors[self.weight].columns)

    def awaited(self) -> tuple[int, ...]:
        return (self.residual,)

    def out_begin(self, tensors: Sequence[TensorSpec]) -> int:
        """The column of out where column 0 goes."""
        return self.part * tensors[self.weight].rows if self.addends == NONE else 0

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        rows, columns = (self.row_begin, self.row_end), (self.column_begin, self.column_end)
        k = self.k(tensors)
        x_rows = rows if self.row_index == NONE else (0, self.x_rows)
        yield Region(self.x, x_rows, k)
        yield Region(self.weight, columns, k)
        for handle in present(self.row_count):
            yield whole(tensors, handle)
        for handle in present(self.x_squares):
            yield Region(handle, x_rows, (0, tensors[handle].columns))
        for handle in present(self.bias, self.out_gain):
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
        begin = self.out_begin(tensors)
        yield Region(self.out, rows, (begin + self.column_begin, begin + self.column_end))
        yield from scaled_writes(tensors, self)
        for handle in present(self.peaks):
            yield Region(handle, rows, (2 * self.tile, 2 * self.tile + 2))

    def flops(self, tensors: Sequence[TensorSpec]) -> int:
        tile = (self.row_end - self.row_begin) * (self.column_end - self.column_begin)
        begin, end = self.k(tensors)
        return 2 * tile * (end - begin)

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        size = tensors[self.weight].rows
        parts = 0 if self.addends == NONE else tensors[self.addends].columns // size
        return {
            **super().constants(tensors),
            "max_addends": largest(parts),
            "any_out_scaled": union(self.out_scaled != NONE),
            "squares_units": squares_units(tensors, self),
            "out_kinds": self.kinds(tensors, self.out),
            "scaled_kinds": self.kinds(tensors, self.out_scaled),
            "squares_kinds": self.kinds(tensors, self.out_squares),
        }

    def layouts(self, tensors: Sequence[TensorSpec]) -> Mapping[str, tuple[Layout, ...]]:
        return {"weight": (units(),)}

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        gathers = self.row_index != NONE and (self.x_rows > 1 or self.row_begin > 0)
        if gathers and any(tensors[h].tagged for h in present(self.x, self.x_squares)):
            return TagOrder.BY_MACHINE  # the kernel reads only the gathered rows of x
        for handle in present(self.residual):
            spec = tensors[handle]
            paired = spec.dtype is F32 and spec.columns % 2 == 0
            if spec.tagged and not (most_rows <= 1 and paired):
                # Stricter than the kernel, which waits for it while its weights stream.
                return TagOrder.BY_MACHINE
        order = super().tag_order(tensors, most_rows)
        if self.addends == NONE:
            return order
        # Each thread reads the addends that it adds right before it stores its results. With tagged addends and
        # results, the kernel of several rows stores nothing before all threads have read theirs.
        results = present(self.out, self.out_scaled, self.out_squares, self.peaks)
        tags = any(tensors[h].tagged for h in results)
        if tensors[self.addends].tagged:
            if (tags and not self._meets(most_rows, tensors)) or order is TagOrder.BY_MACHINE:
                return TagOrder.BY_MACHINE
            return order if tags else TagOrder.WRITES_EARLY
        return TagOrder.READS_LATE if tags and order is TagOrder.KEPT else order

    def _meets(self, most_rows: int, tensors: Sequence[TensorSpec]) -> bool:
        """Whether it is finished by the kernel of several rows, all pairs together."""
        rows = self.row_end - self.row_begin
        is_one_group = not self.matrix and rows <= group_rows(rows, tensors[self.weight].dtype)
        return most_rows > 1 and is_one_group and self.passes(most_rows, tensors) == 1

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, weight, out = tensors[self.x], tensors[self.weight], tensors[self.out]
        yield from ranges(
            rows=(self.row_begin, self.row_end, out.rows),
            columns=(
                self.column_begin,
                self.column_end,
                min(weight.rows, out.own_columns - self.out_begin(tensors)),
            ),
            k=(*self.k(tensors), weight.columns),
            x_rows=(0, self.x_rows, x.rows),
        )
        yield from super().check(tensors)
        yield from shapes(tensors, residual=(self.residual, None, weight.rows))
        yield from check_scaled(tensors, self, weight.rows)
        if unit_of(tensors, self) == WIDE_SQUARES and not self.matrix:
            yield (
                f"out_squares is {tensors[self.out_squares].name}, with sums of {WIDE_SQUARES} columns, but "
                "matrix is 0"
            )
        if self.part_k < weight.columns:
            if self.x_squares != NONE:
                yield f"part {self.part} of {self.part_k} columns of x cannot have x_squares"
            if self.part_k % PART_COLUMNS:
                yield (
                    f"part_k is {self.part_k}, expected a multiple of {PART_COLUMNS} or all "
                    f"{weight.columns} columns"
                )
        if out.tagged and self.out_begin(tensors) * out.dtype.size % 4:
            yield (
                f"out is {out.name}, which is tagged, but part {self.part} begins at column "
                f"{self.out_begin(tensors)} of {out.dtype.name}, within a word"
            )
        if self.out_begin(tensors) and self.out_scaled != NONE:
            yield f"part {self.part} has out_scaled, but out is one of the parts of a sum"
        if self.addends != NONE and tensors[self.addends].columns % weight.rows:
            yield (
                f"addends are {tensors[self.addends].columns} columns, "
                f"expected a multiple of {weight.rows}"
            )
        if self.row_index == NONE and self.x_rows != self.row_end:
            yield f"x_rows is {self.x_rows}, expected row_end {self.row_end} without row_index"
        if self.row_index != NONE and self.matrix:
            yield f"matrix is {self.matrix}, expected 0 with row_index"
        if self.peaks == NONE and self.tile:
            yield f"tile is {self.tile}, expected 0 without peaks"
        if self.peaks != NONE:
            columns = tensors[self.peaks].shares * out.own_columns
            if not self.may_have_peaks(out.dtype, columns):
                yield (
                    f"peaks are of {out.name}, {columns} columns of {out.dtype.name}: "
                    "expected fewer than 2^24 of F32"
                )

    @staticmethod
    def may_have_peaks(dtype: DType, columns: int) -> bool:
        """Whether float32 holds the results and the numbers of their columns exactly.

        ``columns``: of all ranks, if they gather the peaks.
        """
        return dtype is F32 and columns < 1 << 24
