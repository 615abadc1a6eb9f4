"""Calls of Llama 4, and of Llama 3.2 as Meta documents it: [f(a=1, b="x"), g()].

Llama 4 may write them between the tokens <|python_start|> and <|python_end|>.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from megavm.server.tools.grammars import Form
from megavm.server.tools.parser import NotACall, Reading, ToolParser
from megavm.server.tools.python_scanner import PythonScanner
from megavm.server.tools.scanners import SPACE, Malformed

_BEGIN: Final = "<|python_start|>"
_END: Final = "<|python_end|>"


class PythonicParser(ToolParser):
    """See `ToolParser`. Behind <|python_start|>, any name makes a call."""

    openings = "[<"
    separators = SPACE + ","
    form = Form(
        "",
        r"\[[ \t\r\n]*({names})\(",
        list_begin="[",
        list_end="]",
        separator=", ",
    )
    special_tokens = (_BEGIN, _END)

    def _read_call(self, char: str) -> Reading:
        marked = char == "<"
        if marked:
            yield from self._literal("|python_")
            which = yield from self._next()
            if which == "e" and self._after_call:
                yield from self._literal("nd|>")
                self._accept()
                return
            if which != "s":
                raise NotACall
            yield from self._literal("tart|>")
            if (yield from self._next_visible()) != "[":
                raise NotACall
        yield from self._read_list(marked)

    def _read_list(self, marked: bool) -> Reading:
        before, char = self.num_calls, ","
        while char == ",":
            char = yield from self._next_visible()
            if char == "]" and self.num_calls > before:
                break
            name = yield from self._name(char)
            if not self._known(name, marked):
                raise NotACall
            try:
                yield from self._scan(PythonScanner(), (yield from self._next()), name)
            except Malformed:
                yield from self._pass_on()
                return
            char = yield from self._next_visible()
        if char != "]":
            raise NotACall
        self._accept()

    def _name(self, char: str) -> Generator[None, str, str]:
        """A function's name, up to its `(`."""
        name = ""
        while char.isalnum() or char in ("_", "-", "."):
            name += char
            char = yield from self._next()
        if char != "(":
            raise NotACall
        return name
