"""The page's colours differ for people with and without colour vision deficiencies.

colorspacious simulates deuteranopia and protanopia (Machado, Oliveira and Fernandes 2009, severity
100 %) and measures distances in CAM02-UCS, in which 1 is about a just noticeable difference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from colorspacious import cspace_convert
from synthetic import synthetic_trace
from ui.page import Viewer

from megavm.instructions import instruction_set

ROOT = Path(__file__).resolve().parents[3]
PALETTE: dict[str, Any] = json.loads((ROOT / "profiler/ui/source/palette.json").read_text())
VISIONS = ("normal", "deuteranopia", "protanopia")
SPAN_TEXT = (6, 10, 20)  # onSpan of colour.ts
BACKGROUNDS = {"light": (255, 255, 255), "dark": (20, 24, 31)}
IDLE = {"light": (232, 236, 241), "dark": (40, 47, 58)}

Colours = npt.NDArray[np.float64]


def seen(colours: Any, vision: str) -> Colours:
    """sRGB colours of 0 to 255, as CAM02-UCS coordinates of what somebody sees."""
    values = np.asarray(colours, np.float64) / 255
    if vision != "normal":
        kind = vision.replace("nopia", "nomaly")
        space = {"name": "sRGB1+CVD", "cvd_type": kind, "severity": 100}
        values = np.clip(cspace_convert(values, space, "sRGB1"), 0, 1)
    return np.asarray(cspace_convert(values, "sRGB1", "CAM02-UCS"))


def least_distance(colours: Any, vision: str) -> float:
    points = seen(colours, vision)
    distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
    return float(distances[np.triu_indices(len(points), 1)].min())


def contrast(a: Any, b: Any) -> float:
    """WCAG 2's contrast ratio."""

    def luminance(colour: Any) -> float:
        part = np.asarray(colour) / 255
        linear = np.where(part <= 0.04045, part / 12.92, ((part + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("vision", VISIONS)
def test_states_are_far_apart(vision: str) -> None:
    for theme, idle in IDLE.items():
        assert least_distance([*PALETTE["states"].values(), idle], vision) > 20, theme


def test_red_and_green_states_are_too_close() -> None:
    """What the page had: computing green, barriers red, words orange."""
    before = [(64, 172, 122), (92, 155, 240), (226, 96, 84), (240, 178, 70)]
    assert least_distance(before, "normal") > 20
    assert least_distance(before, "deuteranopia") < 12
    assert least_distance(before, "protanopia") < 20


@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_and_phases_differ(vision: str) -> None:
    colours = {tuple(c) for c in [*PALETTE["kinds"].values(), *PALETTE["phases"].values()]}
    assert len(colours) == 14
    assert least_distance(list(colours), vision) > 10
    assert least_distance(list(PALETTE["roles"].values()), vision) > 10


def test_states_have_hues_of_their_own() -> None:
    states, kinds = (seen(list(PALETTE[name].values()), "normal") for name in ("states", "kinds"))
    assert np.linalg.norm(states[:, None] - kinds[None], axis=-1).min() > 10


@pytest.mark.parametrize("vision", VISIONS)
def test_longer_waits_are_darker(vision: str) -> None:
    points = seen(PALETTE["waits"], vision)
    assert all(a - b > 2 for a, b in pairwise(points[:, 0]))
    assert all(np.linalg.norm(a - b) > 8 for a, b in pairwise(points))


def test_names_on_spans_can_be_read() -> None:
    groups = (*PALETTE["kinds"].values(), *PALETTE["states"].values(), *PALETTE["phases"].values())
    assert min(contrast(colour, SPAN_TEXT) for colour in groups) > 4.5
    for background in BACKGROUNDS.values():
        assert min(contrast(colour, background) for colour in PALETTE["states"].values()) > 1.4


def test_every_instruction_has_a_colour() -> None:
    """Those that others add, with opcodes from 500 on, need none."""
    own = {cls.name() for opcode, cls in instruction_set().items() if opcode < 500}
    assert set(PALETTE["kinds"]) == own


def test_a_kind_has_its_colour_in_every_trace(
    make_viewer: Callable[..., Viewer], tmp_path: Path
) -> None:
    """Also where other kinds came before it, and its phases have shades of it."""
    trace = synthetic_trace(workers=2, layers=1, steps=1)
    facts = trace.programs[0].facts
    opcodes = facts["opcodes"]
    renamed = {"matmul": "sample", "sample": "matmul", "embed": "their own"}
    for opcode in opcodes.values():
        opcode["name"] = renamed.get(opcode["name"], opcode["name"])
    facts["labels"][:] = ["first", "qkv", "attention", "mine.0", "gate_up", "mine.1.x", "last"]
    trace.save(tmp_path / "a.megatrace")
    viewer = make_viewer().goto().open(tmp_path / "a.megatrace")
    viewer.page.keyboard.press("2")
    viewer.settle()
    legend = {e["name"]: e["colour"] for e in viewer.run("pane.painting.legend")}
    for kind in ("sample", "matmul", "attention", "qkv_rope", "gate_up"):
        assert legend[kind] == "rgb({} {} {})".format(*PALETTE["kinds"][kind]), kind
    assert "their own" in legend
    viewer.page.keyboard.press("1")
    viewer.settle()
    phases = {e["name"]: e["colour"] for e in viewer.run("pane.painting.legend")}
    assert len(set(phases.values())) == len(phases)
    assert phases["mine.*"] == legend["sample"]
