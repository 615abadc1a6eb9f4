"""A fake server for the tests, whose module is made importable (tests are no package)."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))

from fake_server import FakeServer


@pytest.fixture(scope="session")
def _server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def server(_server: FakeServer) -> FakeServer:
    """The fake server; it remembers the requests of one test."""
    _server.bodies.clear()
    _server.most_at_once = 0
    return _server
