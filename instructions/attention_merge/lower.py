"""AttentionMerge from a graph: joins the splits that rewrites/split_context.py makes."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.attention_merge import AttentionMerge
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut


def lower(operation: Operation, context: Lowering) -> Iterator[AttentionMerge]:
    """Yield tiles with the rows of attention's tiles, cut between KV heads until all workers have one."""
    out = operation.outputs["out"]
    _, splits, heads, width = operation.inputs["partial"].memory.shape
    kv_heads, row_tile = (int(operation.attributes[n]) for n in ("kv_heads", "rows_per_tile"))
    row_tiles = -(-out.rows // row_tile)
    handles = context.handles(operation, "partial", "out")
    for top in range(0, out.rows, row_tile):
        for begin, end in cut(kv_heads, max(1, context.options.workers // row_tiles)):
            yield AttentionMerge(
                **handles,
                row_count=context.row_count,
                row_begin=top,
                row_end=min(top + row_tile, out.rows),
                head_begin=begin * heads // kv_heads,
                head_end=end * heads // kv_heads,
                head_dim=width - 2,
                num_splits=splits,
            )
