"""A request and its sequences: their tokens, slots, KV blocks and stop conditions."""

from __future__ import annotations

import time
from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.scheduler.engine.blocks import NO_PREFIX, block_digest
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.restriction import Follower, Restriction
from megavm.scheduler.engine.step import Floats, Ints, signed_word
from megavm.scheduler.engine.text import NoText, TextStream

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams

TokenIds = Many[int] | npt.NDArray[np.integer[Any]]
FinishReason = Literal["stop", "length", "abort", "error"]
_WORD = (1 << 64) - 1
_NO_TEXT = NoText()


@dataclass
class Times:
    """Times of a request's events, by ``time.perf_counter``; 0 until the event happens."""

    arrived: float = field(default_factory=time.perf_counter)
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(eq=False)
class Request:
    """One prompt and its sampling parameters. ``params.n`` sequences continue it."""

    id: Hashable
    prompt: Ints
    params: SamplingParams
    sequences: tuple[Sequence, ...] = ()
    restriction: Restriction | None = None
    times: Times = field(default_factory=Times)
    cached_tokens: int = 0  # prompt tokens that the first admission found in the prefix cache
    # One entry per prompt token (None for the first), if params ask for them. Complete when the
    # request's first delta is returned.
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def __post_init__(self) -> None:
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt)

    @property
    def unfinished(self) -> list[Sequence]:
        """Its sequences that have not ended."""
        return [s for s in self.sequences if s.state is not State.FINISHED]


@dataclass(slots=True)
class Delta:
    """The tokens and text that one launch added to one sequence.

    ``pieces`` has one piece of text per token, and a single piece if there is no token. Text may
    lag behind ``token_ids`` while a character is incomplete or a stop string is possible.
    ``finish_reason`` is set in the last delta of a sequence. ``stop_reason`` is the stop string or
    stop token id that ended it, None for the model's end-of-sequence token. ``error`` is a sentence
    when ``finish_reason`` is "error".
    """

    request: Request
    index: int  # which of the request's sequences
    token_ids: list[int]
    pieces: list[str]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(self.pieces)

    def extend(self, later: Delta) -> None:
        """Append the delta of a later step of the same launch and sequence."""
        self.token_ids += later.token_ids
        self.pieces += later.pieces
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error = later.error


class State(Enum):
    """State of a sequence. In PREFILLING, DECODING and DRAINING it holds a slot and KV blocks."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    DRAINING = "draining"  # its last row is planned, its last token not yet collected
    FINISHED = "finished"


class Sequence:
    """One continuation of a request's prompt.

    ``max_output``: largest number of tokens that it may add. ``stop_ids``: tokens that end it.
    ``eos_ids``: stop tokens that are not reported as ``stop_reason``.
    """

    __slots__ = (
        "blocks",
        "decoder",
        "digests",
        "dynamic",
        "eos_ids",
        "exhausted",
        "expected",
        "follower",
        "index",
        "max_output",
        "may_stop",
        "num_planned",
        "output",
        "prompt",
        "request",
        "sampled",
        "scoring",
        "seed",
        "slot",
        "state",
        "stop_ids",
        "text",
        "with_logprobs",
    )

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        max_output: int,
        eos_ids: tuple[int, ...],
        text: TextStream | None,
        digests: list[bytes],
    ) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.seed = derived_seed(seed, index)
        self.max_output = max_output
        self.eos_ids = () if params.ignore_eos else eos_ids
        self.stop_ids = stop_token_ids(params, eos_ids)
        self.text = text
        # Gives the texts of tokens if nothing else must be looked at, such as stop strings.
        self.decoder = _NO_TEXT if text is None else text.plain_decoder
        # Whether a token or a text may end it.
        self.may_stop = bool(self.stop_ids) or self.decoder is None
        self.prompt = request.prompt
        self.output: list[int] = []
        self.state = State.WAITING
        self.slot = -1
        self.blocks: list[int] = []
        self.digests = digests
        self.num_planned = 0  # positions whose keys and values have been planned
        self.expected = 0  # tokens that must be collected before it can be admitted again
        # Whether logits of the whole prompt must be computed before it may choose a token.
        self.scoring = bool(index == 0 and request.prompt_logprobs and len(self.prompt) > 1)
        restriction = request.restriction
        self.with_logprobs = params.logprobs is not None  # it returns those of its output
        # Whether it needs more than its largest logit.
        self.sampled = needs_sampling(params, self.stop_ids, restriction)
        # Whether the mask of its next choice depends on its output.
        self.dynamic = restriction is not None and restriction.dynamic
        # Follows the output for masks that depend on it; the thread that executes plans owns it.
        self.follower = (
            Follower(restriction, self.stop_ids, params.min_tokens)
            if restriction and self.dynamic
            else None
        )
        self.exhausted = ""  # error message if reaching max_output is an error

    @property
    def wants_logits(self) -> bool:
        """Whether the host reads the logits of its next steps."""
        return self.with_logprobs or self.scoring

    @property
    def holds_nothing(self) -> bool:
        """Whether it waits, and has neither a slot nor KV blocks, nor a part of them."""
        return self.state is State.WAITING and self.slot < 0 and not self.blocks

    @property
    def num_tokens(self) -> int:
        """Tokens known to the host."""
        return len(self.prompt) + len(self.output)

    @property
    def last_row(self) -> int:
        """The last position that is computed; it chooses the last token."""
        return len(self.prompt) + self.max_output - 2

    @property
    def must_wait(self) -> bool:
        """Whether this must wait until the request's first sequence has scored the prompt."""
        first = self.request.sequences[0]
        return self is not first and first.scoring and first.state is not State.FINISHED

    def token_ids(self) -> Ints:
        """Prompt and output as int32 array."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.array(self.output, dtype=np.int32)])

    def extend_digests(self, block_size: int, count: int) -> None:
        """Compute the digests of the first ``count`` blocks; all must be full of known tokens."""
        have = len(self.digests)
        if have >= count:
            return
        first, base = have * block_size, len(self.prompt)
        if first >= base:
            tokens = np.array(self.output[first - base : count * block_size - base], dtype=np.int32)
        else:
            tokens = self.token_ids()[first : count * block_size]
        for i in range(count - have):
            previous = self.digests[-1] if self.digests else NO_PREFIX
            block = tokens[i * block_size : (i + 1) * block_size]
            self.digests.append(block_digest(previous, block))

    def append(
        self, token: int, stopped: bool, logprobs: TokenLogprobs | None, complete: bool = False
    ) -> Delta:
        """Append the next token. ``stopped``: it is a stop token and the output is long enough.

        ``complete``: its grammar allows nothing after the token.
        """
        if not self.output and not self.request.times.first_token:
            self.request.times.first_token = time.perf_counter()
        self.output.append(token)
        delta = Delta(self.request, self.index, [token], [""], [logprobs] if logprobs else [])
        params, count = self.request.params, len(self.output)
        if self.text is not None and (not stopped or params.include_stop_str_in_output):
            delta.pieces[0], stop = self.text.push(token, count > params.min_tokens)
            if stop is not None:
                return self._end(delta, "stop", stop)
        if stopped:
            return self._finish_text(delta, "stop", None if token in self.eos_ids else token)
        if complete:
            return self._finish_text(delta, "stop")
        if count >= self.max_output:
            if self.exhausted:
                return self._finish_text(delta, "error", error=self.exhausted)
            return self._finish_text(delta, "length")
        return delta

    def finish(self, reason: FinishReason, error: str | None = None) -> Delta:
        """End the sequence without a token, as for an abort or an error."""
        return self._finish_text(Delta(self.request, self.index, [], [""], []), reason, error=error)

    def _finish_text(
        self,
        delta: Delta,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Delta:
        if self.text is not None:
            rest, stop = self.text.finish()
            delta.pieces[-1] += rest
            if stop is not None and reason == "length":
                return self._end(delta, "stop", stop)
        return self._end(delta, reason, stop_reason, error)

    def _end(
        self,
        delta: Delta,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Delta:
        delta.finish_reason, delta.stop_reason, delta.error = reason, stop_reason, error
        self.request.times.finished = time.perf_counter()
        return delta

    def parameters(self) -> tuple[Floats, Ints]:
        """The sequence's rows of sampling_real and sampling_integer."""
        params, restriction = self.request.params, self.request.restriction
        real, integer = [0.0] * REAL_COLUMNS, [-1] * INTEGER_COLUMNS
        # Within what float32 can divide logits by: a smaller temperature makes infinities of them.
        real[Real.TEMPERATURE] = params.temperature and _clip(params.temperature, 1e-6)
        real[Real.TOP_P] = params.top_p
        real[Real.MIN_P] = params.min_p
        real[Real.REPETITION_PENALTY] = _clip(params.repetition_penalty, 1e-30)
        real[Real.PRESENCE_PENALTY] = params.presence_penalty
        real[Real.FREQUENCY_PENALTY] = params.frequency_penalty
        integer[Integer.ENABLED] = int(not self.scoring)
        integer[Integer.SEED_LOW] = signed_word(self.seed)
        integer[Integer.SEED_HIGH] = signed_word(self.seed >> 32)
        integer[Integer.TOP_K] = max(params.top_k, 0)
        integer[Integer.PROMPT_LENGTH] = len(self.prompt)
        integer[Integer.MIN_LENGTH] = len(self.prompt) + min(params.min_tokens, self.max_output)
        integer[Integer.NUM_STOP] = len(self.stop_ids)
        integer[Integer.STOP : Integer.STOP + len(self.stop_ids)] = self.stop_ids
        integer[Integer.MASKED] = int(restriction is not None and restriction.masked)
        integer[Integer.BIASED] = int(restriction is not None and bool(restriction.bias))
        return np.array(real, dtype=np.float32), np.array(integer, dtype=np.int32)


def _clip(value: float, least: float) -> float:
    return min(max(value, least), 1e30)


def needs_sampling(
    params: SamplingParams, stop_ids: Many[int], restriction: Restriction | None = None
) -> bool:
    """Whether a choice with these parameters can be another token than that of the largest logit.

    If not, ``Sequence.parameters`` has temperature 0 and nothing that changes a logit.
    """
    return (
        params.temperature > 0
        or params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
        or (params.min_tokens > 0 and len(stop_ids) > 0)
        or restriction is not None
    )


def stop_token_ids(params: SamplingParams, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The token ids that end a sequence, without duplicates."""
    own = tuple(params.stop_token_ids or ())
    return tuple(dict.fromkeys(own if params.ignore_eos else (*eos_ids, *own)))


def derived_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sequence ``index`` of a request; sequence 0 has the request's seed.

    Others are mixed with the finaliser of SplitMix64 (Steele et al. 2014).
    """
    if index == 0:
        return seed & _WORD
    z = (seed + index * 0x9E3779B97F4A7C15) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB & _WORD
    return z ^ z >> 31
