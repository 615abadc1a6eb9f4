"""The order of a step's rows: those that decode are dealt out to the tiles of attention.

The planner puts the rows of sequences that decode first and the chunks of prompts behind them. An
attention instruction has a range of rows. If rows that decode filled the first ranges, a few
workers would read the keys and values of all of them while the others wait. The order of rows means
nothing: each row names its sequence and position, and logit rows are named by their numbers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megavm.instructions.attention import Attention
from megavm.scheduler.engine.step import Step
from megavm.vm.program import Program


def attention_rows(program: Program) -> int:
    """How many rows an attention instruction of the program has; 0 if there is none."""
    found = np.flatnonzero(program.words[:, 0] == Attention.opcode)
    if not found.size:
        return 0
    first = Attention.decode(program.words[found[0]].astype("<u4").tobytes())
    return first.row_end - first.row_begin


def interleave(step: Step, tile: int) -> Step:
    """The same step, in which each range of ``tile`` rows has its share of the single rows.

    A row is single if no row beside it is its neighbour in its sequence. They come first in their
    range, and those with long contexts are spread as well. All other rows keep their order.
    """
    rows = step.num_rows
    if step.distinct or not 0 < tile < rows:
        return step
    sequence, position = step.row_sequence, step.row_position
    goes_on = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1] + 1)
    single = np.ones(rows, dtype=np.bool_)
    single[1:] &= ~goes_on
    single[:-1] &= ~goes_on
    alone = np.flatnonzero(single)
    count = len(alone)
    if count in (0, rows):
        return step
    ends = np.minimum(np.arange(tile, rows + tile, tile), rows)
    shares = np.diff(count * ends // rows, prepend=0)
    # Place by place: the first of each range, the second of each, ...
    ranges = np.repeat(np.arange(len(ends)), shares)
    turns = np.arange(count) - np.repeat(np.cumsum(shares) - shares, shares)
    places = (ranges * tile + turns)[np.lexsort((ranges, turns))]
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
