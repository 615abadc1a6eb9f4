"""Matmul from a graph: products of all columns of x, or of parts of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megavm.instructions.matmul import Matmul
from megavm.instructions.tiles import SCALED
from megavm.scheduler.compiler.graph import Operation, Range
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.tiling import Lowering, column_unit, product_tiles

OPERANDS = ("x", "weight", "bias", "x_squares", "residual", "row_index", "row_count", "out")


def lower(operation: Operation, context: Lowering) -> Iterator[Matmul]:
    """Yield a tile for each worker. Each part of split K (rewrites/split_k.py) has its own workers."""
    handles: dict[str, Any] = {"row_count": context.row_count}
    handles |= context.handles(operation, *OPERANDS, *SCALED, "addends", "peaks")
    part: dict[str, Any] = {name: handles[name] for name in ("x", "weight", "row_count")}
    part["out"] = handles.get("addends", handles["out"])
    gathered = operation.inputs["x"].rows if "row_index" in operation.inputs else None
    parts = parts_of(operation)
    for number in range(len(parts)):
        is_last = number == len(parts) - 1  # it adds up the others, if a reduce does not
        tiles = tiles_of_part(operation, context.options, number)
        peaks: dict[Range, int] = {}
        if is_last and "peaks" in handles:
            peaks = {columns: n for n, columns in enumerate(sorted({c for c, _ in tiles}))}
        for columns, rows in tiles:
            yield Matmul(
                **(handles if is_last else part),
                row_begin=rows[0],
                row_end=rows[1],
                column_begin=columns[0],
                column_end=columns[1],
                part=number,
                part_k=parts[0][1],
                x_rows=rows[1] if gathered is None else gathered,
                tile=peaks.get(columns, 0),
                eps=operation.attributes.get("eps", 0.0),
                matrix=context.matrix(handles, rows) if gathered is None else 0,
            )


def parts_of(operation: Operation) -> list[Range]:
    """The columns of x that each part multiplies; one part unless the product is split."""
    k = operation.inputs["weight"].columns
    step = int(operation.attributes.get("part_k", k))
    return [(begin, min(begin + step, k)) for begin in range(0, k, step)]


def tiles_of_part(
    operation: Operation, options: CompileOptions, number: int
) -> list[tuple[Range, Range]]:
    """(columns, rows) of the tiles of a part of a product."""
    weight = operation.inputs["weight"]
    unit = column_unit(operation, options)
    begin, end = parts_of(operation)[number]
    # The number of workers of a part is proportional to its columns.
    first = options.workers * begin // weight.columns
    last = options.workers * end // weight.columns
    tiles = product_tiles(
        operation.row_range,
        weight.rows,
        end - begin,
        weight.dtype.size,
        unit,
        1,
        options,
        max(1, last - first),
    )
    return list(tiles)
