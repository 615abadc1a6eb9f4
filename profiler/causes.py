"""Find the cause of every record: the record that delayed the begin of its computation.

An instruction begins to compute when its worker's consumers have left the instruction before it in
the queue and all its channels are complete. A barrier is complete with the target-th signal, tagged
words with the last of their writers. The latest of these events is the cause.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from megavm.profiler.trace import TAGGED, Ints, Longs, TraceProgram

NEVER: Final = -1  # no time
_BATCH: Final = 1 << 22  # producers times steps that are processed at once


@dataclass(frozen=True, eq=False)
class Executions:
    """Records of a trace without causes, sorted by step, worker and slot: [R].

    Times are int64, ns. ``begin``: when the consumers turned to the record (-1: not noted).
    ``stored`` and ``signalled``: when tagged words and barriers report the record as complete.
    ``launch``: the launch of every step, [S].
    """

    programs: tuple[TraceProgram, ...]
    step_program: Ints
    launch: Ints
    step: Ints
    worker: Ints
    slot: Ints
    instruction: Ints
    begin: Longs
    stored: Longs
    signalled: Longs


def find_causes(executions: Executions) -> tuple[Ints, Ints]:
    """``record.cause`` and ``record.cause_channel`` (docs/trace-format.md): int32 [R] each."""
    time, cause = _before_in_queue(executions)
    channel = np.full(len(cause), -1, np.int32)
    for p, program in enumerate(executions.programs):
        steps = np.flatnonzero(executions.step_program == p)
        if not len(program.waits) or not len(steps):
            continue
        records = _records(executions, steps, len(program))
        batch = max(_BATCH // len(program.channel_producers), 1)
        for begin in range(0, len(steps), batch):
            # Start one step earlier, for waits for the step before.
            first, end = max(begin - 1, 0), begin + batch
            at, of, through, arrival = _last_channels(
                executions, program, steps[first:end], records[first:end], begin - first
            )
            # On a tie the channel wins: words that a worker writes for itself take time to arrive.
            later = arrival >= time[at]
            cause[at[later]], channel[at[later]] = of[later], through[later]
    return cause, channel


def _before_in_queue(executions: Executions) -> tuple[Longs, Ints]:
    """For each record, when the consumers left the record before it, and that record or -1."""
    order = np.argsort(executions.worker, kind="stable")
    worker = executions.worker[order]
    launch = executions.launch[executions.step[order]]
    follows = (worker[1:] == worker[:-1]) & (worker[1:] >= 0) & (launch[1:] == launch[:-1])
    before = np.full(len(order), -1, np.int32)
    before[order[1:][follows]] = order[:-1][follows]
    # Consumers may turn to the next record while the storer still stores; that causes no delay.
    begin, stored = executions.begin, executions.stored[before]
    left = np.where(begin >= 0, np.minimum(begin, stored), stored)
    return np.where(before >= 0, left, NEVER), before


def _records(executions: Executions, steps: Longs, n: int) -> Longs:
    """The record of every instruction in each of the steps, or -1: int64 [steps, n]."""
    place = np.full(len(executions.step_program), -1, np.int64)
    place[steps] = np.arange(len(steps))
    row = place[executions.step]
    own = np.flatnonzero(row >= 0)
    records = np.full((len(steps), n), -1, np.int64)
    records[row[own], executions.instruction[own]] = own
    return records


def _last_channels(
    executions: Executions, program: TraceProgram, steps: Longs, records: Longs, skip: int
) -> tuple[Longs, Longs, Ints, Longs]:
    """The last complete channel of every record that waits, except in the first ``skip`` steps.

    Returns the record, the producer that completed the channel, the channel, and the time.
    """
    offsets = program.channel_offsets[:-1]
    counts = np.diff(program.channel_offsets)
    tagged = np.repeat(program.channel_kind == TAGGED, counts)
    producers = records[:, program.channel_producers]
    arrivals = np.where(tagged, executions.stored[producers], executions.signalled[producers])
    arrivals[producers < 0] = NEVER
    complete, last = _last(arrivals, offsets, counts)
    completer = np.take_along_axis(producers, last, axis=1)
    early = (program.channel_target < counts) & (program.channel_kind != TAGGED)
    for c in np.flatnonzero(early):
        # The target-th signal, in order of time, completes the barrier.
        own = slice(offsets[c], offsets[c] + counts[c])
        nth = np.argsort(arrivals[:, own], axis=1, kind="stable")[
            :, program.channel_target[c] - 1, None
        ]
        complete[:, c] = np.take_along_axis(arrivals[:, own], nth, axis=1)[:, 0]
        completer[:, c] = np.take_along_axis(producers[:, own], nth, axis=1)[:, 0]
    # A wait for the step before can only have a cause in the same launch.
    launch = executions.launch[steps]
    together = np.concatenate([[False], (np.diff(steps) == 1) & (launch[1:] == launch[:-1])])
    _, channel, back = program.waits.T
    row = np.arange(len(steps))[:, None] - back
    arrivals = complete[row, channel]
    arrivals[(back > 0) & ~together[:, None]] = NEVER
    instructions, first = np.unique(program.waits[:, 0], return_index=True)
    arrival, which = _last(arrivals, first, np.diff([*first, len(program.waits)]))
    through = channel[which]
    of = completer[np.take_along_axis(row, which, axis=1), through]
    at = records[:, instructions]
    valid = (arrival >= 0) & (at >= 0)
    valid[:skip] = False
    return at[valid], of[valid], through[valid], arrival[valid]


def _last(times: Longs, first: npt.NDArray[np.integer], counts: Longs) -> tuple[Longs, Longs]:
    """The latest time of every group of columns, and its column: [rows, groups] each."""
    latest = np.maximum.reduceat(times, first, axis=1)
    columns = np.where(times == np.repeat(latest, counts, axis=1), np.arange(times.shape[1]), -1)
    return latest, np.maximum.reduceat(columns, first, axis=1)
