"""Progress on stderr: phases, a bar, seconds, and the width of the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import sys

import pytest

from megavm.commands.terminal import Progress


def on_a_terminal(*arguments: str) -> str:
    """What the command writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megavm", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        pieces = []
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)
        os.close(ours)
        assert process.wait(60) == 0
    return b"".join(pieces).decode()


def test_on_a_terminal_loading_shows_its_phases_a_bar_and_their_seconds() -> None:
    generate = ("generate", "stories", "Once", "--max-tokens", "2")
    screen = on_a_terminal(*generate)
    *overwritten, last = screen.replace("\x1b[K", "").split("\r")
    assert "finding the model" in overwritten
    assert any(re.match(r"reading weights \[#+\.*\] \d+/\d+  \d+\.\d s", s) for s in overwritten)
    assert any(re.match(r"\[loaded stories in \d+\.\d s: starting \d", s) for s in overwritten)
    assert screen.count("\n") == 1
    assert last == ""
    assert on_a_terminal(*generate, "--quiet") == ""


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (20, "reading weights 12/"),
        (36, "reading weights 12/48  0.0 s"),
        (40, "reading weights [##......] 12/48  0.0 s"),
        (80, f"reading weights [{'#' * 7}{'.' * 23}] 12/48  0.0 s"),
    ],
)
def test_progress_fits_the_terminal_and_keeps_its_numbers(
    monkeypatch: pytest.MonkeyPatch, columns: int, shown: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    Progress(quiet=False)("reading weights", 12, 48)
    assert screen.getvalue() == f"\r\x1b[K{shown}"
    assert len(shown) < columns
