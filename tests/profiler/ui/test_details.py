"""Small things that a stranger trips over: keyboards, screen readers, spelling, odd names."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic import synthetic_trace
from ui.page import HEAR, Viewer

_HEAR_LINES = """() => { const seen = window.seenLines = [];
  const before = CanvasRenderingContext2D.prototype.fillRect;
  CanvasRenderingContext2D.prototype.fillRect = function (x, y, w, h) {
    if (w === 1 && h > 100) seen.push(x); return before.call(this, x, y, w, h); }; }"""


@pytest.mark.parametrize(("steps", "all_lines"), [(900, False), (12, True)])
def test_lines_of_steps_leave_room_between_them(
    viewer: Viewer, tmp_path: Path, steps: int, all_lines: bool
) -> None:
    synthetic_trace(workers=40, steps=steps, layers=1).save(tmp_path / "steps.megatrace")
    viewer.open(tmp_path / "steps.megatrace")
    viewer.page.keyboard.press("Home")
    viewer.settle()
    viewer.page.evaluate(_HEAR_LINES)
    viewer.run("(app.changed('view'), app.flush())")
    edge = viewer.run("pane.body.left - 1")
    own = viewer.run("Math.round(pane.xOf(app.view, pane.trace.stepBegin[pane.step]))")
    lines = sorted(x for x in viewer.page.evaluate("seenLines") if x not in (edge, own))
    assert len(lines) == steps - 1 if all_lines else 20 < len(lines) < 120
    assert all(b - a >= 10 for a, b in pairwise(lines))


@pytest.mark.parametrize("width", [800, 1280, 1600, 1920, 2400])
def test_the_ruler_names_the_step_that_is_shown(opened: Viewer, width: int) -> None:
    opened.page.evaluate(HEAR)
    opened.page.keyboard.press("i")  # the timeline has all of the window
    for w in range(width, width + 40, 9):
        opened.page.set_viewport_size({"width": w, "height": 700})
        opened.run("(app.setStep(2, false), app.showStep())")
        opened.settle()
        opened.page.evaluate("seenTexts.length = 0")
        opened.run("(app.changed('view'), app.flush())")
        names = opened.page.evaluate("seenTexts.filter(([t]) => /^step /.test(t))")
        assert "step 2" in [name for name, *_ in names], (w, names)
        places = sorted(x for _, x, _ in names)
        assert all(b - a > 35 for a, b in pairwise(places))


def test_small_rates_have_small_units_and_one_is_not_several(
    viewer: Viewer, tmp_path: Path
) -> None:
    trace = synthetic_trace(workers=1, steps=1, layers=2)
    (program,) = trace.programs
    few = {name: getattr(program, name) // 1000 for name in ("bytes", "load_bytes", "flops")}
    machine = {**trace.machine, "bandwidth": 1.5e7, "flops_per_second": 2.5e8}
    small = dataclasses.replace(program, **few)
    dataclasses.replace(trace, machine=machine, programs=(small,)).save(tmp_path / "one.megatrace")
    viewer.open(tmp_path / "one.megatrace")
    text = viewer.tab("Trace").replace("\u202f", " ")
    assert "15.00 MB/s" in text
    assert "250.0 MFLOP/s" in text
    assert "12 in 1 step\n" in text
    assert "0.0" not in " ".join(line for line in text.split("\n") if "B/s" in line)
    viewer.tab("Statistics")
    viewer.page.locator(".page:visible select").nth(0).select_option("trace")
    viewer.settle()
    text = viewer.panel()
    assert "1 step\n" in text
    assert "MB/s" in text
    assert "MFLOP/s" in text
    assert "2 layers of 1 step with 1 row," in viewer.tab("Layer")


def test_tabs_name_their_panels_and_follow_arrows(opened: Viewer) -> None:
    tabs = opened.page.get_by_role("tab")
    tabs.first.click()
    first = opened.page.get_by_role("tabpanel")
    assert first.get_attribute("aria-labelledby") == tabs.first.get_attribute("id")
    assert first.get_attribute("id") == tabs.first.get_attribute("aria-controls")
    for key, number in (("ArrowRight", 1), ("End", tabs.count() - 1), ("ArrowRight", 0)):
        opened.page.keyboard.press(key)
        assert tabs.nth(number).get_attribute("aria-selected") == "true"
        assert opened.page.evaluate("document.activeElement.id") == f"tab-{number}"
    assert opened.run("app.selected") is None  # arrows did not go to the timeline


def test_headers_sort_by_keyboard(opened: Viewer) -> None:
    opened.tab("Layer")
    header = opened.page.locator(".page:visible th").first
    header.get_by_role("button").focus()
    opened.page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    opened.page.keyboard.press("Enter")
    assert header.get_attribute("aria-sort") == "descending"
    names = opened.page.locator(".page:visible table").first.locator("tbody td:first-child")
    texts = names.all_inner_texts()
    assert texts == sorted(texts, reverse=True)


def test_search_spells_the_kinds_that_there_are(opened: Viewer) -> None:
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("kind:atention")
    opened.wait("profiler.queryError !== ''")
    opened.settle()
    text = opened.page.locator(".count").inner_text()
    assert "atention" in text
    assert "attention, embed, gate_up, matmul, qkv_rope, sample" in text
    opened.page.locator("input.search").fill("color:red")
    opened.settle()
    assert "kind: phase: label:" in opened.page.locator(".count").inner_text()
    opened.screenshot("search_error")


def test_selections_are_announced(opened: Viewer) -> None:
    record = opened.record(worker=70, slot=4)
    opened.run(f"app.select(pane, {record}, true)")
    live = opened.page.locator("[aria-live=polite]")
    opened.settle()
    assert "layers.0.gate_up" in live.inner_text()
    assert "worker 70" in live.inner_text()
    opened.page.locator(".overlay").focus()
    opened.page.keyboard.press("ArrowRight")
    opened.settle()
    assert "layers.0.down_proj" in live.inner_text()
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert "nothing" in live.inner_text()


def test_buttons_zoom(opened: Viewer) -> None:
    begin, end = opened.view()
    opened.page.get_by_role("button", name="zoom in").click()
    opened.settle()
    inside = opened.view()
    assert inside[1] - inside[0] == pytest.approx((end - begin) / 2, rel=0.02)
    opened.page.get_by_role("button", name="zoom out").click()
    opened.settle()
    outside = opened.view()
    assert outside[1] - outside[0] == pytest.approx(end - begin, rel=0.05)
    opened.page.get_by_role("button", name="show the step").click()
    opened.settle()
    begin, end = opened.run("[pane.trace.stepBegin[pane.step], pane.trace.stepEnd[pane.step]]")
    assert opened.view() == pytest.approx((begin, end), abs=0.05 * (end - begin))


def test_two_fingers_zoom_around_their_middle(opened: Viewer) -> None:
    client = opened.page.context.new_cdp_session(opened.page)
    begin, end = opened.view()

    def touch(kind: str, *xs: float) -> None:
        points = [{"x": x, "y": 600, "id": i} for i, x in enumerate(xs)]
        client.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    body = opened.run("pane.body")
    at = begin + (500 - body["left"]) / body["width"] * (end - begin)
    touch("touchStart", 450, 550)
    for spread in (60, 80, 100):
        touch("touchMove", 500 - spread, 500 + spread)
    touch("touchEnd")
    opened.settle()
    low, high = opened.view()
    assert high - low == pytest.approx((end - begin) / 2, rel=0.03)
    assert low + (500 - body["left"]) / body["width"] * (high - low) == pytest.approx(
        at, abs=(end - begin) / 200
    )
    assert opened.run("app.selected") is None


def test_names_from_right_to_left_stay_by_themselves(viewer: Viewer, tmp_path: Path) -> None:
    trace = synthetic_trace(2, layers=1, steps=2)
    trace.programs[0].facts["labels"][3] = "layers.0.\u202eevil\u05d0\u05d1"
    trace.save(tmp_path / "bidi.megatrace")
    viewer.open(tmp_path / "bidi.megatrace")
    record = viewer.record(worker=1, slot=3)
    label = viewer.run(f"pane.trace.labelOf({record})")
    assert label == "\u2068layers.0.\u202eevil\u05d0\u05d1\u2069"
    assert viewer.run("pane.phases.layers[0].name") == "layer 0"
    assert "\u2068\u202eevil" in viewer.tab("Layer")
    viewer.run("app.search('layer:0 evil')")
    assert viewer.run("app.matches.records.length") == 4
