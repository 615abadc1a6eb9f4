"""Copy from a graph: stores a value on all ranks where no other instruction can, scatters it, or gathers rows."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.copy import Copy
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut, cut_range
from megavm.vm.config import NONE


def lower(operation: Operation, context: Lowering) -> Iterator[Copy]:
    """Yield a range of rows for each worker, or of columns when there are fewer rows than workers.

    An operation that scatters has as many tiles for each rank as there are workers for it.
    """
    out, workers = operation.outputs["out"], context.options.workers
    handles = context.handles(operation, "x", "out", "row_index", "row_count")
    gathers = "row_index" in handles
    shares: list[int] = [NONE]
    if operation.attributes.get("scatters"):
        shares = list(range(out.shares))
        workers = max(1, workers // len(shares))
    row_tiles = list(cut_range(operation.row_range, workers))
    units = -(-out.own_columns // context.options.column_unit)
    for top, bottom in row_tiles:
        for begin, end in cut(units, workers // len(row_tiles)):
            left, right = (edge * context.options.column_unit for edge in (begin, end))
            for only in shares:
                first = 0 if only == NONE else only * out.own_columns
                yield Copy(
                    **handles,
                    x_row=0 if gathers else top,
                    x_rows=operation.inputs["x"].rows if gathers else NONE,
                    x_column=first + left,
                    row_begin=top,
                    row_end=bottom,
                    column_begin=left,
                    column_end=min(right, out.own_columns),
                    only=only,
                )
