"""Reduce from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.reduce import Reduce
from megavm.instructions.tiles import SCALED
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, column_tiles, column_unit, cut_range

OPERANDS = ("parts", "bias", "residual", "out")


def lower(operation: Operation, context: Lowering) -> Iterator[Reduce]:
    """Yield a tile for each worker: a range of rows if there are enough rows, otherwise of columns too."""
    out, workers = operation.outputs["out"], context.options.workers
    handles = context.handles(operation, *OPERANDS, *SCALED)
    top, bottom = operation.row_range
    if bottom - top >= workers:
        whole = 0, out.own_columns
        tiles = [(whole, rows) for rows in cut_range((top, bottom), workers)]
    else:
        unit = column_unit(operation, context.options)
        cuts = list(column_tiles(out.own_columns, unit, context.options))
        ranges = list(cut_range((top, bottom), max(1, workers // len(cuts))))
        tiles = [(columns, rows) for columns in cuts for rows in ranges]
    for columns, rows in tiles:
        yield Reduce(
            **handles,
            row_count=context.row_count,
            row_begin=rows[0],
            row_end=rows[1],
            column_begin=columns[0],
            column_end=columns[1],
        )
