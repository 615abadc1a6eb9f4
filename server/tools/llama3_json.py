"""Calls of Llama 3.1, 3.2 and 3.3: {"name": "f", "parameters": {...}}.

The token <|python_tag|> may stand before a call, and `;` between two.
"""

from __future__ import annotations

from typing import Final

from megavm.server.tools.grammars import Form
from megavm.server.tools.json_call import JsonCallParser
from megavm.server.tools.parser import NotACall, Reading
from megavm.server.tools.scanners import SPACE

_MARK: Final = "<|python_tag|>"


class Llama3JsonParser(JsonCallParser):
    """See `ToolParser`. Behind <|python_tag|>, any name makes a call."""

    openings = "{<"
    separators = SPACE + ";"
    form = Form(
        "parameters",
        r'\{[ \t\r\n]*"(name|parameters|arguments|type|id)"',
        separator="; ",
        mark=_MARK,
    )
    special_tokens = (_MARK,)

    def _read_call(self, char: str) -> Reading:
        marked = char == "<"
        if marked:
            yield from self._literal(_MARK[1:])
            if (yield from self._next_visible()) != "{":
                raise NotACall
        yield from self._read_object(marked)
