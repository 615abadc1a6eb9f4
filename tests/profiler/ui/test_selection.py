"""The selected instruction: its panel, its arrows, and the keys that move to another one."""

from __future__ import annotations

from pathlib import Path

from ui.page import STEP, Viewer

from megavm.profiler.trace import Trace


def test_click_selects_and_arrows_point_to_what_it_waited_for(
    opened: Viewer, traces: dict[str, Path]
) -> None:
    record = opened.record(worker=70, slot=4)
    begin, end = opened.run(f"pane.trace.span({record})")
    opened.show(begin - 20000, end + 20000)
    opened.page.mouse.click(*opened.point(record))
    opened.settle()
    assert opened.run("app.selected.record") == record
    assert opened.run("app.selected.arrows.incoming.length") == 132
    assert opened.run("app.selected.arrows.outgoing.length") == 132
    trace = Trace.load(traces["a"])
    number = opened.run(f"pane.trace.fileIndex[{record}]")
    cause = opened.run("pane.trace.fileIndex[app.selected.arrows.cause.from]")
    assert cause == trace.record_cause[number]
    text = opened.panel()
    for word in ("layers.0.gate_up", "Last came", "Waits for", "132 writers", "Signals", "Events"):
        assert word in text, word
    opened.screenshot("selected")


def test_a_wait_for_a_step_before_the_trace_is_told(opened: Viewer) -> None:
    opened.run(f"app.select(pane, {opened.record(worker=0, slot=0, step=0)}, true)")
    opened.settle()
    assert "1 of 1 signals, the step before" in opened.panel()
    assert "its producers are not in the trace" in opened.panel()


def test_cause_and_effect_are_followed_with_keys(opened: Viewer) -> None:
    record = opened.record(worker=9, slot=12)
    opened.run(f"app.select(pane, {record}, true)")
    opened.settle()
    cause = opened.run(f"pane.trace.cause[{record}]")
    assert cause >= 0
    opened.page.keyboard.press("[")
    opened.settle()
    assert opened.run("app.selected.record") == cause
    opened.page.keyboard.press("]")
    opened.settle()
    assert opened.run("pane.trace.cause[app.selected.record]") == cause


def test_keyboard_moves_between_instructions(opened: Viewer) -> None:
    record = opened.record(worker=5, slot=3)
    opened.run(f"app.select(pane, {record}, true)")
    opened.page.locator(".overlay").focus()
    opened.page.keyboard.press("ArrowRight")
    opened.settle()
    assert opened.run("app.selected.record") == record + 1
    opened.page.keyboard.press("ArrowDown")
    opened.settle()
    assert opened.run("pane.trace.worker[app.selected.record]") == 6
    opened.page.keyboard.press("f")
    opened.settle()
    begin, end = opened.view()
    assert end - begin < 100000
    opened.page.keyboard.press("?")
    opened.settle()
    assert opened.page.locator("dialog").is_visible()
    opened.screenshot("help")
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert not opened.page.locator("dialog").is_visible()


def test_the_step_is_that_of_the_selected_instruction(opened: Viewer) -> None:
    assert opened.run("pane.step") == STEP
    opened.page.keyboard.press("c")
    opened.run(f"app.select(pane, {opened.record(worker=70, slot=6, step=2)}, true)")
    opened.settle()
    assert opened.run("pane.step") == 2
    assert "Step 2" in opened.tab("Critical path")
    assert opened.page.get_by_role("combobox", name="Step").input_value() == "2"
