"""The mean layer: its phases from the tenth to the ninetieth percentile."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from synthetic import LABELS, synthetic_trace
from ui.page import STEP, Viewer, nanoseconds, table_rows


def test_phases_have_the_mean_and_percentiles_of_all_layers(opened: Viewer) -> None:
    opened.tab("Layer")
    body = opened.page.locator(".page:visible tbody").first
    rows = table_rows(body)
    assert list(rows) == list(LABELS)
    pieces = opened.run("pane.phases.phases")
    begins = {(p["step"], p["name"].rsplit(".", 1)[0]): p["begin"] for p in reversed(pieces)}
    for name in LABELS:
        own = [p for p in pieces if p["short"] == name]
        assert len(own) == 3 * 4
        times = [p["end"] - p["begin"] for p in own]
        begin = [p["begin"] - begins[p["step"], p["name"].rsplit(".", 1)[0]] for p in own]
        low, high = np.percentile(times, [10, 90])
        wanted = [np.mean(begin), np.mean(times), low, high]
        shown = [nanoseconds(text) for text in rows[name][1:5]]
        assert shown == pytest.approx(wanted, rel=0.006, abs=1), name
    opened.screenshot("layer_page")


def test_a_layer_is_selected_in_the_step(opened: Viewer) -> None:
    opened.tab("Layer")
    opened.page.locator(".page:visible tbody").last.locator("tr").nth(2).click()
    opened.settle()
    layer = opened.run(f"pane.phases.layers.find(p => p.step === {STEP} && p.name === 'layer 2')")
    assert opened.run("[app.range.begin, app.range.end]") == [layer["begin"], layer["end"]]


def test_a_program_in_which_nothing_repeats_says_so(viewer: Viewer, tmp_path: Path) -> None:
    trace = synthetic_trace(2, layers=1, steps=2)
    trace.programs[0].facts["labels"][:] = list("abcdefg")
    trace.save(tmp_path / "flat.megatrace")
    assert "Nothing in this program repeats" in viewer.open(tmp_path / "flat.megatrace").tab(
        "Layer"
    )
