"""Analysis of a trace: time by kind and role, waits of workers, bandwidth, balance.

Times are nanoseconds, rates bytes or operations per second. Functions take a ``Selection``:
consecutive steps of a trace.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from megavm.profiler.trace import (
    TAGGED,
    Floats,
    Ints,
    Longs,
    Spans,
    Trace,
    TraceError,
    stable_order,
)

# The states of a worker. The state of its consumers counts: loads of later instructions that run
# while they compute cost no time.
STATES: Final = ("computing", "loading", "barrier", "words", "idle")
BINS: Final = 200  # default number of bins of the bandwidth over time


@dataclass(frozen=True, eq=False)
class Selection:
    """The steps [first, last) of a trace, and their part of its columns."""

    trace: Trace
    first: int
    last: int

    @classmethod
    def of(cls, trace: Trace, number: int | None = None) -> Selection:
        """All steps, or the step with this number (as in ``Trace.step_number``).

        Raises TraceError when the trace does not have the step.
        """
        if number is None:
            return cls(trace, 0, trace.num_steps)
        index = np.flatnonzero(trace.step_number == number)
        if not len(index):
            raise TraceError(
                f"step {number} is not in the trace: it has {trace.step_number[0]} to "
                f"{trace.step_number[-1]}"
            )
        return cls(trace, int(index[0]), int(index[0]) + 1)

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
        """Duration of each step: [steps], s."""
        own = slice(self.first, self.last)
        durations: Floats = (self.trace.step_end[own] - self.trace.step_begin[own]) / 1e9
        return durations

    @functools.cached_property
    def busy(self) -> int:
        """Total duration of the steps, without the gaps between them: ns."""
        own = slice(self.first, self.last)
        return int((self.trace.step_end[own] - self.trace.step_begin[own]).sum())

    @functools.cached_property
    def window(self) -> tuple[int, int]:
        """(begin of the first step, end of the last step): ns."""
        trace = self.trace
        return int(trace.step_begin[self.first]), int(trace.step_end[self.last - 1])

    @functools.cached_property
    def around(self) -> slice:
        """Records of the steps, and of later steps that begin in the window: roles work ahead."""
        trace = self.trace
        begun = np.flatnonzero(trace.step_first < self.window[1]).max(initial=0)
        last = max(self.last, int(begun) + 1)
        return slice(int(trace.step_offsets[self.first]), int(trace.step_offsets[last]))

    def inside(self, times: Longs) -> Longs:
        """A column of times, restricted to ``around`` and clipped to the window; -1 stays."""
        own = times[self.around]
        return np.where(own < 0, -1, np.clip(own, *self.window))

    @functools.cached_property
    def spans(self) -> Spans:
        """The spans of the records."""
        spans = self.trace.spans
        return Spans(**{name: getattr(spans, name)[self.records] for name in vars(spans)})

    def column(self, values: npt.NDArray[np.integer]) -> Longs:
        """A column, restricted to the records of the steps: int64."""
        own: Longs = np.asarray(values[self.records], np.int64)
        return own


@dataclass(frozen=True, eq=False)
class States:
    """Time that each record keeps its worker's consumers in each state: int64 [R], ns.

    The consumers first wait for barriers until the header's waits are over, then for tagged words,
    then for loads until the last one has arrived; then they compute. Stores of the storer while the
    consumers execute the next instruction do not count.
    """

    computing: Longs
    loading: Longs
    barrier: Longs
    words: Longs


def states(spans: Spans) -> States:
    """The states of records, from their spans."""
    return States(
        computing=spans.left - spans.loaded,
        loading=spans.loaded - spans.inputs,
        barrier=spans.waited - spans.begin,
        words=spans.inputs - spans.waited,
    )


def by_kind(selection: Selection) -> list[dict[str, Any]]:
    """Time by kind of instruction, longest first, with the figures for a roofline.

    ``computing``, ``loading``, ``barrier`` and ``words`` are sums over all workers. ``p50`` and
    ``p99`` are percentiles of the time of one instruction from ``begin`` to ``left``. Rates are
    those of all workers if they executed nothing else: the total over (computing + loading) /
    workers. They exceed the memory's bandwidth if data was loaded while the consumers waited. In
    ``bytes`` and ``streamed`` a weight counts once in a step (``TraceProgram.memory_bytes``).
    """
    trace, spans = selection.trace, selection.spans
    kind = selection.column(trace.record_kind)
    time = states(spans)
    count = len(trace.kinds)
    streamed, from_memory, whole_bytes = (
        selection.column(trace.of_instruction(name))
        for name in ("load_bytes", "memory_bytes", "bytes")
    )
    totals = {
        name: np.bincount(kind, values, count)
        for name, values in {
            **vars(time),
            "bytes": whole_bytes - streamed + from_memory,
            "streamed": from_memory,
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
    """Time in which each role had at least one instruction, summed over workers: ns.

    Includes waits. Counts from the beginning of the first step to the end of the last one, and
    includes instructions of other steps in this window: loaders work ahead. Several instructions at
    once count once.
    """
    worker = np.asarray(selection.trace.record_worker[selection.around], np.int64)
    order = stable_order(worker + 1, selection.trace.workers + 1)
    return {
        role: _covered(worker, selection.inside(begin), selection.inside(end), order)
        for role, (begin, end) in role_spans(selection.trace).items()
    }


def role_spans(trace: Trace) -> dict[str, tuple[Longs, Longs]]:
    """For each role, when it begins and ends every record: int64 [R], ns; -1: it has no part.

    The storer's span begins when the consumers leave the record.
    """
    spans, ready = trace.spans, trace.event("ready")
    fetched = np.where(ready >= 0, trace.event("fetched"), -1)
    return {
        "controller": (fetched, np.maximum(ready, fetched)),
        "loader": (spans.load_begin, spans.load_end),
        "consumer": (spans.begin, spans.left),
        "storer": (spans.left, spans.signalled),
    }


def _covered(worker: Longs, begin: Longs, end: Longs, order: Longs) -> int:
    """Total time that spans cover; overlapping spans of one worker count once. -1: no span.

    ``order`` sorts the spans by worker.
    """
    valid = (begin >= 0) & (end > begin)
    unknown = int((end - begin)[valid & (worker < 0)].sum())
    order = order[(valid & (worker >= 0))[order]]
    if not len(order):
        return unknown
    # Shift each worker's times into a range of its own: spans of two workers then never overlap.
    base = worker[order] * (int(end.max()) + 1)
    begin, end = begin[order] + base, end[order] + base
    if (begin[1:] < begin[:-1]).any():  # a role seldom leaves the order of the queue
        again = np.argsort(begin, kind="stable")
        begin, end = begin[again], end[again]
    over = np.maximum.accumulate(np.concatenate([[0], end[:-1]]))
    return unknown + int(np.maximum(end - np.maximum(begin, over), 0).sum())


def by_worker(selection: Selection) -> dict[str, Longs]:
    """Time of each worker in each of ``STATES`` while a step ran: int64 [workers] each, ns.

    For every worker the five times add up to ``selection.busy``. Time that the consumers do not
    spend on an instruction is idle: the worker has no instruction left in the step, or switches to
    the next one. Records with an unknown worker (-1) are left out.
    """
    trace = selection.trace
    worker = trace.record_worker[selection.around] + 1
    inside = Spans(**{n: selection.inside(times) for n, times in vars(trace.spans).items()})
    totals = {
        name: np.bincount(worker, values, trace.workers + 1)[1:].astype(np.int64)
        for name, values in vars(states(inside)).items()
    }
    idle = np.maximum(selection.busy - sum(totals.values()), 0)
    return {**totals, "idle": np.asarray(idle, np.int64)}


@dataclass(frozen=True)
class WaitRow:
    """The waits of the instructions of one phase for those of another."""

    waiting: str  # the phase that waits
    awaited: str  # the phase that it waits for
    kind: str  # "barrier" or "words"
    count: int
    total: int  # ns, of all workers
    longest: int  # ns
    channel: str  # the channel of the longest wait; "queue" for nothing
    last_worker: int  # the worker that most often came last; -1: unknown
    last_count: int  # how often it came last
    worker: int  # the worker that waited; -1: all workers


def waits(selection: Selection, each_worker: bool = False) -> list[WaitRow]:
    """The waits by phase, awaited phase and kind, longest total first.

    Sums over all workers, or with ``each_worker`` one row per worker. ``awaited`` is "nothing" if
    all inputs were complete before the worker turned to the instruction: the wait is then the time
    until the worker saw them.
    """
    trace, spans = selection.trace, selection.spans
    own = np.flatnonzero(spans.inputs > spans.begin)
    if not len(own):
        return []
    waited = (spans.inputs - spans.begin)[own]
    phase, names = phases(trace)
    cause = selection.column(trace.record_cause)[own]
    through = selection.column(trace.record_cause_channel)[own]
    program = selection.column(trace.record_program)[own]
    known = through >= 0
    # The last channel to be complete is the reason of the wait; else the one that took longer.
    tagged = (spans.inputs - spans.waited > spans.waited - spans.begin)[own]
    for number, facts in enumerate(trace.programs):
        of = known & (program == number)
        tagged[of] = facts.channel_kind[through[of]] == TAGGED
    of_label = selection.column(trace.record_label)[own]
    awaited = np.where(known, phase[trace.record_label[cause]], len(names))
    worker = selection.column(trace.record_worker)[own] if each_worker else np.full(len(own), -1)
    # One number per group: sorting numbers is ten times as fast as sorting rows.
    sizes = len(names), len(names) + 1, 2, trace.workers + 1
    key = np.ravel_multi_index((phase[of_label], awaited, tagged.astype(int), worker + 1), sizes)
    order = stable_order(key, math.prod(sizes))
    groups, first = np.unique(key[order], return_index=True)
    rows = []
    for (waiting, produced, words, of), members in zip(
        np.column_stack(np.unravel_index(groups, sizes)).tolist(),
        np.split(order, first[1:]),
        strict=True,
    ):
        longest = members[waited[members].argmax()]
        last = np.array([-1])
        if produced < len(names):
            last = trace.record_worker[cause[members]]
        often = np.bincount(last + 1)
        rows.append(
            WaitRow(
                waiting=names[waiting],
                awaited=names[produced] if produced < len(names) else "nothing",
                kind="words" if words else "barrier",
                count=len(members),
                total=int(waited[members].sum()),
                longest=int(waited[longest]),
                channel=trace.programs[program[longest]].channel_name(int(through[longest])),
                last_worker=int(often.argmax()) - 1,
                last_count=int(often.max()),
                worker=of - 1,
            )
        )
    return sorted(rows, key=lambda row: -row.total)


def came_last(trace: Trace, waited: Longs, who: Ints, count: int) -> tuple[Longs, int]:
    """How often each of ``count`` workers or SMs came last: int64 [count], and of how many waits.

    ``waited``: the records that waited. ``who``: the worker or SM of every record; -1: unknown.
    """
    waited = waited[trace.record_cause_channel[waited] >= 0]
    cause = trace.record_cause[waited]
    often = np.bincount(who[cause[cause >= 0]] + 1, minlength=count + 1)[1:]
    return np.asarray(often, np.int64), len(waited)


def phases(trace: Trace) -> tuple[Ints, tuple[str, ...]]:
    """The phase of every label of the trace, int32 [labels], and the names of the phases.

    Labels that differ only in numbers are one phase: "layers.*.down_proj".
    """
    of_label = [re.sub(r"\d+", "*", label) for label in trace.labels]
    names = tuple(dict.fromkeys(of_label))
    index = {name: i for i, name in enumerate(names)}
    return np.array([index[name] for name in of_label], np.int32), names


@dataclass(frozen=True)
class Balance:
    """The load balance of a phase over workers: means over its layers and steps, ns."""

    phase: str
    count: int  # number of layers times steps
    workers: float  # number of workers that take part
    least: float  # computing and loading of the worker with the least
    mean: float
    longest: float  # computing and loading of the worker with the most
    tail: float  # from the end of the worker that ends first to that of the one that ends last

    @property
    def imbalance(self) -> float:
        """``longest`` / ``mean``; 1 is perfectly balanced."""
        return self.longest / self.mean if self.mean else 1.0


def balance(selection: Selection) -> list[Balance]:
    """The balance of every phase, in the order of the program; leaves out unknown workers."""
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
    """Memory bandwidth in bytes/s, over the time in which steps ran.

    ``streamed`` counts weights and KV, ``from_memory`` the same, but a weight once in a step
    (``TraceProgram.memory_bytes``), ``moved`` all bytes. ``rates`` are streamed bytes/s over time,
    in bins of ``bin`` ns from ``begin`` on. ``ceiling``: measured bandwidth of the memory, or None.
    """

    streamed_bytes: int
    moved_bytes: int
    streamed: float
    moved: float
    from_memory: float
    begin: int
    bin: float
    rates: Floats
    ceiling: float | None

    @property
    def of_ceiling(self) -> float | None:
        """``from_memory`` as a share of ``ceiling``."""
        return self.from_memory / self.ceiling if self.ceiling else None


def bandwidth(selection: Selection, bins: int = BINS) -> Bandwidth:
    """The achieved bandwidth, in total and over time.

    The bytes that an instruction streams are spread over the time of its loads or, if the machine
    has no loader, over the time from its inputs to its end.
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
    return Bandwidth(
        streamed_bytes=int(streamed.sum()),
        moved_bytes=moved,
        streamed=_per_second(selection, "load_bytes"),
        moved=_per_second(selection, "bytes"),
        from_memory=_per_second(selection, "memory_bytes"),
        begin=origin,
        bin=float(edges[1]),
        rates=np.maximum(np.diff(done), 0) / edges[1] * 1e9,
        ceiling=trace.machine.get("bandwidth"),
    )


@dataclass(frozen=True)
class Arithmetic:
    """FLOP/s over the time in which steps ran, and those of a large matrix product, or None."""

    rate: float
    ceiling: float | None

    @property
    def of_ceiling(self) -> float | None:
        """``rate`` as a share of ``ceiling``."""
        return self.rate / self.ceiling if self.ceiling else None


def arithmetic(selection: Selection) -> Arithmetic:
    """The achieved rate of arithmetic."""
    ceiling = selection.trace.machine.get("flops_per_second")
    return Arithmetic(_per_second(selection, "flops"), ceiling)


def _per_second(selection: Selection, name: str) -> float:
    """A column of the programs, summed over the records, per second in which a step ran."""
    total = int(selection.column(selection.trace.of_instruction(name)).sum())
    return total / selection.busy * 1e9 if selection.busy else 0.0


def _ramps(at: Floats, begin: Longs, rate: Floats) -> Floats:
    """The sum of ``rate * max(t - begin, 0)`` at every time t of ``at``."""
    order = np.argsort(begin)
    known = np.searchsorted(begin[order], at, side="right")
    slope = np.concatenate([[0.0], np.cumsum(rate[order])])
    offset = np.concatenate([[0.0], np.cumsum(rate[order] * begin[order])])
    sums: Floats = at * slope[known] - offset[known]
    return sums


def common_steps(selection: Selection) -> Longs:
    """The indices of the steps that have the most frequent number of tokens (ties: the smallest).

    In a trace of prompts and decoding these steps are alike.
    """
    tokens = selection.trace.step_tokens[selection.first : selection.last]
    numbers, counts = np.unique(tokens, return_counts=True)
    return selection.first + np.flatnonzero(tokens == numbers[counts.argmax()])


def median_step(trace: Trace, steps: Longs) -> int:
    """The index of the step of median duration among ``steps``."""
    order = np.argsort((trace.step_end - trace.step_begin)[steps], kind="stable")
    return int(steps[order[len(order) // 2]])


def gaps(selection: Selection) -> Longs:
    """The time between consecutive steps: int64 [steps - 1], ns."""
    own = slice(selection.first, selection.last)
    begin, end = selection.trace.step_begin[own], selection.trace.step_end[own]
    between: Longs = begin[1:] - end[:-1]
    return between
