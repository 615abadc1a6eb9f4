"""Copy from a graph: stores a value on all ranks where no other instruction can."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.copy import Copy
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut, cut_range


def lower(operation: Operation, context: Lowering) -> Iterator[Copy]:
    """Yield a range of rows for each worker, or of columns when there are fewer rows than workers."""
    x, workers = operation.inputs["x"], context.options.workers
    handles = context.handles(operation, "x", "out")
    row_tiles = list(cut_range(operation.row_range, workers))
    units = -(-x.columns // context.options.column_unit)
    for top, bottom in row_tiles:
        for begin, end in cut(units, workers // len(row_tiles)):
            left, right = (edge * context.options.column_unit for edge in (begin, end))
            yield Copy(
                **handles,
                x_row=top,
                x_column=left,
                row_begin=top,
                row_end=bottom,
                column_begin=left,
                column_end=min(right, x.columns),
            )
