"""Calls of Hermes 2 and 3 and of Qwen 2.5 and 3.

<tool_call>
{"name": "f", "arguments": {...}}
</tool_call>

Several calls stand one below the other.
"""

from __future__ import annotations

from typing import Final

from megavm.server.tools.grammars import Form
from megavm.server.tools.json_call import JsonCallParser
from megavm.server.tools.parser import NotACall, Reading

_BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"


class HermesParser(JsonCallParser):
    """See `ToolParser`. A last `}` or `</tool_call>` may be missing."""

    openings = "<"
    ending = _END
    form = Form("arguments", _BEGIN, begin=f"{_BEGIN}\n", end=f"\n{_END}", separator="\n")
    special_tokens = (_BEGIN, _END)

    def _read_call(self, char: str) -> Reading:
        yield from self._literal(_BEGIN[1:])
        if (yield from self._next_visible()) != "{":
            raise NotACall
        before = self.num_calls
        try:
            if not (yield from self._read_object(marked=True)):
                return
            char = yield from self._next_visible()
        except NotACall:
            char = self._held[-1] if self._held else ""
            if self.num_calls == before or char != "<":
                raise
        if char != "<":
            raise NotACall
        for expected in _END[1:]:
            char = yield from self._next()
            if not char:
                self._accept()  # the text ends within the marker
                return
            if char != expected:
                raise NotACall
        self._accept()
