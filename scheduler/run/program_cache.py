"""Verified programs on disk: to read one takes a fiftieth of the time that it takes to compile it.

The key of a program is the hash of all that it follows from: the sizes it is compiled for, and the
code that compiles and verifies. A file that is absent or damaged is compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

import megavm.instructions
import megavm.scheduler
import megavm.vm
from megavm.vm import _native
from megavm.vm.cache import cache_directory, write_whole
from megavm.vm.program import Program

SWITCH: Final = "MEGAVM_PROGRAM_CACHE"  # an environment variable; "0" turns the cache off
MAX_FILES: Final = 4000  # a program has 20 to 300 KB
_REMOVED_AT_ONCE: Final = 1000
_SUFFIX: Final = ".program"
_ORDER: Final = "needs_queue_order"  # a cached property of a program, which verifies it for a GPU

logger = logging.getLogger("megavm")


def cached(facts: object, compile: Callable[[], Program]) -> Program:
    """The program of ``facts``, from the disk or from ``compile``, which must verify it.

    ``facts``: everything that it is compiled for; the ``repr`` says all of it.
    """
    if os.environ.get(SWITCH) == "0":
        return compile()
    path = cache_path(facts)
    program = read(path)
    if program is None:
        program = compile()
        try:
            write_whole(path, file_of(program))
            _prune(path.parent)
        except OSError as error:
            logger.warning("the program cannot be cached in %s: %s", path.parent, error)
    return program


def cache_path(facts: object) -> Path:
    """Where the program of ``facts`` is, compiled by this code."""
    key = hashlib.sha256(f"{_code()} {facts!r}".encode()).hexdigest()
    return cache_directory() / "programs" / f"{key}{_SUFFIX}"


@functools.cache
def _code() -> str:
    """SHA-256 of the code that programs follow from."""
    digest = hashlib.sha256(Path(_native.__file__).read_bytes())
    for package in (megavm.instructions, megavm.scheduler, megavm.vm):
        for folder in package.__path__:
            for path in sorted(Path(folder).rglob("*.py")):
                data = path.read_bytes()
                name = path.relative_to(folder).as_posix()
                digest.update(f"{package.__name__} {name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def file_of(program: Program) -> bytes:
    """A line of JSON and the program. What its verification has found out is in the line."""
    data = program.to_bytes()
    line = {
        "sha256": hashlib.sha256(data).hexdigest(),
        _ORDER: program.__dict__.get(_ORDER),
    }
    return json.dumps(line).encode() + b"\n" + data


def read(path: Path) -> Program | None:
    """The program of such a file; None if it is absent or damaged."""
    try:
        line, _, data = path.read_bytes().partition(b"\n")
        facts = json.loads(line)
        if facts["sha256"] != hashlib.sha256(data).hexdigest():
            raise ValueError("the hash does not match")
        program = Program.from_bytes(data, str(path))
        if facts[_ORDER] is not None:
            program.__dict__[_ORDER] = bool(facts[_ORDER])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is damaged, and its program will be compiled again: %s", path, error)
        return None
    with suppress(OSError):
        os.utime(path)  # used now: see _prune
    return program


def _prune(folder: Path) -> None:
    """Remove the files that have not been used for longest, if there are too many."""
    files = [entry for entry in os.scandir(folder) if entry.name.endswith(_SUFFIX)]
    if len(files) <= MAX_FILES:
        return
    with suppress(OSError):  # another process may do the same
        by_age = sorted((entry.stat().st_mtime, entry.path) for entry in files)
        for _, path in by_age[:_REMOVED_AT_ONCE]:
            os.unlink(path)
