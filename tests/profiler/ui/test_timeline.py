"""The timeline, in a real Chromium: what it shows, and how it zooms, pans and is coloured."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import synthetic_trace
from ui.page import Viewer

from megavm.profiler.analysis import Selection, common_steps, median_step
from megavm.profiler.trace import Trace


def test_empty_page_says_how_to_begin(viewer: Viewer) -> None:
    assert viewer.page.get_by_text("Drop a .megatrace file here").is_visible()
    assert viewer.page.get_by_role("button", name="Open a trace").is_visible()
    viewer.screenshot("empty")


def test_a_trace_opens_on_the_step_of_median_duration(
    opened: Viewer, traces: dict[str, Path]
) -> None:
    trace = Trace.load(traces["a"])
    step = median_step(trace, common_steps(Selection.of(trace)))
    begin, end = opened.view()
    margin = 0.05 * (trace.step_end[step] - trace.step_begin[step])
    assert begin == pytest.approx(trace.step_begin[step], abs=margin)
    assert end == pytest.approx(trace.step_end[step], abs=margin)


def test_trace_is_shown_whole(opened: Viewer, traces: dict[str, Path]) -> None:
    trace = Trace.load(traces["a"])
    assert opened.run("pane.trace.count") == trace.num_records
    opened.page.keyboard.press("Home")
    opened.settle()
    begin, end = opened.view()
    assert begin <= 0
    assert end >= trace.times.max()
    assert "a.megatrace" in opened.page.title()
    text = opened.tab("Trace")
    assert f"{trace.num_records:,} in 3 steps" in text
    assert "synthetic" in text
    # Rows of workers are painted over their whole height.
    assert opened.run("pane.rows.height") >= 132 * 4
    opened.screenshot("whole")


def test_keys_zoom_and_pan(opened: Viewer) -> None:
    opened.page.keyboard.press("Home")
    opened.settle()
    before = opened.view()
    span = before[1] - before[0]
    opened.page.mouse.move(700, 500)
    opened.page.keyboard.down("w")
    opened.wait(f"profiler.view.span < {0.7 * span}")
    opened.page.keyboard.up("w")
    opened.settle()
    zoomed = opened.view()
    opened.page.keyboard.down("d")
    opened.wait(f"profiler.view.begin > {zoomed[0] + 0.05 * span}")
    opened.page.keyboard.up("d")
    opened.settle()
    panned = opened.view()
    assert panned[1] - panned[0] == pytest.approx(zoomed[1] - zoomed[0], rel=0.01)
    opened.page.keyboard.press("Home")
    opened.settle()
    assert opened.view() == pytest.approx(before, rel=0.05, abs=1000)


def test_wheel_zooms_at_the_pointer_and_drag_pans(opened: Viewer) -> None:
    opened.page.mouse.move(900, 500)
    under = opened.run("app.view.begin + (900 - 104) / pane.body.width * app.view.span")
    opened.page.mouse.wheel(0, -600)
    opened.settle()
    begin, end = opened.view()
    assert opened.run("app.view.begin + (900 - 104) / pane.body.width * app.view.span") == (
        pytest.approx(under, abs=(end - begin) / 200)
    )
    opened.page.mouse.down()
    opened.page.mouse.move(700, 500, steps=4)
    opened.page.mouse.up()
    opened.settle()
    width = opened.run("pane.body.width")
    assert opened.view()[0] == pytest.approx(begin + 200 / width * (end - begin), rel=0.05)
    assert opened.run("app.selected") is None


def test_hover_tells_everything_about_an_instruction(
    opened: Viewer, traces: dict[str, Path]
) -> None:
    record = opened.record(worker=70, slot=4)
    begin, end = opened.run(f"pane.trace.span({record})")
    opened.show(begin - 20000, end + 20000)
    opened.page.mouse.move(*opened.point(record))
    opened.settle()
    text = opened.page.locator(".tooltip").inner_text()
    assert "layers.0.gate_up" in text
    assert "worker 70" in text
    trace = Trace.load(traces["a"])
    number = opened.run(f"pane.trace.fileIndex[{record}]")
    wanted = trace.spans.end[number] - trace.spans.begin[number]
    assert f"{wanted / 1000:.2f} µs" in re.sub(r"\s+", " ", text)
    for word in ("waits for", "streams", "262.1 KB", "fetched", "load_arrived", "eps", "row_begin"):
        assert word in text, word
    assert "layers.0.o_proj" in text  # what it waits for
    opened.screenshot("hover")


def test_the_tooltip_follows_what_moves_below_the_pointer(opened: Viewer) -> None:
    first, second = opened.record(worker=70, slot=6), opened.record(worker=70, slot=12)
    begin, end = opened.run(f"pane.trace.span({first})")
    opened.show(begin - 20000, end + 20000)
    opened.page.mouse.move(*opened.point(first))
    opened.settle()
    assert opened.run("app.hovered.record") == first
    middle = (begin + end) / 2
    begin, end = opened.run(f"pane.trace.span({second})")
    opened.show(*(edge + (begin + end) / 2 - middle for edge in opened.view()))
    assert opened.run("app.hovered.record") == second
    assert (
        opened.run(f"pane.trace.labelOf({second})") in opened.page.locator(".tooltip").inner_text()
    )


def test_bars_are_where_the_records_are(opened: Viewer) -> None:
    record = opened.record(worker=70, slot=4)
    begin, end = opened.run(f"pane.trace.span({record})")
    opened.show(begin - 20000, end + 20000)
    x, y = opened.point(record)
    assert (
        opened.run(
            f"pane.recordAt(app.view, {x}, {y} - app.stage.overlay.getBoundingClientRect().top)"
        )
        == record
    )
    pixel = opened.page.evaluate(
        "([x, y]) => { const box = profiler.stage.picture.getBoundingClientRect();"
        " return [...profiler.stage.picture.getContext('2d')"
        ".getImageData(x - box.left, y - box.top, 1, 1).data]; }",
        [x, y],
    )
    code = opened.run(f"pane.painting.codes[{record}]")
    shade = opened.run(
        f"(() => {{ const [a, b] = pane.trace.span({record}), t = (a + b) / 2;"
        f" return pane.trace.lanes[2].edges.findLastIndex(e => e[{record}] <= t); }})()"
    )
    colour = opened.run(f"pane.painting.tables[2][{shade}][{code}]")
    assert pixel[:3] == [colour & 255, colour >> 8 & 255, colour >> 16 & 255]


def test_worker_opens_into_roles(opened: Viewer) -> None:
    opened.show(*opened.run("[pane.trace.stepBegin[1], pane.trace.stepBegin[1] + 40000]"))
    y = opened.run("app.stage.overlay.getBoundingClientRect().top + pane.yOf(20) + 2")
    opened.page.mouse.click(60, y)
    opened.settle()
    assert opened.run("pane.rows.openWorkers") == [20]
    roles = opened.run("[...new Set(pane.rows.lanes(20).map(l => l.role))]")
    assert roles == [0, 1, 2, 3]
    opened.screenshot("roles")
    opened.page.keyboard.press("Shift+E")
    opened.settle()
    assert opened.run("pane.rows.openWorkers") == []


def test_records_without_a_worker_have_a_row(viewer: Viewer, tmp_path: Path) -> None:
    trace = synthetic_trace(workers=3, layers=1, steps=2)
    # One worker's records come first when it is not known which worker it was.
    trace.record_worker[trace.record_worker == 0] = -1
    trace.save(tmp_path / "unknown.megatrace")
    Trace.load(tmp_path / "unknown.megatrace")
    viewer.open(tmp_path / "unknown.megatrace")
    assert viewer.run("pane.trace.workers") == 4
    assert viewer.run("pane.trace.workerName(3)") == "unknown"


@pytest.mark.parametrize("mode", ["phase", "kind", "layer", "role", "wait"])
def test_colour_modes(opened: Viewer, mode: str) -> None:
    opened.show(*opened.run("[pane.trace.stepBegin[1], pane.trace.stepBegin[1] + 60000]"))
    opened.page.locator("label", has_text="Colour").locator("select").select_option(mode)
    opened.settle()
    assert opened.run("app.mode") == mode
    entries = opened.page.locator(".legend .entry").all_inner_texts()
    wanted = {"phase": "gate_up", "kind": "matmul", "layer": "3", "role": "barrier"}
    assert wanted.get(mode, "10 µs and more") in entries
    opened.screenshot(f"colour_{mode}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_theme_follows_the_system_and_the_button(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path], scheme: str
) -> None:
    viewer = make_viewer(color_scheme=scheme).goto().open(traces["a"])

    def brightness() -> float:
        return float(
            viewer.page.evaluate(
                "(() => { const c = profiler.stage.picture; const d = c.getContext('2d')"
                ".getImageData(2, c.height - 4, 1, 1).data; return d[0] + d[1] + d[2]; })()"
            )
        )

    assert viewer.page.evaluate("document.documentElement.dataset.theme") == scheme
    viewer.screenshot(f"theme_{scheme}")
    viewer.page.get_by_role("button", name="Theme").click()
    viewer.settle()
    assert (brightness() > 600) == (scheme == "dark")
    viewer.page.reload()
    assert viewer.page.evaluate("document.documentElement.dataset.theme") != scheme


def test_on_a_phone_the_panel_is_below_the_timeline(opened: Viewer) -> None:
    opened.page.set_viewport_size({"width": 390, "height": 844})
    opened.settle()
    stage, panel = (opened.page.locator(name).bounding_box() for name in ("#stage", ".panel"))
    assert stage is not None
    assert panel is not None
    assert stage["width"] == panel["width"] == 390
    assert panel["y"] >= stage["y"] + stage["height"]
    assert min(stage["height"], panel["height"]) > 250
    opened.screenshot("phone")


@pytest.mark.parametrize("width", [1600, 1000, 420])
def test_the_tabs_of_the_panel_are_in_one_row(opened: Viewer, width: int) -> None:
    opened.page.set_viewport_size({"width": width, "height": 800})
    for tab in opened.page.get_by_role("tab").all():
        tab.click()
        opened.settle()
        boxes = [other.bounding_box() for other in opened.page.get_by_role("tab").all()]
        assert len({box["y"] for box in boxes if box is not None}) == 1, tab.inner_text()


def test_the_legend_fits_a_narrow_window(opened: Viewer) -> None:
    opened.page.set_viewport_size({"width": 360, "height": 740})
    opened.settle()
    legend = opened.page.locator(".legend").bounding_box()
    assert legend is not None
    for entry in opened.page.locator(".legend .entry, .legend .state").all():
        box = entry.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 360
        assert box["y"] + box["height"] <= legend["y"] + legend["height"]
    opened.screenshot("legend-narrow")
