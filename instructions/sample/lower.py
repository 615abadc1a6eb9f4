"""Sample from a graph."""

from __future__ import annotations

from collections.abc import Iterator

from megavm.instructions.sample import Sample
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut

OPERANDS = (
    *("logits", "peaks", "adjusted", "segments", "tokens", "sampling_real", "sampling_integer"),
    *("logit_row", "logit_count", "row_sequence", "row_position"),
)


def lower(operation: Operation, context: Lowering) -> Iterator[Sample]:
    """Yield a range of logit rows for each worker."""
    handles = context.handles(operation, *OPERANDS)
    name = next(n for n in ("logits", "peaks", "segments") if n in operation.inputs)
    for begin, end in cut(operation.inputs[name].rows, context.options.workers):
        yield Sample(**handles, row_begin=begin, row_end=end)
