"""The text of one sequence while it grows: decoding, stop strings, and text held back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """Token ids to text; holds back incomplete characters (megavm.stream_decoder.StreamDecoder).

    Attributes:
        plain: texts that ``step`` would return for these tokens now and change nothing; it may be
            empty. Look the attribute up for every token.
    """

    plain: dict[int, str]

    def step(self, token_id: int) -> str:
        """The text that one more token adds."""
        ...

    def flush(self) -> str:
        """The text still held back, at the end of the sequence."""
        ...


class NoText:
    """A decoder for requests without text."""

    def __init__(self) -> None:
        self.plain: dict[int, str] = {}

    def step(self, token_id: int) -> str:
        """Nothing."""
        return ""

    def flush(self) -> str:
        """Nothing."""
        return ""


class TextStream:
    """Turns tokens into pieces of text and ends at stop strings.

    Text that may be the start of a stop string is held back until later text decides.
    ``include_stop``: return the stop string itself at the end.

    Attributes:
        plain_decoder: where there are no stop strings, the decoder, whose ``step`` is all that
            ``push`` does.
    """

    def __init__(
        self, decoder: Decoder, stops: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._decoder = decoder
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.plain_decoder = None if stops else decoder

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, str | None]:
        """Add a token: the text that is certain now, and the stop string that ended it or None.

        With ``may_stop`` false, stop strings are ordinary text.
        """
        piece = self._decoder.step(token_id)
        return self._append(piece, may_stop) if self._stops else (piece, None)

    def finish(self) -> tuple[str, str | None]:
        """The rest of the text, and the stop string that it completes or None."""
        text, stop = self._append(self._decoder.flush(), True)
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    def _append(self, piece: str, may_stop: bool) -> tuple[str, str | None]:
        if not self._stops:
            return piece, None
        text = self._held + piece
        if not may_stop:
            self._held = ""
            return text, None
        starts = [(text.find(stop), i) for i, stop in enumerate(self._stops)]
        begin, which = min((s for s in starts if s[0] >= 0), default=(-1, -1))
        if begin >= 0:
            stop = self._stops[which]
            self._held = ""
            return text[: begin + len(stop) if self._include_stop else begin], stop
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _possible_start(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
