"""Text for a terminal: tables, and numbers as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def as_text(lines: Iterator[str]) -> str:
    """Lines for a terminal; control characters in names from the trace are replaced."""
    return "\n".join(_CONTROL.sub("\ufffd", line) for line in lines)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Iterator[str]:
    """Lines of a table: the first ``left`` columns are left-aligned, the others right-aligned."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        cells = [
            f"{cell:<{width}}" if i < left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def us(ns: float) -> str:
    """A time in microseconds, of ns."""
    return f"{ns / 1e3:,.1f}"


def worker_name(worker: int, workers: int, ranks: int) -> str:
    """A worker as tables name it: "3", and "1:3" if the ``workers`` are those of several ranks."""
    if ranks == 1 or worker < 0:
        return str(worker)
    rank, own = divmod(worker, max(workers // ranks, 1))
    return f"{rank}:{own}"


def counted(count: int, noun: str) -> str:
    """A number of things: "1 token", "8 tokens"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent(part: float, whole: float) -> str:
    """A share; 0.0% of nothing. What rounds to zero has no sign."""
    return f"{part / whole:z.1%}" if whole else "0.0%"
