"""The order of a step's rows: those that decode are dealt out to the workers.

The planner puts the rows of sequences that decode first and the chunks of prompts behind them. An
attention instruction has a range of rows. If rows that decode filled the first ranges, a few
workers would read the keys and values of all of them while the others wait. The order of rows means
nothing: each row names its sequence and position, and logit rows are named by their numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megavm.instructions.attention import Attention
from megavm.scheduler.engine.step import Step
from megavm.vm.program import Program


class RowRanges(NamedTuple):
    """The ranges of rows of a program's attention: ``rows`` in each; ``abreast``: ranges that have
    an instruction for each worker together."""

    rows: int
    abreast: int


def row_ranges(program: Program) -> RowRanges | None:
    """The ranges of a program's attention; None if it has none."""
    of_kind = np.flatnonzero(program.words[:, 0] == Attention.opcode)
    if not of_kind.size:
        return None
    tiles = (Attention.decode(program.words[i].astype("<u4").tobytes()) for i in of_kind)
    first = next(tiles)
    abreast = 1  # instructions of the first range in the first layer
    for tile in tiles:
        if (tile.q, tile.k_cache) != (first.q, first.k_cache):
            break
        abreast += tile.row_begin == first.row_begin
    return RowRanges(first.row_end - first.row_begin, max(program.workers // abreast, 1))


def interleave(step: Step, ranges: RowRanges | None) -> Step:
    """The same step, whose single rows are spread over as many ranges as workers process at a time.

    A row is single if no row beside it is its neighbour in its sequence. They come first in their
    range, and those with long contexts are spread as well. All other rows keep their order. A step
    whose single rows fill so many ranges stays as it is: to spread them further only makes pieces
    smaller (8B, 512 of them in 4096 rows: 7 % longer).
    """
    rows = step.num_rows
    if ranges is None or ranges.rows >= rows:
        return step
    sequence, position = step.row_sequence, step.row_position
    goes_on = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1] + 1)
    single = np.ones(rows, dtype=np.bool_)
    single[1:] &= ~goes_on
    single[:-1] &= ~goes_on
    alone = np.flatnonzero(single)
    count, size = len(alone), ranges.rows
    used = min(ranges.abreast, rows // size)
    if count in (0, rows) or count > (used - 1) * size:
        return step
    # Turn by turn: the first place of each range, the second of each, ...
    turns, numbers = np.divmod(np.arange(count), used)
    places = numbers * size + turns
    order = np.empty(rows, dtype=np.intp)
    order[places] = alone[np.argsort(-position[alone], kind="stable")]
    free = np.ones(rows, dtype=np.bool_)
    free[places] = False
    order[free] = np.flatnonzero(~single)
    place_of = np.empty(rows, dtype=np.int32)
    place_of[order] = np.arange(rows, dtype=np.int32)
    return replace(
        step,
        row_sequence=sequence[order],
        row_position=position[order],
        logit_row=place_of[step.logit_row],
    )
