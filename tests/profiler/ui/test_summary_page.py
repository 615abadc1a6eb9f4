"""The tabs "Summary" and "What if" say what the reports say, and lead into the timeline."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator import layered, simulate
from synthetic import synthetic_trace
from test_replay import STREAMING
from ui.page import Viewer, nanoseconds, served, table_rows

from megavm.profiler.analysis import Selection, by_kind
from megavm.profiler.summary import summary
from megavm.profiler.trace import Trace
from megavm.profiler.viewer import save_html


@pytest.fixture
def slow(viewer: Viewer, traces: dict[str, Path]) -> Viewer:
    """A viewer of the trace with a slow worker."""
    return viewer.open(traces["b"])


def test_the_summary_opens_first_and_is_that_of_the_report(
    slow: Viewer, traces: dict[str, Path]
) -> None:
    facts = summary(Trace.load(traces["b"]))
    text = slow.panel()
    assert facts["sentence"] in text
    assert "worker 40 came last" in text
    # The report's words: a share is no part.
    headings = slow.page.locator(".page:visible th").all_inner_texts()
    assert "share" in headings
    assert "part" not in headings
    tables = slow.page.locator(".page:visible tbody")
    path = table_rows(tables.nth(0))
    for row in facts["critical_path"]:
        name = row["phase"].removeprefix("layers.*.")
        assert nanoseconds(path[name][1]) == pytest.approx(row["ns"], rel=0.01)
        parts = sum(map(nanoseconds, path[name][3:]))
        assert parts == pytest.approx(row["ns"], rel=0.01, abs=3)
    best = table_rows(tables.nth(1))
    assert list(best) == [row["text"] for row in facts["best"]]
    waits = tables.nth(3).locator("tr").nth(0).locator("td").all_inner_texts()
    assert waits[0] == facts["waits"][0]["label"]
    assert nanoseconds(waits[2]) == pytest.approx(facts["waits"][0]["ns"], rel=0.01)
    late = table_rows(tables.nth(2))
    assert late["40"][1] == f"{facts['late_workers'][0]['count']:,}"
    assert slow.page.locator(".page:visible .strip").nth(0).locator("button").count() == 132
    # Every kind that computes is a dot.
    dots = slow.page.locator(".roofline circle")
    assert dots.count() == sum(row["flops_per_byte"] > 0 for row in facts["kinds"])


def test_shares_of_ceilings_of_kinds_are_those_of_the_report(
    viewer: Viewer, tmp_path: Path
) -> None:
    """Activations are no part of them; the first kind streams none."""
    trace = simulate(layered(6, 2, STREAMING))
    program = trace.programs[0]
    kinds = [program.kinds[kind] for kind in program.kind]
    first = np.array([kind == kinds[0] for kind in kinds])
    own = dataclasses.replace(program, load_bytes=np.where(first, 0, program.load_bytes))
    ceilings = {"bandwidth": 1e10, "flops_per_second": 1e15}
    machine = {**trace.machine, **ceilings}
    trace = dataclasses.replace(trace, programs=(own,), machine=machine)
    trace.save(tmp_path / "kinds.megatrace")
    viewer.open(tmp_path / "kinds.megatrace")
    table = viewer.page.locator(".page:visible table", has_text="FLOP/B")
    assert table.locator("th").last.inner_text() == "of ceiling"
    shown = {name: cells[-1] for name, cells in table_rows(table.locator("tbody")).items()}
    step = summary(trace)["step"]
    for row in by_kind(Selection.of(trace, step)):
        share = max(
            row["streamed_per_second"] / ceilings["bandwidth"],
            row["flops_per_second"] / ceilings["flops_per_second"],
        )
        assert float(shown[row["kind"]].removesuffix(" %")) == pytest.approx(100 * share, abs=0.051)
        if row["kind"] == kinds[0]:
            assert row["streamed_per_second"] == 0
            assert row["bytes_per_second"] / ceilings["bandwidth"] > 10 * share


def test_what_the_summary_names_is_found_in_the_timeline(
    slow: Viewer, traces: dict[str, Path]
) -> None:
    facts = summary(Trace.load(traces["b"]))
    tables = slow.page.locator(".page:visible tbody")
    tables.nth(0).locator("tr").nth(0).click()
    phase = facts["critical_path"][0]["phase"].removeprefix("layers.*.")
    assert slow.run("app.query") == f"phase:{phase}"
    tables.nth(1).locator("tr", has_text="worker 40").click()
    assert slow.run("app.query") == "worker:40"
    tables.nth(2).locator("tr").nth(0).click()
    assert slow.run("app.query") == "worker:40"
    tables.nth(3).locator("tr").nth(0).click()
    slow.settle()
    record = slow.run("pane.trace.fileIndex[app.selected.record]")
    assert record == facts["waits"][0]["record"]
    slow.tab("Summary")
    slow.page.get_by_role("button", name=f"Show step {facts['step']}").click()
    slow.settle()
    assert slow.run("pane.trace.stepNumber[pane.step]") == facts["step"]
    slow.page.get_by_role("button", name="Its critical path").click()
    slow.settle()
    assert slow.run("app.critical")
    slow.tab("Summary")
    slow.page.get_by_role("button", name="What would help").click()
    slow.settle()
    assert "Single changes" in slow.panel()


def test_changes_are_those_of_the_report(slow: Viewer, traces: dict[str, Path]) -> None:
    slow.tab("What if")
    rows = table_rows(slow.page.locator(".page:visible tbody"))
    found = summary(Trace.load(traces["b"]))["what_if"]["changes"]
    gains = [row for row in found if row["saved_ns"] >= 1]
    assert list(rows) == [row["text"] for row in gains]
    for row in gains[:20]:
        cells = rows[row["text"]]
        assert nanoseconds(cells[1].rstrip("*")) == pytest.approx(row["ns"], rel=0.006)
        assert cells[1].endswith("*") == row["memory_bound"]
    slow.page.locator(".page:visible tr", has_text="worker 40").first.click()
    assert slow.run("app.query") == "worker:40"
    slow.page.locator(".page:visible tr", has_text="without waiting for o_proj's").first.click()
    assert slow.run("app.query") == "phase:o_proj"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_tabs_are_pictured(
    make_viewer: Callable[..., Viewer], tmp_path: Path, scheme: str
) -> None:
    trace = synthetic_trace(132, layers=4, steps=30, slow_worker=40)
    at = trace.times[:, trace.record_step == 11].max() - 90_000
    trace.times[trace.times > at] += 400_000
    trace.save(tmp_path / "pictured.megatrace")
    viewer = make_viewer(color_scheme=scheme).goto().open(tmp_path / "pictured.megatrace")
    assert "Steps that took much longer" in viewer.panel()
    viewer.screenshot(f"summary_{scheme}")
    viewer.page.locator(".page:visible .roofline").scroll_into_view_if_needed()
    viewer.screenshot(f"roofline_{scheme}")
    viewer.tab("What if")
    viewer.screenshot(f"what_if_{scheme}")


def test_both_traces_have_a_summary(viewer: Viewer, traces: dict[str, Path]) -> None:
    viewer.open(traces["a"], traces["b"])
    text = viewer.tab("Summary")
    assert "A: a.megatrace" in text
    assert "B: b.megatrace" in text
    assert "Single changes" in viewer.tab("What if")


def test_a_trace_that_cannot_be_replayed_says_why(viewer: Viewer, tmp_path: Path) -> None:
    path = tmp_path / "unknown.megatrace"
    trace = synthetic_trace(workers=1, steps=2, layers=1)
    trace.record_worker[:] = -1
    trace.save(path)
    viewer.open(path)
    assert "There is no replay: the trace does not say which worker" in viewer.tab("What if")


def without_summary(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a file; the columns stay."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    container = json.loads(content[8 : 8 + length])
    header = json.loads(container["__metadata__"]["header"])
    change(header)
    container["__metadata__"]["header"] = json.dumps(header)
    text = json.dumps(container).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


def test_an_old_file_has_its_summary_when_megavm_shows_it(
    make_viewer: Callable[..., Viewer], tmp_path: Path
) -> None:
    path, page = tmp_path / "old.megatrace", tmp_path / "old.html"
    synthetic_trace(workers=4, steps=3, layers=1).save(path)
    without_summary(path, lambda header: header.pop("summary"))
    assert "no summary that this page knows" in make_viewer().goto().open(path).panel()
    with served(path) as port:
        viewer = make_viewer().goto(f"http://127.0.0.1:{port}/")
        viewer.wait("profiler.panes.length === 1")
        viewer.settle()
        assert "A step takes" in viewer.panel()
    save_html(path, page)
    saved = make_viewer().goto(page)
    saved.wait("profiler.panes.length === 1")
    saved.settle()
    assert "A step takes" in saved.panel()


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        [],
        {"version": 1},
        {"version": 1, "step": 0, "waits": [{"record": 1e9}, {"record": -1}, 5], "kinds": [{}]},
        {"version": 1, "step": 0, "workers": {"computing": ["x"] * 99999, "barrier": {}}},
        {"version": 1, "step": 0, "sentence": "<img src=x onerror=alert(1)>", "what_if": 7},
        {
            "version": 1, "step": 0, "outliers": [{"step": 99}], "late_workers": [{"worker": 1e6}],
            "what_if": {"changes": [{"text": "<b>", "ns": "x", "saved_ns": 1e300, "of": 3}]},
            "kinds": [{"kind": "x", "flops_per_byte": 1e308, "flops_per_second": 1e-300}],
        },
    ],
)  # fmt: skip
def test_a_summary_that_lies_harms_nothing(viewer: Viewer, tmp_path: Path, hostile: Any) -> None:
    """What has the wrong type or names nothing counts as absent; text stays text."""
    path = tmp_path / "hostile.megatrace"
    synthetic_trace(workers=4, steps=3, layers=1).save(path)
    without_summary(path, lambda header: header.update(summary=hostile))
    viewer.open(path)
    assert viewer.page.locator(".panel img, .panel b").count() == 0
    assert viewer.tab("What if")


@pytest.mark.parametrize(
    ("bandwidth", "flops", "roofs"), [(None, None, 0), (4e10, None, 1), (4e10, 1e12, 2)]
)
def test_every_measured_ceiling_is_a_roof(
    viewer: Viewer, tmp_path: Path, bandwidth: float | None, flops: float | None, roofs: int
) -> None:
    trace = simulate(layered(6, 2, STREAMING))
    assert isinstance(trace.machine, dict)
    trace.machine.update(bandwidth=bandwidth, flops_per_second=flops)
    trace.save(tmp_path / "streaming.megatrace")
    viewer.open(tmp_path / "streaming.megatrace")
    lines = viewer.page.locator(".roofline .roof")
    assert lines.count() == roofs
    if roofs == 2:
        slope, flat = (
            [float(lines.nth(i).get_attribute(name) or "") for name in ("x1", "y1", "x2", "y2")]
            for i in range(2)
        )
        assert slope[2:] == flat[:2]
        assert flat[1] == flat[3] < slope[1]
