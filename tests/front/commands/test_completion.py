"""Completion in a shell: what argcomplete's script asks `megavm` for, and what it answers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def completions(line: str, place: Path) -> list[str]:
    """What may follow a command line, as the function that argcomplete registers asks for it."""
    found = place / "completions"
    environment = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(found),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
    }
    script = Path(sys.executable).with_name("megavm")
    if not script.exists():
        pytest.skip("the command is not installed")
    done = subprocess.run(
        [script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return [word.strip() for word in found.read_text().splitlines()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("megavm se", ["serve"]),
        ("megavm trace r", ["report"]),
        ("megavm serve --ssl", ["--ssl-certfile", "--ssl-keyfile"]),
        ("megavm serve --tool-call-parser ", ["llama3_json", "hermes", "pythonic"]),
        ("megavm generate --dtype b", ["bfloat16"]),
    ],
)
def test_a_shell_completes_commands_options_and_choices(
    tmp_path: Path, line: str, words: list[str]
) -> None:
    assert completions(line, tmp_path) == words
