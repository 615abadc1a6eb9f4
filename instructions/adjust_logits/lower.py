"""AdjustLogits from a graph."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.sample import SEGMENT_TOKENS
from megavm.scheduler.compiler.graph import Operation
from megavm.scheduler.compiler.tiling import Lowering, cut, equal_tiles

OPERANDS = (
    *("logits", "adjusted", "segments", "tokens", "sampling_real", "sampling_integer"),
    *("logit_row", "logit_count", "row_sequence", "row_position"),
    *("allowed", "bias", "masks_written", "masks_awaited"),
)
# If there are many rows, the tokens of each are cut into at most so many ranges.
MOST_CUTS = 8


def lower(operation: Operation, context: Lowering) -> Iterator[AdjustLogits]:
    """Yield rows, or ranges of a row's tokens, so that workers get about as much."""
    handles = context.handles(operation, *OPERANDS)
    logits, workers = operation.inputs["logits"], context.options.workers
    rows = list(cut(logits.rows, workers))
    cuts = _cuts(len(rows), workers)
    for row_begin, row_end in rows:
        for begin, end in equal_tiles(logits.columns, SEGMENT_TOKENS, cuts):
            yield AdjustLogits(
                **handles,
                row_begin=row_begin,
                row_end=row_end,
                column_begin=begin,
                column_end=end,
            )


def _cuts(rows: int, workers: int) -> int:
    """The number of ranges of a row's tokens with which the busiest worker has least to do."""
    found, least = 1, math.inf
    for cuts in (*range(1, MOST_CUTS + 1), max(1, workers // rows)):
        busiest = -(-rows * cuts // workers) / cuts
        if busiest < least:
            found, least = cuts, busiest
    return found
