"""What `LLM` returns: vLLM's names and meanings."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class GenerationError(RuntimeError):
    """A stream cannot go on: the machine failed or the KV cache is full."""


@dataclass(frozen=True)
class Logprob:
    """The model's opinion of one token, before any sampling parameter.

    Attributes:
        logprob: natural logarithm of its probability, possibly -inf.
        rank: 1 for the most likely token.
        decoded_token: the token's text by itself, None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    Attributes:
        index: which of the `n` continuations this is.
        text: its text, "" without a tokenizer; a stop string and a stop token are not part of it.
        token_ids: its tokens, the stop token included.
        finish_reason: "stop" (a stop string, a stop token or the model's end of text), "length"
            (`max_tokens`, or the end of the context), "abort", or "error".
        stop_reason: the stop string or stop token id; None for the model's own end of text.
        logprobs: for each token its own and the `logprobs` most likely tokens' log-probabilities
            by token id; None when they were not asked for.
        error: a sentence when `finish_reason` is "error"; what was generated before is kept.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A prompt and its continuations.

    Attributes:
        request_id: a number that no other request of the same LLM has.
        prompt: the prompt's text, None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the continuations, by index.
        timings: seconds and rates: `queue_seconds` until a place in a batch was free,
            `time_to_first_token_seconds` and `total_seconds` from the arrival of the request,
            `output_tokens` of all continuations, `output_tokens_per_second` after the first token;
            `cached_prompt_tokens` were known from an earlier request.
        prompt_logprobs: of each token of the prompt as in `CompletionOutput`, None for the first;
            None when they were not asked for.
    """

    request_id: Hashable
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def error(self) -> str | None:
        """Why a continuation failed, None if none did."""
        return next((o.error for o in self.outputs if o.error is not None), None)


@dataclass(frozen=True)
class Chunk:
    """One token of a stream, or the text that remained after the last one.

    Attributes:
        index: which of the `n` continuations it belongs to.
        text: text that can be shown now; "" while a character is incomplete or a stop string may
            have begun.
        token_id: the token, None in a chunk that brings no token.
        logprobs: as in `CompletionOutput`, for this token.
        finish_reason: set in the last chunk of a continuation, together with `stop_reason`.
    """

    index: int
    text: str
    token_id: int | None
    logprobs: dict[int, Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
