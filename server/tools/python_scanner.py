"""Arguments that are written as keyword arguments of a call in Python."""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from megavm.server.tools.scanners import (
    JSON_NUMBER,
    JSON_WORDS,
    MAX_LITERAL,
    SPACE,
    Malformed,
    in_literal,
)

_WORDS: Final = {"True": "true", "False": "false", "None": "null"} | {w: w for w in JSON_WORDS}
_NUMBER: Final = re.compile(
    r"[+-]?(0[xX][0-9a-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[0-9][0-9_]*\.?[0-9_]*([eE][+-]?[0-9]+)?"
    r"|\.[0-9][0-9_]*([eE][+-]?[0-9]+)?)"
)
_ESCAPES: Final = {
    char: json.dumps(ast.literal_eval(f'"\\{char}"'))[1:-1] for char in "\\'\"abfnrtv"
}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_MAX_NAME: Final = 100  # characters of a \N{name}; no character's name is longer


class _State(Enum):
    ITEM = auto()  # an item, or the closing bracket
    KEYWORD = auto()
    EQUALS = auto()  # after a keyword
    COLON = auto()  # after a dict's key
    VALUE = auto()
    AFTER = auto()  # after an item: a comma or the closing bracket
    STRING = auto()
    ESCAPE = auto()
    LITERAL = auto()


@dataclass
class _Open:
    """A bracket that is open: how Python and JSON close it, and what it holds so far."""

    closing: str
    json_closing: str
    items: int = 0
    commas: int = 0


class PythonScanner:
    """Reads keyword arguments from behind a call's `(` to its `)`; returns a JSON object.

    Values are literals: strings, numbers, True, False, None, lists, tuples, and dicts with strings
    as keys. JSON's true, false and null are read too. Nothing is returned before the first keyword,
    or the end, is certain. See `Scanner`.
    """

    def __init__(self) -> None:
        self.done = False
        self._state = _State.ITEM
        self._open = [_Open(")", "}")]
        self._is_key = False
        self._quote = ""
        self._word = ""  # a keyword, an escape or a literal as far as it has come

    def feed(self, char: str) -> str:
        """See `Scanner`."""
        match self._state:
            case _State.STRING:
                return self._in_string(char)
            case _State.ESCAPE:
                return self._in_escape(char)
            case _State.KEYWORD if (self._word + char).isidentifier():
                self._extend(char)
                return ""
            case _State.KEYWORD:
                self._state = _State.EQUALS
            case _State.LITERAL if in_literal(char):
                self._extend(char)
                return ""
            case _State.LITERAL:
                return self._end_literal() + self._structure(char)
        return self._structure(char)

    def _extend(self, char: str) -> None:
        self._word += char
        if len(self._word) > MAX_LITERAL:
            raise Malformed

    def _structure(self, char: str) -> str:
        state, inner = self._state, self._open[-1]
        if char in SPACE:
            return ""
        if state in (_State.AFTER, _State.ITEM) and char == inner.closing:
            return self._close()
        if state is _State.AFTER and char == ",":
            self._state = _State.ITEM
            inner.commas += 1
            return ""
        if state is _State.EQUALS and char == "=":
            self._state = _State.VALUE
            return f"{self._begin_item()}{json.dumps(self._word)}: "
        if state is _State.COLON and char == ":":
            self._state = _State.VALUE
            return ": "
        if state is _State.ITEM and len(self._open) == 1 and char.isidentifier():
            self._state, self._word = _State.KEYWORD, char
            return ""
        if state is _State.ITEM and inner.closing == "}" and char in "\"'":
            return self._begin_item() + self._begin_string(char, is_key=True)
        if state is _State.ITEM and len(self._open) > 1 and inner.closing != "}":
            return self._begin_item() + self._value(char)
        if state is _State.VALUE:
            return self._value(char)
        raise Malformed

    def _begin_item(self) -> str:
        """The character before an item: a comma, or the opening bracket of all arguments."""
        inner = self._open[-1]
        inner.items += 1
        if inner.items > 1:
            return ", "
        return "{" if len(self._open) == 1 else ""

    def _value(self, char: str) -> str:
        if char in "\"'":
            return self._begin_string(char, is_key=False)
        if char in "[({":
            closing = {"[": "]", "(": ")", "{": "}"}[char]
            self._open.append(_Open(closing, "}" if char == "{" else "]"))
            self._state = _State.ITEM
            return "{" if char == "{" else "["
        if in_literal(char):
            self._state, self._word = _State.LITERAL, char
            return ""
        raise Malformed

    def _close(self) -> str:
        inner = self._open.pop()
        if self._open and inner.closing == ")" and inner.items == 1 and not inner.commas:
            raise Malformed  # brackets around one value are no tuple
        self._state, self.done = _State.AFTER, not self._open
        opening = "{" if self.done and not inner.items else ""
        return opening + inner.json_closing

    def _begin_string(self, quote: str, is_key: bool) -> str:
        self._state, self._quote, self._is_key = _State.STRING, quote, is_key
        return '"'

    def _in_string(self, char: str) -> str:
        if char == self._quote:
            self._state = _State.COLON if self._is_key else _State.AFTER
            return '"'
        if char == "\\":
            self._state, self._word = _State.ESCAPE, ""
            return ""
        return json.dumps(char, ensure_ascii=False)[1:-1]

    def _in_escape(self, char: str) -> str:
        if self._word and self._word[0] in "01234567":
            if char in "01234567" and len(self._word) < 3:
                self._word += char
                return ""
            return self._end_escape() + self.feed(char)
        self._word += char
        kind = self._word[0]
        if kind in _HEX_DIGITS:
            if len(self._word) > 1 and char not in "0123456789abcdefABCDEF":
                raise Malformed
            return self._end_escape() if len(self._word) == 1 + _HEX_DIGITS[kind] else ""
        if kind == "N":
            if len(self._word) > _MAX_NAME or self._word[1:2] not in ("", "{"):
                raise Malformed
            return self._end_escape() if char == "}" else ""
        if kind in "01234567":
            return ""
        self._state = _State.STRING
        if kind == "\n":  # the line goes on
            return ""
        # Python keeps the backslash of what is no escape.
        return _ESCAPES.get(kind) or "\\\\" + json.dumps(kind, ensure_ascii=False)[1:-1]

    def _end_escape(self) -> str:
        self._state = _State.STRING
        try:
            return json.dumps(ast.literal_eval(f'"\\{self._word}"'))[1:-1]
        except (SyntaxError, ValueError) as error:
            raise Malformed from error

    def _end_literal(self) -> str:
        self._state, word = _State.AFTER, self._word
        if word in _WORDS:
            return _WORDS[word]
        if JSON_NUMBER.fullmatch(word):
            return word
        if not _NUMBER.fullmatch(word):
            raise Malformed
        try:
            value = ast.literal_eval(word)
        except (SyntaxError, ValueError) as error:
            raise Malformed from error
        if not math.isfinite(value):
            raise Malformed
        return json.dumps(value)
