"""Products: instructions that multiply rows of x with a weight, and finish the sums in their own way.

On a GPU they share one kernel (``products.cuh``); what makes an instruction of it is its epilogue. Their
declarations share the class ``Product``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from megavm.instructions.tiles import (
    LOADED_SQUARES,
    kinds,
    round_up,
    shapes,
    squares_of,
    squares_unit,
)
from megavm.vm.config import (
    BLOCK_UNITS,
    CPU_LANES,
    INPUT_BYTES,
    MATRIX_BLOCKS,
    MAX_GROUP_ROWS,
    MAX_MATRIX_ROWS,
    MAX_SPAN_UNITS,
    MIN_GROUP_ROWS,
    MIN_MATRIX_ROWS,
    MIN_ROWS_CHUNK_PAGES,
    MOST_COUNTED_PAGES,
    NONE,
    PANEL_COLUMNS,
    ROW_CHUNK_PAGES,
    SPLIT_COLUMNS,
    TILE_ROW_BYTES,
    TILES_PER_PAGE,
    UNIT_ROWS,
)
from megavm.vm.constants import Constant, largest, union
from megavm.vm.cuda.memory import rows_chunk_pages
from megavm.vm.isa import Instruction, StepShape, TagOrder
from megavm.vm.layout import has_boxes
from megavm.vm.operands import Field, present
from megavm.vm.tensors import BF16, F32, DType, TensorSpec

# Most columns of an input that is exchanged as words in steps of several rows.
_WORDS_COLUMNS = MIN_ROWS_CHUNK_PAGES * TILES_PER_PAGE * TILE_ROW_BYTES // BF16.size

# On the CPU.
_ROW_BLOCK = CPU_LANES  # rows whose sums are kept together
_COLUMN_BLOCK = 2 * CPU_LANES  # output columns whose sums are alive at the same time
_SPARE_BYTES = 64 * 1024  # for sums of whole blocks, and the buffers of a multiplication method
_ROW_BYTES = 32  # number, scale, position, KV block and peak of a row


class Product(Instruction, is_base=True):
    """s[r] * (x[r] . weight[c]) + bias[c] for rows r of x and c of the weight, and an epilogue.

    The scale s[r] is 1 / RMS of a row of x, from ``x_squares``, or 1. Subclasses declare these operands and
    their own, and the regions that they read and write.
    """

    family = "Products"
    row_by_row = True  # without a row_index

    x: Field[int]
    weight: Field[int]
    bias: Field[int]
    x_squares: Field[int]
    row_count: Field[int]
    row_begin: Field[int]
    row_end: Field[int]
    eps: Field[float]
    matrix: Field[int]

    def weight_rows(self) -> tuple[int, int]:
        """The rows [begin, end) of the weight that it multiplies, in the order in which a GPU stores them."""
        raise NotImplementedError(f"{type(self).__name__} does not declare its rows of the weight")

    def k(self, tensors: Sequence[TensorSpec]) -> tuple[int, int]:
        """The columns [begin, end) of x and weight that it multiplies; all by default."""
        return 0, tensors[self.weight].columns

    def awaited(self) -> tuple[int, ...]:
        """Handles, or NONE, of what the GPU's epilogue awaits when it finishes a block of columns."""
        return ()

    def working_bytes(self, tensors: Sequence[TensorSpec]) -> int:
        """See Instruction.

        Input rows of up to ``INPUT_BYTES`` stay in working memory while weights stream by, and only one
        block of columns has live sums (*input-stationary*: decode). Otherwise the sums of the whole tile
        stay and slices of the input stream by as well (*output-stationary*: prefill).
        """
        itemsize = tensors[self.weight].dtype.size
        rows = self.row_end - self.row_begin
        first, end = self.k(tensors)
        input_bytes = rows * round_up(end - first, PANEL_COLUMNS) * itemsize
        sums = round_up(rows, _ROW_BLOCK) * _COLUMN_BLOCK
        if input_bytes > INPUT_BYTES:
            least = rows * itemsize * SPLIT_COLUMNS
            input_bytes = least * max(INPUT_BYTES // least, 1)
            begin, end = self.weight_rows()
            sums = rows * (end - begin)
        return input_bytes + 4 * sums + _ROW_BYTES * round_up(rows, _ROW_BLOCK) + _SPARE_BYTES

    def constants(self, tensors: Sequence[TensorSpec]) -> Mapping[str, Constant]:
        """See Instruction; cuda/config.cuh defines each but those of single classes (``kinds``)."""
        weight, x = tensors[self.weight], tensors[self.x]
        begin, end = self.k(tensors)
        width = end - begin
        squares = 0
        if self.x_squares != NONE:
            squares = 1 << tensors[self.x_squares].tagged
            squares |= 4 if tensors[self.x_squares].columns % LOADED_SQUARES else 0
        both = {
            "any_part_of_k": union(width < weight.columns),
            "any_bf16_weights": union(weight.dtype is not F32),
            "any_squares": union(squares),
            "any_bias": union(self.bias != NONE),
        }
        if self.matrix:
            return both | {"matrix_rows": largest(matrix_rows(self.row_end - self.row_begin))}
        tile = TILE_ROW_BYTES // weight.dtype.size
        page = tile * TILES_PER_PAGE
        pages = -(-width // page)
        return both | {
            "any_product": union(1),
            "group_rows": largest(group_rows(self.row_end - self.row_begin, weight.dtype)),
            "max_k": largest(width),
            "span_units": largest(self._span_units(pages > rows_chunk_pages(pages))),
            "any_ragged_k": union(weight.columns % tile != 0),
            "any_partial_pages": union(width % page != 0),
            "unit_page_counts": union(1 << min(pages, MOST_COUNTED_PAGES)),
            "any_f32_weights": union(weight.dtype is F32),
            "any_inputs": union(1 << (2 * (x.dtype is F32) + x.tagged)),
        }

    def _units(self) -> int:
        """Units of the weight that it multiplies."""
        begin, end = self.weight_rows()
        return -(-end // UNIT_ROWS) - begin // UNIT_ROWS

    def _span_units(self, chunked: bool) -> int:
        """The units, in whole blocks, that a kernel of several rows multiplies with a chunk of x."""
        blocks = -(-self._units() // BLOCK_UNITS) if chunked else 1
        return min(blocks * BLOCK_UNITS, MAX_SPAN_UNITS)

    def kinds(self, tensors: Sequence[TensorSpec], *results: int) -> Constant:
        """``tiles.kinds`` of the results of a matrix product. Epilogues of others do not ask."""
        return kinds(tensors, *(results if self.matrix else ()))

    def tag_order(self, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        """See Instruction.

        A product loops over rows in groups, over units of 8 rows of the weight in blocks, and, once for
        each block, over long rows in chunks (some kernels once for several blocks, of which none is
        finished before the last chunk). It reads x and x_squares for each group, and ``awaited`` when a
        block is finished, or each pass of a block.

        A matrix product reads all of x before it finishes a group of blocks, a few sums at a time.
        """
        awaited = list(present(*self.awaited()))
        tagged = [h for h in present(self.x, self.x_squares, *awaited) if tensors[h].tagged]
        rows, units = self.row_end - self.row_begin, self._units()
        if self.matrix:
            if tagged:
                return TagOrder.BY_MACHINE
            once = rows <= MAX_MATRIX_ROWS and units <= MATRIX_BLOCKS * BLOCK_UNITS
            return TagOrder.KEPT if once and not awaited else TagOrder.READS_LATE
        weight = tensors[self.weight]
        groups = -(-rows // (1 if most_rows <= 1 else group_rows(rows, weight.dtype)))
        blocks = self.passes(most_rows, tensors)
        if groups > 1 and tagged:
            return TagOrder.BY_MACHINE
        if blocks > 1 and any(h in awaited for h in tagged):
            return TagOrder.BY_MACHINE
        first, last = self.k(tensors)
        pages = ROW_CHUNK_PAGES if most_rows <= 1 else MIN_ROWS_CHUNK_PAGES
        row_bytes = (last - first) * weight.dtype.size
        chunked = row_bytes > pages * TILES_PER_PAGE * TILE_ROW_BYTES
        late = groups > 1 or (chunked and units > BLOCK_UNITS) or (blocks > 1 and awaited)
        return TagOrder.READS_LATE if late else TagOrder.KEPT

    @classmethod
    def prefers_words(cls, operand: str, operands: Collection[str], shape: StepShape) -> bool:
        if shape.rows == 1:
            return True
        # Kernels of several rows leave a tagged residual to the machine, and the words of rows that are
        # gathered. Of wide inputs they hold only a part of the columns, and look at them in several turns.
        if operand not in ("x", "x_squares") or "row_index" in operands:
            return False
        few = shape.rows <= MAX_GROUP_ROWS and shape.columns <= _WORDS_COLUMNS
        return few and shape.ranks == 1

    def passes(self, most_rows: int, tensors: Sequence[TensorSpec]) -> int:
        """How often its GPU kernel finishes a part of its pairs, if it takes rows in groups.

        A kernel for more rows has more such parts: blocks, or passes of a block.
        """
        kernel_rows = group_rows(most_rows, tensors[self.weight].dtype)
        return -(-self._units() * kernel_rows // (BLOCK_UNITS * MIN_GROUP_ROWS))

    def check(self, tensors: Sequence[TensorSpec]) -> Iterator[str]:
        x, weight = tensors[self.x], tensors[self.weight]
        squares = 0 if self.x_squares == NONE else tensors[self.x_squares].columns
        unit = squares_unit(weight.columns, squares)
        yield from shapes(
            tensors,
            x=(self.x, None, weight.columns),
            x_squares=(self.x_squares, None, squares_of(weight.columns, unit)),
            bias=(self.bias, weight.rows, 1),
            row_count=(self.row_count, 1, 1),
        )
        written = {region.tensor for region in self.writes(tensors)}
        for name, handle in (("x", self.x), ("x_squares", self.x_squares)):
            if handle in written:
                yield (
                    f"{name} and a result are {tensors[handle].name}, but inputs are read again for "
                    "other columns"
                )
        rows = self.row_end - self.row_begin
        most = int(is_matrix_product(x, weight, rows))
        if self.matrix > most:
            yield (
                f"matrix is {self.matrix}, expected at most {most} for {rows} rows of {x.name} and "
                f"weights {weight.name}"
            )


def is_matrix_product(x: TensorSpec, weight: TensorSpec, rows: int) -> bool:
    """Whether a GPU can multiply ``rows`` rows of x as a matrix (matrix.cuh)."""
    return rows > MAX_GROUP_ROWS and has_boxes(x) and weight.dtype is BF16


def group_rows(rows: int, weights: DType) -> int:
    """The rows that a GPU multiplies together in products of so many rows that are no matrix products."""
    return MIN_GROUP_ROWS if rows <= MIN_GROUP_ROWS or weights is F32 else MAX_GROUP_ROWS


def matrix_rows(rows: int) -> int:
    """The rows that a matrix product of ``rows`` rows takes at a time: a power of two."""
    return min(max(MIN_MATRIX_ROWS, 1 << (rows - 1).bit_length()), MAX_MATRIX_ROWS)
