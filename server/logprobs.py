"""Log-probabilities in OpenAI's two formats: of completions and of chat completions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.tokenizer import Tokenizer

LEAST: Final = -9999.0  # replaces -inf, which JSON cannot represent


def finite(logprob: float) -> float:
    """A log-probability that JSON can represent; -inf and NaN become LEAST."""
    return logprob if logprob > LEAST else LEAST


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The text of a token, or `token_id:N` if the model has no tokenizer."""
    return tokenizer.token_text(token_id) if tokenizer.available else f"token_id:{token_id}"


class CompletionLogprobs:
    """`logprobs` of a completion: parallel lists over its tokens.

    Control tokens do not advance `text_offset`. If several alternatives have the same text, only
    the most likely one is listed.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def object(self, entries: Iterable[TokenLogprobs | int]) -> dict[str, Any]:
        """The object for the next tokens; a bare token id is a token without log-probability."""
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


def prompt_logprobs(
    entries: Iterable[TokenLogprobs | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: objects by token id for each token, null for the first."""

    def one(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    found: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            found.append(None)
            continue
        own = {str(entry.token_id): one(entry.token_id, entry.logprob, entry.rank)}
        top = enumerate(entry.top, 1)
        best = {str(token): one(token, logprob, rank) for rank, (token, logprob) in top}
        found.append({**own, **best, **own})
    return found


def chat_logprobs(entries: Iterable[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat completion: one object per token."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(tokenizer, token)
        # The text of an incomplete character is U+FFFD, which does not show its bytes.
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
