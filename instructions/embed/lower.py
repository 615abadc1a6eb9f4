"""Embed from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.embed import Embed
from megavm.instructions.tiles import SCALED
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, column_tiles, cut
from megavm.vm.config import NUM_CONSUMER_WARPS


def lower(operation: Operation, context: Lowering) -> Iterator[Embed]:
    """Yield a tile for each worker: a range of rows if there are enough rows, otherwise of columns too."""
    out, workers = operation.outputs["out"], context.options.workers
    names = ("table", "tokens", "row_sequence", "row_position", "out", *SCALED)
    handles = context.handles(operation, *names)
    if out.rows >= workers:
        tiles = [((0, out.own_columns), rows) for rows in cut(out.rows, workers)]
    else:
        # A row is a chain of look-ups: no tile has more rows than a worker looks up side by side.
        ranges = list(cut(out.rows, -(-out.rows // NUM_CONSUMER_WARPS)))
        unit = context.options.target.embedding_unit
        cuts = column_tiles(out.own_columns, unit, context.options, workers // len(ranges))
        tiles = [(columns, rows) for columns in cuts for rows in ranges]
    for columns, rows in tiles:
        yield Embed(
            **handles,
            row_count=context.row_count,
            row_begin=rows[0],
            row_end=rows[1],
            column_begin=columns[0],
            column_end=columns[1],
        )
