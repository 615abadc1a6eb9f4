"""How traces come to the page, and how the page and its view are saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import synthetic_trace
from ui.page import Viewer, served

from megavm.profiler.viewer import save_html


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


def test_served_page_opens_its_trace(
    make_viewer: Callable[..., Viewer], traces: dict[str, Path]
) -> None:
    with served(traces["a"], traces["b"]) as port:
        viewer = make_viewer().goto(f"http://127.0.0.1:{port}/")
        viewer.wait("profiler.panes.length === 2")
        viewer.settle()


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
