"""Files that are damaged or made to harm: one sentence on the page, no error, and nothing runs."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic import synthetic_trace
from ui.page import Viewer

from megavm.profiler.trace import Trace

HTML = "<img src=x onerror=\"window.harm='img'\"><script>window.harm='script'</script>"

_DROP = """([text, name]) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name));
  const options = {bubbles: true, cancelable: true, dataTransfer: transfer, clientY: 300};
  document.body.dispatchEvent(new DragEvent('drop', options));
}"""


@pytest.fixture
def small(tmp_path: Path) -> bytes:
    path = tmp_path / "small.megatrace"
    synthetic_trace(workers=4, layers=1, steps=2).save(path)
    return path.read_bytes()


def drop(viewer: Viewer, data: bytes, name: str = "file.megatrace") -> str:
    """Drop a file and return the sentence on the page; empty when the file was opened."""
    import base64

    viewer.page.evaluate("document.getElementById('message').textContent = 'Reading'")
    viewer.page.evaluate(_DROP, [base64.b64encode(data).decode(), name])
    viewer.wait("!document.getElementById('message').textContent.startsWith('Reading')")
    return viewer.message()


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the columns of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any] | bytes, columns: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + columns


def changed(data: bytes, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """The file with another header: `change` gets the container's and the trace's."""
    outer, columns = parts(data)
    inner = json.loads(outer["__metadata__"]["header"])
    change(outer, inner)
    if "header" in outer.get("__metadata__", {}):
        outer["__metadata__"]["header"] = json.dumps(inner)
    return join(outer, columns)


def with_column(data: bytes, name: str, values: Any) -> bytes:
    """The file with other values in a column of the same size."""
    outer, columns = parts(data)
    begin, end = outer[name]["data_offsets"]
    raw = np.ascontiguousarray(values).tobytes()
    assert len(raw) == end - begin
    return join(outer, columns[:begin] + raw + columns[end:])


def column(data: bytes, name: str) -> Any:
    outer, columns = parts(data)
    begin, end = outer[name]["data_offsets"]
    kind = {"I32": "<i4", "I64": "<i8", "U32": "<u4"}[outer[name]["dtype"]]
    return np.frombuffer(columns[begin:end], kind).copy().reshape(outer[name]["shape"])


def _set(data: bytes, name: str, at: int, value: int) -> bytes:
    values = column(data, name)
    values.reshape(-1)[at] = value
    return with_column(data, name, values)


def _shape(name: str, shape: list[float]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda outer, inner: outer[name].update(shape=shape)


def _offsets(name: str, offsets: list[int]) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda outer, inner: outer[name].update(data_offsets=offsets)


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda d: b"", "too short"),
    "one byte": (lambda d: d[:1], "too short"),
    "truncated in its header": (lambda d: d[:300], "truncated"),
    "truncated in its columns": (lambda d: d[:-1000], "truncated"),
    "random": (lambda d: np.random.default_rng(0).bytes(5000), "truncated, or not a trace"),
    "header of 2^63 bytes": (lambda d: b"\xff" * 7 + b"\x7f" + d[8:], "truncated, or not a trace"),
    "header is no JSON": (lambda d: join(b"{not json", b""), "not JSON"),
    "header is a list": (lambda d: join(b"[]", b""), "not an object"),
    "deep JSON": (lambda d: join(b"[" * 200000 + b"]" * 200000, b""), "not"),
    "another format": (
        lambda d: changed(d, lambda o, i: o["__metadata__"].update(format=HTML)),
        "its format is",
    ),
    "no metadata": (lambda d: changed(d, lambda o, i: o.pop("__metadata__")), "not a trace"),
    "version 2": (
        lambda d: changed(d, lambda o, i: o["__metadata__"].update(version="2")),
        'has version "2"; this page reads version 1',
    ),
    "no programs": (lambda d: changed(d, lambda o, i: i.update(programs=[])), "damaged"),
    "programs of a string": (lambda d: changed(d, lambda o, i: i.update(programs="x")), "damaged"),
    "2^40 workers": (
        lambda d: changed(d, lambda o, i: i["programs"][0].update(workers=2**40)),
        "workers, expected 1 to 65536",
    ),
    "half a worker": (
        lambda d: changed(d, lambda o, i: i["programs"][0].update(workers=2.5)),
        "workers, expected",
    ),
    "2^50 records": (lambda d: changed(d, _shape("record.step", [2**50])), "damaged"),
    "records of all numbers": (lambda d: changed(d, _shape("record.step", [1.5])), "damaged"),
    "columns outside": (lambda d: changed(d, _offsets("times", [0, 2**52])), "truncated"),
    "columns backwards": (lambda d: changed(d, _offsets("times", [80, 0])), "damaged"),
    "a column less": (lambda d: changed(d, lambda o, i: o.pop("times")), '"times" is missing'),
    "another type": (
        lambda d: changed(d, lambda o, i: o["record.slot"].update(dtype="F32")),
        "expected I32",
    ),
    "no labels": (lambda d: changed(d, lambda o, i: i["programs"][0].update(labels=[])), "damaged"),
    "instruction of nobody": (lambda d: _set(d, "record.instruction", 3, 10**6), "instruction"),
    "negative instruction": (lambda d: _set(d, "record.instruction", 3, -5), "instruction"),
    "worker of nobody": (lambda d: _set(d, "record.worker", 3, 4), "worker 4 of 4"),
    "step of nobody": (lambda d: _set(d, "record.step", 3, 7), "step 7"),
    "steps backwards": (lambda d: _set(d, "record.step", 3, 1), "step 0, expected 1"),
    "cause of nobody": (lambda d: _set(d, "record.cause", 3, 2**31 - 1), "cause"),
    "channel of nobody": (lambda d: _set(d, "record.cause_channel", 3, 999), "channel"),
    "producer of nobody": (lambda d: _set(d, "program.0.channel_producers", 0, -2), "damaged"),
    "offsets backwards": (lambda d: _set(d, "program.0.channel_offsets", 1, 10**6), "in order"),
    "waits of nobody": (lambda d: _set(d, "program.0.waits", 1, 10**6), "names nothing"),
    "a time of centuries": (lambda d: _set(d, "times", 5, 2**62), "36 years"),
    "a program of nobody": (lambda d: _set(d, "step.program", 0, 9), "program 9 of 1"),
}


def test_damaged_files_give_one_sentence(viewer: Viewer, small: bytes) -> None:
    for name, (make, words) in FILES.items():
        message = drop(viewer, make(small))
        assert words in message, (name, message)
        assert message.endswith("."), name
        assert len(message) < 250, name
        assert viewer.run("app.panes.length") == 0, name
    viewer.screenshot("hostile")
    # The page is as good as before.
    assert drop(viewer, small) == ""
    assert viewer.run("app.panes.length") == 1


def test_a_bad_file_leaves_the_open_trace_alone(viewer: Viewer, small: bytes) -> None:
    assert drop(viewer, small) == ""
    assert "truncated" in drop(viewer, small[:-8])
    assert viewer.run("pane.trace.count") > 0
    viewer.screenshot("hostile_beside")


def test_times_in_any_order_are_drawn(viewer: Viewer, small: bytes) -> None:
    random = np.random.default_rng(1)
    times = column(small, "times")
    for case in (
        random.integers(-1, 10**6, times.shape),
        np.zeros_like(times),
        np.full_like(times, -1),
        np.full_like(times, 2**50),
        np.where(random.random(times.shape) < 0.5, -1, times),
    ):
        assert drop(viewer, with_column(small, "times", case.astype(np.int64))) == ""
        for key in ("g", "c", "[", "[", "f", "Home", "c"):
            viewer.page.keyboard.press(key)
        viewer.page.mouse.move(700, 500)
        for name in ("Statistics", "Critical path", "Trace"):
            viewer.page.get_by_role("tab", name=name).click()
            viewer.page.wait_for_timeout(120)


def test_causes_in_a_circle_end(viewer: Viewer, small: bytes) -> None:
    cause = column(small, "record.cause")
    assert (
        drop(
            viewer,
            with_column(small, "record.cause", np.roll(np.arange(len(cause)), 1).astype(np.int32)),
        )
        == ""
    )
    viewer.page.keyboard.press("c")
    viewer.settle()
    assert viewer.run("pane.causes.path(pane.step).length") <= len(cause)


def test_random_damage_is_never_an_error(viewer: Viewer, small: bytes) -> None:
    random = np.random.default_rng(7)
    opened = 0
    for _ in range(60):
        data = bytearray(small)
        for _ in range(int(random.integers(1, 6))):
            data[int(random.integers(0, len(data)))] = int(random.integers(0, 256))
        message = drop(viewer, bytes(data))
        opened += message == ""
        assert message == "" or message.endswith("."), message
    assert opened > 0


def test_html_in_names_is_text(viewer: Viewer, tmp_path: Path) -> None:
    trace = synthetic_trace(workers=4, layers=1, steps=2)
    program = trace.programs[0]
    facts = json.loads(json.dumps(dict(program.facts)))
    facts["labels"] = [f"{HTML} {label}" for label in facts["labels"]]
    facts["barriers"] = [HTML + b for b in facts["barriers"]]
    facts["tensors"] = [[HTML + t[0], t[1], HTML, HTML, t[4]] for t in facts["tensors"]]
    for opcode in facts["opcodes"].values():
        opcode["name"] = HTML + opcode["name"]
        opcode["help"] = HTML
        for field in opcode["fields"]:
            field["name"] = HTML + field["name"]
    members = {HTML: HTML, "name": HTML}
    bad: Trace = replace(
        trace,
        programs=(replace(program, facts=facts),),
        machine={**trace.machine, "device": HTML, "name": HTML, "clock": HTML},
        environment=members,
        model=members,
        notes=members,
        created=HTML,
        megavm=HTML,
        events=tuple(e._replace(help=HTML) for e in trace.events),
    )
    path = tmp_path / "<b>x.megatrace"
    bad.save(path)
    viewer.open(path)
    viewer.show(*viewer.run("[pane.trace.stepBegin[1], pane.trace.stepEnd[1]]"))
    viewer.run("app.select(pane, 5, true)")
    viewer.settle()
    x, y = viewer.point(5)
    viewer.page.mouse.move(x, y)
    viewer.settle()
    assert "<img src=x" in viewer.page.locator(".tooltip").inner_text()
    assert "<script>" in viewer.panel()
    viewer.screenshot("html_in_names")
    for name in ("Statistics", "Critical path", "Compare", "Trace"):
        viewer.tab(name)
    for mode in "12345":
        viewer.page.keyboard.press(mode)
        viewer.settle()
    assert viewer.page.evaluate("window.harm") is None
    assert viewer.page.evaluate("document.querySelectorAll('img').length") == 0
    assert viewer.page.evaluate("document.querySelectorAll('script').length") == 1


def test_hostile_addresses_are_ignored(
    make_viewer: Callable[..., Viewer], small: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "small.megatrace"
    path.write_bytes(small)
    addresses = (
        "#view=1_0&record=-5&step=zzz&range=9_1_-4_1e9&rows=1e99_nan&colour=__proto__&open=1e9",
        "#view=Infinity_-Infinity&record=99999999&search=%22%3Cimg%3E&critical=7&rows=0_0",
        "#%E0%A4%A",
    )
    for address in addresses:
        viewer = make_viewer().goto()
        viewer.page.evaluate("a => { location.hash = a; }", address)
        viewer.open(path)
        assert viewer.run("Number.isFinite(app.view.begin) && app.view.end > app.view.begin")
