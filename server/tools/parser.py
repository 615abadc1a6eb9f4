"""Finding calls in what a model writes, while it writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ClassVar

from megavm.server.tools.grammars import Form
from megavm.server.tools.request import MAX_NAME
from megavm.server.tools.scanners import SPACE, Malformed, Scanner

Reading = Generator[None, str]  # is sent characters, and "" at the end of the text


@dataclass
class CallDelta:
    """The new part of one call. `name` is set in the first delta of a call only."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class Parsed:
    """The addition of a piece of text to the message: content, and parts of calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class NotACall(Exception):
    """The text that looked like a call is none."""


class ToolParser(ABC):
    """Splits what a model writes into content and calls, piece by piece.

    The pieces may be cut anywhere: all results together are the same. Text is held back while it
    may be the beginning of a call, and is content if it is none. Once the name of a call and the
    beginning of its arguments are there, the call is certain. Arguments that are malformed further
    on are passed on as they are. Whitespace beside a call is dropped where no text follows it.

    Subclasses read one call after the other in `_read_call`.

    `functions`: names of the functions that may be called. Where nothing but its form marks a call,
    only these names make one.

    Attributes:
        num_calls: calls that have begun.
        unfinished: whether the arguments of the last call have begun and not ended.
    """

    openings: ClassVar[str]  # the characters with which a call may begin
    separators: ClassVar[str] = SPACE  # what may stand between two calls
    form: ClassVar[Form]  # how to write calls
    special_tokens: ClassVar[
        tuple[str, ...]
    ]  # tokens of a call that are control tokens for some models

    def __init__(self, functions: Collection[str]) -> None:
        self.num_calls = 0
        self.unfinished = False
        self._functions = functions
        self._parsed = Parsed()
        self._held: list[str] = []  # what has been read and may be text
        self._space = ""  # it is content if text follows
        self._after_call = False
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> Parsed:
        """Read the next piece of the text, and return the content and calls that are certain."""
        for char in text:
            self._reading.send(char)
        return self._take()

    def finish(self) -> Parsed:
        """End the text, and return the rest. Nothing may be pushed afterwards."""
        with suppress(StopIteration):
            self._reading.send("")
        if not self._after_call:
            self._parsed.content += self._space
        return self._take()

    def _take(self) -> Parsed:
        parsed, self._parsed = self._parsed, Parsed()
        return parsed

    @abstractmethod
    def _read_call(self, char: str) -> Reading:
        """Read calls, of which `char`, in the result of `_next`, is the first character.

        Raises:
            NotACall: what has been read since the last `_accept` is text. The last character may
                begin another call.
        """

    # For subclasses.

    def _next(self) -> Generator[None, str, str]:
        """The next character, which is held; "" at the end."""
        char = yield
        self._held.append(char)
        return char

    def _next_visible(self) -> Generator[None, str, str]:
        """The next character that is no whitespace."""
        while (char := (yield from self._next())) and char in SPACE:
            pass
        return char

    def _literal(self, text: str) -> Reading:
        """Read exactly this text."""
        for expected in text:
            if (yield from self._next()) != expected:
                raise NotACall

    def _accept(self) -> None:
        """Decide that the characters read so far are no text."""
        self._held.clear()

    def _begin(self, name: str) -> None:
        """A call has begun."""
        self._accept()
        self._space, self._after_call = "", True
        self._parsed.calls.append(CallDelta(self.num_calls, name))
        self.num_calls += 1
        self.unfinished = True

    def _end(self) -> None:
        """The arguments of the call are complete."""
        self._accept()
        self.unfinished = False

    def _arguments(self, text: str) -> None:
        """More of the arguments of the last call."""
        index, calls = self.num_calls - 1, self._parsed.calls
        if not calls or calls[-1].index != index:
            calls.append(CallDelta(index))
        calls[-1].arguments += text

    def _scan(self, scanner: Scanner, char: str, name: str) -> Reading:
        """Read the arguments of a call; it begins when the scanner returns a first text.

        `char` is their first character, which has been read.

        Raises:
            NotACall: they are malformed before the call has begun.
            Malformed: they are malformed further on.
        """
        begun, unread = False, ""  # unread: not returned by the scanner yet
        while True:
            unread += char
            try:
                text = scanner.feed(char) if char else ""
            except Malformed:
                if not begun:
                    raise NotACall from None
                self._arguments(unread)
                raise
            if text and not begun:
                self._begin(name)
                begun = True
            if begun:
                self._arguments(text)
                self._accept()
            if text:
                unread = ""
            if not char:
                if begun:
                    self._arguments(unread)
                raise NotACall
            if scanner.done:
                self._end()
                return
            char = yield from self._next()

    def _pass_on(self, ending: str = "") -> Reading:
        """Pass on malformed arguments as they are, up to `ending` or the end of the text."""
        self.unfinished = False
        tail = ""
        while char := (yield):
            tail += char
            if ending and tail.endswith(ending):
                tail = tail[: -len(ending)]
                break
            keep = _overlap(tail, ending)
            self._arguments(tail[: len(tail) - keep])
            tail = tail[len(tail) - keep :]
        self._arguments(tail)
        self._accept()

    def _known(self, name: str, marked: bool) -> bool:
        """Whether a name makes a call; `marked`: tokens of the format mark it as one."""
        return 0 < len(name) <= MAX_NAME and (marked or name in self._functions)

    # Reading.

    def _read(self) -> Reading:
        char = yield
        while char:
            if char not in self.openings:
                self._text(char)
                char = yield
                continue
            self._held.append(char)
            try:
                yield from self._read_call(char)
                char = yield
            except NotACall:
                char = self._held.pop() if self._held else ""
                self._text("".join(self._held))
                self._held.clear()
        # The text has ended.
        yield

    def _text(self, text: str) -> None:
        visible = text.rstrip(self.separators if self._after_call else None)
        if visible:
            self._parsed.content += self._space + visible
            self._space, self._after_call = text[len(visible) :], False
        else:
            self._space += text


def _overlap(text: str, ending: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `ending`."""
    lengths = range(min(len(text), len(ending) - 1), 0, -1)
    return next((n for n in lengths if ending.startswith(text[-n:])), 0)
