"""Calls in OpenAI's form: of messages, and of the deltas of a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megavm.server.ids import new_id
from megavm.server.tools.parser import CallDelta, Parsed, ToolParser


class ToolMessage:
    """The message of one choice: turns its text, piece by piece, into content and calls.

    ``parallel``: whether it may hold several calls; others than the first are left out.
    """

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel

    def delta(self, text: str, is_last: bool) -> dict[str, Any]:
        """The content and tool_calls that a piece of text adds; absent where there are none."""
        parsed = [self._parser.push(text), *([self._parser.finish()] if is_last else [])]
        content = "".join(part.content for part in parsed)
        calls = self._calls(parsed)
        return {
            **({"content": content} if content else {}),
            **({"tool_calls": [_delta(call) for call in calls]} if calls else {}),
        }

    def whole(self, text: str) -> dict[str, Any]:
        """Content and tool_calls of a whole text; content is null where there are only calls."""
        parsed = [self._parser.push(text), self._parser.finish()]
        content = "".join(part.content for part in parsed)
        calls = [_call(call) for call in self._calls(parsed)]
        if not calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": calls}

    def finish_reason(self, reason: str | None) -> str | None:
        """OpenAI's finish_reason for that of the engine; to be called at the end."""
        called = self._parser.num_calls and not self._parser.unfinished
        return "tool_calls" if called and reason == "stop" else reason

    def _calls(self, parsed: list[Parsed]) -> list[CallDelta]:
        """The calls of some pieces, with one delta for each."""
        merged: dict[int, CallDelta] = {}
        for call in (call for part in parsed for call in part.calls):
            if call.index and not self._parallel:
                continue
            before = merged.setdefault(call.index, CallDelta(call.index))
            before.name = before.name if call.name is None else call.name
            before.arguments += call.arguments
        return list(merged.values())


def _call(call: CallDelta) -> dict[str, Any]:
    return {
        "id": f"call_{new_id()}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _delta(call: CallDelta) -> dict[str, Any]:
    if call.name is not None:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


NewMessage = Callable[[], ToolMessage]
