"""Replay of a recorded step with some of its times changed: how long would it take then?

With nothing changed, the replay gives the recorded times. What it cannot know: loads of several
workers share a memory, so no step becomes shorter than its streamed bytes over the measured
bandwidth. What happens before the step, and the order in which workers take and signal
instructions, stay as they were recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from megavm.profiler.recorded_step import NEVER, RecordedStep
from megavm.profiler.trace import Floats, Longs, TraceError

# Kinds of changes. "computing", "loading" and "balance" are of a phase, "latency" and "wait" of
# an exchange, "worker" of a worker, "switching" and "ring" of all workers.
CHANGES: Final = (
    *("computing", "loading", "latency", "wait", "worker", "balance", "switching", "ring"),
)
_CELLS: Final = 1 << 22  # records, or waits, times scenarios that are replayed at once


@dataclass(frozen=True)
class Change:
    """One changed thing: ``factor`` times the time that was recorded.

    ``what`` is one of ``CHANGES``. ``of``: a phase, an exchange ("layers.*.o_proj words"), or a
    worker's number; empty: all of them. A "wait" is dropped, and a "balance" evened out, by factor
    0; other factors mean nothing for them. A "ring" has ``factor`` times the pages.
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
        # A ring is modelled by itself (``_fit``): what counts is the model with a changed one
        # compared with the model of the recorded one.
        rings = [any(c.what == "ring" for c in changes) for changes in scenarios]
        if any(rings):
            others = [[c for c in changes if c.what != "ring"] for changes in scenarios]
            same = [[*changes, Change("ring", "", 1.0)] for changes in others]
            changed, modelled, recorded = (self._replay(s) for s in (scenarios, same, others))
            ratio = np.where(rings, recorded.step / np.maximum(modelled.step, 1.0), 1.0)
            return Replayed(np.maximum(changed.step * ratio, changed.floor), changed.floor)
        return self._replay(scenarios)

    def _replay(self, scenarios: Sequence[Sequence[Change]]) -> Replayed:
        size = max(_CELLS // max(self._count, len(self._pair_record)), 1)
        parts = [scenarios[i : i + size] for i in range(0, len(scenarios), size)]
        found = [self._run(_Factors(self, part)) for part in parts]
        step = np.concatenate([*(part[0] for part in found), np.empty(0)])
        floor = np.concatenate([*(part[1] for part in found), np.empty(0)])
        return Replayed(step, floor)

    def _run(self, factors: _Factors) -> tuple[Floats, Floats]:
        shape = self._count, factors.scenarios
        took, summed, left, end, signalled, loaded = (np.zeros(shape) for _ in range(6))
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
            took[own] = inputs
            self._load(own, begin, inputs, left, loaded, factors)
            self._fit(own, took, summed, loaded, factors)
            tail = self._tail[rows]
            # If loads come later than they did, less is left to compute when the last one is there.
            later = np.maximum(loaded[own] - inputs - self._loads_take[rows], 0.0)
            tail = np.where(
                tail > 0, np.maximum(tail * work - later, self._last[rows] * work), tail
            )
            computed = np.maximum(inputs + self._full[rows] * work, loaded[own] + tail)
            summed[own] = computed
            left[own] = computed + self._leave[rows] * work
            end[own] = computed + self._store[rows] * work
            signalled[own] = end[own] + self._signal[rows] * factors.latency[self._signals[own]]
            if len(batch.channels):
                tagged = self._tagged[batch.producer_channel][:, None]
                done = np.where(tagged, end[batch.producers], signalled[batch.producers])
                complete[batch.channels] = np.maximum.reduceat(done, batch.first_producers, axis=0)
        floor = self._floor(factors)
        return np.maximum(signalled.max(axis=0), floor), floor

    def _load(
        self,
        own: Longs,
        begin: Floats,
        inputs: Floats,
        left: Floats,
        loaded: Floats,
        factors: _Factors,
    ) -> None:
        """Set when the last load of the records ``own`` arrives; never for those without."""

        by = factors.loading[self._phase[own]] * factors.worker[self._worker[own]]

        def after(of: Longs, kind: Longs) -> Floats:
            earlier = np.where(of[own, None] >= 0, left[of[own]], 0.0)
            same = np.where(kind[own, None] == 1, inputs, begin)
            return np.where(kind[own, None] >= 0, same, earlier)

        before = self._load_before[own]
        start = after(self._start_of, self._start_kind)
        start = np.where(self._start_after_load[own, None], loaded[before], start)
        start += self._start_lag[own, None]
        over = np.where(before[:, None] >= 0, loaded[before], start)
        base = np.where(self._follows[own, None], over, np.maximum(start, over))
        arrived = base + self._pipe[own, None] * by
        user = self._used_of[own]
        used = left[np.maximum(user, 0)] + self._used_lag[own, None]
        arrived = np.where(user[:, None] >= 0, np.maximum(arrived, used), arrived)
        other = self._room_worker[own]
        phase = self._phase[other]
        held = np.where(
            self._exposed[other, None], factors.loading[phase], factors.computing[phase]
        )
        held *= factors.worker[self._worker[other]]
        held[self._room_waits[own]] = 1.0
        lag = np.maximum(self._room_lag[own, None] * held, self._least[own, None] * by)
        room = after(self._room_of, self._room_kind) + lag
        arrived = np.where(self._room[own, None], np.maximum(arrived, room), arrived)
        # Where a ring is modelled (``_fit``), it was not the recorded one that held loads up.
        arrived = np.where(factors.ring > 0, base + self._shared[own, None] * by, arrived)
        loaded[own] = np.where(self._loading[own, None], arrived, NEVER)

    def _fit(
        self, own: Longs, took: Floats, summed: Floats, loaded: Floats, factors: _Factors
    ) -> None:
        """Hold up the loads of the records ``own`` until rings that are modelled have room.

        ``took`` and ``summed``: when records had their inputs, and when their sums were complete.
        Between these times consumers use what was loaded evenly. A record that does not fit as a
        whole loads the rest no faster than the memory brings it.
        """
        for k in np.flatnonzero(factors.ring).tolist():
            size = factors.ring[k] * self.ring_bytes
            of, part = factors.ring_users[factors.ring[k]]
            user = of[own]
            first, last = took[user, k], summed[user, k]
            used = first + part[own] * (last - first)
            rest = np.maximum(self._bytes[own] - size, 0.0) * self._byte_ns
            used = np.where(user == own, took[own, k] + rest, used)
            fits = np.where(user >= 0, used + self._page_ns, NEVER)
            loaded[own, k] = np.maximum(loaded[own, k], fits)

    def _floor(self, factors: _Factors) -> Floats:
        """The time that the memory needs for the streamed bytes; 0: it was not what held up."""
        ceiling = self.trace.machine.get("bandwidth")
        none = np.zeros(factors.scenarios)
        if not ceiling or not self._loading.any():
            return none
        own = np.bincount(self._phase, self._memory_bytes, len(self.phases))
        needed: Floats = own @ factors.loading / ceiling * 1e9
        return needed if own.sum() / ceiling * 1e9 <= self.recorded else none


class _Factors:
    """The factors of scenarios, by what they are of: [phases, exchanges or workers, scenarios]."""

    def __init__(self, replay: Replay, scenarios: Sequence[Sequence[Change]]) -> None:
        count = self.scenarios = len(scenarios)
        self._replay = replay
        phase_count, exchanges = len(replay.phases), len(replay.exchanges)
        self.computing = np.ones((phase_count, count))
        self.loading = np.ones((phase_count, count))
        self.even = np.zeros((phase_count, count))
        # The last row is of signals that nobody waits for in the step.
        self.latency = np.ones((exchanges + 1, count))
        self.dropped = np.zeros((exchanges + 1, count), np.bool_)
        self.worker = np.ones((replay.trace.workers, count))
        self.switching = np.ones(count)
        self.ring = np.zeros(count)  # 0: as it was recorded
        for k, changes in enumerate(scenarios):
            for change in changes:
                self._add(change, k)
        self.ring_users = {
            factor: replay.ring_users(factor * replay.ring_bytes)
            for factor in np.unique(self.ring[self.ring > 0]).tolist()
        }

    def _add(self, change: Change, k: int) -> None:
        what, factor = change.what, change.factor
        if what in ("computing", "loading"):
            table = self.computing if what == "computing" else self.loading
            table[self._rows(change, self._replay.phases), k] *= factor
        elif what == "balance":
            self.even[self._rows(change, self._replay.phases), k] = 1 - factor
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
            self.ring[k] = factor
        else:
            raise TraceError(f"a change is of {', '.join(CHANGES)}, not of {what!r}")

    def _rows(self, change: Change, names: Sequence[str]) -> Any:
        if not change.of:
            return slice(None)
        rows = [i for i, name in enumerate(names) if name == change.of]
        if not rows:
            raise TraceError(f"the step has no {change.of!r} to change the {change.what} of")
        return rows
