"""The order of a step's rows: those that decode are dealt out to the workers.

The planner puts the rows of sequences that decode first and the chunks of prompts behind them. An
attention instruction has a range of rows. If rows that decode filled the first ranges, a few
workers would read the keys and values of all of them while the others wait; and a step that only
decodes waits for the range whose rows have the longest contexts altogether. The order of rows means
nothing: each row names its sequence and position, and logit rows are named by their numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np

from megavm.instructions.attention import Attention
from megavm.scheduler.engine.step import Step
from megavm.vm.config import HEADER_WORDS
from megavm.vm.program import Program


class RowRanges(NamedTuple):
    """The ranges of rows of a program's attention: ``rows`` in each; ``abreast``: ranges that have
    an instruction for each worker together."""

    rows: int
    abreast: int


def row_ranges(program: Program) -> RowRanges | None:
    """The ranges of a program's attention; None if it has none."""
    tiles = program.words[program.words[:, 0] == Attention.opcode, HEADER_WORDS:]
    if not len(tiles):
        return None
    column = {field.name: i for i, field in enumerate(Attention.fields)}
    begin, layer = (tiles[:, column[name]] for name in ("row_begin", "k_cache"))
    abreast = int(np.count_nonzero((begin == begin[0]) & (layer == layer[0])))
    rows = int(tiles[0, column["row_end"]]) - int(begin[0])
    return RowRanges(rows, max(program.workers // abreast, 1))


# Rows that only decode stay in order if their contexts differ by fewer tokens: a worker passes so
# many in the time of an exchange.
UNEVEN_TOKENS: Final = 512


def is_uneven(step: Step) -> bool:
    """Whether the contexts of a step's rows differ by many tokens."""
    position = step.row_position
    return bool(position.max() - position.min() >= UNEVEN_TOKENS)


def interleave(step: Step, ranges: RowRanges | None) -> Step:
    """The same step, whose single rows are spread over ranges so that these have equal contexts.

    A row is single if no row beside it is its neighbour in its sequence. Beside rows of prompts,
    single rows are spread over as many ranges as workers process at a time, come first in their
    range, and the rows of prompts keep their order. A step whose single rows fill so many ranges
    stays as it is: to spread them further only makes pieces smaller (8B, 512 of them in 4096 rows:
    7 % longer). If all rows are single, they stay as they are unless the step ``is_uneven``.
    """
    rows = step.num_rows
    if ranges is None or ranges.rows >= rows or (ranges.rows == 1 and ranges.abreast >= rows):
        return step
    sequence, position, size = step.row_sequence, step.row_position, ranges.rows
    if sequence[0] == sequence[-1] and position[-1] - position[0] == rows - 1:
        return step  # most likely one prompt
    single = np.ones(rows, dtype=np.bool_)
    if not step.distinct:
        goes_on = (sequence[1:] == sequence[:-1]) & (position[1:] == position[:-1] + 1)
        single[1:] &= ~goes_on
        single[:-1] &= ~goes_on
    alone = np.flatnonzero(single)
    count = len(alone)
    if count == rows:
        if not is_uneven(step):
            return step
        room = [min(size, rows - begin) for begin in range(0, rows, size)]
    else:
        used = min(ranges.abreast, rows // size)
        if count == 0 or count > (used - 1) * size:
            return step
        each, more = divmod(count, used)
        room = [each + (number < more) for number in range(used)]
    longest_first = alone[np.argsort(-position[alone], kind="stable")]
    neighbours = -(-len(room) // ranges.abreast)
    places = deal((position[longest_first] + 1).tolist(), room, size, neighbours)
    order = np.empty(rows, dtype=np.intp)
    order[places] = longest_first
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


def deal(contexts: Iterable[int], room: list[int], size: int, neighbours: int) -> list[int]:
    """The place of each context, which descend. Range i has ``size`` places, and takes ``room[i]``.

    Each goes to the range that has least: R. L. Graham, *Bounds on multiprocessing timing
    anomalies*, 1969. Of ranges that have the same, such as all at first, those come first that are
    ``neighbours`` apart: so many that follow each other have one worker.
    """
    order = sorted(range(len(room)), key=lambda number: number % neighbours)
    least = [(0, turn) for turn, number in enumerate(order) if room[number]]
    taken = [0] * len(room)
    places = []
    for context in contexts:
        tokens, turn = least[0]
        number = order[turn]
        places.append(number * size + taken[number])
        taken[number] += 1
        if taken[number] == room[number]:
            heapq.heappop(least)
        else:
            heapq.heapreplace(least, (tokens + context, turn))
    return places
