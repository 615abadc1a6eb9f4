"""Sampling parameters and stop conditions, with the names and meanings of vLLM."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from megavm.structured_outputs import StructuredOutputsParams
from megavm.vm.config import MAX_STOP_TOKENS

MAX_COMPLETIONS: Final = 16384
MAX_LOGPROBS: Final = 20
MAX_LOGIT_BIAS: Final = 100.0
MAX_LOGIT_BIASES: Final = 1024
MAX_BAD_WORDS: Final = 128
_MAX_TOKEN: Final = (1 << 31) - 1
_GENERATION_KEYS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. The constructor checks all values.

    Attributes:
        n: completions per prompt.
        temperature: divides the logits; 0 takes the most likely token.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to this.
        top_k: keep this many most likely tokens; 0 or -1 keeps all.
        min_p: keep tokens at least this probable relative to the most likely one.
        repetition_penalty: > 1 makes tokens of the prompt and the output less likely.
        presence_penalty: subtracted from the logits of tokens that occur in the output.
        frequency_penalty: subtracted once per occurrence of a token in the output.
        seed: the same seed gives the same tokens for the same logits, which on a GPU depend on
            the batch (docs/server.md, Seeds); None draws a new seed.
        stop: strings that end a completion; stored as a tuple.
        stop_token_ids: token ids that end a completion; stored as a tuple.
        max_tokens: most tokens of a completion; None continues to the end of the context.
        min_tokens: tokens before a stop string or stop token may end a completion.
        ignore_eos: continue after the model's end-of-sequence token.
        logprobs: number of alternatives to report per token; None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt; the prefix cache is not used for
            this prompt then.
        truncate_prompt_tokens: continue only this many tokens at the end of a longer prompt; -1
            takes as many as leave room for `max_tokens` in the context.
        skip_special_tokens: leave control tokens out of the text.
        kept_special_token_ids: control tokens that stay in the text nevertheless, such as those
            that mark tool calls; stored as a tuple.
        include_stop_str_in_output: keep the stop string at the end of the text.
        structured_outputs: the form of the output, such as a JSON schema. A completion ends with
            the output; without room for it in max_tokens, its text is only a beginning.
        logit_bias: token id to a number in [-100, 100] that is added to its logit before all other
            parameters; ids may be texts, as in JSON. Stored as a dict.
        allowed_token_ids: the only token ids that may be chosen; stored as a tuple.
        bad_words: texts that may not occur in the output, each as its own tokens; stored as a
            tuple.

    Raises:
        ValueError: a parameter has a wrong type or is out of range; the message names the
            parameter and its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    kept_special_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None

    def __post_init__(self) -> None:
        self._integer("n", 1, MAX_COMPLETIONS)
        self._number("temperature", 0.0, math.inf)
        self._number("top_p", 0.0, 1.0, open_low=True)
        self._integer("top_k", -1, _MAX_TOKEN)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_low=True)
        self._number("presence_penalty", -2.0, 2.0)
        self._number("frequency_penalty", -2.0, 2.0)
        self._integer("seed", -(1 << 63), (1 << 63) - 1, optional=True)
        self._integer("max_tokens", 1, _MAX_TOKEN, optional=True)
        self._integer("min_tokens", 0, _MAX_TOKEN)
        self._integer("logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("prompt_logprobs", 0, MAX_LOGPROBS, optional=True)
        self._integer("truncate_prompt_tokens", -1, _MAX_TOKEN, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be None, -1 or positive, not 0")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        self._read_stop()
        self._read_stop_token_ids()
        self._read_logit_bias()
        self._read_allowed_token_ids()
        self._read_bad_words()
        if self.structured_outputs is not None:
            read = StructuredOutputsParams.read(self.structured_outputs)
            self._set("structured_outputs", read)
        self._set("kept_special_token_ids", self._token_ids("kept_special_token_ids"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, not {self.min_tokens}"
            )

    @classmethod
    def from_generation_config(cls, generation: Mapping[str, Any], **given: Any) -> SamplingParams:
        """The given parameters, else those of generation_config.json, else the class's defaults.

        Raises:
            ValueError: as for the constructor.
        """
        values = {
            key: generation[key] for key in _GENERATION_KEYS if generation.get(key) is not None
        }
        if generation.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            return cls(**{**values, **given})
        except ValueError:
            try:
                cls(**values)
            except ValueError as error:
                raise ValueError(f"generation_config.json: {error}") from error
            raise

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty if `stop` is None."""
        return tuple(self.stop or ())

    @property
    def restricts(self) -> bool:
        """Whether something is said about which tokens may be chosen."""
        names = ("structured_outputs", "logit_bias", "allowed_token_ids", "bad_words")
        return any(getattr(self, name) is not None for name in names)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _integer(self, name: str, low: int, high: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if value is None and optional:
            return
        if not is_integer(value) or not low <= value <= high:
            either = "None or " if optional else ""
            raise ValueError(
                f"{name} must be {either}an integer in [{low}, {high}], not {_short(value)}"
            )
        self._set(name, int(value))

    def _number(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        good = is_number(value)
        if good:
            try:
                number = float(value)
            except OverflowError:
                number = math.inf
            good = (
                math.isfinite(number) and low <= number <= high and not (open_low and number == low)
            )
        if not good:
            interval = (
                f"{'(' if open_low else '['}{low:g}, {high:g}{')' if high == math.inf else ']'}"
            )
            raise ValueError(f"{name} must be a number in {interval}, not {_short(value)}")
        self._set(name, number)

    def _read_stop(self) -> None:
        stop = self.stop
        if stop is None:
            return
        strings = [stop] if isinstance(stop, str) else stop
        if (
            not isinstance(strings, list | tuple)
            or not all(isinstance(text, str) for text in strings)
            or not all(strings)
        ):
            raise ValueError(f"stop must hold strings that are not empty, not {_short(stop)}")
        self._set("stop", tuple(strings))

    def _read_stop_token_ids(self) -> None:
        ids = self.stop_token_ids
        if ids is None:
            return
        if isinstance(ids, list | tuple) and len(ids) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids must hold at most {MAX_STOP_TOKENS} token ids, not {len(ids)}"
            )
        self._set("stop_token_ids", self._token_ids("stop_token_ids"))

    def _token_ids(self, name: str) -> tuple[int, ...]:
        ids = getattr(self, name)
        if not isinstance(ids, list | tuple) or not all(
            is_integer(token) and 0 <= token <= _MAX_TOKEN for token in ids
        ):
            raise ValueError(f"{name} must hold token ids, not {_short(ids)}")
        return tuple(int(token) for token in ids)

    def _read_logit_bias(self) -> None:
        bias = self.logit_bias
        if bias is None:
            return
        if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIASES:
            raise ValueError(
                f"logit_bias must be a dict of at most {MAX_LOGIT_BIASES} token ids to numbers,"
                f" not {_short(bias)}"
            )
        read: dict[int, float] = {}
        for token, value in bias.items():
            text = str(token)
            if not (text.isascii() and text.isdigit() and int(text) <= _MAX_TOKEN):
                raise ValueError(f"logit_bias must hold token ids, not {_short(bias)}")
            good = is_number(value)
            if not good or not -MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS:
                raise ValueError(f"logit_bias must hold numbers in [-100, 100], not {_short(bias)}")
            read[int(text)] = float(value)
        self._set("logit_bias", read or None)

    def _read_allowed_token_ids(self) -> None:
        ids = self.allowed_token_ids
        if ids is None:
            return
        good = isinstance(ids, list | tuple) and len(ids) > 0
        if not good or not all(is_integer(t) and 0 <= t <= _MAX_TOKEN for t in ids):
            raise ValueError(
                f"allowed_token_ids must hold at least one token id, not {_short(ids)}"
            )
        self._set("allowed_token_ids", tuple(int(token) for token in ids))

    def _read_bad_words(self) -> None:
        words = self.bad_words
        if words is None:
            return
        good = isinstance(words, list | tuple) and len(words) <= MAX_BAD_WORDS
        if not good or not all(isinstance(word, str) and word.strip() for word in words):
            raise ValueError(
                f"bad_words must hold at most {MAX_BAD_WORDS} texts that are not empty,"
                f" not {_short(words)}"
            )
        self._set("bad_words", tuple(words) or None)


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or numpy, and not a bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a value is a real number of Python or numpy, and not a bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
