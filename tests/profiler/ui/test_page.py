"""What a user does with the page, in a real Chromium. Its numbers agree with the analysis."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from recording import record_ring
from synthetic import like_a_gpu, synthetic_trace
from ui.page import Viewer, served

from megavm.profiler.analysis import Selection, balance, by_kind, by_role, by_worker
from megavm.profiler.critical_path import critical_path
from megavm.profiler.report import report
from megavm.profiler.trace import Trace
from megavm.profiler.viewer import save_html

if TYPE_CHECKING:
    from playwright.sync_api import Locator

STEP = 1  # what the page looks at first: the step of median duration, set by the tests


def test_empty_page_says_how_to_begin(viewer: Viewer) -> None:
    assert viewer.page.get_by_text("Drop a .megatrace file here").is_visible()
    assert viewer.page.get_by_role("button", name="Open a trace").is_visible()
    viewer.screenshot("empty")


def test_trace_is_shown_whole(opened: Viewer, traces: dict[str, Path]) -> None:
    trace = Trace.load(traces["a"])
    assert opened.run("pane.trace.count") == trace.num_records
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


def test_the_step_is_that_of_the_selected_instruction(opened: Viewer) -> None:
    assert opened.run("pane.step") == STEP
    opened.page.keyboard.press("c")
    opened.run(f"app.select(pane, {opened.record(worker=70, slot=6, step=2)}, true)")
    opened.settle()
    assert opened.run("pane.step") == 2
    assert "Step 2" in opened.tab("Critical path")
    assert opened.page.get_by_label("Step").input_value() == "2"


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


@pytest.mark.parametrize(
    ("query", "test"),
    [
        ("kind:attention", "kind === 'attention'"),
        ("kind:attention layer:2 worker:7", "kind === 'attention' && layer === 2 && worker === 7"),
        ("layer:1-2,none worker:0-3", "[1, 2, -1].includes(layer) && worker <= 3"),
        ("wait>3us phase:o_proj", "wait > 3000 && label.endsWith('o_proj')"),
        ("!kind:matmul step:2", "kind !== 'matmul' && step === 2"),
        ("label:layers.3.down_proj time<=10us", "label === 'layers.3.down_proj' && time <= 10000"),
        ("down worker:5", "label.includes('down') && worker === 5"),
        ("bytes>=200KB", "bytes >= 200000"),
    ],
)
def test_search_finds_what_it_says(opened: Viewer, query: str, test: str) -> None:
    opened.page.keyboard.press("/")
    opened.page.keyboard.type(query)
    opened.settle()
    wanted = opened.run(
        "Array.from(pane.trace.worker, (worker, r) => { const t = pane.trace,"
        " kind = t.kindOf(r), label = t.labelOf(r), layer = t.layer[r], step = t.step[r],"
        " bytes = t.bytes[r], wait = t.waitOf(r), time = t.span(r)[1] - t.span(r)[0];"
        f" return {test}; }}).filter(Boolean).length"
    )
    assert wanted > 0
    assert opened.run("app.matches.records.length") == wanted
    assert f"{wanted:,} found" in opened.page.locator(".count").inner_text()
    opened.page.keyboard.press("Enter")
    opened.settle()
    assert opened.run("app.matches.mask[app.selected.record]") == 1
    assert opened.page.locator(".count").inner_text().startswith("1 of") or (
        " of " in opened.page.locator(".count").inner_text()
    )


def test_next_and_previous_match_go_around(opened: Viewer) -> None:
    opened.run("app.search('kind:sample')")
    opened.page.locator(".overlay").focus()
    seen = []
    for key in ("n", "n", "n", "n", "Shift+N"):
        opened.page.keyboard.press(key)
        opened.settle()
        seen.append(opened.run("pane.trace.step[app.selected.record]"))
    assert sorted(seen[:3]) == [0, 1, 2]
    assert seen[3] == seen[0]
    assert seen[4] == seen[2]
    opened.screenshot("search")


def test_search_says_what_it_does_not_understand(opened: Viewer) -> None:
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("wait>soon")
    opened.settle()
    assert '"soon" is not a time such as 3us' in opened.page.locator(".count").inner_text()
    opened.page.keyboard.press("Escape")
    opened.settle()
    assert opened.run("app.query") == ""


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


def test_the_step_that_is_shown_first_is_that_of_the_report(viewer: Viewer, tmp_path: Path) -> None:
    """Of those of the most frequent number of tokens the one of median duration."""
    trace = synthetic_trace(workers=2, steps=7, layers=1)
    order = np.argsort(trace.step_end - trace.step_begin, kind="stable")
    trace.step_tokens[order[3:]] = (9, 2, 1, 1)
    trace.save(tmp_path / "tokens.megatrace")
    viewer.open(tmp_path / "tokens.megatrace")
    assert report(trace)["critical_path"]["step"] == order[2] == viewer.run("pane.step")


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
    found = _rows(viewer.page.locator(".page:visible tbody").first)
    for name in ("gate_up", "qkv", "down_proj"):
        own = [i for i, label in enumerate(trace.labels) if label.endswith(name)]
        times = (ends - begins)[np.isin(trace.record_label, own)]
        wanted = np.percentile(times, [50, 99])
        assert [_time(text) for text in found[name][2:4]] == pytest.approx(wanted, rel=0.01)


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
    cells = list(_rows(opened.page.locator(".page:visible tbody").first).values())
    selection = Selection.of(Trace.load(traces["a"]), STEP)
    wanted = by_kind(selection)
    assert [c[0] for c in cells] == [w["kind"] for w in wanted]
    for cell, row in zip(cells, wanted, strict=True):
        assert cell[1] == f"{row['count']:,}"
        assert _time(cell[2]) == pytest.approx(float(row["p50"]), rel=0.01)
        assert _time(cell[4]) == pytest.approx(float(row["total"]), rel=0.005)
        assert cell[7] == "-" or _rate(cell[7]) == pytest.approx(
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


def _time(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit]


def _rate(text: str) -> float:
    value, unit = text.split()
    return float(value) * {"GB/s": 1e9, "TB/s": 1e12}[unit]


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


def test_legend_filters(opened: Viewer) -> None:
    opened.page.locator(".legend .entry", has_text="o_proj").click()
    opened.settle()
    assert opened.run("app.query") == "phase:o_proj"
    assert opened.run("app.matches.records.length") == 132 * 4 * 3
    opened.page.locator(".legend .entry", has_text="o_proj").click()
    opened.settle()
    assert opened.run("app.query") == ""


def _rows(body: Locator) -> dict[str, list[str]]:
    """The cells of a table's rows, by the first one."""
    rows = body.locator("tr")
    texts = [rows.nth(i).locator("td").all_inner_texts() for i in range(rows.count())]
    return {cells[0]: cells for cells in texts}


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
    cells, path = (_rows(viewer.page.locator(".page:visible tbody").nth(i)) for i in range(2))
    a, b = (
        {r["kind"]: r for r in by_kind(Selection.of(Trace.load(traces[n]), step))} for n in "ab"
    )
    assert _time(cells["gate_up"][1]) == pytest.approx(float(a["gate_up"]["total"]), rel=0.005)
    assert _time(cells["gate_up"][2]) == pytest.approx(float(b["gate_up"]["total"]), rel=0.005)
    # So it is of the critical path.
    assert next(iter(path)) == "o_proj"
    facts = report(Trace.load(traces["b"]), step)["critical_path"]["contributions"]
    wanted = sum(row["total"] for row in facts if row["phase"] == "layers.*.o_proj")
    assert _time(path["o_proj"][2]) == pytest.approx(wanted, rel=0.005)
    # Zoom is shared; the next step is shown in both.
    viewer.page.locator(".overlay").focus()
    viewer.page.keyboard.press(",")
    viewer.settle()
    assert viewer.run("app.panes.map(p => p.step)") == [max(0, step - 1)] * 2
    viewer.page.get_by_role("button", name="Close B").click()
    viewer.settle()
    assert viewer.run("app.panes.length") == 1


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


def test_address_brings_the_view_back(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "a.html"
    save_html(traces["a"], page)
    first = make_viewer().goto(page)
    first.wait("profiler.panes.length === 1")
    record = first.record(worker=33, slot=6)
    first.run(f"app.select(pane, {record}, true)")
    first.run("app.setStep(2, true)")
    first.run("app.setMode('wait')")
    first.run("app.search('phase:qkv')")
    first.run("pane.rows.toggle(12)")
    first.run("app.setRange({pane, begin: 1000, end: 90000, workers: [3, 9]})")
    first.show(20000, 120000)
    address = first.page.url
    assert "#" in address
    second = make_viewer().goto(address)
    second.wait("profiler.panes.length === 1")
    second.settle()
    assert second.view() == pytest.approx((20000, 120000), abs=2)
    assert second.run("app.selected.record") == record
    assert second.run("[app.mode, app.query, pane.step]") == ["wait", "phase:qkv", 2]
    assert second.run("[app.range.begin, app.range.end, ...app.range.workers]") == [
        1000,
        90000,
        3,
        9,
    ]
    assert second.run("pane.rows.openWorkers") == [12]


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


def test_saved_page_opens_alone(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path], tmp_path: Path
) -> None:
    viewer = make_viewer().goto().open(traces["a"], traces["b"])
    with viewer.page.expect_download() as download:
        viewer.page.get_by_role("button", name="Save as HTML").click()
    saved = tmp_path / "saved.html"
    download.value.save_as(saved)
    assert download.value.suggested_filename == "a.html"
    again = make_viewer(offline=True).goto(saved)
    again.wait("profiler.panes.length === 2")
    again.settle()
    assert again.run("app.panes.map(p => p.trace.name)") == ["a.megatrace", "b.megatrace"]
    assert again.run("pane.trace.count") == viewer.run("pane.trace.count")
    # And that page can be saved again.
    with again.page.expect_download() as download:
        again.page.get_by_role("button", name="Save as HTML").click()
    twice = tmp_path / "twice.html"
    download.value.save_as(twice)
    assert twice.read_bytes() == saved.read_bytes()


def test_page_saved_by_the_command_is_the_one_saved_by_the_page(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path], tmp_path: Path
) -> None:
    save_html(traces["a"], tmp_path / "command.html", compare=traces["b"])
    viewer = make_viewer(offline=True).goto(tmp_path / "command.html")
    viewer.wait("profiler.panes.length === 2")
    viewer.settle()


def test_served_page_opens_its_trace(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path]
) -> None:
    with served(traces["a"], traces["b"]) as port:
        viewer = make_viewer().goto(f"http://127.0.0.1:{port}/")
        viewer.wait("profiler.panes.length === 2")
        viewer.settle()


def test_dropped_files_are_opened(viewer: Viewer, tmp_path: Path) -> None:
    small = tmp_path / "small.megatrace"
    synthetic_trace(workers=4, layers=1, steps=2).save(small)
    data = small.read_bytes().hex()
    drop = """([hex, name, y]) => {
      const bytes = new Uint8Array(hex.match(/../g).map((h) => parseInt(h, 16)));
      const transfer = new DataTransfer();
      transfer.items.add(new File([bytes], name));
      for (const type of ['dragover', 'drop']) document.body.dispatchEvent(new DragEvent(type,
        {bubbles: true, cancelable: true, dataTransfer: transfer, clientY: y}));
    }"""
    viewer.page.evaluate(drop, [data, "one.megatrace", 300])
    viewer.wait("profiler.panes.length === 1")
    # On the lower half: beside the first.
    viewer.page.evaluate(drop, [data, "two.megatrace", 800])
    viewer.wait("profiler.panes.length === 2")
    viewer.settle()
    assert viewer.run("app.panes.map(p => p.trace.name)") == ["one.megatrace", "two.megatrace"]
    viewer.screenshot("few_workers")
    viewer.page.evaluate(drop, [data, "three.megatrace", 300])
    viewer.wait("profiler.panes.length === 1")


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
    found = _rows(tables.nth(1))
    for row in balance(selection):
        cells = found[row.phase.removeprefix("layers.*.")]
        times = [_time(text) for text in cells[2:5]]
        assert times == pytest.approx([row.least, row.mean, row.longest], rel=0.01), row.phase
    texts = viewer.page.locator(".page:visible .pair").all_inner_texts()
    shown = dict(text.split("\n") for text in texts if "\n" in text)
    for role, occupied in by_role(selection).items():
        time = _time(shown[role].split(" · ")[0])
        assert time == pytest.approx(occupied / trace.workers, rel=0.01), role


def test_records_without_a_worker_have_a_row(viewer: Viewer, tmp_path: Path) -> None:
    trace = synthetic_trace(workers=3, layers=1, steps=2)
    # One worker's records come first when it is not known which worker it was.
    trace.record_worker[trace.record_worker == 0] = -1
    trace.save(tmp_path / "unknown.megatrace")
    Trace.load(tmp_path / "unknown.megatrace")
    viewer.open(tmp_path / "unknown.megatrace")
    assert viewer.run("pane.trace.workers") == 4
    assert viewer.run("pane.trace.workerName(3)") == "unknown"
