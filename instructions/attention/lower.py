"""Attention from a graph."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from megavm.instructions.attention import Attention
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.tiling import Lowering, cut

OPERANDS = (
    *("q", "k_cache", "v_cache", "row_sequence", "row_position", "block_table"),
    *("k_new", "v_new", "out", "partial"),
)


class Tiling(NamedTuple):
    """How an attention is cut: ``heads`` tiles of KV heads, ``rows`` per tile, ``splits`` of the
    context, ``chunk`` tokens at a time."""

    heads: int
    rows: int
    splits: int
    chunk: int


def lower(operation: Operation, context: Lowering) -> Iterator[Attention]:
    """Yield a tile for each range of rows, range of KV heads and split of the context."""
    q = operation.inputs["q"]
    kv_heads = operation.inputs["k_cache"].memory.shape[1]
    tiles = tiling(operation, context.options)
    handles = context.handles(operation, *OPERANDS)
    tops, heads = range(0, q.rows, tiles.rows), list(cut(kv_heads, tiles.heads))
    places = list(itertools.product(tops, heads, range(tiles.splits)))
    if tiles.splits > 1 and len(places) > context.options.workers:
        # Neighbours get one worker: then they are not pieces of one row, which may be much longer
        # than the others.
        places.sort(key=lambda place: (place[1], place[2]))
    for top, (begin, end), split in places:
        yield Attention(
            **handles,
            row_count=context.row_count,
            row_begin=top,
            row_end=min(top + tiles.rows, q.rows),
            head_begin=begin,
            head_end=end,
            split=split,
            num_splits=tiles.splits,
            chunk=tiles.chunk,
            context=int(operation.attributes["context"]),
            step_rows=q.rows,
            scale=operation.attributes["scale"],
        )


def tiling(operation: Operation, options: CompileOptions) -> Tiling:
    """How an operation is cut."""
    _, kv_heads, block_size, _ = operation.inputs["k_cache"].memory.shape
    q = operation.inputs["q"]
    context = int(operation.attributes["context"])
    queries = 0 if "k_new" in operation.inputs else q.columns // kv_heads
    return attention_tiling(q.rows, kv_heads, block_size, context, options, queries)


def attention_tiling(
    rows: int,
    kv_heads: int,
    block_size: int,
    context: int,
    options: CompileOptions,
    queries: int = 0,
) -> Tiling:
    """How an attention of ``rows`` rows over up to ``context`` tokens is cut.

    ``queries``: elements of a row's queries for one KV head, if several rows may belong to a sequence. No
    tile then has more rows than the machine attends to together, because late rows of a prompt cost
    more: many small tiles balance better.

    Heads are cut first, because all heads cost the same and the rows of a prompt do not. Rows are cut into no
    more tiles than workers take at once: one more would make some of them do two, which takes no less time
    if a tile's time is that of its rows, and twice as much if it is that of its tokens. The context is
    split only if this gives work to idle workers, and the context is long enough for
    ``Target.few_splits`` splits of at least ``min_chunk`` tokens. If there would be many splits, workers are
    left free for the merges, which then already wait when the last split ends.

    A ``context`` (of a program: a power of two) of several times ``Target.long_split`` tokens is split into up to
    ``Target.many_splits`` splits:

    - In steps that only decode, even if all workers have tiles: one row may have it, and the others may be
      short. Each of its KV heads would keep one worker busy while all others wait.
    - In steps of few rows of prompts, such as a question about a text that has been read before: splits of the
      context instead of tiles of fewer rows then give all workers work.

    With ``options.fixed_order`` there is one split, and tiles of many rows have as many as the machine
    attends to together: a GPU adds up a row alone in another order than beside its neighbours.
    """
    target = options.target
    most_tiles = options.workers * options.waves
    head_tiles = min(kv_heads, most_tiles)
    row_tile = -(-rows // (most_tiles // head_tiles))
    together = target.attention_elements
    most = max(together // queries, 1) if queries and together and rows > target.group_rows else 0
    if most:
        row_tile = min(rows if options.fixed_order else row_tile, most)
    if options.fixed_order:
        return Tiling(head_tiles, row_tile, 1, block_size)
    tiles = -(-rows // row_tile) * head_tiles
    splits = options.workers // tiles
    if splits >= target.many_splits:
        splits = (options.workers - tiles) // tiles
    long_enough = -(-context // options.min_chunk)
    splits = max(1, min(splits, long_enough)) if long_enough >= target.few_splits else 1
    long = min(context // target.long_split, target.many_splits) if target.long_split else 1
    if not queries and long >= target.few_splits:
        # Workers have enough tiles, but one row may have most of the tokens.
        splits *= max(1, long // splits)
    elif most:
        # A tile of few rows takes as long as one of many: fewer tiles, and splits of them.
        pieces = min(options.workers // (-(-rows // most) * head_tiles), long)
        if pieces > 1 and pieces >= splits:
            row_tile = -(-rows // (options.workers // (pieces * head_tiles)))
            splits = pieces
    return Tiling(head_tiles, row_tile, splits, block_size)
