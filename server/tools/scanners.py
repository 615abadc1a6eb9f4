"""The common part of the scanners of a call's arguments (json_scanner.py, python_scanner.py).

A scanner reads what the model writes character by character, and returns it as JSON as soon as it
is certain, so that a client can follow it.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

SPACE: Final = " \t\n\r"
JSON_WORDS: Final = ("true", "false", "null")
JSON_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
MAX_LITERAL: Final = 400  # characters; no number is longer
_IN_LITERAL: Final = re.compile(r"[A-Za-z0-9_.+-]")


class Malformed(Exception):
    """The last character cannot stand where it does."""


class Scanner(Protocol):
    """Reads the arguments of one call.

    Attributes:
        done: whether the last character ended the arguments.
    """

    done: bool

    def feed(self, char: str) -> str:
        """Read one character; the JSON that is certain now.

        Raises:
            Malformed: the text is not what the scanner reads.
        """
        ...


def in_literal(char: str) -> bool:
    """Whether a character may be a part of a number or a word."""
    return _IN_LITERAL.match(char) is not None
