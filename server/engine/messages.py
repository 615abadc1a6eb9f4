"""What a server and its engine tell each other.

Messages are pickled where the engine has a process of its own, so they hold values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.prompt_limits import PromptLimits
from megavm.scheduler.engine.sequence import FinishReason
from megavm.scheduler.engine.step import Ints

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams


class ShortRunning(Exception):
    """No step ran while a trace was recorded."""


@dataclass(frozen=True)
class ModelFacts:
    """What the event loop must know of a model that is loaded.

    Attributes:
        directory: of the model's files.
        chat_template: a file that takes the place of the model's template; None: there is none.
        generation: generation_config.json.
        limits: what a prompt must be.
        max_num_seqs: sequences that run at the same time.
        machine: what executes programs.
        dtype: name of the type of weights and KV cache.
        process: id of the engine's process; None: this one.
    """

    directory: str
    chat_template: str | None
    generation: Mapping[str, Any]
    limits: PromptLimits
    max_num_seqs: int
    machine: str
    dtype: str
    process: int | None = None


# To the engine.


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue a request for each prompt.

    Continuation c of prompt p has the index p * params.n + c. `key` names them all; `arrived` is
    their time by `time.perf_counter`. If the parameters restrict tokens, the answer is `Accepted`
    or `Refused`.
    """

    key: int
    prompts: tuple[Ints, ...]
    params: SamplingParams
    arrived: float


@dataclass(frozen=True, slots=True)
class Abort:
    """End what is left of the requests of a key before the next step."""

    key: int


@dataclass(frozen=True, slots=True)
class AskMetrics:
    """Answer with an EngineSnapshot. The model must be loaded."""

    key: int


@dataclass(frozen=True, slots=True)
class Record:
    """Answer with a trace file of the next steps; of fewer if `timeout` seconds pass before.

    One at a time. The error is a ValueError if the machine cannot trace, ShortRunning if no step
    ran.
    """

    key: int
    steps: int
    timeout: float


@dataclass(frozen=True, slots=True)
class StopRecording:
    """End the recording of a trace, if there is one."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Give up loading, or end after the running step."""


Command = Submit | Abort | AskMetrics | Record | StopRecording | Stop


# From the engine.


@dataclass(frozen=True, slots=True)
class Loading:
    """A phase of loading: `done` of `total`."""

    phase: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The model is there, and takes requests."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """The model is not there: why, or None if loading was given up."""

    error: Exception | None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request with restricted tokens is queued; none of its tokens came before."""

    key: int


@dataclass(frozen=True, slots=True)
class Refused:
    """A request is not queued: its restriction is not possible (ValueError), or the engine failed.

    `sequences` of it will never end, because they have not begun; the other ones are aborted.
    """

    key: int
    sequences: int
    error: Exception | None


@dataclass(frozen=True, slots=True)
class PromptRead:
    """What is known of a prompt when its first token comes; see sequence.Request."""

    cached_tokens: int
    logprobs: list[TokenLogprobs | None] | None


# (key, index, token ids, pieces of text) of a sequence that goes on, without log-probabilities.
PlainPart = tuple[int, int, list[int], list[str]]
# And the log-probabilities, finish_reason, stop_reason and error; see sequence.Delta. The last one
# is what is known of the prompt, with the first part of a request.
WholePart = tuple[
    int,
    int,
    list[int],
    list[str],
    list[TokenLogprobs],
    FinishReason | None,
    int | str | None,
    str | None,
    PromptRead | None,
]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one step, in order. Tuples of built-in types are pickled fastest."""

    parts: list[PlainPart | WholePart]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to `AskMetrics` or `Record`: a value or an error."""

    key: int
    value: Any
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """The engine has stopped for good.

    `gone`: its thread or process has ended, and answers nothing. This is always the last event.
    """

    cause: str
    gone: bool = False


Event = Loading | Loaded | NotLoaded | Accepted | Refused | Tokens | Answer | Broken
