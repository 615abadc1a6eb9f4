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


def test_every_tab_says_which_trace_it_is_of(viewer: Viewer, traces: dict[str, Path]) -> None:
    viewer.open(traces["a"])
    assert viewer.tab("Layer").startswith("The mean layer")
    viewer.open(traces["b"])
    assert viewer.tab("Layer").startswith("A: the mean layer")
    assert viewer.tab("Critical path").startswith("A: step ")
    assert "A: step " in viewer.tab("Statistics")
    viewer.run("app.select(app.panes[1], 700, true)")
    viewer.settle()
    label = viewer.run("app.panes[1].trace.labelOf(700)")
    assert viewer.tab("Instruction").startswith(f"B: {label}")
    assert viewer.tab("Critical path").startswith("B: step ")
    assert viewer.page.locator("[aria-live]").first.inner_text().startswith(f"B: {label}")
    x, y = viewer.run(
        "(() => { const pane = app.panes[1], box = app.stage.overlay.getBoundingClientRect();"
        " const [a, b] = pane.trace.span(700);"
        " return [box.left + pane.xOf(app.view, (a + b) / 2), box.top + pane.middleOf(700)]; })()"
    )
    viewer.page.mouse.move(x, y)
    viewer.settle()
    tip = viewer.page.locator(".tooltip")
    assert tip.inner_text().startswith("B: ")
    # It stays inside of the window when what it shows changes under the pointer.
    for key in "+++":
        viewer.page.keyboard.press(key)
    viewer.settle()
    box = tip.bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= viewer.page.viewport_size["height"]  # type: ignore[index]


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
