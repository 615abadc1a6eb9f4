"""A trace: the events of a running machine, as columns. trace_file.py reads and writes it."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from megavm.profiler.tables import worker_name
from megavm.vm import events
from megavm.vm.tensors import DType

MAX_TIME: Final = 1 << 60  # nanoseconds
MAX_SMS: Final = 1 << 16  # no GPU has so many
SUFFIX: Final = ".megatrace"  # trace files end with it

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint32]


class Event(NamedTuple):
    """A point in the life of an instruction, as a file of a trace describes it."""

    name: str
    role: str
    help: str


EVENTS: Final = tuple(Event(event.label, event.role, event.doc) for event in events.Event)

BARRIER, TAGGED = 0, 1  # kinds of a channel


class TraceError(ValueError):
    """A trace cannot be read or used; the message gives the reason in one sentence."""


def _tensor_bytes(tensor: Sequence[Any]) -> float:
    """Bytes of a tensor of the header; infinite if its type is not known."""
    _, shape, dtype, _, _ = tensor
    size = float(DType[dtype].size) if dtype in DType.__members__ else math.inf
    for length in shape:
        size *= float(min(max(length, 0), MAX_TIME))
    return size


@dataclass(frozen=True, eq=False)
class TraceProgram:
    """A program in a trace: n instructions, c channels, w waits (docs/trace-format.md).

    ``facts`` are the program's members of the header: fingerprint, dynamic, workers, barriers,
    tensors, labels, metadata, opcodes.
    """

    facts: Mapping[str, Any]
    words: Words  # [n, 32]
    label: Ints  # [n]
    bytes: Longs  # [n]
    load_bytes: Longs  # [n]
    flops: Longs  # [n]
    channel_kind: Ints  # [c]
    channel_object: Ints  # [c]
    channel_target: Ints  # [c]
    channel_offsets: Ints  # [c + 1]
    channel_producers: Ints  # [channel_offsets[c]]
    waits: Ints  # [w, 3]: instruction, channel, steps back; sorted by instruction

    def __len__(self) -> int:
        return len(self.words)

    @property
    def workers(self) -> int:
        """Number of workers of all ranks."""
        return int(self.facts["workers"])

    @property
    def ranks(self) -> int:
        """Number of ranks: worker w of rank r is number r * workers / ranks + w."""
        return int(self.facts.get("ranks", 1))

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of instruction (names of opcodes), in the order of the opcodes."""
        return tuple(dict.fromkeys(self._name(int(o)) for o in np.unique(self.words[:, 0])))

    @functools.cached_property
    def kind(self) -> Ints:
        """The kind of every instruction, an index of ``kinds``: int32 [n]."""
        opcodes, inverse = np.unique(self.words[:, 0], return_inverse=True)
        index = {name: i for i, name in enumerate(self.kinds)}
        of_opcode = np.array([index[self._name(int(o))] for o in opcodes], np.int32)
        return of_opcode[inverse.reshape(-1)]

    def _name(self, opcode: int) -> str:
        return str(self.facts["opcodes"][str(opcode)]["name"])

    @functools.cached_property
    def memory_bytes(self) -> Longs:
        """``load_bytes`` with every weight counted once in a step: int64 [n].

        A weight that several instructions stream is divided among them: all but the first may find
        it in a cache. KV blocks count as often as they are streamed.
        """
        weights = self._weights
        _, first, group = np.unique(weights, axis=0, return_index=True, return_inverse=True)
        group = group.reshape(-1)
        sizes = np.array([_tensor_bytes(tensor) for tensor in self.facts["tensors"]] + [0.0])
        size = self.ranks * sizes[weights[first]].sum(axis=1)
        size[(weights[first] < 0).all(axis=1)] = np.inf
        streamed = np.bincount(group, self.load_bytes)
        share = np.minimum(size / np.maximum(streamed, 1.0), 1.0)
        return np.asarray(self.load_bytes * share[group], np.int64)

    @functools.cached_property
    def _weights(self) -> Longs:
        """The weights that every instruction names, sorted; -1: none. int64 [n, tensor fields]."""
        tensors = self.facts["tensors"]
        is_weight = np.array([tensor[3] == "weight" for tensor in tensors] + [False])
        fields = {
            int(opcode): [field["word"] for field in facts["fields"] if field["kind"] == "tensor"]
            for opcode, facts in self.facts["opcodes"].items()
        }
        found = np.full((len(self), max(map(len, fields.values()), default=0)), -1, np.int64)
        for opcode, words in fields.items():
            own = self.words[:, 0] == opcode
            handles = np.minimum(self.words[own][:, words], len(tensors)).astype(np.int64)
            found[own, : len(words)] = np.where(is_weight[handles], handles, -1)
        return np.sort(found, axis=1)

    def channel_name(self, channel: int) -> str:
        """The name of the barrier or tagged tensor of a channel; "queue" for -1."""
        if channel < 0:
            return "queue"
        thing = int(self.channel_object[channel])
        if self.channel_kind[channel] == TAGGED:
            return str(self.facts["tensors"][thing][0])
        return str(self.facts["barriers"][thing] or f"barrier {thing}")


def stable_order(values: npt.NDArray[np.integer], limit: int) -> Longs:
    """The indices that sort values from 0 to ``limit`` - 1; equal ones stay in order."""
    # Sorting numbers of 16 bits takes a tenth of the time.
    small = limit <= 1 << 16
    return np.argsort(values.astype(np.uint16) if small else values, kind="stable")


@dataclass(frozen=True, eq=False)
class Spans:
    """The times of every record, missing ones filled in: int64 [R], ns.

    begin <= waited <= inputs <= loaded <= computed <= left <= end <= signalled. ``waited``: end of
    the wait for the header's barriers. ``loaded``: when the consumers had seen the loads.
    ``left``: when the consumers turned to the next instruction, possibly while the storer still
    stored; ``end`` if no instruction follows. ``load_begin`` and ``load_end``, the time in which
    loads were in flight, are -1 for a record without loads. ``load_end`` is later than ``loaded``
    where a kernel noted the arrival of what its first products need.
    """

    begin: Longs
    waited: Longs
    inputs: Longs
    loaded: Longs
    computed: Longs
    left: Longs
    end: Longs
    signalled: Longs
    load_begin: Longs
    load_end: Longs


@dataclass(frozen=True, eq=False)
class Trace:
    """P programs, S steps, R records (one instruction executed once), E events.

    ``times`` is int64 [E, R]: nanoseconds since the first event, -1 if an event was not noted.
    Records are sorted by step, worker and slot. docs/trace-format.md describes every column.
    """

    machine: Mapping[str, Any]
    programs: tuple[TraceProgram, ...]
    step_program: Ints  # [S]
    step_number: Longs  # [S]
    step_tokens: Ints  # [S]
    record_step: Ints  # [R]
    record_worker: Ints  # [R]
    record_slot: Ints  # [R]
    record_instruction: Ints  # [R]
    record_cause: Ints  # [R]
    record_cause_channel: Ints  # [R]
    times: Longs  # [E, R]
    # Absent from traces of programs that are not a model's, and from older files.
    step_sequences: Ints | None = None  # [S]
    step_prompt_rows: Ints | None = None  # [S]
    # The SM of a GPU on which a record was executed, -1: unknown. Absent: all are.
    record_sm: Ints | None = None  # [R]
    events: tuple[Event, ...] = EVENTS
    created: str = ""
    megavm: str = ""
    environment: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_steps(self) -> int:
        return len(self.step_program)

    @property
    def num_records(self) -> int:
        return len(self.record_step)

    @functools.cached_property
    def workers(self) -> int:
        """Number of workers of the program with the most."""
        return max((p.workers for p in self.programs), default=0)

    @functools.cached_property
    def ranks(self) -> int:
        """Number of ranks of the programs, which is the same for all programs of a model."""
        return max((p.ranks for p in self.programs), default=1)

    @functools.cached_property
    def record_rank(self) -> Ints:
        """The rank of every record: int32 [R]."""
        sizes = np.array([max(len(p) // p.ranks, 1) for p in self.programs], np.int32)
        return self.record_instruction // sizes[self.record_program]

    def worker_title(self, worker: int) -> str:
        """A worker's name: "worker 3", in a trace of several ranks "rank 1, worker 3"."""
        if self.ranks == 1 or worker < 0:
            return f"worker {worker}"
        own = worker % max(self.workers // self.ranks, 1)
        return f"rank {self.worker_rank(worker)}, worker {own}"

    def worker_rank(self, worker: int) -> int:
        """The rank of a worker."""
        return worker // max(self.workers // self.ranks, 1)

    def worker_name(self, worker: int) -> str:
        """A worker's name in tables: "3", in a trace of several ranks "1:3"."""
        return worker_name(worker, self.workers, self.ranks)

    @functools.cached_property
    def sms(self) -> tuple[tuple[int, int], ...]:
        """The SMs that executed records, as (rank, number of the SM on its GPU), sorted."""
        places = np.unique(self._sm_places)
        return tuple(divmod(place, MAX_SMS) for place in places[places >= 0].tolist())

    @functools.cached_property
    def record_place(self) -> Ints:
        """The SM of every record as an index of ``sms``; -1: unknown. int32 [R]."""
        among = np.array([rank * MAX_SMS + sm for rank, sm in self.sms], np.int64)
        places = self._sm_places
        return np.where(places >= 0, np.searchsorted(among, places), -1).astype(np.int32)

    @property
    def _sm_places(self) -> Longs:
        """A number for the SM of every record, different for each rank; -1: unknown."""
        if self.record_sm is None:
            return np.full(self.num_records, -1, np.int64)
        places = self.record_rank.astype(np.int64) * MAX_SMS + self.record_sm
        return np.where(self.record_sm >= 0, places, -1)

    def sm_title(self, rank: int, sm: int) -> str:
        """The name of an SM: "SM 3", in a trace of several ranks "rank 1, SM 3"."""
        return f"SM {sm}" if self.ranks == 1 else f"rank {rank}, SM {sm}"

    @functools.cached_property
    def by_worker(self) -> Longs:
        """The records of each worker in the order of its queue, worker after worker: int64 [R].

        Those of unknown workers come first.
        """
        return stable_order(self.record_worker + 1, self.workers + 1)

    @functools.cached_property
    def record_program(self) -> Ints:
        """The program of every record: int32 [R]."""
        return self.step_program[self.record_step]

    @functools.cached_property
    def step_offsets(self) -> Longs:
        """Records of step s are [step_offsets[s], step_offsets[s + 1]): int64 [S + 1]."""
        return np.searchsorted(self.record_step, np.arange(self.num_steps + 1))

    def event(self, name: str) -> Longs:
        """The times of one event: int64 [R], all -1 if the trace lacks the event."""
        for row, event in enumerate(self.events):
            if event.name == name:
                times: Longs = self.times[row]
                return times
        return np.full(self.num_records, -1, np.int64)

    def of_instruction(self, name: str) -> Longs:
        """A column of the programs ("bytes", "memory_bytes", ...) for every record: int64 [R]."""
        values = [np.asarray(getattr(p, name), np.int64) for p in self.programs]
        joined: Longs = np.concatenate([*values, np.empty(0, np.int64)])
        return joined[self._instruction]

    @functools.cached_property
    def _instruction(self) -> Longs:
        """The instruction of every record, a number among those of all programs: int64 [R]."""
        first: Longs = np.cumsum([0, *map(len, self.programs)])
        return first[self.record_program] + self.record_instruction

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of instruction in all programs."""
        return tuple(dict.fromkeys(kind for p in self.programs for kind in p.kinds))

    @functools.cached_property
    def record_kind(self) -> Ints:
        """The kind of every record, an index of ``kinds``: int32 [R]."""
        return self._joined([(p.kinds, p.kind) for p in self.programs], self.kinds)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The distinct labels in all programs."""
        return tuple(dict.fromkeys(str(x) for p in self.programs for x in p.facts["labels"]))

    @functools.cached_property
    def record_label(self) -> Ints:
        """The label of every record, an index of ``labels``: int32 [R]."""
        return self._joined([(p.facts["labels"], p.label) for p in self.programs], self.labels)

    def _joined(self, own: Sequence[tuple[Sequence[str], Ints]], names: Sequence[str]) -> Ints:
        index = {name: i for i, name in enumerate(names)}
        parts = [
            np.array([index[n] for n in names_], np.int32)[of] for names_, of in own if len(of)
        ]
        return np.concatenate([*parts, np.empty(0, np.int32)])[self._instruction]

    @functools.cached_property
    def spans(self) -> Spans:
        """The times of every record; missing times are derived from those that were noted."""
        at = {e.name: self.event(e.name) for e in EVENTS}
        known = self.times.max(axis=0, initial=-1)
        end = np.where(at["end"] >= 0, at["end"], known)
        begin = end.copy()
        for name in ("computed", "inputs", "load_begin", "ready", "fetched", "begin"):
            begin = np.where(at[name] >= 0, np.minimum(at[name], end), begin)
        ready = np.clip(at["ready"], begin, end)
        inputs = np.where(at["inputs"] >= 0, at["inputs"], np.maximum(ready, self._words(end)))
        inputs = np.clip(inputs, begin, end)
        following = self._next(begin, end)
        computed = np.where(at["computed"] >= 0, at["computed"], following)
        computed = np.clip(computed, inputs, end)
        arrived = np.where(at["load_arrived"] >= 0, at["load_arrived"], at["load_issued"])
        in_flight = np.maximum(arrived, at["load_issued"])
        load_begin = np.where(arrived >= 0, at["load_begin"], -1)
        return Spans(
            begin=begin,
            waited=np.minimum(ready, inputs),
            inputs=inputs,
            loaded=np.clip(np.where(load_begin >= 0, arrived, -1), inputs, computed),
            computed=computed,
            left=np.clip(following, computed, end),
            end=end,
            signalled=np.maximum(at["signalled"], end),
            load_begin=load_begin,
            load_end=np.where(load_begin >= 0, np.maximum(in_flight, load_begin), -1),
        )

    def _words(self, end: Longs) -> Longs:
        """When the tagged words that a record waited for were written, by its cause; else -1."""
        tagged = np.zeros(self.num_records, np.bool_)
        for p, program in enumerate(self.programs):
            own = (self.record_program == p) & (self.record_cause_channel >= 0)
            tagged[own] = program.channel_kind[self.record_cause_channel[own]] == TAGGED
        return np.where(tagged & (self.record_cause >= 0), end[self.record_cause], -1)

    def _next(self, begin: Longs, end: Longs) -> Longs:
        """When the worker of each record turned to the next record; ``end`` if there is none."""
        order = self.by_worker
        worker = self.record_worker[order]
        follows = (worker[1:] == worker[:-1]) & (worker[1:] >= 0)
        following = end.copy()
        following[order[:-1][follows]] = begin[order[1:][follows]]
        return following

    @functools.cached_property
    def step_first(self) -> Longs:
        """Time of the first event of each step; it may precede the end of the step before."""
        first = np.full(self.num_records, MAX_TIME)
        for times in self.times:
            np.minimum(first, times, where=times >= 0, out=first)
        return np.minimum.reduceat(first, self.step_offsets[:-1]) if self.num_steps else first

    @functools.cached_property
    def step_begin(self) -> Longs:
        """When each step begins, not before its predecessor ends: int64 [S], ns.

        Steps of one launch overlap, because a worker may fetch instructions of a step before the
        previous step has ended.
        """
        over = np.concatenate([[0], self.step_end[:-1]])
        both: Longs = np.minimum(np.maximum(self.step_first, over), self.step_end)
        return both

    @functools.cached_property
    def step_end(self) -> Longs:
        """When the last record of each step and of all earlier steps ends: int64 [S], ns."""
        last = self.spans.signalled
        end = np.maximum.reduceat(last, self.step_offsets[:-1]) if self.num_steps else last
        return np.maximum.accumulate(end)

    # The file.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a safetensors file. Raises OSError when that fails."""
        from megavm.profiler.trace_file import write

        write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read and check a trace. Raises TraceError when the file is not a valid trace."""
        from megavm.profiler.trace_file import read

        return read(path)
