"""Tools for lowering: the operands of an operation, and the tiles of its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megavm.instructions.tiles import INPUT_BYTES, MATRIX_BLOCKS, SPLIT_COLUMNS, matrix_rows
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import Storage
from megavm.vm.config import BLOCK_UNITS, MAX_GROUP_ROWS, UNIT_ROWS
from megavm.vm.tensors import BF16, F32, DType

Range = tuple[int, int]  # half-open
# Matrix products on the GPU (H200): what a worker reads from the second-level cache, and computes,
# while all do; what a tile costs besides, and each of its sums.
WORKER_BANDWIDTH = 40e9
WORKER_FLOPS = 5.3e12
TILE_SECONDS = 1.5e-6
SUM_SECONDS = 1e-10
BLOCK_ROWS = BLOCK_UNITS * UNIT_ROWS
AS_FAST = 1.01
ROWS_TOGETHER = 8
SUMS_BYTES = 128 * 1024  # a product on the CPU keeps this much of its sums while x streams


@dataclass(frozen=True)
class Lowering:
    """The context of a lowering: storage and options.

    ``row_count``: handle of the tensor that holds the number of live rows, or NONE.
    """

    storage: Storage
    options: CompileOptions
    row_count: int

    def handles(self, operation: Operation, *names: str) -> dict[str, Any]:
        """Handles of the named inputs and outputs; names that the operation lacks are left out."""
        values = {**operation.inputs, **operation.outputs}
        return {name: self.storage.handle(values[name]) for name in names if name in values}


def column_tiles(
    size: int, unit: int, options: CompileOptions, workers: int | None = None
) -> Iterator[Range]:
    """Cut [0, size) at multiples of ``unit`` into nearly equal tiles, ``waves`` per worker.

    ``workers``: number of workers; all by default.
    """
    return equal_tiles(size, unit, (workers or options.workers) * options.waves)


def equal_tiles(size: int, unit: int, count: int) -> Iterator[Range]:
    """Cut [0, size) at multiples of ``unit`` into at most ``count`` nearly equal tiles."""
    units = -(-size // unit)
    tiles = min(units, count)
    for i in range(tiles):
        yield units * i // tiles * unit, min(units * (i + 1) // tiles * unit, size)


def product_tiles(
    rows: int,
    columns: int,
    k: int,
    itemsize: int,
    unit: int,
    width: int,
    options: CompileOptions,
    workers: int | None = None,
) -> Iterator[tuple[Range, Range]]:
    """(columns, rows) of each tile of a matrix product; tiles of the same weights are adjacent.

    ``itemsize``: bytes of an element of the weights. ``width``: sums per column of the result.
    ``unit`` and ``workers``: see ``column_tiles``. If all input rows fit into ``INPUT_BYTES``, they
    stay there while weights stream. Otherwise the sums stay, and input and weights stream.
    """
    if is_matrix_step(rows, BF16 if itemsize == BF16.size else F32, options):
        yield from matrix_tiles(rows, columns, k, unit, width, workers or options.workers)
        return
    if rows * k * itemsize <= INPUT_BYTES:
        row_tile, column_tile = rows, columns
    else:
        fitting = INPUT_BYTES // (min(k, SPLIT_COLUMNS) * itemsize)
        row_tile = min(rows, 1 << (fitting.bit_length() - 1))
        column_tile = SUMS_BYTES // (4 * row_tile * width) // unit * unit
    for begin, end in column_tiles(columns, unit, options, workers):
        pieces = -(-(end - begin) // column_tile)
        step = -(-(end - begin) // (pieces * unit)) * unit
        for left in range(begin, end, step):
            for top in range(0, rows, row_tile):
                yield (left, min(left + step, end)), (top, min(top + row_tile, rows))


def is_matrix_step(rows: int, weights: DType, options: CompileOptions) -> bool:
    """Whether products of such a step are matrix products on their machine."""
    return options.target.matrix_rows > 0 and rows > MAX_GROUP_ROWS and weights is BF16


def matrix_tiles(
    rows: int, columns: int, k: int, unit: int, width: int, workers: int
) -> Iterator[tuple[Range, Range]]:
    """(columns, rows) of each tile of a matrix product, see ``product_tiles``.

    The cut is the one with the fewest tiles of those that a rough model of the GPU finds about as
    fast as the fastest. Neighbours share weights, and the rows of ROWS_TOGETHER tiles of rows stay
    in the second-level cache.
    """
    row_tile = matrix_rows(rows)
    seconds = {
        tiles: _seconds(rows, columns, k, unit, width, workers, tiles)
        for tiles in _column_cuts(-(-columns // unit), -(-rows // row_tile), workers)
    }
    limit = AS_FAST * min(seconds.values())
    tiles = min(tiles for tiles, time in seconds.items() if time <= limit)
    row_ranges = [(top, min(top + row_tile, rows)) for top in range(0, rows, row_tile)]
    if len(row_ranges) > 1 and row_ranges[-1][1] - row_ranges[-1][0] <= MAX_GROUP_ROWS:
        row_ranges[-2:] = [(row_ranges[-2][0], rows)]  # so few rows are no matrix
    for first in range(0, len(row_ranges), ROWS_TOGETHER):
        for columns_of_tile in equal_tiles(columns, unit, tiles):
            for row_range in row_ranges[first : first + ROWS_TOGETHER]:
                yield columns_of_tile, row_range


def _column_cuts(units: int, row_tiles: int, workers: int) -> set[int]:
    """Numbers of tiles of columns that give every worker equally many tiles, as far as possible."""
    waves = range(1, 4 + units * row_tiles // workers)
    return {max(1, min(units, workers * n // row_tiles)) for n in waves}


def _seconds(
    rows: int, columns: int, k: int, unit: int, width: int, workers: int, tiles: int
) -> float:
    """What a product takes with so many tiles of columns, roughly."""
    row_tile = matrix_rows(rows)
    units = -(-columns // unit)
    weight_rows = -(-units // tiles) * unit * width
    sums = -(-weight_rows // BLOCK_ROWS) * BLOCK_ROWS * row_tile
    # Rows of x are read again for every group of blocks.
    groups = -(-weight_rows // (BLOCK_ROWS * MATRIX_BLOCKS))
    read = BF16.size * k * (weight_rows + groups * min(row_tile, rows))
    tile = max(read / WORKER_BANDWIDTH, 2 * sums * k / WORKER_FLOPS)
    tile += TILE_SECONDS + SUM_SECONDS * sums
    return -(-tiles * -(-rows // row_tile) // workers) * tile


def cut(size: int, pieces: int) -> Iterator[Range]:
    """Cut [0, size) into at most ``pieces`` nearly equal ranges."""
    pieces = min(size, pieces)
    for i in range(pieces):
        yield size * i // pieces, size * (i + 1) // pieces
