"""The names of layers and phases over time."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from recording import record, ring
from synthetic import LABELS, synthetic_trace
from ui.page import Viewer

from megavm.profiler.trace import Trace


def pieces(viewer: Viewer, which: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = viewer.run(f"pane.phases.{which}")
    return found


def test_phases_begin_when_half_of_their_inputs_are_there(
    opened: Viewer, traces: dict[str, Path]
) -> None:
    trace = Trace.load(traces["a"])
    found = [p for p in pieces(opened, "phases") if p["step"] == 1]
    names = ["embed", *(f"layers.{i}.{name}" for i in range(4) for name in LABELS), "sample"]
    assert [p["name"] for p in found] == names
    labels = trace.programs[0].facts["labels"]
    label = trace.programs[0].label[trace.record_instruction]
    for piece in found[1:]:
        own = (trace.record_step == 1) & (label == labels.index(piece["name"]))
        inputs = np.sort(trace.spans.inputs[own])
        assert piece["begin"] == inputs[len(inputs) // 2], piece
    assert all(a["end"] == b["begin"] for a, b in pairwise(found))
    assert found[0]["begin"] == opened.run("pane.trace.stepBegin[1]")
    assert found[-1]["end"] == opened.run("pane.trace.stepEnd[1]")


def test_layers_join_their_phases(opened: Viewer) -> None:
    layers = [p for p in pieces(opened, "layers") if p["step"] == 2]
    assert [p["name"] for p in layers] == [f"layer {i}" for i in range(4)]
    phases = [p for p in pieces(opened, "phases") if p["step"] == 2]
    assert [p["begin"] for p in layers] == [p["begin"] for p in phases if p["short"] == "qkv"]
    opened.screenshot("bands")


def test_a_click_on_a_phase_selects_its_time(opened: Viewer) -> None:
    piece = next(
        p for p in pieces(opened, "phases") if p["name"] == "layers.2.gate_up" and p["step"] == 1
    )
    opened.show(piece["begin"] - 20000, piece["end"] + 20000)
    middle = (piece["begin"] + piece["end"]) / 2
    x, y = opened.run(
        f"[pane.xOf(app.view, {middle}), pane.phaseBand.top + 5 +"
        " app.stage.overlay.getBoundingClientRect().top]"
    )
    opened.page.mouse.move(x, y)
    opened.settle()
    assert "layers.2.gate_up" in opened.page.locator(".tooltip").inner_text()
    opened.page.mouse.click(x, y)
    opened.settle()
    assert opened.run("[app.range.begin, app.range.end]") == [piece["begin"], piece["end"]]


def test_programs_without_layers_have_their_own_names(viewer: Viewer, tmp_path: Path) -> None:
    record(ring(2, 3)).trace().save(tmp_path / "ring.megatrace")
    viewer.open(tmp_path / "ring.megatrace")
    first = [p["name"] for p in pieces(viewer, "layers") if p["step"] == 0]
    assert first == ["rounds 0", "rounds 1", "rounds 2"]
    trace = synthetic_trace(2, layers=1, steps=1)
    trace.programs[0].facts["labels"][:] = ["", "b", "c", "d", "e", "f", ""]
    trace.save(tmp_path / "flat.megatrace")
    viewer.page.reload()
    viewer.open(tmp_path / "flat.megatrace")
    assert pieces(viewer, "layers") == []
    assert [p["name"] for p in pieces(viewer, "phases")] == ["embed", *"bcdef", "sample"]
    assert viewer.run("pane.layerBand.height") == 0
