"""A trace: what a machine noted while it ran, as columns, and the file that holds it.

docs/trace-format.md describes the file; this module writes and reads it. Nothing in a file is
executed, and a file that is damaged or made to harm is refused with one sentence.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

FORMAT: Final = "megavm-trace"
VERSION: Final = "1"
MAX_WORKERS: Final = 1 << 16
MAX_TIME: Final = 1 << 60  # nanoseconds

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]


class Event(NamedTuple):
    """A point in the life of an instruction, and the role that notes it."""

    name: str
    role: str
    help: str


EVENTS: Final = (
    Event("fetched", "controller", "the instruction is decoded"),
    Event("ready", "controller", "the waits of its header are over"),
    Event("load_begin", "loader", "before its first load is issued"),
    Event("load_issued", "loader", "after its last load was issued"),
    Event("load_arrived", "loader", "its last load is there"),
    Event("begin", "consumer", "the consumers turn to it"),
    Event("inputs", "consumer", "its inputs are there, tagged words too"),
    Event("computed", "consumer", "its sums are complete"),
    Event("end", "consumer", "its results are stored"),
    Event("signalled", "storer", "its barrier is signalled"),
)

BARRIER, TAGGED = 0, 1  # kinds of a channel


class TraceError(ValueError):
    """A trace that cannot be read or used, and why, in one sentence."""


@dataclass(frozen=True, eq=False)
class TraceProgram:
    """A program as a trace holds it: n instructions, c channels, w waits (docs/trace-format.md).

    ``facts`` are its members of the header: fingerprint, dynamic, workers, barriers, tensors,
    labels, metadata, opcodes.
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
        return int(self.facts["workers"])

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The different kinds of instruction (names of opcodes), in the order of the opcodes."""
        return tuple(dict.fromkeys(self._name(int(o)) for o in np.unique(self.words[:, 0])))

    @functools.cached_property
    def kind(self) -> Ints:
        """Of every instruction its kind, an index of ``kinds``: int32 [n]."""
        opcodes, inverse = np.unique(self.words[:, 0], return_inverse=True)
        index = {name: i for i, name in enumerate(self.kinds)}
        of_opcode = np.array([index[self._name(int(o))] for o in opcodes], np.int32)
        return of_opcode[inverse.reshape(-1)]

    def _name(self, opcode: int) -> str:
        return str(self.facts["opcodes"][str(opcode)]["name"])

    def channel_name(self, channel: int) -> str:
        """The barrier or the tagged tensor of a channel; "queue" for -1."""
        if channel < 0:
            return "queue"
        thing = int(self.channel_object[channel])
        if self.channel_kind[channel] == TAGGED:
            return str(self.facts["tensors"][thing][0])
        return str(self.facts["barriers"][thing] or f"barrier {thing}")


@dataclass(frozen=True, eq=False)
class Spans:
    """The times of every record without holes: int64 [R], ns, with

    begin <= waited <= inputs <= computed <= end <= signalled. ``waited`` is the end of the wait for
    the header's barriers. ``load_begin`` and ``load_end`` are -1 where nothing was loaded.
    """

    begin: Longs
    waited: Longs
    inputs: Longs
    computed: Longs
    end: Longs
    signalled: Longs
    load_begin: Longs
    load_end: Longs


@dataclass(frozen=True, eq=False)
class Trace:
    """P programs, S steps of them, R records (one instruction executed once), E events.

    ``times`` is int64 [E, R]: nanoseconds since the first event, -1 where an event was not noted.
    Records are sorted by step, worker and slot. docs/trace-format.md says what every column holds.
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
        """Workers of the largest program."""
        return max((p.workers for p in self.programs), default=0)

    @functools.cached_property
    def record_program(self) -> Ints:
        """The program of every record: int32 [R]."""
        return self.step_program[self.record_step]

    @functools.cached_property
    def step_offsets(self) -> Longs:
        """Records of step s are [step_offsets[s], step_offsets[s + 1]): int64 [S + 1]."""
        return np.searchsorted(self.record_step, np.arange(self.num_steps + 1))

    def event(self, name: str) -> Longs:
        """The times of one event: int64 [R], all -1 when the trace does not have it."""
        for row, event in enumerate(self.events):
            if event.name == name:
                times: Longs = self.times[row]
                return times
        return np.full(self.num_records, -1, np.int64)

    def of_instruction(self, name: str) -> Longs:
        """A column of the programs ("bytes", "flops", ...) for every record: int64 [R]."""
        values = [np.asarray(getattr(p, name), np.int64) for p in self.programs]
        first = np.cumsum([0, *map(len, values)])
        joined = np.concatenate([*values, np.empty(0, np.int64)])
        return joined[first[self.record_program] + self.record_instruction]

    @functools.cached_property
    def kinds(self) -> tuple[str, ...]:
        """The different kinds of instruction in all programs."""
        return tuple(dict.fromkeys(kind for p in self.programs for kind in p.kinds))

    @functools.cached_property
    def record_kind(self) -> Ints:
        """The kind of every record, an index of ``kinds``: int32 [R]."""
        return self._joined([(p.kinds, p.kind) for p in self.programs], self.kinds)

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The different labels in all programs."""
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
        sizes = [len(of) for _, of in own]
        first = np.cumsum([0, *sizes])
        joined = np.concatenate([*parts, np.empty(0, np.int32)])
        return joined[first[self.record_program] + self.record_instruction]

    @functools.cached_property
    def spans(self) -> Spans:
        """The times of every record, what was not noted filled in from what was."""
        at = {e.name: self.event(e.name) for e in EVENTS}
        known = self.times.max(axis=0, initial=-1)
        end = np.where(at["end"] >= 0, at["end"], known)
        begin = end.copy()
        for name in ("computed", "inputs", "load_begin", "ready", "fetched", "begin"):
            begin = np.where(at[name] >= 0, np.minimum(at[name], end), begin)
        ready = np.clip(at["ready"], begin, end)
        inputs = np.where(at["inputs"] >= 0, np.clip(at["inputs"], begin, end), ready)
        computed = np.where(at["computed"] >= 0, np.clip(at["computed"], inputs, end), end)
        arrived = np.where(at["load_arrived"] >= 0, at["load_arrived"], at["load_issued"])
        load_begin = np.where(arrived >= 0, at["load_begin"], -1)
        return Spans(
            begin=begin,
            waited=np.minimum(ready, inputs),
            inputs=inputs,
            computed=computed,
            end=end,
            signalled=np.maximum(at["signalled"], end),
            load_begin=load_begin,
            load_end=np.where(load_begin >= 0, np.maximum(arrived, load_begin), -1),
        )

    @functools.cached_property
    def step_begin(self) -> Longs:
        """When each step begins, its predecessor being over: int64 [S], ns.

        Steps of one launch overlap: a worker may fetch for a step before the last one has ended.
        """
        first = np.where(self.times >= 0, self.times, MAX_TIME).min(axis=0, initial=MAX_TIME)
        begin = np.minimum.reduceat(first, self.step_offsets[:-1]) if self.num_steps else first
        over = np.concatenate([[0], self.step_end[:-1]])
        both: Longs = np.minimum(np.maximum(begin, over), self.step_end)
        return both

    @functools.cached_property
    def step_end(self) -> Longs:
        """When the last record of each step, and of those before it, has ended: int64 [S], ns."""
        last = self.spans.signalled
        end = np.maximum.reduceat(last, self.step_offsets[:-1]) if self.num_steps else last
        return np.maximum.accumulate(end)

    # The file.

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as a safetensors file. Raises OSError when that is not possible."""
        from safetensors.numpy import save

        header = {
            "created": self.created,
            "megavm": self.megavm,
            "machine": dict(self.machine),
            "environment": dict(self.environment),
            "model": dict(self.model),
            "events": [event._asdict() for event in self.events],
            "programs": [dict(p.facts) for p in self.programs],
            "notes": dict(self.notes),
        }
        columns = {name: getattr(self, name.replace(".", "_")) for name in _TRACE_COLUMNS}
        for p, program in enumerate(self.programs):
            columns |= {f"program.{p}.{name}": getattr(program, name) for name in _PROGRAM_COLUMNS}
        text = json.dumps(header, allow_nan=False)
        metadata = {"format": FORMAT, "version": VERSION, "header": text}
        data = save({n: np.ascontiguousarray(v) for n, v in columns.items()}, metadata=metadata)
        with open(path, "wb") as file:
            file.write(data)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace and check all of it. Raises TraceError when the file is no trace."""
        try:
            return _read(os.fspath(path))
        except TraceError as error:
            raise TraceError(f"{os.fspath(path)} is not a trace: {error}") from error
        except OSError as error:
            raise TraceError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error


# Columns: type and shape, sizes by name. A size is bound by the first column that has it.
_Column = tuple[str, tuple[str | int, ...]]
_TRACE_COLUMNS: Final[dict[str, _Column]] = {
    "step.program": ("<i4", ("steps",)),
    "step.number": ("<i8", ("steps",)),
    "step.tokens": ("<i4", ("steps",)),
    "record.step": ("<i4", ("records",)),
    "record.worker": ("<i4", ("records",)),
    "record.slot": ("<i4", ("records",)),
    "record.instruction": ("<i4", ("records",)),
    "record.cause": ("<i4", ("records",)),
    "record.cause_channel": ("<i4", ("records",)),
    "times": ("<i8", ("events", "records")),
}
_PROGRAM_COLUMNS: Final[dict[str, _Column]] = {
    "words": ("<u4", ("instructions", 32)),
    "label": ("<i4", ("instructions",)),
    "bytes": ("<i8", ("instructions",)),
    "load_bytes": ("<i8", ("instructions",)),
    "flops": ("<i8", ("instructions",)),
    "channel_kind": ("<i4", ("channels",)),
    "channel_object": ("<i4", ("channels",)),
    "channel_target": ("<i4", ("channels",)),
    "channel_offsets": ("<i4", ("channels + 1",)),
    "channel_producers": ("<i4", ("producers",)),
    "waits": ("<i4", ("waits", 3)),
}

# Members of JSON objects and their types.
_HEADER: Final = {
    "created": str,
    "megavm": str,
    "machine": dict,
    "environment": dict,
    "model": dict,
    "events": list,
    "programs": list,
    "notes": dict,
}
_MACHINE: Final = {"name": str, "device": str, "workers": int, "clock": str}
_PROGRAM: Final = {
    "fingerprint": str,
    "dynamic": bool,
    "workers": int,
    "barriers": list,
    "tensors": list,
    "labels": list,
    "metadata": dict,
    "opcodes": dict,
}


def _read(path: str) -> Trace:
    from safetensors import SafetensorError, safe_open

    columns: dict[str, npt.NDArray[Any]] = {}
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_version(metadata)
            columns.update((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    except SafetensorError as error:
        raise TraceError(f"it is truncated or no safetensors file ({_line(error)})") from error
    except (TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        # A type that numpy does not have, a size that does not fit.
        raise error if isinstance(error, TraceError) else TraceError(_line(error)) from error
    header = _read_header(metadata["header"])
    sizes = {"events": len(header["events"])}
    own = _take(columns, "", _TRACE_COLUMNS, sizes)
    programs = []
    for p, facts in enumerate(header["programs"]):
        taken = _take(columns, f"program.{p}.", _PROGRAM_COLUMNS, {})
        programs.append(TraceProgram(facts, **taken))
        _check_program(f"program {p}", programs[-1])
    known: dict[str, Any] = {name.replace(".", "_"): column for name, column in own.items()}
    known |= {name: header[name] for name in ("created", "megavm", "environment", "model", "notes")}
    events = tuple(Event(e["name"], e["role"], e["help"]) for e in header["events"])
    trace = Trace(machine=header["machine"], programs=tuple(programs), events=events, **known)
    _check_trace(trace)
    return trace


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _check_version(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise TraceError("its metadata does not say format megavm-trace")
    if metadata.get("version") != VERSION:
        raise TraceError(f"it has version {metadata.get('version')!r}, this megavm reads {VERSION}")
    if "header" not in metadata:
        raise TraceError("it has no header")


def _read_header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"its header is no JSON ({_line(error)})") from error
    _check_members("the header", header, _HEADER)
    machine = header["machine"]
    _check_members("machine", machine, _MACHINE)
    for name in ("bandwidth", "clock_step"):
        value = machine.setdefault(name, None)
        if value is not None and (not _is_number(value) or not 0 < value < float("inf")):
            raise TraceError(f"machine.{name} is {_show(value)}, not a positive number")
    for i, event in enumerate(header["events"]):
        _check_members(f"event {i}", event, {"name": str, "role": str, "help": str})
    names = [event["name"] for event in header["events"]]
    if len(set(names)) != len(names):
        raise TraceError("it has an event twice")
    for p, program in enumerate(header["programs"]):
        _check_facts(f"program {p}", program)
    result: dict[str, Any] = header
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _check_members(what: str, value: object, members: Mapping[str, type]) -> None:
    if not isinstance(value, dict):
        raise TraceError(f"{what} is {_show(value)}, not an object")
    for name, expected in members.items():
        if type(value.get(name)) is not expected:
            raise TraceError(f"{what} has {name} {_show(value.get(name))}, not {expected.__name__}")


def _check_strings(what: str, values: Sequence[object]) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TraceError(f"{what} are not all strings")


def _check_facts(what: str, facts: Any) -> None:
    """The members of a program in the header."""
    _check_members(what, facts, _PROGRAM)
    if not 1 <= facts["workers"] <= MAX_WORKERS:
        raise TraceError(f"{what} has {facts['workers']} workers, expected 1 to {MAX_WORKERS}")
    _check_strings(f"the barriers of {what}", facts["barriers"])
    _check_strings(f"the labels of {what}", facts["labels"])
    for tensor in facts["tensors"]:
        form = [list, str, list, str, str, bool]
        if [type(tensor), *map(type, tensor if isinstance(tensor, list) else [])] != form:
            raise TraceError(f"{what} has the tensor {_show(tensor)}")
        if not all(type(size) is int for size in tensor[1]):
            raise TraceError(f"{what} has a tensor of shape {_show(tensor[1])}")
    for opcode, facts_ in facts["opcodes"].items():
        where = f"opcode {_show(opcode)} of {what}"
        if not (opcode.isascii() and opcode.isdigit()):
            raise TraceError(f"{where} is no number")
        _check_members(where, facts_, {"name": str, "help": str, "fields": list})
        for described in facts_["fields"]:
            _check_members(
                f"a field of {where}", described, {"name": str, "word": int, "kind": str}
            )
            if not 0 <= described["word"] < 32:
                raise TraceError(f"a field of {where} is word {described['word']} of 32")


def _take(
    columns: Mapping[str, npt.NDArray[Any]],
    prefix: str,
    wanted: Mapping[str, _Column],
    sizes: dict[str, int],
) -> dict[str, npt.NDArray[Any]]:
    """The columns of a table, of the right types and of shapes that agree."""
    taken = {}
    for name, (dtype, shape) in wanted.items():
        column = columns.get(prefix + name)
        if column is None:
            raise TraceError(f"column {prefix}{name} is missing")
        if column.dtype != np.dtype(dtype) or column.ndim != len(shape):
            raise TraceError(
                f"column {prefix}{name} is {column.dtype} of shape {column.shape}, "
                f"expected {np.dtype(dtype)} of [{', '.join(map(str, shape))}]"
            )
        for have, size in zip(column.shape, shape, strict=True):
            if size == "channels + 1":
                size = sizes["channels"] + 1
            expected = sizes.setdefault(size, have) if isinstance(size, str) else size
            if have != expected:
                raise TraceError(
                    f"column {prefix}{name} has shape {column.shape}, expected {expected} {size}"
                )
        taken[name] = column
    return taken


def _check_range(what: str, values: npt.NDArray[Any], low: int, high: Any) -> None:
    """Raise TraceError when a value is not in [low, high), which is one number or one for each."""
    wrong = np.flatnonzero((values < low) | (values >= high))
    if len(wrong):
        end = high if np.ndim(high) == 0 else high[wrong[0]]
        raise TraceError(
            f"{what} is {values[wrong[0]]} at {wrong[0]}, expected {low} to {int(end) - 1}"
        )


def _check_program(what: str, program: TraceProgram) -> None:
    facts, n = program.facts, len(program)
    _check_range(f"{what}: label", program.label, 0, len(facts["labels"]))
    for opcode in np.unique(program.words[:, 0]):
        if str(opcode) not in facts["opcodes"]:
            raise TraceError(f"{what} has opcode {opcode}, which it does not describe")
    _check_range(f"{what}: flops", program.flops, 0, MAX_TIME)
    _check_range(f"{what}: bytes", program.bytes, 0, MAX_TIME)
    _check_range(f"{what}: load_bytes", program.load_bytes, 0, program.bytes + 1)
    _check_range(f"{what}: channel_kind", program.channel_kind, 0, 2)
    things = np.array([len(facts["barriers"]), len(facts["tensors"])])[program.channel_kind]
    _check_range(f"{what}: channel_object", program.channel_object, 0, things)
    offsets = program.channel_offsets
    if offsets[0] != 0 or offsets[-1] != len(program.channel_producers):
        raise TraceError(
            f"{what}: channel_offsets go from {offsets[0]} to {offsets[-1]}, "
            f"there are {len(program.channel_producers)} producers"
        )
    if len(program.channel_kind) and (np.diff(offsets) < 1).any():
        raise TraceError(f"{what}: channel_offsets do not grow: every channel has a producer")
    _check_range(f"{what}: channel_producers", program.channel_producers, 0, n)
    counts = np.diff(offsets).astype(np.int64)
    limit = np.where(program.channel_kind == BARRIER, counts + 1, 1)
    _check_range(f"{what}: channel_target", program.channel_target, 0, limit)
    for column, high in enumerate((n, len(program.channel_kind), 2)):
        _check_range(f"{what}: waits", program.waits[:, column], 0, high)
    if (np.diff(program.waits[:, 0]) < 0).any():
        raise TraceError(f"{what}: waits are not sorted by instruction")


def _check_trace(trace: Trace) -> None:
    steps, records = trace.num_steps, trace.num_records
    if not records:
        raise TraceError("it has no records")
    _check_range("step.program", trace.step_program, 0, len(trace.programs))
    _check_range("step.number", trace.step_number, 0, MAX_TIME)
    _check_range("step.tokens", trace.step_tokens, 0, 1 << 31)
    if (np.diff(trace.step_number) <= 0).any():
        raise TraceError("step.number does not grow")
    _check_range("record.step", trace.record_step, 0, steps)
    _check_range("record.slot", trace.record_slot, 0, 1 << 31)
    if len(np.unique(trace.record_step)) != steps:
        raise TraceError("it has a step without records")
    workers = np.array([p.workers for p in trace.programs])[trace.record_program]
    _check_range("record.worker", trace.record_worker, -1, workers)
    order = np.lexsort((trace.record_slot, trace.record_worker, trace.record_step))
    if (order != np.arange(records)).any():
        raise TraceError("records are not sorted by step, worker and slot")
    instructions = np.array([len(p) for p in trace.programs])[trace.record_program]
    _check_range("record.instruction", trace.record_instruction, 0, instructions)
    _check_range("record.cause", trace.record_cause, -1, records)
    channels = np.array([len(p.channel_kind) for p in trace.programs])[trace.record_program]
    _check_range("record.cause_channel", trace.record_cause_channel, -1, channels)
    _check_range("times", trace.times.reshape(-1), -1, MAX_TIME)
    for record in np.flatnonzero(trace.times.max(axis=0, initial=-1) < 0)[:1]:
        raise TraceError(f"record {record} has no event")
