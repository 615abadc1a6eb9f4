"""Arguments that are written as JSON."""

from __future__ import annotations

import json
from enum import Enum, auto

from megavm.server.tools.scanners import (
    JSON_NUMBER,
    JSON_WORDS,
    MAX_LITERAL,
    SPACE,
    Malformed,
    in_literal,
)


class _State(Enum):
    VALUE = auto()
    FIRST_VALUE = auto()  # a value, or the end of an empty list
    KEY = auto()
    FIRST_KEY = auto()  # a key, or the end of an empty object
    COLON = auto()
    AFTER = auto()  # after a value: a comma or a closing bracket
    STRING = auto()
    ESCAPE = auto()
    LITERAL = auto()


class JsonScanner:
    """Reads one JSON object, and returns it as it is written. See `Scanner`.

    Line breaks and other control characters in strings, which models write and JSON forbids, become
    escapes.
    """

    def __init__(self) -> None:
        self.done = False
        self._state = _State.VALUE
        self._closing: list[str] = []  # brackets that must come, innermost last
        self._is_key = False
        self._word = ""  # an escape or a literal as far as it has come

    def feed(self, char: str) -> str:
        """See `Scanner`."""
        if self._state is _State.STRING:
            return self._in_string(char)
        if self._state is _State.ESCAPE:
            self._in_escape(char)
        elif self._state is _State.LITERAL and in_literal(char):
            self._word += char
            if len(self._word) > MAX_LITERAL:
                raise Malformed
        else:
            if self._state is _State.LITERAL:
                self._end_literal()
            if char not in SPACE:
                self._structure(char)
        return char

    def _structure(self, char: str) -> None:
        state, closing = self._state, self._closing[-1] if self._closing else ""
        if state in (_State.AFTER, _State.FIRST_VALUE, _State.FIRST_KEY) and char == closing:
            self._closing.pop()
            self._state, self.done = _State.AFTER, not self._closing
        elif state is _State.AFTER and char == ",":
            self._state = _State.KEY if closing == "}" else _State.VALUE
        elif state is _State.COLON and char == ":":
            self._state = _State.VALUE
        elif state in (_State.KEY, _State.FIRST_KEY) and char == '"':
            self._state, self._is_key = _State.STRING, True
        elif state in (_State.VALUE, _State.FIRST_VALUE):
            self._value(char)
        else:
            raise Malformed

    def _value(self, char: str) -> None:
        if char == "{":
            self._closing.append("}")
            self._state = _State.FIRST_KEY
        elif not self._closing:
            raise Malformed  # arguments are an object
        elif char == "[":
            self._closing.append("]")
            self._state = _State.FIRST_VALUE
        elif char == '"':
            self._state, self._is_key = _State.STRING, False
        elif in_literal(char):
            self._state, self._word = _State.LITERAL, char
        else:
            raise Malformed

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._state = _State.COLON if self._is_key else _State.AFTER
        elif char == "\\":
            self._state, self._word = _State.ESCAPE, ""
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _in_escape(self, char: str) -> None:
        self._word += char
        if self._word[0] == "u":
            if len(self._word) > 1 and char not in "0123456789abcdefABCDEF":
                raise Malformed
            if len(self._word) == 5:
                self._state = _State.STRING
        elif char in '"\\/bfnrt':
            self._state = _State.STRING
        else:
            raise Malformed

    def _end_literal(self) -> None:
        if self._word not in JSON_WORDS and not JSON_NUMBER.fullmatch(self._word):
            raise Malformed
        self._state = _State.AFTER
