"""The trace file: what is written is read back, and what is no trace is refused in one sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file
from synthetic import like_a_gpu, synthetic_trace

from megavm.profiler.chrome import save_chrome
from megavm.profiler.diff import diff, format_diff
from megavm.profiler.perfetto import save_perfetto
from megavm.profiler.report import format_report, report
from megavm.profiler.trace import EVENTS, Trace, TraceError

Columns = dict[str, Any]
Header = dict[str, Any]
HTML = "<img src=x onerror=alert(1)></script>"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "small.megatrace"
    synthetic_trace(workers=3, steps=2, layers=1).save(path)
    return path


def read(path: Path) -> tuple[Columns, dict[str, str]]:
    with safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name).copy() for name in file.keys()}, file.metadata()  # noqa: SIM118


def changed(
    small: Path, tmp_path: Path, change: Callable[[Columns, Header, dict[str, str]], None]
) -> Path:
    """A copy of the file in which columns, header or metadata are others."""
    columns, metadata = read(small)
    header = json.loads(metadata["header"])
    change(columns, header, metadata)
    metadata["header"] = metadata.get("raw") or json.dumps(header)
    path = tmp_path / "changed.megatrace"
    save_file(columns, path, metadata=metadata)
    return path


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a) and not isinstance(a, type):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, tuple) and a and dataclasses.is_dataclass(a[0]):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_a_trace_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    trace = synthetic_trace(workers=4, steps=3, layers=2)
    trace.save(tmp_path / "a")
    assert same(Trace.load(tmp_path / "a"), trace)


def test_the_file_is_what_the_documentation_says(small: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "trace-format.md").read_text()
    columns, metadata = read(small)
    assert {"format", "version", "header"} == metadata.keys()
    for name in columns:
        assert f"`{name.replace('program.0.', 'program.<p>.')}`" in text
    header = json.loads(metadata["header"])
    members = [*header, *header["programs"][0], *header["machine"]]
    assert all(f"`{name}`" in text for name in members)
    for event in EVENTS:
        assert f"| {event.name} | {event.role} | {event.help} |" in text.replace("`", "")


def test_a_truncated_file_is_refused_at_any_length(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    path = tmp_path / "short"
    for length in [*range(0, 64), *range(64, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match="is not a trace: it is truncated or no safetensors"):
            Trace.load(path)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "random"
    for content in (data, struct.pack("<Q", len(data)) + data):
        path.write_bytes(content)
        with pytest.raises(TraceError, match="is not a trace"):
            Trace.load(path)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_file_is_refused_or_can_be_worked_with(
    small: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "damaged"
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        trace = Trace.load(path)
        assert format_report(report(trace))
        assert format_diff(diff(trace, trace))
        save_perfetto(trace, path.with_name("damaged.pftrace"))
        save_chrome(trace, path.with_name("damaged.json"))


def set_column(name: str, value: Any, at: Any = 0) -> Callable[[Columns, Header, Any], None]:
    def change(columns: Columns, header: Header, metadata: Any) -> None:
        columns[name][at] = value

    return change


def replace_column(name: str, make: Callable[[Any], Any]) -> Callable[[Columns, Header, Any], None]:
    def change(columns: Columns, header: Header, metadata: Any) -> None:
        columns[name] = np.ascontiguousarray(make(columns[name]))

    return change


def set_header(*path: Any, value: Any) -> Callable[[Columns, Header, Any], None]:
    def change(columns: Columns, header: Header, metadata: Any) -> None:
        at: Any = header
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return change


def set_metadata(name: str, value: str) -> Callable[[Columns, Header, Any], None]:
    def change(columns: Columns, header: Header, metadata: Any) -> None:
        metadata[name] = value

    return change


HUGE = 2**31 - 1
HOSTILE = {
    "another version": (set_metadata("version", "2"), "version '2', this megavm reads 1"),
    "another format": (set_metadata("format", "weights"), "does not say format megavm-trace"),
    "header no JSON": (set_metadata("raw", "{"), "its header is no JSON"),
    "header a list": (set_metadata("raw", "[]"), "the header is .*, not an object"),
    "header deep": (set_metadata("raw", "[" * 100_000), "its header is no JSON"),
    "header NaN": (set_metadata("raw", '{"created": NaN}'), "NaN is no JSON"),
    "header endless number": (set_metadata("raw", '{"created": 1e999}'), "its header is no JSON"),
    "header long number": (set_metadata("raw", "9" * 5000), "its header is no JSON"),
    "header half a character": (set_metadata("raw", '["\\ud800"]'), "its header is no JSON"),
    "workers huge": (set_header("programs", 0, "workers", value=10**12), "10+ workers, expected"),
    "workers text": (set_header("programs", 0, "workers", value="3"), "workers '3', not int"),
    "machine's workers": (
        set_header("machine", "workers", value=4),
        "machine.workers is 4, its programs have 3",
    ),
    "workers few": (set_header("programs", 0, "workers", value=2), r"record.worker is 2 at \d+"),
    "pages none": (set_header("programs", 0, "pages", value=0), "has 0 pages, expected 1 to"),
    "pages huge": (set_header("programs", 0, "pages", value=10**12), "pages, expected 1 to 1024"),
    "pages text": (set_header("programs", 0, "early_pages", value="4"), "'4' early_pages"),
    "no programs": (set_header("programs", value=[]), "step.program is 0 at 0"),
    "no labels": (set_header("programs", 0, "labels", value=[]), "label is 0 at 0"),
    "label number": (set_header("programs", 0, "labels", 0, value=7), "labels .* not all strings"),
    "tensor short": (set_header("programs", 0, "tensors", 0, value=["x"]), r"tensor \['x'\]"),
    "opcode gone": (set_header("programs", 0, "opcodes", value={}), "does not describe"),
    "opcode text": (set_header("programs", 0, "opcodes", "x", value={}), "is no number"),
    "field word": (
        set_header("programs", 0, "opcodes", "3", "fields", 0, "word", value=32),
        "word 32 of 32",
    ),
    "header deeper than is written": (
        set_header("notes", "a", value=json.loads("[" * 64 + "]" * 64)),
        "its header nests deeper than 64",
    ),
    "version long": (set_metadata("version", "9" * 5000), r"has version '9+\.\.\., this megavm"),
    "bandwidth huge": (
        set_header("machine", "bandwidth", value=10**400),
        "not a number above 0, at most",
    ),
    "bandwidth text": (
        set_header("machine", "bandwidth", value="fast"),
        "not a number above 0, at most",
    ),
    "bandwidth zero": (
        set_header("machine", "bandwidth", value=0),
        "not a number above 0, at most",
    ),
    "flops text": (
        set_header("machine", "flops_per_second", value="1e15"),
        "not a number above 0, at most",
    ),
    "event twice": (set_header("events", 1, "name", value="fetched"), "an event twice"),
    "events few": (set_header("events", value=[]), "column times has shape"),
    "model a list": (set_header("model", value=[]), r"model \[\], not dict"),
    "step program": (set_column("step.program", 1), "step.program is 1 at 0, expected 0 to 0"),
    "step number": (set_column("step.number", 5), "step.number does not grow"),
    "record step": (set_column("record.step", HUGE), "record.step is 2147483647 at 0"),
    "record order": (set_column("record.step", 1), "not sorted by step, worker and slot"),
    "record worker": (set_column("record.worker", -2), "record.worker is -2 at 0"),
    "instruction": (set_column("record.instruction", HUGE), "record.instruction is 2147483647"),
    "cause": (set_column("record.cause", HUGE), "record.cause is 2147483647"),
    "cause channel": (set_column("record.cause_channel", 99), "record.cause_channel is 99"),
    "time": (set_column("times", 2**62, (0, 0)), "times is 4611686018427387904 at 0"),
    "no event": (set_column("times", -1, (slice(None), 3)), "record 3 has no event"),
    "opcode": (set_column("program.0.words", 77, (0, 0)), "opcode 77, which it does not describe"),
    "label": (set_column("program.0.label", -1), "label is -1 at 0"),
    "bytes": (set_column("program.0.bytes", -1), "bytes is -1 at 0"),
    "load bytes": (set_column("program.0.load_bytes", 2**40), "load_bytes is 1099511627776 at 0"),
    "channel kind": (set_column("program.0.channel_kind", 2), "channel_kind is 2 at 0"),
    "channel object": (set_column("program.0.channel_object", 99), "channel_object is 99 at 0"),
    "channel target": (set_column("program.0.channel_target", 4), "channel_target is 4 at 0"),
    "offsets begin": (set_column("program.0.channel_offsets", 1), "channel_offsets go from 1"),
    "offsets fall": (
        set_column("program.0.channel_offsets", 99, 1),
        "every channel has a producer",
    ),
    "offsets huge": (
        set_column("program.0.channel_offsets", HUGE, -1),
        "channel_offsets go from 0 to 2147483647",
    ),
    "producer": (
        set_column("program.0.channel_producers", HUGE),
        "channel_producers is 2147483647",
    ),
    "wait": (set_column("program.0.waits", HUGE, (0, 1)), "waits is 2147483647 at 0"),
    "waits order": (set_column("program.0.waits", 5, (0, 0)), "waits are not sorted"),
    "steps without": (
        replace_column("step.program", lambda c: np.zeros(3, np.int32)),
        r"step.number has shape \(2,\), expected 3 steps",
    ),
    "records short": (
        replace_column("record.worker", lambda c: c[:-1]),
        "record.worker has shape",
    ),
    "type": (
        replace_column("times", lambda c: c.astype(np.float64)),
        "column times is float64 of shape",
    ),
    "dimensions": (replace_column("times", lambda c: c[0]), "column times is int64 of shape"),
    "narrow words": (replace_column("program.0.words", lambda c: c[:, :31]), "expected 32 32"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_file_made_to_harm_is_refused_in_one_sentence(
    small: Path, tmp_path: Path, case: str
) -> None:
    change, sentence = HOSTILE[case]
    with pytest.raises(TraceError, match=sentence) as caught:
        Trace.load(changed(small, tmp_path, change))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_column_is_named(small: Path, tmp_path: Path) -> None:
    def drop(columns: Columns, header: Header, metadata: Any) -> None:
        del columns["record.cause"]

    with pytest.raises(TraceError, match=r"column record\.cause is missing"):
        Trace.load(changed(small, tmp_path, drop))


def test_a_count_that_the_file_cannot_hold_is_refused(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    for shape in ([10, 2**60], [2**62, 2**62], [-1, 5]):
        header["times"]["shape"] = shape
        text = json.dumps(header).encode()
        path = tmp_path / "huge"
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
        with pytest.raises(TraceError, match="is not a trace"):
            Trace.load(path)


@pytest.mark.parametrize("about", [{"data_offsets": [8, 0]}, {"dtype": "\x1b[2J\x9b"}])
def test_names_in_what_is_wrong_with_a_file_do_nothing_to_a_terminal(
    small: Path, tmp_path: Path, about: Header
) -> None:
    data = small.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    column = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8], **about}
    header["\x1b]0;owned\x07\u202e" + "x" * 5000] = column
    text = json.dumps(header).encode()
    path = tmp_path / "names"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(TraceError, match="is not a trace") as caught:
        Trace.load(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 600


def test_a_file_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nothing"):
        Trace.load(tmp_path / "nothing")
    with pytest.raises(TraceError, match=r"cannot read|is not a trace"):
        Trace.load(tmp_path)


def test_more_columns_and_members_than_are_known_do_no_harm(small: Path, tmp_path: Path) -> None:
    def add(columns: Columns, header: Header, metadata: Any) -> None:
        columns["record.energy"] = np.zeros(4, np.float32)
        header["colour"] = header["machine"]["colour"] = header["programs"][0]["colour"] = HTML

    assert Trace.load(changed(small, tmp_path, add)).num_steps == 2


def test_columns_of_types_that_nobody_here_knows_do_no_harm(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    length = struct.unpack_from("<Q", data)[0]
    header = json.loads(data[8 : 8 + length])
    end = len(data) - 8 - length
    header["record.energy"] = {"dtype": "BF16", "shape": [2], "data_offsets": [end, end + 4]}
    text = json.dumps(header).encode()
    path = tmp_path / "later"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + bytes(4))
    assert same(Trace.load(path), Trace.load(small))


def test_names_with_markup_stay_what_they_are(small: Path, tmp_path: Path) -> None:
    def rename(columns: Columns, header: Header, metadata: Any) -> None:
        header["model"]["name"] = HTML
        header["programs"][0]["labels"] = [
            HTML + label for label in header["programs"][0]["labels"]
        ]

    trace = Trace.load(changed(small, tmp_path, rename))
    assert trace.model["name"] == HTML
    assert HTML in format_report(report(trace))


def test_names_do_nothing_to_a_terminal(small: Path, tmp_path: Path) -> None:
    def rename(columns: Columns, header: Header, metadata: Any) -> None:
        header["machine"]["device"] = "\x1b]0;owned\x07\nGPU\u202e"
        labels = header["programs"][0]["labels"]
        header["programs"][0]["labels"] = [f"\x1b[2J\x9b{label}" for label in labels]

    trace = Trace.load(changed(small, tmp_path, rename))
    for text in (format_report(report(trace)), format_diff(diff(trace, trace))):
        assert "GPU" in text
        assert all(line.isprintable() for line in text.split("\n"))


def test_events_in_another_order_mean_the_same(small: Path, tmp_path: Path) -> None:
    def turn(columns: Columns, header: Header, metadata: Any) -> None:
        header["events"].reverse()
        columns["times"] = np.ascontiguousarray(columns["times"][::-1])

    turned, plain = Trace.load(changed(small, tmp_path, turn)), Trace.load(small)
    assert same(turned.spans, plain.spans)


def test_spans_are_in_order_whatever_was_noted() -> None:
    random = np.random.default_rng(0)
    trace = synthetic_trace(workers=3, steps=2, layers=1)
    for _ in range(50):
        times = np.where(random.random(trace.times.shape) < 0.5, -1, trace.times)
        times[0] = np.maximum(times[0], 0)
        spans = dataclasses.replace(trace, times=times).spans
        marks = (
            spans.begin,
            spans.waited,
            spans.inputs,
            spans.loaded,
            spans.computed,
            spans.left,
            spans.end,
            spans.signalled,
        )
        for before, after in itertools.pairwise(marks):
            assert (before <= after).all()
        assert ((spans.load_end >= spans.load_begin) | (spans.load_end < 0)).all()
        assert ((spans.load_begin < 0) == (spans.load_end < 0)).all()


def test_loads_are_in_flight_until_the_last_one_is_issued() -> None:
    trace = synthetic_trace(workers=3, steps=2, layers=1)
    spans, rows = trace.spans, [event.name for event in trace.events]
    times = trace.times.copy()
    times[rows.index("load_issued")] = spans.computed
    times[rows.index("load_arrived")] = spans.inputs  # what the first products need
    first = dataclasses.replace(trace, times=times).spans
    assert (first.loaded == first.inputs).all()
    assert (first.load_end == np.maximum(spans.computed, spans.load_begin)).all()


def test_consumers_leave_an_instruction_when_they_turn_to_the_next() -> None:
    trace = like_a_gpu(synthetic_trace(workers=3, steps=2, layers=1))
    spans = trace.spans
    order = np.argsort(trace.record_worker, kind="stable")
    same = trace.record_worker[order][1:] == trace.record_worker[order][:-1]
    before, after = order[:-1][same], order[1:][same]
    assert (spans.end[before] > spans.begin[after]).all()
    assert (spans.left[before] == np.maximum(spans.begin[after], spans.computed[before])).all()
    assert spans.left[order[-1]] == spans.end[order[-1]]


def test_inputs_that_were_not_noted_were_there_with_the_last_words() -> None:
    trace = like_a_gpu(synthetic_trace(workers=3, steps=2, layers=1))
    silent = trace.record_kind == trace.kinds.index("gate_up")
    assert (trace.event("inputs")[silent] < 0).all()
    spans = trace.spans
    through = trace.record_cause_channel[silent]
    assert (trace.programs[0].channel_kind[through] == 1).all()
    written = spans.end[trace.record_cause[silent]]
    wanted = np.clip(written, spans.waited[silent], spans.end[silent])
    assert (spans.inputs[silent] == wanted).all()
    assert (spans.inputs[silent] > spans.begin[silent]).all()
