"""Log-probabilities in the two shapes that OpenAI's clients know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.tokenizer import Tokenizer

LEAST: Final = -9999.0  # in the place of -inf, which JSON lacks


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold; NaN is the least, too."""
    return logprob if logprob > LEAST else LEAST


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token; its number, if the model has no tokenizer."""
    return tokenizer.token_text(token_id) if tokenizer.available else f"token_id:{token_id}"


class CompletionLogprobs:
    """`logprobs` of a completion: parallel lists over its tokens.

    Control tokens take no room in the text. Of several tokens with the same text the most likely
    one is listed among the alternatives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def object(self, entries: Iterable[TokenLogprobs | int]) -> dict[str, Any]:
        """The object of the tokens that follow; a bare token id is a token without a value."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in entries:
            token = entry.token_id if isinstance(entry, TokenLogprobs) else entry
            text = token_text(self._tokenizer, token)
            if isinstance(entry, TokenLogprobs):
                value = finite(entry.logprob)
                values.append(value)
                tops.append(self._top(entry, text, value))
            else:
                values.append(None)
                tops.append(None)
            tokens.append(text)
            offsets.append(self._offset)
            if not self._tokenizer.is_special(token):
                self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs, text: str, value: float) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in entry.top:
            top.setdefault(token_text(self._tokenizer, token), finite(logprob))
        top.setdefault(text, value)
        return top


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat completion: an object for every token."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        # A part of a character has bytes that its text does not show.
        known = list(text.encode()) if "\ufffd" not in text else None
        return {"token": text, "logprob": finite(logprob), "bytes": known}

    content = [
        {
            **one(entry.token_id, entry.logprob),
            "top_logprobs": [one(token, logprob) for token, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}
