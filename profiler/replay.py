"""Replay of a recorded step with some of its times changed: how long would it take then?

Loads are replayed page by page (ring.py), all else with the recorded times between what depends on
each other. A step is predicted to take its recorded time, times the replay with the changes over
that without. What the replay cannot know: how several workers share a memory; each has its even
share, or a larger one where few load (RecordedStep), and no step becomes shorter than its streamed
bytes over the measured bandwidth. What happens before the step, and the order in which workers take
and signal instructions, stay as they were recorded.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from megavm.profiler.recorded_step import NEVER, RecordedStep
from megavm.profiler.ring import Rings
from megavm.profiler.trace import Floats, Longs, TraceError
from megavm.vm.config import PAGE_BYTES

# Kinds of changes. The first four and "balance" are of a phase, "latency" and "wait" of an
# exchange, "worker" of a worker, "switching" and "ring" of all workers.
CHANGES: Final = (
    *("computing", "storing", "loading", "bytes", "latency", "wait", "worker", "balance"),
    *("switching", "ring"),
)
_CELLS: Final = 1 << 22  # records, or waits, times scenarios that are replayed at once
_HALVINGS: Final = 6  # so often the interval is halved in which a time is looked for
_SAME: Final = 0.999  # a replay that takes this part of the recorded time is not faster


@dataclass(frozen=True)
class Change:
    """One changed thing: ``factor`` times the time that was recorded.

    ``what`` is one of ``CHANGES``. ``of``: a phase, an exchange ("layers.*.o_proj words"), or a
    worker's number; empty: all of them (a "wait": all exchanges). A "wait" is dropped, and a
    "balance" evened out, by factor 0; other factors mean nothing for them. A "wait" is also of
    "<phase> loads", if these wait for barriers. A "ring" has ``factor`` times the pages, and
    "bytes" are those that instructions load: computing them takes as long as before. "storing" is
    the part of computing that comes after the sums: a change of both multiplies it by both factors.
    """

    what: str
    of: str
    factor: float


class Replayed(NamedTuple):
    """The duration of a step under every scenario: ns. ``floor``: what the memory needs for it."""

    step: Floats
    floor: Floats


class Replay(RecordedStep):
    """A step of a trace, ready to be replayed.

    Raises TraceError as ``RecordedStep`` does.
    """

    def run(self, scenarios: Sequence[Sequence[Change]]) -> Replayed:
        """The duration of the step under every scenario, each a combination of changes."""
        found = self._replay([(), *scenarios], self._way)
        same = float(found.step[0])
        step = found.step[1:] * (self.recorded / same if same > 0 else 1.0)
        return Replayed(np.maximum(step, found.floor[1:]), found.floor[1:])

    def _replay(self, scenarios: Sequence[Sequence[Change]], way: float) -> Replayed:
        size = max(_CELLS // max(self._count, len(self._pair_record)), 1)
        parts = [scenarios[i : i + size] for i in range(0, len(scenarios), size)]
        found = [self._run(_Factors(self, part), way)[:2] for part in parts]
        step = np.concatenate([*(part[0] for part in found), np.empty(0)])
        floor = np.concatenate([*(part[1] for part in found), np.empty(0)])
        return Replayed(step, floor)

    def _run(self, factors: _Factors, way: float) -> tuple[Floats, Floats, Floats]:
        """The steps, what the memory needs for them, and how long after the inputs of every record
        its loads arrive in the first scenario."""
        shape = self._count, factors.scenarios
        left, end, signalled = (np.zeros(shape) for _ in range(3))
        took = np.zeros(self._count)
        # No loader is further ahead than by all that it loads.
        most = np.bincount(self._worker, self._pages).max(initial=1.0) * factors.bytes.max()
        pages = np.clip(np.rint(factors.ring * self.ring_pages), 1, max(most, 1)).astype(np.int64)
        # A page that takes longer than since it was asked for was asked for late. One that takes
        # less did not queue in the memory.
        asked = min(way, self._page_ns)
        rings = Rings(pages, self.early_pages, self.first_load, asked, way - asked)
        complete = np.empty((len(self._producers), factors.scenarios))
        for batch in self._batches:
            own = batch.records
            rows = own[:, None]
            begin = np.repeat(self._begin[rows], factors.scenarios, axis=1)
            later = self._before[own] >= 0
            at = own[later]
            begin[later] = left[self._before[at]] + self._turn[at, None] * factors.switching
            inputs = np.maximum(begin + self._poll[rows], self._fixed[rows])
            if len(batch.pairs):
                channel = self._pair_channel[batch.pairs]
                exchange = self._exchange[channel]
                hop = self._hop[batch.pairs, None]
                # A negative lag is one of clocks, not one that a faster exchange would shorten.
                seen = complete[channel] + np.where(hop > 0, hop * factors.latency[exchange], hop)
                seen[factors.dropped[exchange]] = NEVER
                waiters = batch.waiters
                came = np.maximum.reduceat(seen, batch.first_pairs, axis=0)
                inputs[waiters] = np.maximum(inputs[waiters], came)
            phase, worker = self._phase[own], factors.worker[self._worker[own]]
            even = 1 + factors.even[phase] * (self._even[rows] - 1)
            work = factors.computing[phase] * worker * even
            full = self._full[rows] * work
            loaded = self._load(own, begin, inputs, full, rings, asked, factors)
            took[own] = (loaded - inputs)[:, 0]
            tail = self._tail[rows]
            # If loads come later than they did, less is left to compute when the last one is there.
            later = np.maximum(loaded - inputs - self._loads_take[rows], 0.0)
            tail = np.where(
                tail > 0, np.maximum(tail * work - later, self._last[rows] * work), tail
            )
            computed = np.maximum(inputs + full, loaded + tail)
            after = work * factors.storing[phase]
            left[own] = computed + self._leave[rows] * after
            end[own] = computed + self._store[rows] * after
            signalled[own] = end[own] + self._signal[rows] * factors.latency[self._signals[own]]
            if len(batch.channels):
                tagged = self._tagged[batch.producer_channel][:, None]
                done = np.where(tagged, end[batch.producers], signalled[batch.producers])
                complete[batch.channels] = np.maximum.reduceat(done, batch.first_producers, axis=0)
        floor = self._floor(factors)
        return np.maximum(signalled.max(axis=0), floor), floor, took

    def _load(
        self,
        own: Longs,
        begin: Floats,
        inputs: Floats,
        full: Floats,
        rings: Rings,
        way: float,
        factors: _Factors,
    ) -> Floats:
        """When the last load of each of the records ``own`` arrives; never for those without.

        Pages are ``way`` ns on their way, those that wait for barriers as long as recorded.
        """
        loaded = np.full(inputs.shape, NEVER)
        loads = np.flatnonzero(self._pages[own])
        of = own[loads]
        size = self._bytes[of, None] * factors.bytes[self._phase[of]]
        slower = factors.loading[self._phase[of]] * factors.worker[self._worker[of]]
        ready = (
            inputs[loads]
            + self._after_inputs[of, None]
            + (self._first_page[of, None] - way) * slower
        )
        loaded[loads] = rings.load(
            self._worker[of],
            np.ceil(size / PAGE_BYTES).astype(np.int64),
            begin[loads],
            inputs[loads],
            np.where(factors.ahead[self._phase[of]], NEVER, ready),
            full[loads],
            slower,
            self._intervals[of],
        )
        return loaded

    @functools.cached_property
    def _way(self) -> float:
        """From a free place in a ring until consumers see the page that comes there: ns.

        No recording has it. The time since a page was asked for is longer where pages queue in the
        memory, and it does not say how late the loader asked. So the way is the least time with
        which neither the step nor the loads behind a full ring are replayed faster than recorded.
        """
        low, high = PAGE_BYTES * self._byte_ns, self.ring_pages * self.interval
        if high <= low or not self._is_faster(low):
            return low
        # Most often it is shorter than the time since pages were asked for.
        if low < self._page_ns < high:
            if self._is_faster(self._page_ns):
                low = self._page_ns
            else:
                high = self._page_ns
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if self._is_faster(middle):
                low = middle
            else:
                high = middle
        return high

    def _is_faster(self, way: float) -> bool:
        """Whether the replay with this way of a page is faster than the recording."""
        step, _, took = self._run(_Factors(self, [()]), way)
        late = (took - self._loads_take)[self._behind_ring]
        return bool(step[0] < _SAME * self.recorded or (len(late) and np.median(late) < 0))

    @functools.cached_property
    def _behind_ring(self) -> Longs:
        """The records of one phase that load more than a ring holds: of that with most of them."""
        beyond = np.maximum(self._pages - self.ring_pages - self.early_pages, 0)
        pages = np.bincount(self._phase, beyond)
        records = np.bincount(self._phase, beyond > 0)
        most = np.lexsort((pages, records))[-1]
        found: Longs = np.flatnonzero(self._exposed & (self._phase == most) & (beyond > 0))
        return found

    def _floor(self, factors: _Factors) -> Floats:
        """The time that the memory needs for the streamed bytes; 0: it was not what held up."""
        ceiling = self.trace.machine.get("bandwidth")
        none = np.zeros(factors.scenarios)
        if not ceiling or not self._loading.any():
            return none
        own = np.bincount(self._phase, self._memory_bytes, len(self.phases))
        needed: Floats = own @ (factors.loading * factors.bytes) / ceiling * 1e9
        return needed if own.sum() / ceiling * 1e9 <= self.recorded else none


class _Factors:
    """The factors of scenarios, by what they are of: [phases, exchanges or workers, scenarios]."""

    def __init__(self, replay: Replay, scenarios: Sequence[Sequence[Change]]) -> None:
        count = self.scenarios = len(scenarios)
        self._replay = replay
        phase_count, exchanges = len(replay.phases), len(replay.exchanges)
        self.computing = np.ones((phase_count, count))
        self.loading = np.ones((phase_count, count))
        self.storing = np.ones((phase_count, count))
        self.bytes = np.ones((phase_count, count))
        self.even = np.zeros((phase_count, count))
        # The last row is of signals that nobody waits for in the step.
        self.latency = np.ones((exchanges + 1, count))
        self.dropped = np.zeros((exchanges + 1, count), np.bool_)
        self.ahead = np.zeros((phase_count, count), np.bool_)  # loads wait for no barriers
        self.worker = np.ones((replay.trace.workers, count))
        self.switching = np.ones(count)
        self.ring = np.ones(count)
        for k, changes in enumerate(scenarios):
            for change in changes:
                self._add(change, k)

    def _add(self, change: Change, k: int) -> None:
        what, factor = change.what, change.factor
        if what in ("computing", "storing", "loading", "bytes"):
            table: Floats = getattr(self, what)
            table[self._rows(change, self._replay.phases), k] *= factor
        elif what == "balance":
            self.even[self._rows(change, self._replay.phases), k] = 1 - factor
        elif what == "wait" and change.of in self._replay.late_loads:
            self.ahead[self._rows(change, [f"{name} loads" for name in self._replay.phases]), k] = (
                True
            )
        elif what in ("latency", "wait"):
            rows = self._rows(change, [" ".join(e) for e in self._replay.exchanges])
            if what == "latency":
                self.latency[rows, k] *= factor
            else:
                self.dropped[rows, k] = True
        elif what == "worker":
            workers = [str(w) for w in range(len(self.worker))]
            self.worker[self._rows(change, workers), k] *= factor
        elif what == "switching":
            self.switching[k] *= factor
        elif what == "ring":
            self.ring[k] *= factor
        else:
            raise TraceError(f"a change is of {', '.join(CHANGES)}, not of {what!r}")

    def _rows(self, change: Change, names: Sequence[str]) -> Any:
        if not change.of:
            return slice(None)
        rows = [i for i, name in enumerate(names) if name == change.of]
        if not rows:
            raise TraceError(f"the step has no {change.of!r} to change the {change.what} of")
        return rows
