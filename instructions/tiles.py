"""Helpers of the matrix-product instructions: tile sizes, constants, and checks of operand shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megavm.vm.config import (
    BLOCK_UNITS,
    CPU_LANES,
    INPUT_BYTES,
    MATRIX_BLOCKS,
    MAX_GROUP_ROWS,
    MAX_MATRIX_ROWS,
    MIN_MATRIX_ROWS,
    NONE,
    PANEL_COLUMNS,
    ROW_CHUNK_PAGES,
    ROWS_CHUNK_PAGES,
    SPLIT_COLUMNS,
    TILE_ROW_BYTES,
    TILES_PER_PAGE,
    UNIT_ROWS,
)
from megavm.vm.constants import Constant, largest, union
from megavm.vm.isa import TagOrder
from megavm.vm.layout import has_boxes
from megavm.vm.operands import present
from megavm.vm.tensors import BF16, F32, Region, TensorSpec

# On the CPU.
_ROW_BLOCK = CPU_LANES  # rows whose sums are kept together
_COLUMN_BLOCK = 2 * CPU_LANES  # output columns whose sums are alive at the same time
_SPARE_BYTES = 64 * 1024  # for sums of whole blocks, and the buffers of a multiplication method
_ROW_BYTES = 32  # number, scale, position, KV block and peak of a row

SCALED = ("out_gain", "out_scaled", "out_squares")  # operands of a producer of rows to normalise


def round_up(size: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-size // unit) * unit


def aligned(size: int) -> int:
    """Bytes of the CPU's working memory that an allocation of ``size`` bytes takes."""
    return round_up(size, 64)


def product_working_bytes(rows: int, columns: int, k: int, itemsize: int) -> int:
    """Working memory of ``out[rows, columns] = x[rows, k] . w[columns, k]^T`` on the CPU.

    ``itemsize``: bytes of an element of w. Input rows of up to ``INPUT_BYTES`` stay there while weights
    stream by, and only one block of columns has live sums (*input-stationary*: decode). Otherwise the
    sums of the whole tile stay and slices of the input stream by as well (*output-stationary*: prefill).
    """
    held = rows * round_up(k, PANEL_COLUMNS) * itemsize
    sums = round_up(rows, _ROW_BLOCK) * _COLUMN_BLOCK
    if held > INPUT_BYTES:
        least = rows * itemsize * SPLIT_COLUMNS
        held = least * max(INPUT_BYTES // least, 1)
        sums = rows * columns
    return held + 4 * sums + _ROW_BYTES * round_up(rows, _ROW_BLOCK) + _SPARE_BYTES


def is_matrix_product(x: TensorSpec, weight: TensorSpec, rows: int) -> bool:
    """Whether a GPU can multiply ``rows`` rows of x as a matrix (instructions/product/matrix.cuh)."""
    return rows > MAX_GROUP_ROWS and has_boxes(x) and weight.dtype is BF16


def check_matrix(tensors: Sequence[TensorSpec], inst: Any) -> Iterator[str]:
    """A sentence about the operand ``matrix`` of a product."""
    x, weight, rows = tensors[inst.x], tensors[inst.weight], inst.row_end - inst.row_begin
    most = int(is_matrix_product(x, weight, rows))
    if inst.matrix > most:
        yield (
            f"matrix is {inst.matrix}, expected at most {most} for {rows} rows of {x.name} and weights "
            f"{weight.name}"
        )


def matrix_rows(rows: int) -> int:
    """The rows that a matrix product of ``rows`` rows takes at a time: a power of two."""
    return min(max(MIN_MATRIX_ROWS, 1 << (rows - 1).bit_length()), MAX_MATRIX_ROWS)


def product_constants(
    tensors: Sequence[TensorSpec],
    *,
    rows: int,
    matrix: int,
    x: int,
    weight: int,
    x_squares: int,
    bias: int = NONE,
    width: int | None = None,
) -> dict[str, Constant]:
    """Constants of the device code for ``x . weight^T`` (cuda/config.cuh defines each).

    ``matrix``: the operand of that name. ``width``: the number of columns that are multiplied, if not all.
    """
    spec = tensors[weight]
    width = spec.columns if width is None else width
    tile = TILE_ROW_BYTES // spec.dtype.size
    source = tensors[x]
    squares = 0
    if x_squares != NONE:
        squares = 1 << tensors[x_squares].tagged
        squares |= 4 if tensors[x_squares].columns % 4 else 0
    if matrix:
        return {
            "matrix_rows": largest(matrix_rows(rows)),
            "any_part_of_k": union(width < spec.columns),
            "any_bf16_weights": union(1),
            "any_squares": union(squares),
            "any_bias": union(bias != NONE),
        }
    pages_of_row = -(-width // (tile * TILES_PER_PAGE))
    return {
        "any_product": union(1),
        "max_k": largest(width),
        "any_part_of_k": union(width < spec.columns),
        "any_ragged_k": union(spec.columns % tile != 0),
        "any_partial_pages": union(width % (tile * TILES_PER_PAGE) != 0),
        "any_odd_pages": union(pages_of_row % 2),
        "any_f32_weights": union(spec.dtype is F32),
        "any_bf16_weights": union(spec.dtype is not F32),
        "any_inputs": union(1 << (2 * (source.dtype is F32) + source.tagged)),
        "any_squares": union(squares),
        "any_bias": union(bias != NONE),
    }


def product_tag_order(
    tensors: Sequence[TensorSpec],
    *,
    rows: int,
    matrix: int,
    units: int,
    k: int,
    itemsize: int,
    inputs: Iterable[int],
    added: Iterable[int] = (),
    single_row: bool,
) -> TagOrder:
    """``Instruction.tag_order`` of a product of ``units`` units of weight rows of ``k`` columns.

    A product loops over rows in groups, over units in blocks, and, once for each block, over long rows in
    chunks. It reads ``inputs`` for each group, and ``added`` tensors when a block is finished.

    A matrix product reads all of x before it finishes a group of blocks, a few sums at a time.
    """
    inputs, added = list(present(*inputs)), list(present(*added))
    if matrix:
        if any(tensors[h].tagged for h in (*inputs, *added)):
            return TagOrder.BY_MACHINE
        once = rows <= MAX_MATRIX_ROWS and units <= MATRIX_BLOCKS * BLOCK_UNITS
        return TagOrder.KEPT if once and not added else TagOrder.READS_LATE
    groups = -(-rows // (1 if single_row else MAX_GROUP_ROWS))
    blocks = -(-units // BLOCK_UNITS)
    pages = ROW_CHUNK_PAGES if single_row else ROWS_CHUNK_PAGES
    chunked = k * itemsize > pages * TILES_PER_PAGE * TILE_ROW_BYTES
    if groups > 1 and any(tensors[h].tagged for h in (*inputs, *added)):
        return TagOrder.BY_MACHINE
    if blocks > 1 and any(tensors[h].tagged for h in added):
        return TagOrder.BY_MACHINE
    late = groups > 1 or (blocks > 1 and (chunked or added))
    return TagOrder.READS_LATE if late else TagOrder.KEPT


def units_of(begin: int, end: int) -> int:
    """Number of units of weight rows that hold the rows [begin, end) of a weight."""
    return -(-end // UNIT_ROWS) - begin // UNIT_ROWS


def ranges(**limits: tuple[int, int, int]) -> Iterator[str]:
    """A sentence for every ``name=(begin, end, size)`` that is not 0 <= begin < end <= size."""
    for name, (begin, end, size) in limits.items():
        if not 0 <= begin < end <= size:
            yield f"{name} [{begin}, {end}) is empty or outside [0, {size})"


def shapes(tensors: Sequence[TensorSpec], **expected: tuple[int, int | None, int]) -> Iterator[str]:
    """A sentence for every ``name=(handle, rows, columns)`` whose tensor has another matrix shape.

    Rows None: any number (declared regions must lie inside anyway). A handle NONE is skipped.
    """
    for name, (handle, rows, columns) in expected.items():
        if handle == NONE:
            continue
        spec = tensors[handle]
        if spec.columns != columns or rows not in (None, spec.rows):
            yield _other_shape(name, spec, rows, columns)


def result_columns(tensors: Sequence[TensorSpec], **expected: tuple[int, int]) -> Iterator[str]:
    """A sentence for every result ``name=(handle, columns)`` if one rank writes another number of columns.

    A handle NONE is skipped.
    """
    for name, (handle, columns) in expected.items():
        if handle != NONE and tensors[handle].own_columns != columns:
            yield _other_shape(name, tensors[handle], None, columns)


def _other_shape(name: str, spec: TensorSpec, rows: int | None, columns: int) -> str:
    shares = f" in {spec.shares} shares" if spec.shares > 1 else ""
    expected = f"{'any' if rows is None else rows} x {columns}"
    return f"{name} is {spec.name} of {spec.rows} x {spec.columns}{shares}, expected {expected}"


def whole_groups(tensors: Sequence[TensorSpec], group: int, **operands: int) -> Iterator[str]:
    """A sentence for every operand ``name=handle`` with a part that is not whole groups of ``group`` rows.

    A handle NONE is skipped.
    """
    for name, handle in operands.items():
        for part in () if handle == NONE else tensors[handle].parts:
            if part.rows % group:
                yield (
                    f"{name} is {tensors[handle].name}, whose part {part.name} has {part.rows} rows: "
                    f"not a multiple of {group}"
                )


def squares_of(columns: int) -> int:
    """Number of sums of squares of a row of ``columns`` columns."""
    return -(-columns // UNIT_ROWS)


def scaled_writes(inst: Any) -> Iterator[Region]:
    """The regions of ``out_scaled`` and ``out_squares`` that belong to the instruction's tile of out."""
    rows, columns = (inst.row_begin, inst.row_end), (inst.column_begin, inst.column_end)
    for handle in present(inst.out_scaled):
        yield Region(handle, rows, columns)
    for handle in present(inst.out_squares):
        yield Region(handle, rows, (columns[0] // UNIT_ROWS, squares_of(columns[1])))


def check_scaled(tensors: Sequence[TensorSpec], inst: Any, size: int) -> Iterator[str]:
    """Sentences about ``out_gain``, ``out_scaled`` and ``out_squares``; out has ``size`` columns."""
    handles = {name: getattr(inst, name) for name in SCALED}
    missing = [name for name, handle in handles.items() if handle == NONE]
    if len(missing) == len(handles):
        return
    if missing:
        yield f"{missing[0]} is missing: {', '.join(handles)} go together"
    yield from shapes(tensors, out_gain=(inst.out_gain, size, 1))
    yield from result_columns(
        tensors,
        out_scaled=(inst.out_scaled, size),
        out_squares=(inst.out_squares, squares_of(size)),
    )
    begin, end = inst.column_begin, inst.column_end
    if begin % UNIT_ROWS or (end % UNIT_ROWS and end < size):
        yield (
            f"columns [{begin}, {end}) of {size} do not begin and end at multiples of "
            f"{UNIT_ROWS}, which out_squares needs"
        )
