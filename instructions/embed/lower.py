"""Embed from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.embed import Embed
from megavm.instructions.tiles import SCALED
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, column_tiles, cut


def lower(operation: Operation, context: Lowering) -> Iterator[Embed]:
    """Yield a tile for each worker: a range of rows if there are enough rows, otherwise of columns."""
    out, workers = operation.outputs["out"], context.options.workers
    names = ("table", "tokens", "row_sequence", "row_position", "out", *SCALED)
    handles = context.handles(operation, *names)
    if out.rows >= workers:
        tiles = [((0, out.own_columns), rows) for rows in cut(out.rows, workers)]
    else:
        cuts = column_tiles(out.own_columns, context.options.target.embedding_unit, context.options)
        tiles = [(columns, (0, out.rows)) for columns in cuts]
    for columns, rows in tiles:
        yield Embed(
            **handles,
            row_count=context.row_count,
            row_begin=rows[0],
            row_end=rows[1],
            column_begin=columns[0],
            column_end=columns[1],
        )
