"""The fixture `overlap`; makes what supports these tests importable (tests are no package)."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

import toy_runner


@pytest.fixture(params=["queued", "overlap", "in_turn"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the engine plans a step while the one before it runs.

    "queued": toy runners run steps behind each other, as GPUs do.
    """
    if request.param == "queued":
        init = toy_runner.ToyRunner.__init__
        monkeypatch.setattr(
            toy_runner.ToyRunner, "__init__", functools.partialmethod(init, queues=True)
        )
    return bool(request.param != "in_turn")
