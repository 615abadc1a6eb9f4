"""Tools for lowering: the operands of an operation, and the tiles of its result."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megavm.instructions.product import is_matrix_product, matrix_rows
from megavm.instructions.tiles import squares_unit
from megavm.scheduler.compiler.graph import Operation, Range
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import Storage
from megavm.vm.config import PANEL_COLUMNS
from megavm.vm.target import Target
from megavm.vm.tensors import BF16, F32


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

    def matrix(self, handles: Mapping[str, int], rows: Range) -> int:
        """The operand ``matrix`` of a product: whether its rows are multiplied as a matrix."""
        x, weight = (self.storage.tensors[handles[name]] for name in ("x", "weight"))
        has_matrices = self.options.target.matrix_rows > 0
        return int(has_matrices and is_matrix_product(x, weight, rows[1] - rows[0]))


def column_unit(operation: Operation, options: CompileOptions) -> int:
    """Column tiles of ``operation`` begin at multiples of it; none cuts a sum of squares."""
    unit, out = options.column_unit, operation.outputs
    if "out_squares" in out:
        columns, sums = out["out_scaled"].own_columns, out["out_squares"].own_columns
        unit = math.lcm(unit, squares_unit(columns, sums))
    return unit


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
    rows: Range,
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
    ``unit`` and ``workers``: see ``column_tiles``. If up to ``Target.tile_rows`` input rows fit
    into a worker (``Target.input_bytes``), they stay there while weights stream. Otherwise the sums
    stay, and input and weights stream.
    """
    target = options.target
    first, last = rows
    count = last - first
    if target.is_matrix_step(count, BF16 if itemsize == BF16.size else F32):
        workers = workers or options.workers
        yield from matrix_tiles(rows, columns, k, unit, width, workers, target)
        return
    row_tile, column_tile = min(count, target.tile_rows), columns
    padded = -(-k // PANEL_COLUMNS) * PANEL_COLUMNS
    if row_tile * padded * itemsize > target.input_bytes:
        fitting = target.input_bytes // (min(padded, target.split_columns) * itemsize)
        row_tile = min(count, 1 << (fitting.bit_length() - 1))
        while row_tile > 1 and 4 * row_tile * width * unit > target.sums_bytes:
            row_tile = -(-row_tile // 2)
        column_tile = target.sums_bytes // (4 * row_tile * width) // unit * unit
    for begin, end in column_tiles(columns, unit, options, workers):
        tiles = -(-(end - begin) // column_tile)
        step = -(-(end - begin) // (tiles * unit)) * unit
        for left in range(begin, end, step):
            for top in range(first, last, row_tile):
                yield (left, min(left + step, end)), (top, min(top + row_tile, last))


def matrix_tiles(
    rows: Range, columns: int, k: int, unit: int, width: int, workers: int, target: Target
) -> Iterator[tuple[Range, Range]]:
    """(columns, rows) of each tile of a matrix product, see ``product_tiles``.

    Several cuts are about as fast as the fastest (``Target.matrix_times``); the one with the fewest
    tiles is taken. Neighbours share weights, and the rows of ``Target.matrix_row_tiles`` tiles of
    rows stay in the second-level cache.

    Raises ValueError when the machine has no matrix products.
    """
    begin, end = rows
    row_tile = matrix_rows(end - begin)
    tiles, _ = matrix_cut(end - begin, columns, k, unit, width, workers, target)
    row_ranges = [(top, min(top + row_tile, end)) for top in range(begin, end, row_tile)]
    if len(row_ranges) > 1 and row_ranges[-1][1] - row_ranges[-1][0] <= target.group_rows:
        row_ranges[-2:] = [(row_ranges[-2][0], end)]  # so few rows are no matrix
    together = target.matrix_row_tiles
    for first in range(0, len(row_ranges), together):
        for column_range in equal_tiles(columns, unit, tiles):
            for row_range in row_ranges[first : first + together]:
                yield column_range, row_range


@functools.lru_cache(maxsize=1024)  # layers ask the same
def matrix_cut(
    rows: int, columns: int, k: int, unit: int, width: int, workers: int, target: Target
) -> tuple[int, float]:
    """The number of tiles of columns of a matrix product, and its predicted time in seconds.

    Raises ValueError when the machine has no matrix products.
    """
    times = target.matrix_times
    if times is None:
        raise ValueError(f"machine {target.name} has no matrix products")
    seconds = {
        tiles: _seconds(rows, columns, k, unit, width, workers, tiles, target)
        for tiles in _column_cuts(-(-columns // unit), -(-rows // matrix_rows(rows)), workers)
    }
    limit = times.equal * min(seconds.values())
    tiles = min(tiles for tiles, time in seconds.items() if time <= limit)
    return tiles, seconds[tiles]


def _column_cuts(units: int, row_tiles: int, workers: int) -> set[int]:
    """Numbers of tiles of columns that give every worker equally many tiles, as far as possible."""
    waves = range(1, 4 + units * row_tiles // workers)
    return {max(1, min(units, workers * n // row_tiles)) for n in waves}


def _seconds(
    rows: int,
    columns: int,
    k: int,
    unit: int,
    width: int,
    workers: int,
    tiles: int,
    target: Target,
) -> float:
    """The predicted time of a product that is cut into so many tiles of columns."""
    row_tile = matrix_rows(rows)
    units = -(-columns // unit)
    weight_rows = -(-units // tiles) * unit * width
    tile = tile_seconds(min(row_tile, rows), weight_rows, k, target)
    return -(-tiles * -(-rows // row_tile) // workers) * tile


def tile_seconds(rows: int, weight_rows: int, k: int, target: Target) -> float:
    """The predicted time of a tile of a matrix product: so many rows of x and of the weight."""
    assert target.matrix_times is not None
    sums = -(-weight_rows // target.block_rows) * target.block_rows * matrix_rows(rows)
    # Rows of x are read again for every group of blocks.
    groups = -(-weight_rows // (target.block_rows * target.matrix_blocks))
    read = BF16.size * k * (weight_rows + groups * rows)
    return target.matrix_times.seconds(read, 2 * sums * k, sums)


def cut(size: int, count: int) -> Iterator[Range]:
    """Cut [0, size) into at most ``count`` nearly equal ranges."""
    return cut_range((0, size), count)


def cut_range(whole: Range, count: int) -> Iterator[Range]:
    """Cut ``whole`` into at most ``count`` nearly equal ranges."""
    begin, size = whole[0], whole[1] - whole[0]
    count = min(size, count)
    for i in range(count):
        yield begin + size * i // count, begin + size * (i + 1) // count
