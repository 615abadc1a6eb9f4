"""`megavm --help` and `--version`: what they print, how fast, and what they import."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Run

import megavm
from megavm import cli

PACKAGE = Path(megavm.__file__).parent
# "generate", ..., "trace", "trace report", ...
COMMANDS = tuple(
    name
    for command, parser in cli.build_parser().commands.items()
    for name in (command, *(f"{command} {action}" for action in parser.commands))
)


def start(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    """The command as a process of its own, with `FakeLLM` nowhere in it."""
    command = [sys.executable, "-m", "megavm", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=PACKAGE.parent, **keywords
    )


def test_help_lists_the_commands_and_answers_at_once() -> None:
    times, least = [], []
    for _ in range(7):  # in turns: the speed of a shared core changes
        begin = time.perf_counter()
        process = start("--help")
        out, err = process.communicate()
        times.append(time.perf_counter() - begin)
        assert (process.returncode, err) == (0, "")
        assert all(command.split()[0] in out for command in COMMANDS)
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import argparse, shutil"], check=True)
        least.append(time.perf_counter() - begin)
    assert min(times) < 5 * min(least)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megavm.cli import main; main(['generate', '--help']);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'json',"
        " 'importlib.metadata', 'subprocess', 'asyncio', 'pathlib'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_text_fits_a_terminal(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.code == 0
    assert result.out.startswith("usage: megavm")
    assert max(map(len, result.out.splitlines())) <= 100


def test_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"megavm {megavm.__version__}\n"
    assert re.fullmatch(r"\d+[\w.+]*", megavm.__version__)


def test_without_a_command_the_help_is_printed(run: Run) -> None:
    result = run()
    assert result.code == 0
    assert "generate" in result.out


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, megavm; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(megavm))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = megavm.nothing_such
