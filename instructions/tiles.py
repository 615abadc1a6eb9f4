"""What the matrix-product instructions share: the tile they hold, and checks of operand shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megavm.vm.config import NONE, PAGE_BYTES
from megavm.vm.isa import F32, Region, Resources, TagOrder, TensorSpec, pages, present

PANEL_PAGES = 9  # pages that may hold input rows; the rest of the ring streams weights
STREAM_PAGES = 3  # the least that keeps a weight stream going
SPLIT_COLUMNS = 512  # input columns held at a time when whole rows do not fit: a multiple of this
COLUMN_BLOCK = 32  # output columns whose sums are alive at the same time
ROW_BLOCK = 16  # rows whose sums are kept together
VECTOR = 32  # input columns are padded to a multiple of this
SCALED = ("out_gain", "out_scaled", "out_squares")  # of who makes what is normalised
TILE_ROW_BYTES = 64  # on the GPU weights are tiles of 8 rows of 64 bytes,
TILES_PER_PAGE = 32  # and so many tiles a page
MAX_GROUP_ROWS = 8  # rows of a step of several that a GPU's worker multiplies at a time
BLOCK_UNITS = 8  # units of weight rows whose sums it finishes at a time
ROWS_CHUNK_PAGES = 2  # pages of a unit that it multiplies with its input at a time,
ROW_CHUNK_PAGES = 4  # in a program of one row
SCRATCH_PER_ROW = 16  # bytes: number, scale, position and KV block of an input row
SQUARES_COLUMNS = 8  # of a row of x whose squares are one sum: a unit of weights on the GPU


def round_up(size: int, unit: int) -> int:
    """The next multiple of ``unit``."""
    return -(-size // unit) * unit


def product_resources(rows: int, columns: int, k: int, itemsize: int) -> Resources:
    """Resources of ``out[rows, columns] = x[rows, k] . w[columns, k]^T``, ``itemsize`` bytes an element.

    If the input rows fit into ``PANEL_PAGES`` they stay there while weights stream by, and only one block
    of columns has live sums (*input-stationary*: decode). Otherwise the sums of the whole tile stay in
    registers and slices of the input stream by as well (*output-stationary*: prefill).
    """
    panel = rows * round_up(k, VECTOR) * itemsize
    scratch = SCRATCH_PER_ROW * round_up(rows, ROW_BLOCK)
    if panel <= PANEL_PAGES * PAGE_BYTES:
        return Resources(
            pages=pages(panel) + STREAM_PAGES,
            scratch_bytes=scratch,
            accumulator_bytes=4 * round_up(rows, ROW_BLOCK) * COLUMN_BLOCK,
            semaphores=2,
        )
    fitting = PANEL_PAGES * PAGE_BYTES // (rows * itemsize * SPLIT_COLUMNS)
    return Resources(
        pages=pages(rows * itemsize * SPLIT_COLUMNS * max(fitting, 1)) + STREAM_PAGES,
        scratch_bytes=scratch,
        accumulator_bytes=4 * rows * columns,
        semaphores=2,
    )


def product_constants(
    tensors: Sequence[TensorSpec],
    *,
    x: int,
    weight: int,
    x_squares: int,
    biases: Sequence[int] = (),
    width: int | None = None,
) -> dict[str, int]:
    """What device code for ``x . weight^T`` is compiled for (cuda/config.cuh says what each means).

    ``width``: the columns that are multiplied, if not all.
    """
    spec = tensors[weight]
    width = spec.columns if width is None else width
    tile = TILE_ROW_BYTES // spec.dtype.size
    source = tensors[x]
    squares = 0
    if x_squares != NONE:
        squares = 1 << tensors[x_squares].tagged
        squares |= 4 if tensors[x_squares].columns % 4 else 0
    pages_of_row = -(-width // (tile * TILES_PER_PAGE))
    return {
        "any_product": 1,
        "max_k": width,
        "any_part_of_k": int(width < spec.columns),
        "any_ragged_k": int(spec.columns % tile != 0),
        "any_partial_pages": int(width % (tile * TILES_PER_PAGE) != 0),
        "any_odd_pages": pages_of_row % 2,
        "any_f32_weights": int(spec.dtype is F32),
        "any_bf16_weights": int(spec.dtype is not F32),
        "any_inputs": 1 << (2 * (source.dtype is F32) + source.tagged),
        "any_squares": squares,
        "any_bias": int(any(b != NONE for b in biases)),
    }


def product_tag_order(
    tensors: Sequence[TensorSpec],
    *,
    rows: int,
    units: int,
    k: int,
    itemsize: int,
    inputs: Iterable[int],
    added: Iterable[int] = (),
    single_row: bool,
) -> TagOrder:
    """``Instruction.tag_order`` of a product of ``units`` units of weight rows of ``k`` columns.

    It goes through rows in groups, through units in blocks, and through long rows in chunks, once for each
    block. ``inputs`` are read for each group, ``added`` tensors when a block is finished.
    """
    groups = -(-rows // (1 if single_row else MAX_GROUP_ROWS))
    blocks = -(-units // BLOCK_UNITS)
    pages = ROW_CHUNK_PAGES if single_row else ROWS_CHUNK_PAGES
    chunked = k * itemsize > pages * TILES_PER_PAGE * TILE_ROW_BYTES
    added = list(present(*added))
    if groups > 1 and any(tensors[h].tagged for h in (*present(*inputs), *added)):
        return TagOrder.BY_MACHINE
    if blocks > 1 and any(tensors[h].tagged for h in added):
        return TagOrder.BY_MACHINE
    late = groups > 1 or (blocks > 1 and (chunked or added))
    return TagOrder.READS_LATE if late else TagOrder.KEPT


def units_of(begin: int, end: int) -> int:
    """Units of weight rows that hold the rows [begin, end) of a weight."""
    return -(-end // SQUARES_COLUMNS) - begin // SQUARES_COLUMNS


def ranges(**limits: tuple[int, int, int]) -> Iterator[str]:
    """A sentence for every ``name=(begin, end, size)`` that is not 0 <= begin < end <= size."""
    for name, (begin, end, size) in limits.items():
        if not 0 <= begin < end <= size:
            yield f"{name} [{begin}, {end}) is empty or outside [0, {size})"


def shapes(tensors: Sequence[TensorSpec], **wanted: tuple[int, int | None, int]) -> Iterator[str]:
    """A sentence for every ``name=(handle, rows, columns)`` whose tensor has another matrix shape.

    Rows None: any number (declared regions must lie inside anyway). A handle NONE is skipped.
    """
    for name, (handle, rows, columns) in wanted.items():
        if handle == NONE:
            continue
        spec = tensors[handle]
        if spec.columns != columns or rows not in (None, spec.rows):
            expected = f"{'any' if rows is None else rows} x {columns}"
            yield f"{name} is {spec.name} of {spec.rows} x {spec.columns}, expected {expected}"


def squares_of(columns: int) -> int:
    """Sums of squares that a row of so many columns has."""
    return -(-columns // SQUARES_COLUMNS)


def scaled_writes(inst: Any) -> Iterator[Region]:
    """The regions of ``out_scaled`` and ``out_squares`` that belong to the instruction's tile of out."""
    rows, columns = (inst.row_begin, inst.row_end), (inst.column_begin, inst.column_end)
    for handle in present(inst.out_scaled):
        yield Region(handle, rows, columns)
    for handle in present(inst.out_squares):
        yield Region(handle, rows, (columns[0] // SQUARES_COLUMNS, squares_of(columns[1])))


def check_scaled(tensors: Sequence[TensorSpec], inst: Any, size: int) -> Iterator[str]:
    """Sentences about ``out_gain``, ``out_scaled`` and ``out_squares``; out has ``size`` columns."""
    handles = {name: getattr(inst, name) for name in SCALED}
    missing = [name for name, handle in handles.items() if handle == NONE]
    if len(missing) == len(handles):
        return
    if missing:
        yield f"{missing[0]} is missing: {', '.join(handles)} go together"
    yield from shapes(
        tensors,
        out_gain=(inst.out_gain, size, 1),
        out_scaled=(inst.out_scaled, None, size),
        out_squares=(inst.out_squares, None, squares_of(size)),
    )
    begin, end = inst.column_begin, inst.column_end
    if begin % SQUARES_COLUMNS or (end % SQUARES_COLUMNS and end < size):
        yield (
            f"columns [{begin}, {end}) of {size} do not begin and end at multiples of "
            f"{SQUARES_COLUMNS}, which out_squares needs"
        )
