"""GateUp from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.gate_up import GateUp
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, product_tiles

OPERANDS = ("x", "weight", "bias", "x_squares", "out")


def lower(operation: Operation, context: Lowering) -> Iterator[GateUp]:
    """Yield a tile of columns for each worker."""
    weight, out = operation.inputs["weight"], operation.outputs["out"]
    handles = context.handles(operation, *OPERANDS)
    size, unit = weight.dtype.size, context.options.column_unit
    for columns, rows in product_tiles(
        operation.row_range, out.own_columns, weight.columns, size, unit, 2, context.options
    ):
        yield GateUp(
            **handles,
            row_count=context.row_count,
            row_begin=rows[0],
            row_end=rows[1],
            column_begin=columns[0],
            column_end=columns[1],
            eps=operation.attributes.get("eps", 0.0),
            matrix=context.matrix(handles, rows),
        )
