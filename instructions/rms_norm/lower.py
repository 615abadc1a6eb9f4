"""RmsNorm from a graph, for normalisations that are not fused into other instructions."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.rms_norm import RmsNorm
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut_range


def lower(operation: Operation, context: Lowering) -> Iterator[RmsNorm]:
    """Yield a range of rows for each worker."""
    handles = context.handles(operation, "x", "gain", "out")
    for begin, end in cut_range(operation.row_range, context.options.workers):
        yield RmsNorm(
            **handles,
            row_count=context.row_count,
            row_begin=begin,
            row_end=end,
            eps=operation.attributes["eps"],
        )
