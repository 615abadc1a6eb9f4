"""Export in Perfetto's native format: https://perfetto.dev/docs/reference/synthetic-track-event

This module encodes the messages itself instead of using the protobuf runtime: they are few and
simple, the encoder is thirty lines and five times as fast as generated classes, and the export
needs no further dependency. Tests parse the output with the official classes. Field numbers are
those of perfetto_trace.proto.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import fields
from typing import IO, Any, Final

from megavm.profiler.output import open_output
from megavm.profiler.slices import (
    INSIDE,
    MAX_ROWS,
    ROLES,
    THROUGH,
    Lane,
    arrows,
    counter,
    details,
    inner,
    lanes,
    title,
)
from megavm.profiler.trace import Trace, TraceProgram

SEQUENCE: Final = 1
SLICE_BEGIN, SLICE_END, COUNTER = 1, 2, 4
STATE_CLEARED, NEEDS_STATE = 1, 2
EXPLICIT_ORDER: Final = 3
# Names of the arguments of slices; in SQL "debug.flops" and so on (docs/profiling.md).
ARGUMENTS: Final = (
    "step", "instruction", "bytes", "flops", "streamed_bytes", "bytes_per_second", "held_up_by",
    "cause", "cause_worker",
)  # fmt: skip
ROOT, STEPS, BANDWIDTH = 1, 2, 3  # tracks; workers and lanes follow
FIRST_WORKER: Final = 16
FIRST_RANK: Final = 1 << 40


def varint(value: int) -> bytes:
    """An unsigned number, seven bits per byte, lowest bits first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """A field that is a varint."""
    return varint(field << 3) + varint(value)


def chunk(field: int, data: bytes | str) -> bytes:
    """A field that is a string or a message."""
    raw = data.encode() if isinstance(data, str) else data
    return varint(field << 3 | 2) + varint(len(raw)) + raw


def fixed64(field: int, value: int) -> bytes:
    """A field that is a fixed64."""
    return varint(field << 3 | 1) + struct.pack("<Q", value)


def double(field: int, value: float) -> bytes:
    """A field that is a double."""
    return varint(field << 3 | 1) + struct.pack("<d", value)


# The end of every slice packet: its sequence, and the flag that it uses interned data.
_TAIL: Final = number(10, SEQUENCE) + number(13, NEEDS_STATE)
_PAIRS: Final = [bytes((i & 0x7F | 0x80, i >> 7 | 0x80)) for i in range(1 << 14)]


def _at(time: int, event: bytes) -> bytes:
    """A packet with a TrackEvent (encoded with its field's tag) at a time in ns.

    Nearly the whole file consists of these packets, so the varint of the time comes from a table of
    two-byte pieces; varints may be longer than necessary.
    """
    body = b"\x40" + _PAIRS[time & 0x3FFF] + _PAIRS[time >> 14 & 0x3FFF] + varint(time >> 28)
    body += event
    return b"\x0a" + varint(len(body) + len(_TAIL)) + body + _TAIL


def _event(kind: int, track: int, more: bytes = b"") -> bytes:
    return chunk(11, number(9, kind) + number(11, track) + more)


def save_perfetto(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the trace.

    A worker is a track with the lanes of its roles below it; of several ranks, each is a track with
    its workers below it. Arrows lead from the instruction whose signal or words came last to the
    instruction that waited for them.

    Raises TraceError when the trace does not say which worker executed what, OSError when the file
    cannot be written.
    """
    own = lanes(trace)
    with open_output(path, "wb") as file:
        _Writer(trace, own, file).write()


class _Writer:
    def __init__(self, trace: Trace, own: Sequence[Lane], file: IO[Any]) -> None:
        self.trace = trace
        self.lanes = own
        self.file = file
        # Names of slices, kinds and arguments, with the numbers under which they are interned.
        names = [*(label or "instruction" for label in trace.labels), "step", *INSIDE]
        self.names = {name: i for i, name in enumerate(dict.fromkeys(names), 1)}
        self.kinds = {kind: i for i, kind in enumerate(trace.kinds, 1)}
        self.arguments = {name: i for i, name in enumerate(ARGUMENTS, 1)}
        values = [*THROUGH, *(label or "instruction" for label in trace.labels)]
        self.values = {value: i for i, value in enumerate(dict.fromkeys(values), 1)}
        self.about = [self._about(program) for program in trace.programs]
        self.steps = [self._argument("step", n) for n in trace.step_number.tolist()]
        self.details = details(trace)
        flows = arrows(trace, own)
        self.arrives = {record: flow for flow, record in enumerate(flows.target.tolist(), 1)}
        self.leaves: dict[int, list[int]] = defaultdict(list)
        for flow, record in enumerate(flows.source.tolist(), 1):
            self.leaves[record].append(flow)

    def write(self) -> None:
        """Write the whole file: interned data, tracks, steps, lanes, counter."""
        self._intern()
        self._track(ROOT, title(self.trace), 0, 0, number(11, EXPLICIT_ORDER))
        self._track(STEPS, "steps", ROOT, 0)
        unit = chunk(8, chunk(6, "GB/s"))
        self._track(BANDWIDTH, "weights and KV, GB/s", ROOT, 1, unit)
        ordered = number(11, EXPLICIT_ORDER)
        several = self.trace.ranks > 1
        for rank in range(self.trace.ranks if several else 0):
            self._track(FIRST_RANK + rank, f"rank {rank}", ROOT, 2 + rank, ordered)
        for worker in sorted({lane.worker for lane in self.lanes}):
            name = self.trace.worker_title(worker)
            above = FIRST_RANK + self.trace.worker_rank(worker) if several else ROOT
            self._track(_worker(worker), name, above, 2 + worker, ordered)
        for lane in self.lanes:
            self._track(_track_of(lane), lane.name, _worker(lane.worker), lane.place)
        self._steps()
        for lane in self.lanes:
            self._lane(lane)
        self._counter()

    def _packet(self, fields: bytes, flags: int = NEEDS_STATE) -> None:
        self.file.write(chunk(1, fields + number(10, SEQUENCE) + number(13, flags)))

    def _intern(self) -> None:
        tables = ((1, self.kinds), (2, self.names), (3, self.arguments), (29, self.values))
        data = b"".join(
            chunk(field, number(1, i) + chunk(2, name))
            for field, table in tables
            for name, i in table.items()
        )
        self._packet(chunk(12, data) + number(87, 1), STATE_CLEARED)

    def _track(self, track: int, name: str, parent: int, rank: int, more: bytes = b"") -> None:
        above = number(5, parent) if parent else b""
        fields = number(1, track) + chunk(2, name) + above + number(12, rank) + more
        self._packet(chunk(60, fields))

    def _argument(self, name: str, value: int) -> bytes:
        return chunk(4, number(1, self.arguments[name]) + number(3, value))

    def _details(self, lane: Lane) -> list[bytes]:
        """The encoded details of every slice of a consumer's lane."""
        found, workers = self.details, range(-1, self.trace.workers)
        labels = [self._text("cause", label or "instruction") for label in self.trace.labels]
        through = [self._text("held_up_by", name) for name in THROUGH]
        # The last entry is that of -1: there is no cause, or its worker is not known.
        labels.append(b"")
        late = [b"" if w < 0 else self._argument("cause_worker", w) for w in workers]
        late = [*late[1:], late[0]]
        rate = chunk(4, number(1, self.arguments["bytes_per_second"]) + double(5, 0.0))[:-8]
        columns = (getattr(found, field.name)[lane.record] for field in fields(found))
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [
            self._argument("flops", flops)
            + (
                self._argument("streamed_bytes", size) + rate + struct.pack("<d", per_second)
                if size
                else b""
            )
            + through[by]
            + labels[label]
            + late[worker]
            for flops, size, per_second, label, worker, by in rows
        ]

    def _text(self, name: str, value: str) -> bytes:
        """An argument whose value is an interned string."""
        return chunk(4, number(1, self.arguments[name]) + number(17, self.values[value]))

    def _steps(self) -> None:
        trace = self.trace
        name = number(10, self.names["step"])
        columns = (trace.step_number, trace.step_begin, trace.step_end)
        ends = _event(SLICE_END, STEPS)
        for step, begin, end in zip(*(c.tolist() for c in columns), strict=True):
            begins = _event(SLICE_BEGIN, STEPS, name + self._argument("step", step))
            self.file.write(_at(begin, begins) + _at(end, ends))

    def _lane(self, lane: Lane) -> None:
        trace, track = self.trace, _track_of(lane)
        consumer = lane.role == "consumer"
        ends = _event(SLICE_END, track)
        parts = []
        for name, begin, end in inner(trace, lane) if consumer else []:
            named = number(10, self.names[name])
            parts.append((name == "compute", named, begin.tolist(), end.tolist()))
        about = self._details(lane) if consumer else []
        packets = []
        columns = (
            lane.record,
            lane.begin,
            lane.end,
            trace.record_step[lane.record],
            trace.record_program[lane.record],
            trace.record_instruction[lane.record],
        )
        rows = zip(*(c.tolist() for c in columns), strict=True)
        for i, (record, begin, end, step, program, instruction) in enumerate(rows):
            more = self.about[program][instruction] + self.steps[step]
            if consumer:
                more += about[i]
            if consumer and record in self.leaves:
                more += b"".join(fixed64(47, flow) for flow in self.leaves[record])
            packets.append(_at(begin, _event(SLICE_BEGIN, track, more)))
            for arrives, named, begins, stops in parts:
                arrow = self.arrives.get(record) if arrives else None
                if stops[i] > begins[i] or arrow is not None:
                    more = named if arrow is None else named + fixed64(48, arrow)
                    packets.append(_at(begins[i], _event(SLICE_BEGIN, track, more)))
                    packets.append(_at(stops[i], ends))
            packets.append(_at(end, ends))
        self.file.write(b"".join(packets))

    def _about(self, program: TraceProgram) -> list[bytes]:
        """The encoded fields of each instruction's slice: name, kind, arguments."""
        facts = zip(
            program.label.tolist(), program.kind.tolist(), program.bytes.tolist(), strict=True
        )
        return [
            number(10, self.names[program.facts["labels"][label] or "instruction"])
            + number(3, self.kinds[program.kinds[kind]])
            + self._argument("instruction", i)
            + self._argument("bytes", size)
            for i, (label, kind, size) in enumerate(facts)
        ]

    def _counter(self) -> None:
        streams = counter(self.trace)
        for i, rate in enumerate(streams.rates.tolist()):
            time = round(streams.begin + i * streams.bin)
            self.file.write(_at(time, _event(COUNTER, BANDWIDTH, double(44, rate / 1e9))))


def _worker(worker: int) -> int:
    """The track of a worker; the tracks of its lanes have the next numbers."""
    return FIRST_WORKER + worker * (len(ROLES) * MAX_ROWS + 1)


def _track_of(lane: Lane) -> int:
    return _worker(lane.worker) + 1 + lane.place
