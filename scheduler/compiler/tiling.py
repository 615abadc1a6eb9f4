"""Tools for lowering: the operands of an operation, and the tiles of its result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megavm.instructions.tiles import INPUT_BYTES, SPLIT_COLUMNS
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.storage import Storage

Range = tuple[int, int]  # half-open
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
    units = -(-size // unit)
    tiles = min(units, (workers or options.workers) * options.waves)
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


def cut(size: int, pieces: int) -> Iterator[Range]:
    """Cut [0, size) into at most ``pieces`` nearly equal ranges."""
    pieces = min(size, pieces)
    for i in range(pieces):
        yield size * i // pieces, size * (i + 1) // pieces
