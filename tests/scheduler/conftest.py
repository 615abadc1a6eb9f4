"""The fixture `overlap`; makes what supports these tests importable (tests are no package)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


@pytest.fixture(params=[True, False], ids=["overlap", "in_turn"])
def overlap(request: pytest.FixtureRequest) -> bool:
    """Whether the engine plans a step while the one before it runs."""
    return bool(request.param)
