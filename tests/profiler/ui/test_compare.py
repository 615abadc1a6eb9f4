"""Two traces on the page: what is different about the runs is said, and links keep ranges."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from synthetic import synthetic_trace
from ui.page import Viewer, served


def test_different_runs_are_noted(viewer: Viewer, tmp_path: Path) -> None:
    a, b = tmp_path / "a.megatrace", tmp_path / "b.megatrace"
    first = synthetic_trace(workers=4, steps=3, layers=1)
    second = synthetic_trace(workers=6, steps=3, layers=1)
    first.save(a)
    dataclasses.replace(
        second,
        model={"name": "another"},
        machine={**second.machine, "device": "faster"},
        step_tokens=second.step_tokens + 1,
    ).save(b)
    viewer.open(a, b)
    text = viewer.panel()
    assert "The models are different: synthetic in A, another in B." in text
    assert "The devices are different: synthetic in A, faster in B." in text
    assert "The numbers of workers are different: 4 in A, 6 in B." in text
    assert "The steps have different numbers of rows: 1 in A, 2 in B." in text
    viewer.screenshot("compare_notes")


def test_the_same_program_has_no_notes(viewer: Viewer, traces: dict[str, Path]) -> None:
    viewer.open(traces["a"], traces["b"])
    assert viewer.page.locator(".page:visible .note").count() == 0


def test_a_range_of_the_second_trace_is_in_the_link(
    viewer: Viewer, traces: dict[str, Path]
) -> None:
    with served(traces["a"], traces["b"]) as port:
        address = f"http://127.0.0.1:{port}/"
        viewer.goto(address)
        viewer.wait("profiler.panes.length === 2")
        viewer.settle()
        viewer.run("app.setRange({ pane: app.panes[1], begin: 5000, end: 9000, workers: [2, 40] })")
        viewer.settle()
        link = viewer.run("location.hash")
        assert "range_b=5000_9000_2_40" in link
        viewer.goto("about:blank")
        viewer.goto(address + link)
        viewer.wait("profiler.panes.length === 2")
        viewer.settle()
        found = "[app.range.begin, app.range.end, ...app.range.workers, app.range.pane.letter]"
        assert viewer.run(found) == [5000, 9000, 2, 40, "B"]
