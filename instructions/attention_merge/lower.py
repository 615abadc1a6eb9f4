"""AttentionMerge from a graph: joins the splits that rewrites/split_context.py makes."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.attention_merge import AttentionMerge
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut


def lower(operation: Operation, context: Lowering) -> Iterator[AttentionMerge]:
    """Yield tiles of attention's tiles, cut between KV heads and then rows until all workers have one."""
    out = operation.outputs["out"]
    _, splits, heads, width = operation.inputs["partial"].memory.shape
    kv_heads, row_tile = (int(operation.attributes[n]) for n in ("kv_heads", "rows_per_tile"))
    workers, row_tiles = context.options.workers, -(-out.rows // row_tile)
    handles = context.handles(operation, "partial", "out")
    ranges = [
        (top + begin, top + end)
        for top in range(0, out.rows, row_tile)
        for begin, end in cut(
            min(row_tile, out.rows - top), max(1, workers // (row_tiles * kv_heads))
        )
    ]
    for row_begin, row_end in ranges:
        for begin, end in cut(kv_heads, max(1, workers // row_tiles)):
            yield AttentionMerge(
                **handles,
                row_count=context.row_count,
                row_begin=row_begin,
                row_end=row_end,
                head_begin=begin * heads // kv_heads,
                head_end=end * heads // kv_heads,
                head_dim=width - 2,
                num_splits=splits,
            )
