"""A recorded step as a graph of dependencies, with the lag of every dependency.

A record turns to its instruction when its worker has left the one before, has its inputs when the
channels that it waits for are complete, its loads when its worker's loader has brought them, and
its results after that. Each of these times is the latest of the times that it depends on, each plus
a lag. Lags come from the recording: only the dependency that came last shows its own, so that of
the others is taken to be the median of their phase, and never so long that it would have come last.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megavm.profiler.analysis import phases
from megavm.profiler.trace import TAGGED, Floats, Longs, Trace, TraceError
from megavm.vm.config import PAGE_BYTES

MAX_RECORDS: Final = 200_000  # of a step; more would take many seconds
NEVER: Final = -np.inf
_HELD_UP: Final = 1.1  # loads that take so many times their time were held up

Bools = npt.NDArray[np.bool_]


class Exchange(NamedTuple):
    """All channels whose last producers are of one phase and that are of one kind."""

    phase: str
    kind: str  # "words" or "barrier"


class RecordedStep:
    """A step of a trace: what its records depend on, and the lags after what they depend on.

    Raises TraceError when the trace does not say which worker executed what, when the step has more
    than ``MAX_RECORDS`` records, or when its dependencies form a cycle.
    """

    def __init__(self, trace: Trace, step: int) -> None:
        self.trace = trace
        offsets = trace.step_offsets
        own = slice(int(offsets[step]), int(offsets[step + 1]))
        self.records = own
        self._count = own.stop - own.start
        number = int(trace.step_number[step])
        if self._count > MAX_RECORDS:
            raise TraceError(
                f"step {number} has {self._count:,} records: a replay has at most {MAX_RECORDS:,}"
            )
        self._worker = trace.record_worker[own].astype(np.int64)
        if (self._worker < 0).any():
            raise TraceError(
                "the trace does not say which worker executed what (a dynamic queue), so that a "
                "step cannot be replayed"
            )
        self._origin = int(trace.step_begin[step])
        self.recorded = int(trace.step_end[step]) - self._origin
        phase, self.phases = phases(trace)
        self._phase = phase[trace.record_label[own]].astype(np.int64)
        self._label = trace.record_label[own].astype(np.int64)
        first = np.append(True, self._worker[1:] != self._worker[:-1])
        self._before = np.where(first, -1, np.arange(self._count) - 1)
        self._read_times()
        self._read_channels(int(trace.step_program[step]))
        self._find_input_lags(step)
        self._read_loads()
        self._find_ring(int(trace.step_program[step]))
        self._find_computing()
        self._find_product_lags()
        self._batches = self._order()

    # Recorded times, and lags between them.

    def _read_times(self) -> None:
        spans = self.trace.spans

        def since_begin(times: Longs) -> Floats:
            return (times[self.records] - self._origin).astype(np.float64)

        self._begin = since_begin(spans.begin)
        self._inputs = since_begin(spans.inputs)
        self._computed = since_begin(spans.computed)
        self._left = since_begin(spans.left)
        self._end = since_begin(spans.end)
        self._signalled = since_begin(spans.signalled)
        before = np.where(self._before >= 0, self._left[self._before], self._begin)
        self._turn = self._begin - before

    def _read_channels(self, number: int) -> None:
        """The channels of the step, the records that wait for each, and those that complete it."""
        program = self.trace.programs[number]
        place = np.full(len(program), -1, np.int64)
        place[self.trace.record_instruction[self.records]] = np.arange(self._count)
        waits = program.waits[program.waits[:, 2] == 0].astype(np.int64)
        record, channel = place[waits[:, 0]], waits[:, 1]
        channels, inverse = np.unique(channel, return_inverse=True)
        offsets, producers = program.channel_offsets, []
        exchanges: dict[Exchange, int] = {}
        self._tagged = program.channel_kind[channels] == TAGGED
        self._exchange = np.zeros(len(channels), np.int64)
        for i, c in enumerate(channels.tolist()):
            members = place[program.channel_producers[offsets[c] : offsets[c + 1]]]
            members = members[members >= 0]
            done = (self._end if self._tagged[i] else self._signalled)[members]
            target = int(program.channel_target[c])
            if not self._tagged[i] and target < len(members):
                # The first signals complete a barrier; who is first stays as recorded.
                members = members[np.argsort(done, kind="stable")[:target]]
                done = (self._signalled)[members]
            producers.append(members)
            if len(members):
                name = self.phases[self._phase[members[done.argmax()]]]
                exchange = Exchange(name, "words" if self._tagged[i] else "barrier")
                self._exchange[i] = exchanges.setdefault(exchange, len(exchanges))
        sizes = np.array([len(members) for members in producers], np.int64)
        known = (record >= 0) & (sizes[inverse.reshape(-1)] > 0 if len(sizes) else True)
        order = np.argsort(record[known], kind="stable")
        self._pair_record = record[known][order]
        self._pair_channel = inverse.reshape(-1)[known][order]
        self._producers = producers
        self._signals = np.zeros(self._count, np.int64)  # the exchange of a record's signal
        for phase in np.unique(self._phase).tolist():
            exchange = Exchange(self.phases[phase], "barrier")
            self._signals[self._phase == phase] = exchanges.get(exchange, -1)
        self.exchanges = tuple(exchanges)
        done_by = [self._end, self._signalled]
        self._arrival = np.array(
            [
                done_by[0 if self._tagged[i] else 1][members].max(initial=NEVER)
                for i, members in enumerate(producers)
            ],
            np.float64,
        )

    def _find_input_lags(self, step: int) -> None:
        """Lags from the turn of the worker, and from every channel, to the inputs of a record."""
        trace, inputs = self.trace, self._inputs
        arrival = self._arrival[self._pair_channel]
        last = np.full(self._count, NEVER)
        np.maximum.at(last, self._pair_record, arrival)
        cause = trace.record_cause[self.records]
        outside = (trace.record_cause_channel[self.records] >= 0) & (cause >= 0)
        outside &= trace.record_step[cause] != step
        # Inputs that an earlier step handed over come when they came.
        self._fixed = np.where(outside, inputs, NEVER)
        known = np.isfinite(last) & ~outside
        awaited = known & (last >= self._begin)
        waited = inputs - np.where(known, last, inputs)
        way = np.where(awaited, waited, _typical(waited, awaited, self._phase))
        # A result that came just before the worker turned to the record may have been on its way.
        polled = inputs - self._begin
        direct = ~outside & ~awaited & ~(known & (last + way > self._begin) & (polled > 0))
        pair = self._pair_record
        way = np.where(direct | outside, way, waited)
        self._hop = np.minimum(way[pair], inputs[pair] - arrival)
        typical = _typical(polled, direct & known, self._phase, otherwise=np.zeros(self._count))
        self._poll = np.where(direct, polled, np.minimum(typical, polled))

    def _read_loads(self) -> None:
        """What records load, which load comes before, and how long a byte takes."""
        spans, own = self.trace.spans, self.records
        self._bytes = self.trace.of_instruction("load_bytes")[own].astype(np.float64)
        self._memory_bytes = self.trace.of_instruction("memory_bytes")[own]
        self._loading: Bools = np.asarray((spans.load_begin[own] >= 0) & (self._bytes > 0))
        self._load_start, self._loaded = (
            np.where(self._loading, times[own] - self._origin, 0).astype(np.float64)
            for times in (spans.load_begin, spans.load_end)
        )
        self._pages = np.where(self._loading, np.ceil(self._bytes / PAGE_BYTES), 0).astype(np.int64)
        numbers = np.where(self._loading, np.arange(self._count), -1)
        first = np.flatnonzero(self._before < 0)
        latest = np.maximum.accumulate(numbers)
        previous = np.append(-1, latest[:-1])
        previous[previous < np.repeat(first, np.diff([*first, self._count]))] = -1
        self._load_before = np.where(self._loading, previous, -1)
        over = np.where(previous >= 0, self._loaded[previous], NEVER)
        self._load_took = self._loaded - np.maximum(self._load_start, over)
        self._byte_ns = self._ns_per_byte()

    def _find_ring(self, program: int) -> None:
        """The ring of a loader, and how long a page takes since it was asked for."""
        own, facts = self.records, self.trace.programs[program].facts
        noted = self._loading & (self.trace.event("load_issued")[own] >= 0)
        issued = (self.trace.event("load_issued")[own] - self._origin).astype(np.float64)
        issued = np.where(noted, issued, NEVER)
        # If the program does not say how many pages a ring has: as many as loaders were ahead.
        self._knows_ring = "pages" in facts
        ahead = 0.0 if self._knows_ring else self._ahead(issued)
        self.ring_pages = int(facts.get("pages", round(ahead / PAGE_BYTES)))
        self.early_pages = int(facts.get("early_pages", 0))
        # Consumers note arrivals when they have seen them: early ones are nearer to the truth.
        waited = noted & (self._loaded > self._inputs)
        delays = (self._loaded - issued)[waited]
        self._page_ns = PAGE_BYTES * self._byte_ns
        if len(delays):
            self._page_ns = max(self._page_ns, float(np.quantile(delays, 0.25)))
        self.interval = PAGE_BYTES * max(self._byte_ns, self._share_ns())
        self._find_late_loads(issued)
        self._find_intervals()
        first = self._loading & (self._load_before < 0)
        self.first_load = np.zeros(int(self._worker.max(initial=0)) + 1)
        self.first_load[self._worker[first]] = self._load_start[first]

    def _find_late_loads(self, issued: Floats) -> None:
        """The phases whose loads wait for the barriers of their records.

        No load of theirs was asked for before. But loads of which the memory is behind follow each
        other, without a gap.
        """
        ready = (self.trace.spans.waited[self.records] - self._origin).astype(np.float64)
        barriers = ~self._tagged[self._pair_channel]
        known = self._loading & (np.bincount(self._pair_record, barriers, self._count) > 0)
        # Of what fits into the ring, the last page was asked for as soon as the first might be.
        asked = np.where(self._pages <= self.ring_pages, issued, self._load_start)
        before = np.where(self._load_before >= 0, issued[self._load_before], NEVER)
        took = issued - np.where(np.isfinite(before), before, self._load_start)
        gap = took > _HELD_UP * self._pages * self.interval

        def count(records: Bools) -> Longs:
            return np.bincount(self._phase[records], minlength=len(self.phases))

        late = (count(known & (asked < ready)) == 0) & (2 * count(known & gap) > count(known))
        self.late_loads = tuple(f"{self.phases[p]} loads" for p in np.flatnonzero(late).tolist())
        self._after_inputs = np.where(
            known & late[self._phase], np.minimum(ready - self._inputs, 0.0), NEVER
        )

    def _find_intervals(self) -> None:
        """The times from page to page: of those that fit into a ring, and of those behind them.

        Where few workers load more than a ring, or later than all others could, the rings of the
        others are full by then, and these few share the memory.
        """
        few = self._loaders() / len(np.unique(self._worker))
        alone = np.maximum(PAGE_BYTES * self._byte_ns, self.interval * few)
        late = np.isfinite(self._after_inputs)
        self._intervals = np.column_stack([np.where(late, alone, self.interval), alone])
        # From when late loads might begin to their first page, if the others came at this rate.
        took = self._loaded - self._inputs - np.where(late, self._after_inputs, 0.0)
        others = np.maximum(self._pages - 1, 0) * alone
        self._first_page = np.maximum(took - others, PAGE_BYTES * self._byte_ns)

    def intervals_of(self, phase: str) -> tuple[float, float, float]:
        """Of a phase that loads: mean ns from page to page, of those that fit into a ring and of
        those behind them, and mean pages of an instruction."""
        own = self._loading & (self._phase == self.phases.index(phase))
        fitting, behind = self._intervals[own].mean(axis=0).tolist()
        return fitting, behind, float(self._pages[own].mean())

    def _find_computing(self) -> None:
        """Which records computed what held up their own loads, rather than waited for loads."""
        seen = self._loading & (self._loaded >= self._inputs)
        behind = self._intervals[:, 1]
        seen &= self._load_took > _HELD_UP * self._pages * behind
        took = np.where(seen, self._loaded - self._inputs, 0.0)
        ring = float(self.ring_pages * PAGE_BYTES)
        if not self._knows_ring and self._byte_ns:
            # What did not fit into the ring came after the inputs.
            fitted = (self._bytes - took / self._byte_ns)[seen]
            loaded = np.where(self._loading, self._loaded, NEVER)
            ring = max(self._ahead(loaded), float(fitted.max(initial=0.0)))
        # Loads that wait for barriers all come after them, those that fit into the ring as well.
        before = np.where(np.isfinite(self._after_inputs), 0.0, ring)
        rest = np.maximum(self._bytes - before, 0.0) / PAGE_BYTES
        least = rest * behind + np.where(rest > 0, self._page_ns, 0.0)
        # The memory serves some workers faster than others: the median worker of a phase decides.
        usual, fastest = (_typical(t, seen, self._phase, otherwise=t) for t in (took, least))
        self._computes = seen & (usual > _HELD_UP * fastest)

    def _ahead(self, loaded: Floats) -> float:
        """How many bytes loaders were ahead of their consumers at most."""
        most = 0.0
        length = np.maximum(self._computed - self._inputs, 1.0)
        for begin, end in self._queues:
            own = slice(begin, end)
            done = np.cumsum(self._bytes[own])
            # The consumers use the bytes of a record evenly from its inputs to its sums.
            edges = np.column_stack([self._inputs[own], self._inputs[own] + length[own]]).ravel()
            used = np.column_stack([done - self._bytes[own], done]).ravel()
            edges = np.maximum.accumulate(edges)
            loads = np.flatnonzero(np.isfinite(loaded[own]))
            ahead = done[loads] - np.interp(loaded[own][loads], edges, used)
            most = max(most, float(ahead.max(initial=0.0)))
        return most

    def _share_ns(self) -> float:
        """Time of a byte when all workers load and share the memory evenly: ns; 0: unknown."""
        ceiling = self.trace.machine.get("bandwidth")
        if not ceiling:
            return 0.0
        # A weight that is streamed again comes from a cache.
        again = float(self._bytes.sum()) / max(float(self._memory_bytes.sum()), 1.0)
        return float(len(np.unique(self._worker)) * 1e9 / ceiling / max(again, 1.0))

    def _loaders(self) -> Longs:
        """How many workers load in a record's layer and phase."""
        loads = np.column_stack([self._label, self._worker])[self._loading]
        labels = np.unique(loads, axis=0)[:, 0]
        found: Longs = np.bincount(labels, minlength=int(self._label.max(initial=0)) + 1)
        return found[self._label]

    def _ns_per_byte(self) -> float:
        """Time of a worker's loader for a byte when nothing holds it up: ns."""
        took, ceiling = self._load_took, self.trace.machine.get("bandwidth")
        known = self._loading & (took > 0)
        if not known.any():
            return 0.0
        # The rate above which a tenth of all bytes came.
        rates = self._bytes[known] / took[known]
        order = np.argsort(-rates)
        share = np.cumsum(self._bytes[known][order]) / self._bytes[known].sum()
        fast = float(rates[order][np.searchsorted(share, 0.1)])
        workers = len(np.unique(self._worker))
        return 1 / max(fast, ceiling / 1e9 / workers if ceiling else 0.0)

    @functools.cached_property
    def _queues(self) -> list[tuple[int, int]]:
        first = np.flatnonzero(self._before < 0)
        return list(zip(first.tolist(), [*first[1:].tolist(), self._count], strict=True))

    def _find_product_lags(self) -> None:
        """Lags from inputs, and from the last load, to the sums of a record; and what follows."""
        arrived = np.where(self._loading, np.minimum(self._loaded, self._computed), self._inputs)
        late = self._loading & (arrived > self._inputs)
        self._exposed = late & ~self._computes
        whole, rest = self._computed - self._inputs, self._computed - arrived
        self._loads_take = np.where(self._loading, self._loaded - self._inputs, 0.0)
        # Computing that loads hide takes as long as where they hide nothing: in the same phase,
        # else for a page; and no longer than if every page took what comes after the last.
        pages = np.maximum(self._bytes / PAGE_BYTES, 1.0)
        guess = rest * pages
        known = self._loading & ~self._exposed
        if (seen := known & self._computes).any():
            # What comes after the last page comes once, however many there are.
            page = float(np.median((self._loads_take / pages)[seen]))
            guess = np.minimum(guess, rest + (pages - 1) * page)
        elif known.any():
            guess = np.minimum(guess, pages * np.median((whole / pages)[known]))
        full = _typical(whole, ~self._exposed, self._phase, otherwise=np.maximum(guess, rest))
        self._full = np.where(self._exposed, np.minimum(full, whole), whole)
        tail = _typical(rest, self._exposed, self._phase, otherwise=np.zeros(self._count))
        self._tail = np.where(self._exposed, rest, np.minimum(tail, np.minimum(whole, rest)))
        self._tail[~self._loading] = 0.0
        # Where a load is noted after the sums, it did not hold them up.
        self._tail -= np.where(self._loading, self._loaded - arrived, 0.0)
        self._last = np.clip(self._tail, 0.0, self._full / pages)  # the last page's part
        self._leave = self._left - self._computed
        self._store = self._end - self._computed
        self._signal = self._signalled - self._end
        # A worker's share of a label, as a part of the mean share.
        key = self._label * (self._worker.max() + 1) + self._worker
        shares, member = np.unique(key, return_inverse=True)
        total = np.bincount(member.reshape(-1), whole)
        label = shares // (self._worker.max() + 1)
        mean = np.bincount(label, total) / np.maximum(np.bincount(label), 1)
        ratio = np.divide(mean[label], total, out=np.ones_like(total), where=total > 0)
        self._even = ratio[member.reshape(-1)]

    def _order(self) -> list[Batch]:
        """Order: a record's level is above those of all that it depends on."""
        after: list[list[int]] = [[] for _ in range(self._count)]  # channels that wait for a record
        missing = np.array([len(members) for members in self._producers], np.int64)
        for c, members in enumerate(self._producers):
            for record in members.tolist():
                after[record].append(c)
        waiting: list[list[int]] = [[] for _ in self._producers]
        for record, c in zip(self._pair_record.tolist(), self._pair_channel.tolist(), strict=True):
            waiting[c].append(record)
        needs = np.bincount(self._pair_record, minlength=self._count) + (self._before >= 0)
        level = [0] * self._count
        channel_level = [0] * len(self._producers)
        left, open_ = needs.tolist(), missing.tolist()
        ready = [r for r in range(self._count) if left[r] == 0]
        done = 0
        while ready:
            record = ready.pop()
            done += 1
            for c in after[record]:
                channel_level[c] = max(channel_level[c], level[record])
                open_[c] -= 1
                if open_[c] == 0:
                    for waiter in waiting[c]:
                        level[waiter] = max(level[waiter], channel_level[c] + 1)
                        left[waiter] -= 1
                        if left[waiter] == 0:
                            ready.append(waiter)
            following = record + 1
            if following < self._count and self._before[following] == record:
                level[following] = max(level[following], level[record] + 1)
                left[following] -= 1
                if left[following] == 0:
                    ready.append(following)
        if done < self._count:
            raise TraceError(f"the dependencies of {self._count - done} records go in a circle")
        return _batches(
            np.array(level), np.array(channel_level), self._pair_record, self._producers
        )

    @property
    def used_phases(self) -> tuple[str, ...]:
        """The phases of the step, in the order of the program."""
        return tuple(self.phases[p] for p in np.unique(self._phase).tolist())

    @property
    def loading_phases(self) -> tuple[str, ...]:
        """The phases whose loads were noted."""
        return tuple(self.phases[p] for p in np.unique(self._phase[self._loading]).tolist())


class Batch(NamedTuple):
    """Records of one level, the pairs of which they wait for channels, and complete channels."""

    records: Longs
    pairs: Longs  # rows of the pairs, grouped by record
    waiters: Longs  # places in ``records`` of the groups of pairs
    first_pairs: Longs
    channels: Longs
    producers: Longs  # of the channels, one after the other
    producer_channel: Longs
    first_producers: Longs


def _batches(
    level: Longs, channel_level: Longs, pair_record: Longs, producers: Sequence[Longs]
) -> list[Batch]:
    depth = int(level.max(initial=-1)) + 1
    records = _grouped(level, depth)
    pairs = _grouped(level[pair_record], depth)
    channels = _grouped(channel_level, depth)
    batches = []
    for own, pair, channel in zip(records, pairs, channels, strict=True):
        waiting, first = np.unique(pair_record[pair], return_index=True)
        channel = np.array([c for c in channel.tolist() if len(producers[c])], np.int64)
        sizes = [len(producers[c]) for c in channel.tolist()]
        joined = np.concatenate([*(producers[c] for c in channel.tolist()), np.empty(0, np.int64)])
        batches.append(
            Batch(
                records=own,
                pairs=pair,
                waiters=np.searchsorted(own, waiting),
                first_pairs=first,
                channels=channel,
                producers=joined.astype(np.int64),
                producer_channel=np.repeat(channel, sizes).astype(np.int64),
                first_producers=np.cumsum([0, *sizes[:-1]])[: len(sizes)],
            )
        )
    return batches


def _grouped(of: Longs, count: int) -> list[Longs]:
    """The indices of every group, in order."""
    order = np.argsort(of, kind="stable")
    return np.split(order, np.searchsorted(of[order], np.arange(1, count)))


def _typical(values: Floats, known: Bools, group: Longs, otherwise: Floats | None = None) -> Floats:
    """For every record the median of the known values of its group.

    Groups without one: ``otherwise``, or the median of all known values, or 0.
    """
    if otherwise is None:
        whole = float(np.median(values[known])) if known.any() else 0.0
        otherwise = np.full(len(values), whole)
    result = otherwise.copy()
    for number in np.unique(group[known]).tolist():
        result[group == number] = np.median(values[known & (group == number)])
    return result
