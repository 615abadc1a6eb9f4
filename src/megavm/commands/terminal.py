"""Output of the commands: progress, errors, JSON, statistics."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from megavm.outputs import Chunk

EXIT_ERROR: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

STREAM_FAILED: Final = "the generation ended with an error before it was complete"

_BAR_WIDTH: Final = 30
_LEAST_BAR_WIDTH: Final = 5  # no bar is drawn if less fits
_WORTH_TELLING: Final = 0.05  # seconds; the summary leaves out shorter phases


class Progress:
    """One line on stderr that shows the current phase; prints nothing if stderr is no terminal.

    Call `progress(phase, done, total)` at the beginning of a phase and after every piece of it.
    """

    def __init__(self, quiet: bool) -> None:
        self.enabled = not quiet and sys.stderr is not None and sys.stderr.isatty()
        self._seconds: dict[str, float] = {}
        self._phase = ""
        self._began = time.perf_counter()

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        if not self.enabled:
            return
        if phase != self._phase:
            self._end_phase()
            self._phase = phase
        width = 80
        with suppress(OSError, ValueError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns or width
        width = max(width - 1, 1)  # a full line would wrap
        line = phase
        if total > 1:
            count = f" {done}/{total}  {time.perf_counter() - self._began:.1f} s"
            room = min(_BAR_WIDTH, width - len(phase) - len(" []") - len(count))
            if room >= _LEAST_BAR_WIDTH:
                filled = room * done // total
                line += f" [{'#' * filled}{'.' * (room - filled)}]"
            line += count
        sys.stderr.write(f"\r\x1b[K{line[:width]}")
        sys.stderr.flush()

    def clear(self) -> None:
        """Erase the line."""
        if self.enabled:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def finish(self, what: str) -> None:
        """Replace the line by a summary: the time of `what` and of its longer phases."""
        if not self.enabled:
            return
        self._end_phase()
        self.clear()
        phases = ", ".join(
            f"{phase} {seconds:.1f}"
            for phase, seconds in self._seconds.items()
            if seconds >= _WORTH_TELLING
        )
        total = sum(self._seconds.values())
        print(f"[{what} in {total:.1f} s{': ' if phases else ''}{phases}]", file=sys.stderr)

    def _end_phase(self) -> None:
        now = time.perf_counter()
        if self._phase:
            spent = self._seconds.get(self._phase, 0.0) + now - self._began
            self._seconds[self._phase] = spent
        self._phase, self._began = "", now


class Statistics:
    """Counts and times the chunks of one answer."""

    def __init__(self) -> None:
        self.tokens = 0
        self.first = 0.0
        self.total = 0.0

    def watch(self, chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
        started = time.perf_counter()
        try:
            for chunk in chunks:
                if chunk.token_id is not None:
                    self.tokens += 1
                    self.first = self.first or time.perf_counter() - started
                yield chunk
        finally:
            self.total = time.perf_counter() - started

    def __str__(self) -> str:
        rate = self.tokens / self.total if self.total > 0 else 0.0
        return (
            f"[{self.tokens} tokens in {self.total:.2f} s, {rate:.1f} tokens/s,"
            f" first after {self.first:.2f} s]"
        )


def sentence(error: BaseException) -> str | None:
    """The message for the user about a known error; None for an unexpected error (a bug)."""
    if isinstance(error, ImportError):
        if (error.name or "").startswith("megavm"):
            return f"this installation of megavm is incomplete ({error}): install it with pip"
        if isinstance(error, ModuleNotFoundError):
            return f"the Python package {error.name} is not installed"
        return f"a Python package cannot be loaded: {error}"
    if isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "CUDA out of memory")
    ):
        return f"not enough memory: {error or 'an allocation failed'}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    if isinstance(error, ValueError | OSError) or type(error).__module__.startswith("megavm."):
        return str(getattr(error, "cause", error)) or type(error).__name__
    return None


def print_error(error: BaseException) -> None:
    """Print a known error on stderr, in one line."""
    if sys.stderr is None:
        return
    print("megavm: error:", " ".join((sentence(error) or "").split()), file=sys.stderr)


def write(text: str) -> None:
    """Print a piece of text and flush."""
    sys.stdout.write(text)
    sys.stdout.flush()


def join_ids(ids: Iterable[int]) -> str:
    """Token ids as text, for models without a tokenizer."""
    return " ".join(map(str, ids))


def print_json(value: object) -> None:
    """Print one JSON object on one line."""
    import json

    print(json.dumps(_plain(value), allow_nan=False))


def _plain(value: Any) -> Any:
    """`value` as plain JSON values: infinities become +-9999, NaN becomes None."""
    import dataclasses
    import math

    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else math.copysign(9999.0, value)
    return value
