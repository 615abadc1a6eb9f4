"""Statistics of ranges, steps and workers. Their numbers agree with the analysis."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_trace
from ui.page import STEP, Viewer, bytes_per_second, nanoseconds, table_rows

from megavm.profiler.analysis import Selection, by_kind, by_worker
from megavm.profiler.trace import Trace


def test_range_has_statistics(opened: Viewer, traces: dict[str, Path]) -> None:
    page = opened.page
    page.mouse.move(400, 160)
    page.mouse.down()
    page.mouse.move(800, 160, steps=4)
    page.mouse.up()
    opened.settle()
    begin, end = opened.run("[app.range.begin, app.range.end]")
    width = opened.run("pane.body.width")
    assert end - begin == pytest.approx(400 / width * opened.run("app.view.span"), rel=0.02)
    text = opened.panel()
    for word in ("duration", "instructions", "streamed", "of ceiling", "computing", "barrier"):
        assert word in text, word
    trace = Trace.load(traces["a"])
    inside = (trace.spans.end > begin) & (trace.spans.begin < end)
    assert f"{int(inside.sum()):,}" in text
    assert "gate_up" in text
    opened.screenshot("range")
    page.keyboard.press("f")
    opened.settle()
    assert opened.view()[0] == pytest.approx(begin - 0.02 * (end - begin), rel=0.01)
    page.keyboard.press("Escape")
    opened.settle()
    assert opened.run("app.range") is None


def test_range_between_events_has_what_is_in_it(viewer: Viewer, tmp_path: Path) -> None:
    """What ends when the range begins is not in it; quantiles are those of the library."""
    trace = synthetic_trace(workers=2, steps=1, layers=2)
    trace.save(tmp_path / "small.megatrace")
    viewer.open(tmp_path / "small.megatrace")
    begins, ends = trace.spans.begin, trace.spans.left
    for record in np.flatnonzero(trace.record_worker == 0)[2:6].tolist():
        begin, end = int(begins[record]), int(ends[record])
        assert (ends[trace.record_worker == 0] == begin).any()
        viewer.run(
            f"app.setRange({{pane, begin: {begin}, end: {end}, workers: [0, 1]}}),"
            " app.changed('range')"
        )
        assert "instructions\n1\n" in viewer.tab("Statistics")
    viewer.page.locator(".page:visible select").nth(0).select_option("trace")
    viewer.page.locator(".page:visible select").nth(1).select_option("phase")
    viewer.settle()
    found = table_rows(viewer.page.locator(".page:visible tbody").first)
    for name in ("gate_up", "qkv", "down_proj"):
        own = [i for i, label in enumerate(trace.labels) if label.endswith(name)]
        times = (ends - begins)[np.isin(trace.record_label, own)]
        wanted = np.percentile(times, [50, 99])
        assert [nanoseconds(text) for text in found[name][2:4]] == pytest.approx(wanted, rel=0.01)


def test_no_range_streams_more_than_it_reads_and_writes(opened: Viewer) -> None:
    """Loaders work ahead: what arrives in a range may be read after it."""
    begin, end = opened.run("[pane.trace.stepBegin[1], pane.trace.stepEnd[1]]")
    opened.tab("Statistics")
    ranges = np.linspace(begin, end, 25)
    seen = set()
    for low, high in pairwise(ranges.tolist()):
        opened.run(
            f"app.setRange({{pane, begin: {low}, end: {high}, workers: [0, pane.trace.workers]}}),"
            " app.changed('range')"
        )
        opened.settle()
        pairs = opened.page.locator(".page:visible .pair").all_inner_texts()
        shown = dict(text.split("\n") for text in pairs if "\n" in text)
        streamed, moved = (
            bytes_per_second(shown[name].split(" · ")[1])
            for name in ("streamed", "read and written")
        )
        assert streamed <= 1.01 * moved
        seen.add(shown["streamed"])
    assert len(seen) > 20


def test_a_range_between_launches_has_no_rates(opened: Viewer) -> None:
    begin, end = opened.run("[pane.trace.stepEnd[0] + 100, pane.trace.stepBegin[1] - 100]")
    assert end > begin
    opened.run(
        f"app.setRange({{pane, begin: {begin}, end: {end}, workers: [0, pane.trace.workers]}}),"
        " app.changed('range')"
    )
    text = opened.tab("Statistics")
    assert "a step ran for 0 ns" in text
    assert "NaN" not in text
    assert "Infinity" not in text


def test_range_of_some_workers(opened: Viewer) -> None:
    page = opened.page
    page.keyboard.down("Shift")
    page.mouse.move(400, 400)
    page.mouse.down()
    page.mouse.move(800, 460, steps=4)
    page.mouse.up()
    page.keyboard.up("Shift")
    opened.settle()
    low, high = opened.run("app.range.workers")
    assert 5 < high - low < 40
    assert f"workers {low} to {high - 1}" in opened.panel()


def test_statistics_of_a_step_are_those_of_the_report(
    opened: Viewer, traces: dict[str, Path]
) -> None:
    opened.run(f"app.setStep({STEP}, true)")
    opened.settle()
    opened.page.get_by_role("tab", name="Statistics").click()
    opened.page.locator(".page:visible select").nth(1).select_option("kind")
    opened.settle()
    cells = list(table_rows(opened.page.locator(".page:visible tbody").first).values())
    selection = Selection.of(Trace.load(traces["a"]), STEP)
    wanted = by_kind(selection)
    assert [c[0] for c in cells] == [w["kind"] for w in wanted]
    for cell, row in zip(cells, wanted, strict=True):
        assert cell[1] == f"{row['count']:,}"
        assert nanoseconds(cell[2]) == pytest.approx(float(row["p50"]), rel=0.01)
        assert nanoseconds(cell[4]) == pytest.approx(float(row["total"]), rel=0.005)
        assert cell[7] == "-" or bytes_per_second(cell[7]) == pytest.approx(
            float(row["bytes_per_second"]), rel=0.01
        )
    # The split of the workers' time.
    text = opened.panel()
    split = by_worker(selection)
    whole = sum(int(v.sum()) for v in split.values())
    for name, values in split.items():
        found = re.search(rf"{name}\s+(.*?) · ([\d.]+) %", text)
        assert found is not None, name
        assert float(found[2]) == pytest.approx(100 * values.sum() / whole, abs=0.15)
    opened.screenshot("statistics")


def test_statistics_by_worker_find_the_slow_one(viewer: Viewer, traces: dict[str, Path]) -> None:
    viewer.open(traces["b"])
    viewer.tab("Statistics")
    viewer.page.locator(".page:visible select").nth(1).select_option("worker")
    viewer.settle()
    viewer.page.locator(".page:visible th", has_text="wait").click()
    viewer.page.locator(".page:visible th", has_text="wait").click()
    first = viewer.page.locator(".page:visible tbody tr").first
    assert first.locator("td").first.inner_text() == "worker 40"
    first.click()
    viewer.settle()
    assert viewer.run("app.query") == "worker:40"
