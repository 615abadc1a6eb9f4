"""Answers about a trace: time by kind and role, what workers waited for, bandwidth, balance.

Times are nanoseconds, rates bytes or operations per second. Functions take a ``Selection``: steps
of a trace that follow each other.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megavm.profiler.trace import Floats, Ints, Longs, Spans, Trace, TraceError

# What a worker does at a moment. Its consumers decide: while they compute, loads of later
# instructions go on beside them and cost nothing.
STATES: Final = ("computing", "loading", "barrier", "words", "idle")
BINS: Final = 200  # of the bandwidth over time


@dataclass(frozen=True, eq=False)
class Selection:
    """The steps [first, last) of a trace, and what of it belongs to them."""

    trace: Trace
    first: int
    last: int

    @classmethod
    def of(cls, trace: Trace, number: int | None = None) -> Selection:
        """All steps, or the one of this number in the life of the machine.

        Raises TraceError when the trace does not have it.
        """
        if number is None:
            return cls(trace, 0, trace.num_steps)
        found = np.flatnonzero(trace.step_number == number)
        if not len(found):
            raise TraceError(
                f"step {number} is not in the trace: it has {trace.step_number[0]} to "
                f"{trace.step_number[-1]}"
            )
        return cls(trace, int(found[0]), int(found[0]) + 1)

    @property
    def steps(self) -> int:
        return self.last - self.first

    @functools.cached_property
    def records(self) -> slice:
        """Records of the steps."""
        offsets = self.trace.step_offsets
        return slice(int(offsets[self.first]), int(offsets[self.last]))

    @functools.cached_property
    def step_seconds(self) -> Floats:
        """How long each step took: [steps], s."""
        own = slice(self.first, self.last)
        durations: Floats = (self.trace.step_end[own] - self.trace.step_begin[own]) / 1e9
        return durations

    @functools.cached_property
    def busy(self) -> int:
        """Time in which a step ran, gaps between steps left out: ns."""
        own = slice(self.first, self.last)
        return int((self.trace.step_end[own] - self.trace.step_begin[own]).sum())

    @functools.cached_property
    def window(self) -> tuple[int, int]:
        """When the first step begins and the last one ends: ns."""
        trace = self.trace
        return int(trace.step_begin[self.first]), int(trace.step_end[self.last - 1])

    @functools.cached_property
    def around(self) -> slice:
        """Records of the steps, and of later ones that begin in the window: roles work ahead."""
        trace = self.trace
        begun = np.flatnonzero(trace.step_first < self.window[1]).max(initial=0)
        last = max(self.last, int(begun) + 1)
        return slice(int(trace.step_offsets[self.first]), int(trace.step_offsets[last]))

    def inside(self, times: Longs) -> Longs:
        """Of a column of times those of the records around, clipped to the window; -1 stays."""
        own = times[self.around]
        return np.where(own < 0, -1, np.clip(own, *self.window))

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans of the records."""
        spans = self.trace.spans
        return Spans(**{name: getattr(spans, name)[self.records] for name in vars(spans)})

    def column(self, values: npt.NDArray[np.integer]) -> Longs:
        """The records' part of a column."""
        own: Longs = np.asarray(values[self.records], np.int64)
        return own


@dataclass(frozen=True, eq=False)
class States:
    """How long each record keeps its worker's consumers in which state: int64 [R], ns.

    The wait for inputs is for barriers until the header's waits are over, then for words. What
    follows is loading until the last load is there, then computing. What the storer stores while
    the consumers are at the next instruction does not count.
    """

    computing: Longs
    loading: Longs
    barrier: Longs
    words: Longs


def states(spans: Spans) -> States:
    """The states of records, from their spans."""
    loaded = np.clip(spans.load_end, spans.inputs, spans.computed)
    return States(
        computing=spans.left - loaded,
        loading=loaded - spans.inputs,
        barrier=spans.waited - spans.begin,
        words=spans.inputs - spans.waited,
    )


def by_kind(selection: Selection) -> list[dict[str, Any]]:
    """Time by kind of instruction, longest first, each with its place under the roofline.

    ``computing``, ``loading``, ``barrier`` and ``words`` are of all workers together; ``p50`` and
    ``p99`` are of one instruction's time from ``begin`` to ``left``. Rates are what all workers
    would reach that did nothing else: over the time of computing and loading, by workers. What was
    loaded while the consumers waited makes them higher than the memory allows.
    """
    trace, spans = selection.trace, selection.spans
    kind = selection.column(trace.record_kind)
    time = states(spans)
    count = len(trace.kinds)
    totals = {
        name: np.bincount(kind, values, count)
        for name, values in {
            **vars(time),
            "bytes": selection.column(trace.of_instruction("bytes")),
            "streamed": selection.column(trace.of_instruction("load_bytes")),
            "flops": selection.column(trace.of_instruction("flops")),
        }.items()
    }
    whole = spans.left - spans.begin
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(trace.kinds):
        own = whole[kind == i]
        if not len(own):
            continue
        total = {key: int(values[i]) for key, values in totals.items()}
        seconds = (total["computing"] + total["loading"]) / 1e9 / trace.workers
        rows.append(
            {
                "kind": name,
                "count": len(own),
                "total": sum(total[state] for state in STATES[:4]),
                **total,
                "p50": float(np.percentile(own, 50)),
                "p99": float(np.percentile(own, 99)),
                "bytes_per_second": total["bytes"] / seconds if seconds else 0.0,
                "streamed_per_second": total["streamed"] / seconds if seconds else 0.0,
                "flops_per_second": total["flops"] / seconds if seconds else 0.0,
                "flops_per_byte": total["flops"] / total["bytes"] if total["bytes"] else 0.0,
            }
        )
    return sorted(rows, key=lambda row: -int(row["total"]))


def by_role(selection: Selection) -> dict[str, int]:
    """How long each role of all workers had an instruction at least, waiting included: ns.

    From the beginning of the first step to the end of the last one, whatever step the instruction
    is of: loaders work ahead. Several instructions at once count once.
    """
    worker = np.asarray(selection.trace.record_worker[selection.around], np.int64)
    return {
        role: _covered(worker, selection.inside(begin), selection.inside(end))
        for role, (begin, end) in role_spans(selection.trace).items()
    }


def role_spans(trace: Trace) -> dict[str, tuple[Longs, Longs]]:
    """When each role had every record: begin and end, int64 [R], ns; -1: it had nothing to do.

    The storer has what the consumers have left.
    """
    spans, ready = trace.spans, trace.event("ready")
    fetched = np.where(ready >= 0, trace.event("fetched"), -1)
    return {
        "controller": (fetched, np.maximum(ready, fetched)),
        "loader": (spans.load_begin, spans.load_end),
        "consumer": (spans.begin, spans.left),
        "storer": (spans.left, spans.signalled),
    }


def _covered(worker: Longs, begin: Longs, end: Longs) -> int:
    """The time that spans of the same worker cover, where they overlap once; -1: no span."""
    some = (begin >= 0) & (end > begin)
    unknown = int((end - begin)[some & (worker < 0)].sum())
    order = np.lexsort((begin, worker))
    order = order[(some & (worker >= 0))[order]]
    if not len(order):
        return unknown
    # Every worker has a time of its own, so that no span reaches into those of the next one.
    base = worker[order] * (int(end.max()) + 1)
    begin, end = begin[order] + base, end[order] + base
    over = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return unknown + int(np.maximum(end - np.maximum(begin, over), 0).sum())


def by_worker(selection: Selection) -> dict[str, Longs]:
    """How long each worker was in which of ``STATES`` while a step ran: int64 [workers] each, ns.

    The five together are ``selection.busy`` for every worker. What the consumers do not spend on an
    instruction is idle: the worker has nothing left in the step, or turns to the next instruction.
    Records whose worker is not known (-1) are not in it.
    """
    trace = selection.trace
    worker = trace.record_worker[selection.around]
    known = worker >= 0
    inside = Spans(**{n: selection.inside(times) for n, times in vars(trace.spans).items()})
    totals = {
        name: np.bincount(worker[known], values[known], trace.workers).astype(np.int64)
        for name, values in vars(states(inside)).items()
    }
    idle = np.maximum(selection.busy - sum(totals.values()), 0)
    return {**totals, "idle": np.asarray(idle, np.int64)}


@dataclass(frozen=True)
class WaitRow:
    """Instructions of one phase that waited for another: how often, how long, who came last."""

    waiting: str  # phases
    awaited: str
    kind: str  # "barrier" or "words"
    count: int
    total: int  # ns, of all workers
    longest: int
    channel: str  # of the longest
    last_worker: int  # who came last most often, and how often
    last_count: int
    worker: int  # who waited; -1: all workers


def waits(selection: Selection, each_worker: bool = False) -> list[WaitRow]:
    """What instructions waited for and whose signal or words came last, longest total first.

    Of all workers together, or a row for each of them. Where everything was there before the worker
    turned to the instruction, and it still waited, ``awaited`` is "nothing": the time until it saw
    that.
    """
    trace, spans = selection.trace, selection.spans
    some = np.flatnonzero(spans.inputs > spans.begin)
    if not len(some):
        return []
    waited = (spans.inputs - spans.begin)[some]
    phase, names = phases(trace)
    cause = selection.column(trace.record_cause)[some]
    through = selection.column(trace.record_cause_channel)[some]
    program = selection.column(trace.record_program)[some]
    known = through >= 0
    tagged = (spans.inputs - spans.waited > spans.waited - spans.begin)[some]
    of_label = selection.column(trace.record_label)[some]
    awaited = np.where(known, phase[trace.record_label[cause]], len(names))
    worker = selection.column(trace.record_worker)[some] if each_worker else np.full(len(some), -1)
    key = np.column_stack([phase[of_label], awaited, tagged, worker])
    groups, group = np.unique(key, axis=0, return_inverse=True)
    group = group.reshape(-1)
    order = np.lexsort((-waited, group))
    first = np.searchsorted(group[order], np.arange(len(groups)))
    rows = []
    for (waiting, produced, words, of), members in zip(
        groups.tolist(), np.split(order, first[1:]), strict=True
    ):
        longest = members[0]
        workers = trace.record_worker[cause[members]] if produced < len(names) else np.array([-1])
        who, often = np.unique(workers, return_counts=True)
        rows.append(
            WaitRow(
                waiting=names[waiting],
                awaited=names[produced] if produced < len(names) else "nothing",
                kind="words" if words else "barrier",
                count=len(members),
                total=int(waited[members].sum()),
                longest=int(waited[longest]),
                channel=trace.programs[program[longest]].channel_name(int(through[longest])),
                last_worker=int(who[often.argmax()]),
                last_count=int(often.max()),
                worker=of,
            )
        )
    return sorted(rows, key=lambda row: -row.total)


def phases(trace: Trace) -> tuple[Ints, tuple[str, ...]]:
    """The phase of every label of the trace, int32 [labels], and the phases' names.

    Labels that differ in numbers alone are one phase: "layers.*.down_proj".
    """
    of_label = [re.sub(r"\d+", "*", label) for label in trace.labels]
    names = tuple(dict.fromkeys(of_label))
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[name] for name in of_label], np.int32), names


@dataclass(frozen=True)
class Balance:
    """How evenly a phase is spread over workers: means over its layers and steps, ns."""

    phase: str
    count: int  # layers and steps
    workers: float  # that take part
    least: float  # computing and loading of the worker that has least
    mean: float
    longest: float  # of the worker that takes longest
    tail: float  # from the first worker's last end to the last one's

    @property
    def imbalance(self) -> float:
        """How many times the mean the longest is: 1 is even."""
        return self.longest / self.mean if self.mean else 1.0


def balance(selection: Selection) -> list[Balance]:
    """The load imbalance of every phase, in the order of the program; known workers only."""
    trace, spans = selection.trace, selection.spans
    worker = selection.column(trace.record_worker)
    known = worker >= 0
    phase, names = phases(trace)
    label = selection.column(trace.record_label)
    step = selection.column(trace.record_step) - selection.first
    time = states(spans)
    labels = len(trace.labels)
    key = ((step * labels + label) * trace.workers + worker)[known]
    if not len(key):
        return []
    shares, member = np.unique(key, return_inverse=True)
    busy = np.bincount(member, (time.computing + time.loading)[known])
    last = np.zeros(len(shares), np.int64)
    np.maximum.at(last, member, spans.end[known])
    group = shares // trace.workers
    first = np.flatnonzero(np.diff(group, prepend=-1))
    of_phase = phase[group[first] % labels]
    columns = {
        "workers": np.diff([*first, len(group)]).astype(float),
        "least": np.minimum.reduceat(busy, first),
        "longest": np.maximum.reduceat(busy, first),
        "tail": (np.maximum.reduceat(last, first) - np.minimum.reduceat(last, first)).astype(float),
    }
    columns["mean"] = np.add.reduceat(busy, first) / columns["workers"]
    counts = np.bincount(of_phase, minlength=len(names))
    means = {
        n: np.bincount(of_phase, v, len(names)) / np.maximum(counts, 1) for n, v in columns.items()
    }
    return [
        Balance(names[i], int(counts[i]), **{name: float(m[i]) for name, m in means.items()})
        for i in np.flatnonzero(counts)
    ]


@dataclass(frozen=True, eq=False)
class Bandwidth:
    """Bytes of memory over time, as bytes/s of the time in which a step ran.

    ``streamed`` are weights and KV, ``moved`` are all bytes. ``rates`` are streamed bytes/s in bins
    of ``bin`` ns from ``begin`` on.
    """

    streamed_bytes: int
    moved_bytes: int
    streamed: float
    moved: float
    begin: int
    bin: float
    rates: Floats
    ceiling: float | None

    @property
    def of_ceiling(self) -> float | None:
        """``streamed`` as a share of what the memory can give."""
        return self.streamed / self.ceiling if self.ceiling else None


def bandwidth(selection: Selection, bins: int = BINS) -> Bandwidth:
    """The achieved bandwidth, in all and over time.

    What an instruction streams is spread over the time of its loads, or, where the machine has no
    loader, over the time from its inputs to its end.
    """
    trace, spans = selection.trace, selection.spans
    streamed = selection.column(trace.of_instruction("load_bytes"))
    moved = int(selection.column(trace.of_instruction("bytes")).sum())
    loads = spans.load_end >= 0
    start = np.where(loads, spans.load_begin, spans.inputs)
    stop = np.maximum(np.where(loads, spans.load_end, spans.end), start + 1)
    begin, end = selection.window
    origin = min(begin, int(start.min()))
    start, stop = start - origin, stop - origin
    edges = np.linspace(0, max(end - origin, int(stop.max())), bins + 1)
    rate = streamed / (stop - start)
    done = _ramps(edges, start, rate) - _ramps(edges, stop, rate)
    seconds = selection.busy / 1e9
    total = int(streamed.sum())
    return Bandwidth(
        streamed_bytes=total,
        moved_bytes=moved,
        streamed=total / seconds if seconds else 0.0,
        moved=moved / seconds if seconds else 0.0,
        begin=origin,
        bin=float(edges[1]),
        rates=np.maximum(np.diff(done), 0) / edges[1] * 1e9,
        ceiling=trace.machine.get("bandwidth"),
    )


def _ramps(at: Floats, begin: Longs, rate: Floats) -> Floats:
    """The sum of ``rate * max(t - begin, 0)`` at every time t of ``at``."""
    order = np.argsort(begin)
    known = np.searchsorted(begin[order], at, side="right")
    slope = np.concatenate([[0.0], np.cumsum(rate[order])])
    offset = np.concatenate([[0.0], np.cumsum(rate[order] * begin[order])])
    sums: Floats = at * slope[known] - offset[known]
    return sums


def common_steps(selection: Selection) -> Longs:
    """The indices of the steps of the number of tokens that most of them have, the least of those.

    So that of a trace of prompts and decoding the steps are alike.
    """
    tokens = selection.trace.step_tokens[selection.first : selection.last]
    numbers, counts = np.unique(tokens, return_counts=True)
    return selection.first + np.flatnonzero(tokens == numbers[counts.argmax()])


def median_step(trace: Trace, steps: Longs) -> int:
    """The index of the one of these steps whose duration is the median."""
    order = np.argsort((trace.step_end - trace.step_begin)[steps], kind="stable")
    return int(steps[order[len(order) // 2]])


def gaps(selection: Selection) -> Longs:
    """The time between each step and the one before: int64 [steps - 1], ns."""
    own = slice(selection.first, selection.last)
    begin, end = selection.trace.step_begin[own], selection.trace.step_end[own]
    between: Longs = begin[1:] - end[:-1]
    return between
