"""A trace in the form that other viewers need: lanes of slices that do not overlap, and arrows.

A role of a worker has several lanes where its slices overlap: loaders have several loads in flight,
and a controller fetches the next instruction during the waits of this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from megavm.profiler.analysis import Bandwidth, Selection, bandwidth, role_spans
from megavm.profiler.trace import EVENTS, TAGGED, Floats, Longs, Trace, TraceError

ROLES: Final = tuple(dict.fromkeys(event.role for event in EVENTS))
INSIDE: Final = ("wait for a barrier", "wait for words", "load", "compute", "store")
THROUGH: Final = ("start", "queue", "barrier", "words")  # how a cause held a record up
MAX_ROWS: Final = 16  # most lanes of a role of a worker; of the last one, slices are cut
BINS_PER_STEP: Final = 50  # bins of the bandwidth counter
MAX_BINS: Final = 20_000


@dataclass(frozen=True, eq=False)
class Lane:
    """Slices of one role of a worker, in order of time; int64 [n] each, times in ns."""

    worker: int
    role: str
    row: int  # which lane of the role
    record: Longs
    begin: Longs
    end: Longs

    @property
    def name(self) -> str:
        """The role, with a number from the second lane on: "loader", "loader 2"."""
        return f"{self.role} {self.row + 1}" if self.row else self.role

    @property
    def place(self) -> int:
        """A number that orders the lanes of a worker."""
        return place(self.role, self.row)


def place(role: str, row: int = 0) -> int:
    """The place of a lane among those of its worker."""
    return ROLES.index(role) * MAX_ROWS + row


def lanes(trace: Trace) -> list[Lane]:
    """All lanes that have slices, by worker, role and row. Slices of no length are left out.

    The consumers of a worker have one lane: their slices do not overlap.

    Raises TraceError when the trace does not say which worker executed an instruction.
    """
    if (trace.record_worker < 0).any():
        raise TraceError(
            "the trace does not say which worker executed what (a dynamic queue): it has no lanes"
        )
    of_role = role_spans(trace)
    order = np.argsort(trace.record_worker, kind="stable")
    workers, first = np.unique(trace.record_worker[order], return_index=True)
    result: list[Lane] = []
    for worker, own in zip(workers.tolist(), np.split(order, first[1:]), strict=True):
        for role in ROLES:
            begin, end = (times[own] for times in of_role[role])
            result += _lanes(worker, role, own, begin, end)
    return result


def _lanes(worker: int, role: str, record: Longs, begin: Longs, end: Longs) -> Iterator[Lane]:
    order = np.lexsort((end, begin))
    order = order[(begin >= 0)[order] & (end > begin)[order]]
    record, begin, end = record[order], begin[order], end[order]
    rows = _rows(begin, end, 1 if role == "consumer" else MAX_ROWS)
    for row in np.unique(rows).tolist():
        own = rows == row
        # Only in the last row, or in a damaged file, is there anything to cut.
        before = np.maximum.accumulate(np.concatenate([[0], end[own][:-1]]))
        first = np.maximum(begin[own], before)
        visible = end[own] > first
        columns = (record[own], first, end[own])
        yield Lane(worker, role, row, *(column[visible] for column in columns))


def _rows(begin: Longs, end: Longs, most: int) -> Longs:
    """For each span, sorted by begin, the first row in which it overlaps none, or the last."""
    rows = np.zeros(len(begin), np.int64)
    if most == 1 or (begin[1:] >= np.maximum.accumulate(end)[:-1]).all():
        return rows
    ends = [0] * most
    for i, (first, last) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        row = next((r for r in range(most) if ends[r] <= first), most - 1)
        rows[i] = row
        ends[row] = max(ends[row], last)
    return rows


def inner(trace: Trace, lane: Lane) -> list[tuple[str, Longs, Longs]]:
    """The inner slices of a consumer's lane: for each name of INSIDE begin and end, int64 [n].

    They follow each other within the outer slice; their length may be 0.
    """
    spans = trace.spans
    marks = [
        np.clip(values[lane.record], lane.begin, lane.end)
        for values in (spans.waited, spans.inputs, spans.loaded, spans.computed)
    ]
    waited, inputs, loaded, computed = marks
    loaded = np.clip(loaded, inputs, computed)
    borders = [lane.begin, waited, inputs, loaded, computed, lane.end]
    return list(zip(INSIDE, borders[:-1], borders[1:], strict=True))


@dataclass(frozen=True, eq=False)
class Details:
    """Arguments of the consumers' slices beside their names: a value per record, [R] each.

    ``bytes_per_second``: of its streamed bytes over the time of its loads, or of its computing
    where a machine has no loader; 0 if it streams none. ``cause_label``: index of ``trace.labels``;
    ``cause_worker``: both -1 without a cause. ``through``: index of ``THROUGH``.
    """

    flops: Longs
    streamed_bytes: Longs
    bytes_per_second: Floats
    cause_label: Longs
    cause_worker: Longs
    through: Longs


def details(trace: Trace) -> Details:
    """The details of all records."""
    streamed, spans = trace.of_instruction("load_bytes"), trace.spans
    loads = spans.load_end >= 0
    begin = np.where(loads, spans.load_begin, spans.inputs)
    took = np.maximum(np.where(loads, spans.load_end, spans.end) - begin, 1)
    cause, channel = trace.record_cause, trace.record_cause_channel
    tagged = np.zeros(trace.num_records, np.int64)
    for p, program in enumerate(trace.programs):
        own = (trace.record_program == p) & (channel >= 0)
        tagged[own] = program.channel_kind[channel[own]] == TAGGED
    through = np.where(channel >= 0, THROUGH.index("barrier") + tagged, THROUGH.index("queue"))
    return Details(
        flops=trace.of_instruction("flops"),
        streamed_bytes=streamed,
        bytes_per_second=streamed / took * 1e9,
        cause_label=np.where(cause >= 0, trace.record_label[cause], -1).astype(np.int64),
        cause_worker=np.where(cause >= 0, trace.record_worker[cause], -1).astype(np.int64),
        through=np.where(cause >= 0, through, THROUGH.index("start")),
    )


@dataclass(frozen=True, eq=False)
class Arrows:
    """Causes that came through a channel, from a record to the one that waited; int64 [k] each.

    ``begin``: when the source's slice begins. ``end``: when the target had its inputs. In ns.
    """

    source: Longs
    target: Longs
    begin: Longs
    end: Longs


def arrows(trace: Trace, own: Sequence[Lane]) -> Arrows:
    """The causes that came through a channel, if source and target both have a consumer slice."""
    begin, end = (np.full(trace.num_records, -1, np.int64) for _ in range(2))
    for lane in own:
        if lane.role == "consumer":
            begin[lane.record], end[lane.record] = lane.begin, lane.end
    through = (trace.record_cause_channel >= 0) & (trace.record_cause >= 0) & (begin >= 0)
    target = np.flatnonzero(through)
    source = trace.record_cause[target].astype(np.int64)
    start = begin[source]
    seen = np.clip(trace.spans.inputs[target], begin[target], end[target])
    # Times of several clocks, or of a damaged file, may not be in order.
    valid = (start >= 0) & (source != target) & (start <= seen)
    return Arrows(source[valid], target[valid], start[valid], seen[valid])


def counter(trace: Trace) -> Bandwidth:
    """The bandwidth over time, with enough bins to resolve steps."""
    bins = min(trace.num_steps * BINS_PER_STEP, MAX_BINS)
    return bandwidth(Selection.of(trace), bins)


def title(trace: Trace) -> str:
    """A title of the trace: model and machine."""
    return f"{trace.model.get('name', 'unknown model')} on {trace.machine['name']}"
