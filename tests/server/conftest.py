"""Fixtures of the server's tests; makes what supports them importable (tests are no package)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler" / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from serving import RunningServer, assert_idle, serving

from megavm import LLM


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server for the tests of one module; in the end nothing may be left in it."""
    with serving() as running_server:
        yield running_server
        assert_idle(running_server)


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same model without a server."""
    with LLM("stories", dtype="float32", max_num_seqs=8) as model:
        yield model
