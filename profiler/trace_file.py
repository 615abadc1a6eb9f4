"""Reads and writes trace files in the format of docs/trace-format.md.

Reading executes nothing from a file, and refuses damaged and malicious files with a message of one
sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from megavm.profiler.output import open_output
from megavm.profiler.summary import VERSION as SUMMARY_VERSION
from megavm.profiler.summary import summary
from megavm.profiler.trace import BARRIER, MAX_SMS, MAX_TIME, Event, Trace, TraceError, TraceProgram

FORMAT: Final = "megavm-trace"
VERSION: Final = "1"
MAX_WORKERS: Final = 1 << 16
MAX_PAGES: Final = 1 << 10  # most pages of a ring
MAX_QUOTE: Final = 200  # characters of a library's error message that are shown
MAX_DEPTH: Final = 64  # nesting of objects and lists in the header
MAX_NUMBER: Final = 1e30  # largest bytes/s and ns; arithmetic with it does not overflow

# Columns: type and shape, with named sizes. The first column with a name determines its size.
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
_OPTIONAL_COLUMNS: Final[dict[str, _Column]] = {
    "step.sequences": ("<i4", ("steps",)),
    "step.prompt_rows": ("<i4", ("steps",)),
    "record.sm": ("<i4", ("records",)),
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
_RING: Final = {"pages": 1, "early_pages": 0}  # members that may be absent, and their least values


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace. Raises OSError when that fails; there is no new file then."""
    with open_output(path, "wb") as file:
        file.write(encode(trace))


def encode(trace: Trace) -> bytes:
    """A trace as the bytes of its file."""
    header = {
        "created": trace.created,
        "megavm": trace.megavm,
        "machine": dict(trace.machine),
        "environment": dict(trace.environment),
        "model": dict(trace.model),
        "events": [event._asdict() for event in trace.events],
        "programs": [dict(p.facts) for p in trace.programs],
        "notes": dict(trace.notes),
    }
    names = [*_TRACE_COLUMNS, *_OPTIONAL_COLUMNS]
    found = {name: getattr(trace, name.replace(".", "_")) for name in names}
    columns = {name: column for name, column in found.items() if column is not None}
    for p, program in enumerate(trace.programs):
        columns |= {f"program.{p}.{name}": getattr(program, name) for name in _PROGRAM_COLUMNS}
    header |= _summary(trace)
    metadata = {"format": FORMAT, "version": VERSION, "header": json.dumps(header, allow_nan=False)}
    return save({n: np.ascontiguousarray(v) for n, v in columns.items()}, metadata=metadata)


def _summary(trace: Trace) -> dict[str, Any]:
    """The member ``summary`` of the header; none for a trace whose numbers make no sense."""
    try:
        found = summary(trace)
        json.dumps(found, allow_nan=False)
    except ValueError:  # causes that go in a circle, rates that are infinite
        return {}
    return {"summary": found}


def with_summary(path: str | os.PathLike[str]) -> tuple[bytes, int]:
    """A file with a summary of this version: its first bytes, and where in the file the rest is.

    A file that has one, and one that is no valid trace, stays as it is: no first bytes, and 0.
    Raises OSError when the file cannot be read.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        text = file.read(min(length, size))
    try:
        container = json.loads(text)
        header = json.loads(container["__metadata__"]["header"])
        if header.get("summary", {}).get("version") == SUMMARY_VERSION:
            return b"", 0
        container["__metadata__"]["header"] = json.dumps(header | _summary(read(path)))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return b"", 0
    begin = json.dumps(container).encode()
    begin += b" " * (-len(begin) % 8)
    return len(begin).to_bytes(8, "little") + begin, 8 + length


def read(path: str | os.PathLike[str]) -> Trace:
    """Read and check a trace. Raises TraceError when the file is not a valid trace."""
    with _named(path) as name:
        return _read(name)


def check_format(path: str | os.PathLike[str]) -> None:
    """Check only the header of a file. Raises TraceError when it is not that of a trace."""
    with _named(path) as name, open(name, "rb"), safe_open(name, framework="numpy") as file:
        _check_version(file.metadata() or {})


@contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[str]:
    """Turn errors about a file into TraceErrors that name the file."""
    name = os.fspath(path)
    try:
        yield name
    except SafetensorError as error:
        reason = f"it is truncated or no safetensors file ({_line(error)})"
        raise TraceError(f"{name} is not a trace: {reason}") from error
    except TraceError as error:
        raise TraceError(f"{name} is not a trace: {error}") from error
    except OSError as error:
        raise TraceError(f"cannot read {name}: {error.strerror or error}") from error


def _read(path: str) -> Trace:
    try:
        with open(path, "rb"), safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_version(metadata)
            header = _read_header(metadata["header"])
            names = _column_names(len(header["programs"]))
            columns = {name: file.get_tensor(name) for name in file.keys() if name in names}  # noqa: SIM118
    except (TypeError, ValueError, AttributeError, OverflowError, MemoryError) as error:
        # For example a type that numpy lacks, or a size that does not fit.
        raise error if isinstance(error, TraceError) else TraceError(_line(error)) from error
    sizes = {"events": len(header["events"])}
    present = {name: kind for name, kind in _OPTIONAL_COLUMNS.items() if name in columns}
    own = _take(columns, "", _TRACE_COLUMNS | present, sizes)
    programs = []
    for p, facts in enumerate(header["programs"]):
        taken = _take(columns, f"program.{p}.", _PROGRAM_COLUMNS, {})
        programs.append(TraceProgram(facts, **taken))
        _check_program(f"program {p}", programs[-1])
    members = ("created", "megavm", "environment", "model", "notes")
    known: dict[str, Any] = {name: header[name] for name in members}
    known |= {name.replace(".", "_"): column for name, column in own.items()}
    events = tuple(Event(e["name"], e["role"], e["help"]) for e in header["events"])
    trace = Trace(machine=header["machine"], programs=tuple(programs), events=events, **known)
    _check_trace(trace)
    return trace


def _column_names(programs: int) -> set[str]:
    """The columns of a trace with this many programs; other columns of a file are not read."""
    own = {f"program.{p}.{name}" for p in range(programs) for name in _PROGRAM_COLUMNS}
    return own | _TRACE_COLUMNS.keys() | _OPTIONAL_COLUMNS.keys()


def _line(error: BaseException) -> str:
    """An error message in one line; unprintable characters of names from the file are replaced."""
    text = " ".join(str(error).split()) or type(error).__name__
    clean = "".join(c if c.isprintable() else "\ufffd" for c in text[:MAX_QUOTE])
    return clean if len(text) <= MAX_QUOTE else f"{clean}..."


def _check_version(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != FORMAT:
        raise TraceError("its metadata does not say format megavm-trace")
    if metadata.get("version") != VERSION:
        raise TraceError(
            f"it has version {_show(metadata.get('version'))}, this megavm reads {VERSION}"
        )
    if "header" not in metadata:
        raise TraceError("it has no header")


def _read_header(text: str) -> dict[str, Any]:
    try:
        header = json.loads(text, parse_constant=_no_constant)
        # Lone surrogates and infinite numbers would fail later, when the header is written again.
        json.dumps(header, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise TraceError(f"its header is no JSON ({_line(error)})") from error
    _check_members("the header", header, _HEADER)
    _check_depth(header)
    machine = header["machine"]
    _check_members("machine", machine, _MACHINE)
    for name in ("bandwidth", "flops_per_second", "clock_step"):
        value = machine.setdefault(name, None)
        if value is not None and not (_is_number(value) and 0 < value <= MAX_NUMBER):
            raise TraceError(
                f"machine.{name} is {_show(value)}, not a number above 0, at most {MAX_NUMBER:g}"
            )
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


def _check_depth(header: object) -> None:
    """Refuse deep nesting: JSON writers are recursive and could not write it again."""
    level = [header]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for value in level
            if isinstance(value, dict | list)
            for item in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise TraceError(f"its header nests deeper than {MAX_DEPTH}")


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
    """Check the members of a program in the header."""
    _check_members(what, facts, _PROGRAM)
    if not 1 <= facts["workers"] <= MAX_WORKERS:
        raise TraceError(f"{what} has {facts['workers']} workers, expected 1 to {MAX_WORKERS}")
    ranks = facts.get("ranks", 1)
    if type(ranks) is not int or ranks < 1 or facts["workers"] % ranks:
        raise TraceError(f"{what} has {_show(ranks)} ranks for {facts['workers']} workers")
    for name, least in _RING.items():
        count = facts.get(name, least)
        if type(count) is not int or not least <= count <= MAX_PAGES:
            raise TraceError(f"{what} has {_show(count)} {name}, expected {least} to {MAX_PAGES}")
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
    """The columns of a table, after a check of their types and shapes."""
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
    """Raise TraceError when a value is not in [low, high); ``high`` may differ per value."""
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
    if n % program.ranks:
        raise TraceError(f"{what} has {n} instructions for {program.ranks} ranks")
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
    ranks = sorted({program.ranks for program in trace.programs})
    if len(ranks) > 1:
        raise TraceError(f"its programs have different numbers of ranks: {_show(ranks)}")
    _check_range("step.program", trace.step_program, 0, len(trace.programs))
    _check_range("step.number", trace.step_number, 0, MAX_TIME)
    _check_range("step.tokens", trace.step_tokens, 0, 1 << 31)
    most = trace.step_tokens.astype(np.int64) + 1
    for name, column in (
        ("step.sequences", trace.step_sequences),
        ("step.prompt_rows", trace.step_prompt_rows),
    ):
        if column is not None:
            _check_range(name, column, 0, most)
    if (np.diff(trace.step_number) <= 0).any():
        raise TraceError("step.number does not grow")
    _check_range("record.step", trace.record_step, 0, steps)
    _check_range("record.slot", trace.record_slot, 0, 1 << 31)
    if len(np.unique(trace.record_step)) != steps:
        raise TraceError("it has a step without records")
    workers = np.array([p.workers for p in trace.programs])[trace.record_program]
    _check_range("record.worker", trace.record_worker, -1, workers)
    if trace.machine["workers"] not in {program.workers for program in trace.programs}:
        named = _show(trace.machine["workers"])
        raise TraceError(f"machine.workers is {named}, its programs have {trace.workers}")
    if trace.record_sm is not None:
        _check_range("record.sm", trace.record_sm, -1, MAX_SMS)
    step, worker, slot = (
        np.diff(column) for column in (trace.record_step, trace.record_worker, trace.record_slot)
    )
    grows = (step > 0) | (step == 0) & ((worker > 0) | (worker == 0) & (slot >= 0))
    if not grows.all():
        raise TraceError("records are not sorted by step, worker and slot")
    instructions = np.array([len(p) for p in trace.programs])[trace.record_program]
    _check_range("record.instruction", trace.record_instruction, 0, instructions)
    _check_range("record.cause", trace.record_cause, -1, records)
    channels = np.array([len(p.channel_kind) for p in trace.programs])[trace.record_program]
    _check_range("record.cause_channel", trace.record_cause_channel, -1, channels)
    _check_range("times", trace.times.reshape(-1), -1, MAX_TIME)
    for record in np.flatnonzero(trace.times.max(axis=0, initial=-1) < 0)[:1]:
        raise TraceError(f"record {record} has no event")
