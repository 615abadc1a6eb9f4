"""Calls that are JSON objects: {"name": "f", "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Final

from megavm.server.tools.json_scanner import JsonScanner
from megavm.server.tools.parser import NotACall, ToolParser
from megavm.server.tools.scanners import Malformed

_ARGUMENTS: Final = ("arguments", "parameters")
_MORE: Final = ("type", "id")  # keys beside them, which say nothing more


@dataclass
class _Call:
    """A call as far as it has been read."""

    name: str = ""
    arguments: str = ""  # held until the object ends
    streamed: bool = False  # the arguments have been passed on instead
    malformed: bool = False


class JsonCallParser(ToolParser):
    """See `ToolParser`. Arguments may also be JSON in a string, null, or absent."""

    ending: ClassVar[str] = ""  # what ends a call whose arguments are malformed

    def _read_object(self, marked: bool) -> Generator[None, str, bool]:
        """Read a call from behind its `{`; whether it ends with its `}`.

        Else its arguments were malformed, and it has been passed on up to `ending`.

        Raises:
            NotACall: as for `_read_call`.
        """
        call, char = _Call(), ","
        while char == ",":
            key = yield from self._key()
            char = yield from self._next_visible()
            if key == "name" and char == '"' and not call.name:
                call.name = yield from self._string()
                if not self._known(call.name, marked):
                    raise NotACall
            elif key in _ARGUMENTS and not (call.arguments or call.streamed):
                yield from self._read_arguments(call, char)
                if call.malformed:
                    return False
            elif key in _MORE and char == '"':
                yield from self._string()
            else:
                raise NotACall
            char = yield from self._next_visible()
        if char != "}" or not call.name:
            raise NotACall
        if not call.streamed:
            self._begin(call.name)
            self._arguments(call.arguments or "{}")
            self._end()
        self._accept()
        return True

    def _read_arguments(self, call: _Call, char: str) -> Generator[None, str]:
        if call.name and char == "{":
            call.streamed = True
            try:
                yield from self._scan(JsonScanner(), char, call.name)
            except Malformed:
                call.malformed = True
                yield from self._pass_on(self.ending)
        elif char == "{":
            call.arguments = yield from self._object()
        elif char == '"':
            call.arguments = yield from self._string()
            if not _is_object(call.arguments):
                raise NotACall
        elif char == "n":
            yield from self._literal("ull")
            call.arguments = "{}"
        else:
            raise NotACall

    def _key(self) -> Generator[None, str, str]:
        if (yield from self._next_visible()) != '"':
            raise NotACall
        key = yield from self._string()
        if (yield from self._next_visible()) != ":":
            raise NotACall
        return key

    def _string(self) -> Generator[None, str, str]:
        """A string from behind its opening quote."""
        raw, char = "", (yield from self._next())
        while char != '"':
            if char == "\\":
                raw += char
                char = yield from self._next()
            if not char:
                raise NotACall
            raw += char
            char = yield from self._next()
        try:
            text = json.loads(f'"{raw}"', strict=False)
        except ValueError as error:
            raise NotACall from error
        assert isinstance(text, str)
        return text

    def _object(self) -> Generator[None, str, str]:
        """An object from behind its `{`, held as a whole."""
        scanner = JsonScanner()
        text = scanner.feed("{")
        while not scanner.done:
            if not (char := (yield from self._next())):
                raise NotACall
            try:
                text += scanner.feed(char)
            except Malformed as error:
                raise NotACall from error
        return text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
