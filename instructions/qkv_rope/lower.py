"""QkvRope from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.qkv_rope import QkvRope
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, product_tiles

OPERANDS = (
    *("x", "weight", "bias", "x_squares"),
    *("q", "k_new", "v_new", "k_cache", "v_cache"),
    *("rope", "row_sequence", "row_position", "block_table"),
)


def lower(operation: Operation, context: Lowering) -> Iterator[QkvRope]:
    """Yield a tile of rotation pairs for each worker. Queries, keys and values are cut together."""
    weight = operation.inputs["weight"]
    handles = context.handles(operation, *OPERANDS)
    head_dim = operation.inputs["rope"].columns
    unit = QkvRope.pair_unit(head_dim, context.options.column_unit)
    for tile, rows in product_tiles(
        operation.row_range,
        weight.rows // 2,
        weight.columns,
        weight.dtype.size,
        unit,
        2,
        context.options,
    ):
        yield QkvRope(
            **handles,
            row_count=context.row_count,
            row_begin=rows[0],
            row_end=rows[1],
            pair_begin=tile[0],
            pair_end=tile[1],
            eps=operation.attributes.get("eps", 0.0),
            matrix=context.matrix(handles, rows),
        )
