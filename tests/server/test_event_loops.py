"""The server without uvloop and httptools. All other tests run with them, as it is installed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# uvicorn chooses when it is imported: they are hidden before that.
WITHOUT = """
import sys
sys.modules["uvloop"] = sys.modules["httptools"] = None
import pytest
from megavm.server.connections import HttpProtocol
assert HttpProtocol.__name__ == "H11Protocol"
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.timeout(300)
def test_connections_and_streams_are_alike_without_uvloop_and_httptools() -> None:
    files = [HERE / "test_connections.py", HERE / "test_event_streams.py"]
    # All of the second file, and of the first one waits and limits.
    chosen = (
        "test_event_streams or headers or silent_connection or reads_nothing or more_connections"
    )
    arguments = ["-q", "-p", "no:cacheprovider", "-k", chosen, *map(str, files)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 20
