"""The results of `LLM`, with the names and meanings of vLLM."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class GenerationError(RuntimeError):
    """A stream has failed: the machine failed, the KV cache is full, or the LLM was closed."""


@dataclass(frozen=True)
class Logprob:
    """The log-probability of one token, before any sampling parameter.

    Attributes:
        logprob: natural logarithm of the probability, possibly -inf.
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
        text: its text, "" without a tokenizer; excludes the stop string or stop token unless
            `include_stop_str_in_output` is set.
        token_ids: its tokens, including the stop token.
        finish_reason: "stop" (a stop string, a stop token or the model's end of text), "length"
            (`max_tokens`, or the end of the context), "abort", or "error".
        stop_reason: the stop string or stop token id; None for the model's end-of-text token.
        logprobs: per token, log-probabilities by token id of this token and of the `logprobs` most
            likely tokens; None when not requested.
        error: a sentence when `finish_reason` is "error"; earlier tokens are kept.
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
        request_id: a number that is unique within the LLM.
        prompt: the prompt's text, None if it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: the continuations, by index.
        timings: `queue_seconds`: from the arrival of the request to its admission.
            `time_to_first_token_seconds`, `total_seconds`: from the arrival of the request.
            `output_tokens`: tokens of all continuations. `output_tokens_per_second`: rate after the
            first token. `cached_prompt_tokens`: tokens found in the prefix cache.
        prompt_logprobs: per token of the prompt, as in `CompletionOutput`, None for the first
            token; None when not requested.
    """

    request_id: Hashable
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    timings: dict[str, float] = field(default_factory=dict)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def error(self) -> str | None:
        """The error of the first continuation that failed, None if none did."""
        return next((o.error for o in self.outputs if o.error is not None), None)


@dataclass(frozen=True)
class Chunk:
    """One token of a stream, or the text that remains after the last token.

    Attributes:
        index: which of the `n` continuations it belongs to.
        text: text that is certain now; "" while a character is incomplete or a stop string may
            have begun.
        token_id: the token, None in a chunk without a token.
        logprobs: as in `CompletionOutput`, for this token.
        finish_reason: set in the last chunk of a continuation, together with `stop_reason`.
    """

    index: int
    text: str
    token_id: int | None
    logprobs: dict[int, Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
