"""Steps, the critical path and comparisons have the numbers of `megavm trace report`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from recording import record_ring
from synthetic import like_a_gpu, synthetic_trace
from ui.page import STEP, Viewer, bytes_per_second, nanoseconds, table_rows

from megavm.profiler.analysis import (
    Selection,
    arithmetic,
    balance,
    bandwidth,
    by_kind,
    by_role,
    by_worker,
    gaps,
)
from megavm.profiler.critical_path import critical_path
from megavm.profiler.report import report
from megavm.profiler.trace import Trace


def test_the_step_that_is_shown_first_is_that_of_the_report(viewer: Viewer, tmp_path: Path) -> None:
    """Of those of the most frequent number of tokens the one of median duration."""
    trace = synthetic_trace(workers=2, steps=7, layers=1)
    order = np.argsort(trace.step_end - trace.step_begin, kind="stable")
    trace.step_tokens[order[3:]] = (9, 2, 1, 1)
    trace.save(tmp_path / "tokens.megatrace")
    viewer.open(tmp_path / "tokens.megatrace")
    assert report(trace)["critical_path"]["step"] == order[2] == viewer.run("pane.step")


def test_critical_path_is_that_of_the_report(opened: Viewer, traces: dict[str, Path]) -> None:
    opened.run(f"app.setStep({STEP}, true)")
    opened.settle()
    opened.page.keyboard.press("c")
    opened.settle()
    trace = Trace.load(traces["a"])
    path = critical_path(trace, STEP)
    found = opened.run(f"pane.causes.path({STEP}).map(l => pane.trace.fileIndex[l.record])")
    assert found == [link.record for link in path.links]
    length = opened.run(f"pane.causes.path({STEP}).reduce((s, l) => s + l.end - l.begin, 0)")
    assert length == path.length
    assert length == pytest.approx(path.end - path.begin, rel=0.02)
    opened.screenshot("critical_path")
    # Everything else is dimmed.
    dim = opened.run("pane.painting.codes.filter(c => c & 128).length")
    assert dim == trace.num_records - len(path.links)
    # From the end of the path back to its beginning, and forth again.
    for _ in path.links:
        opened.run("app.follow(-1)")
    assert opened.run("pane.trace.fileIndex[app.selected.record]") == path.links[0].record
    for link in path.links[1:]:
        opened.run("app.follow(1)")
        assert opened.run("pane.trace.fileIndex[app.selected.record]") == link.record
    assert "Link by link" in opened.panel()
    opened.page.keyboard.press("c")
    opened.settle()
    assert opened.run("pane.painting.codes.filter(c => c & 128).length") == 0


def test_two_traces_are_compared_step_by_step(viewer: Viewer, traces: dict[str, Path]) -> None:
    viewer.open(traces["a"], traces["b"])
    assert viewer.run("app.panes.length") == 2
    step = viewer.run("pane.step")
    assert viewer.run("app.panes.map(p => p.origin === p.trace.stepBegin[p.step])") == [True, True]
    text = viewer.panel()
    assert "a.megatrace" in text
    assert "b.megatrace" in text
    viewer.screenshot("compare")
    # The slow phase is the largest change.
    cells, path = (table_rows(viewer.page.locator(".page:visible tbody").nth(i)) for i in range(2))
    a, b = (
        {r["kind"]: r for r in by_kind(Selection.of(Trace.load(traces[n]), step))} for n in "ab"
    )
    assert nanoseconds(cells["gate_up"][1]) == pytest.approx(
        float(a["gate_up"]["total"]), rel=0.005
    )
    assert nanoseconds(cells["gate_up"][2]) == pytest.approx(
        float(b["gate_up"]["total"]), rel=0.005
    )
    # It is the largest change of the critical path too.
    assert next(iter(path)) == "o_proj"
    facts = report(Trace.load(traces["b"]), step)["critical_path"]["contributions"]
    wanted = sum(row["total"] for row in facts if row["phase"] == "layers.*.o_proj")
    assert nanoseconds(path["o_proj"][2]) == pytest.approx(wanted, rel=0.005)
    # Zoom is shared; the next step is shown in both.
    viewer.page.locator(".overlay").focus()
    viewer.page.keyboard.press(",")
    viewer.settle()
    assert viewer.run("app.panes.map(p => p.step)") == [max(0, step - 1)] * 2
    viewer.page.get_by_role("button", name="Close B").click()
    viewer.settle()
    assert viewer.run("app.panes.length") == 1


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_traces_of_the_cpu_machine_have_the_numbers_of_the_report(
    viewer: Viewer, tmp_path: Path, tagged: bool, dynamic: bool
) -> None:
    trace = record_ring(tagged, dynamic)
    trace.save(tmp_path / "ring.megatrace")
    viewer.open(tmp_path / "ring.megatrace")
    assert viewer.run("[...pane.trace.stepBegin]") == trace.step_begin.tolist()
    assert viewer.run("[...pane.trace.stepEnd]") == trace.step_end.tolist()
    for step in range(trace.num_steps):
        found = viewer.run(
            f"pane.causes.path({step}).map(l =>"
            " [pane.trace.fileIndex[l.record], l.begin, l.end, ...l.parts])"
        )
        links = critical_path(trace, step).links
        assert found == [[x.record, x.begin, x.end, *x.parts.values()] for x in links]
    # A hop waits for the one before: an arrow goes from each to the next.
    hop = viewer.run(
        "pane.trace.instruction.findIndex((i, r) => i === 3 && pane.trace.step[r] === 1)"
    )
    viewer.run(f"app.select(pane, {hop}, true)")
    viewer.settle()
    arrows = viewer.run("app.selected.arrows.incoming.map(a => pane.trace.instruction[a.from])")
    assert arrows == [2]


def test_traces_like_a_gpus_have_the_numbers_of_the_report(viewer: Viewer, tmp_path: Path) -> None:
    trace = like_a_gpu(synthetic_trace(workers=6, steps=3, layers=2))
    trace.save(tmp_path / "gpu.megatrace")
    viewer.open(tmp_path / "gpu.megatrace")
    spans, edges = trace.spans, "pane.trace.lanes[2].edges"
    for number, name in enumerate(("begin", "waited", "inputs", "", "computed", "left")):
        if name:
            found = viewer.run(f"Array.from(pane.trace.byFile, r => {edges}[{number}][r])")
            assert found == getattr(spans, name).tolist(), name
    assert viewer.run("pane.trace.lanes.map(l => l.depth)")[2] == 1
    for step in range(trace.num_steps):
        found = viewer.run(f"pane.causes.path({step}).map(l => [l.begin, l.end, ...l.parts])")
        links = critical_path(trace, step).links
        assert found == [[x.begin, x.end, *x.parts.values()] for x in links]
    viewer.tab("Statistics")
    viewer.page.locator(".page:visible select").nth(0).select_option("trace")
    viewer.settle()
    selection = Selection.of(trace)
    tables = viewer.page.locator(".page:visible tbody")
    found = table_rows(tables.nth(1))
    for row in balance(selection):
        cells = found[row.phase.removeprefix("layers.*.")]
        times = [nanoseconds(text) for text in cells[2:5]]
        assert times == pytest.approx([row.least, row.mean, row.longest], rel=0.01), row.phase
    texts = viewer.page.locator(".page:visible .pair").all_inner_texts()
    shown = dict(text.split("\n") for text in texts if "\n" in text)
    for role, occupied in by_role(selection).items():
        time = nanoseconds(shown[role].split(" · ")[0])
        assert time == pytest.approx(occupied / trace.workers, rel=0.01), role


def test_gaps_between_launches_do_not_count(opened: Viewer, traces: dict[str, Path]) -> None:
    trace = Trace.load(traces["a"])
    selection = Selection.of(trace)
    assert gaps(selection).sum() > 0.02 * selection.busy
    opened.tab("Statistics")
    opened.page.locator(".page:visible select").nth(0).select_option("trace")
    opened.settle()
    texts = opened.page.locator(".page:visible .pair").all_inner_texts()
    shown = dict(text.split("\n") for text in texts if "\n" in text)
    found = bandwidth(selection)
    for name, wanted in (("streamed", found.streamed), ("read and written", found.moved)):
        rate = shown[name].split(" · ")[1]
        assert bytes_per_second(rate) == pytest.approx(wanted, rel=0.01), name
    assert f"{100 * (found.of_ceiling or 0):.1f} % of ceiling" in shown["streamed"]
    assert f"a step ran for {selection.busy / 1e3:.1f}" in shown["duration"]
    done = arithmetic(selection)
    assert f"{100 * (done.of_ceiling or 0):.1f} % of ceiling" in shown["operations"]
    for state, times in by_worker(selection).items():
        share = float(shown[state].split(" · ")[1].removesuffix(" %"))
        wanted = 100 * times.sum() / trace.workers / selection.busy
        assert share == pytest.approx(wanted, abs=0.1), state
