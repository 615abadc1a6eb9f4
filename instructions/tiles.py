"""What the matrix-product instructions share: the tile they hold, and checks of operand shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.vm.config import NONE, PAGE_BYTES
from megavm.vm.isa import F32, Resources, TensorSpec, pages

PANEL_PAGES = 9  # pages that may hold input rows; the rest of the ring streams weights
STREAM_PAGES = 3  # the least that keeps a weight stream going
SPLIT_COLUMNS = 512  # input columns held at a time when whole rows do not fit: a multiple of this
COLUMN_BLOCK = 32  # output columns whose sums are alive at the same time
ROW_BLOCK = 16  # rows whose sums are kept together
VECTOR = 32  # input columns are padded to a multiple of this
TILE_ROW_BYTES = 64  # on the GPU weights are tiles of 8 rows of 64 bytes,
TILES_PER_PAGE = 32  # and so many tiles a page
SCRATCH_PER_ROW = 16  # bytes: number, scale, position and KV block of an input row


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
    gain: int = NONE,
    biases: Sequence[int] = (),
    k: tuple[int, int] | None = None,
) -> dict[str, int]:
    """What device code for ``x . weight^T`` is compiled for (cuda/config.cuh says what each means).

    ``k``: the columns that are multiplied, if not all.
    """
    spec = tensors[weight]
    begin, end = k or (0, spec.columns)
    width = end - begin
    tile = TILE_ROW_BYTES // spec.dtype.size
    source = tensors[x]
    pages_of_row = -(-width // (tile * TILES_PER_PAGE))
    gain_dtype = None if gain == NONE else tensors[gain].dtype
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
        "any_normalised_bf16": int(gain != NONE and source.dtype is not F32),
        "any_f32_gain": int(gain_dtype is F32),
        "any_bias": int(any(b != NONE for b in biases)),
    }


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
