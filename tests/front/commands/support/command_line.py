"""What a command line of `megavm` printed, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Result:
    """Exit code, stdout and stderr."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a refused command."""
        assert self.code == 2
        assert self.out == ""
        assert re.fullmatch(r"megavm: error: [^\n]+\n", self.err), self.err
        return self.err


# The fixture `run`.
Run = Callable[..., Result]
