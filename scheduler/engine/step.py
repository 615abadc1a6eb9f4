"""Step: the input of the machine. StepRunner: what runs it. Plan: a step and the host's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megavm.scheduler.engine.restriction import Restriction
    from megavm.scheduler.engine.sequence import Sequence
    from megavm.scheduler.engine.slots import Expected
    from megavm.scheduler.engine.step_memory import Rows

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


# Above so many rows, there is a bucket in the middle between two powers of two.
_MIDDLE_ROWS: Final = 512


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def bucket_rows(rows: int) -> int:
    """The rows of the smallest bucket for so many: 1, 2, 4, ..., 512, 768, 1024, 1536, 2048, ...

    A bucket never has more than the largest step. Logit rows are rounded in the same way.

    On a GPU dead rows save little time: a worker has one large tile of each product, and one whose
    tile is dead waits for the others. So from 512 rows on, there are more buckets than powers of
    two; docs/techniques.md, "Sizes of buckets", says why not more.
    """
    size = power_of_two(rows)
    middle = size * 3 // 4
    return middle if rows <= middle and middle > _MIDDLE_ROWS else size


def bucket_sizes(most: int) -> list[int]:
    """The rows of all buckets for steps of up to ``most`` rows; the last may have more."""
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(bucket_rows(sizes[-1] + 1))
    return sizes


def signed_word(number: int) -> int:
    """The int32 with the low 32 bits of a number."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


@dataclass(slots=True)
class Step:
    """One pass over a batch of tokens: decode tokens of many sequences and chunks of prefill.

    Row r is the token at ``row_position[r]`` of the sequence in slot ``row_sequence[r]``. The step
    writes its keys and values, and it attends to positions 0 .. row_position[r]. Logits are
    computed for the rows ``logit_row``. ``context`` is the largest position + 1. ``sampled``: a
    sequence that chooses a token needs more than its largest logit (``Sequence.sampled``); if none
    chooses yet, one of its sequences will. In a launch of several steps all positions advance by
    one from step to step. ``wants_logits``: the host may read the logits afterwards, or if none are
    computed, those of later steps of its sequences; else it reads only the chosen tokens.
    ``awaits_masks``: it begins before its masks are known, and ``StepRunner.give_masks`` must be
    called.
    """

    row_sequence: Ints
    row_position: Ints
    logit_row: Ints
    context: int
    sampled: bool = False
    distinct: bool | None = None  # whether its rows belong to different sequences; None: unknown
    wants_logits: bool = True
    awaits_masks: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows, each one token."""
        return len(self.row_sequence)

    def parts(self, rows: int) -> list[Step]:
        """Steps of at most so many rows that, one after the other, choose the same tokens."""
        found = []
        for begin in range(0, self.num_rows, rows):
            own = slice(begin, begin + rows)
            logit_row = self.logit_row[(self.logit_row >= begin) & (self.logit_row < begin + rows)]
            found.append(
                replace(
                    self,
                    row_sequence=self.row_sequence[own],
                    row_position=self.row_position[own],
                    logit_row=logit_row - np.int32(begin),
                    distinct=self.distinct or None,
                )
            )
        return found


class MasksNeeded(Exception):
    """A step that awaits masks cannot be started without them now."""


class Launch(Protocol):
    """A step that the machine runs, or will run after the one before it."""

    def finish(self, gone: Bools | None = None) -> None:
        """Wait until it is complete and bring the chosen tokens to the host.

        ``gone``, by slot: leave out the tokens of these, which belong to others meanwhile. Raises
        MachineFault when the step has failed; the machine can run others then.
        """
        ...

    def cancel(self) -> None:
        """Wait for its end without results, after a step before it has failed."""
        ...


class StepRunner(Protocol):
    """Runs steps on a machine, in memory that host and machine share (scheduler/run/runner.py)."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_logit_rows(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    tokens: Ints  # [max_num_seqs, max_model_len + 1]; read only, write with write_tokens
    block_table: Ints  # [max_num_seqs, KV blocks per sequence]; likewise with write_blocks
    sampling_real: Floats  # [max_num_seqs, REAL_COLUMNS]
    sampling_integer: Ints  # [max_num_seqs, INTEGER_COLUMNS]

    @property
    def runs_behind(self) -> bool:
        """Whether ``start`` mostly returns before the step is complete."""
        ...

    @property
    def machine_seconds(self) -> float:
        """For how long the machine has run steps that have ended without a fault."""
        ...

    @property
    def late_launches(self) -> int:
        """Launches that began when the GPU ran nothing; 0 on other machines."""
        ...

    allowed: Ints  # [max_num_seqs, words of a mask]; publish what you write
    bias: Floats  # [max_num_seqs, vocab_size]; likewise

    @property
    def logits(self) -> Rows:
        """[max_logit_rows, vocab_size]; row i belongs to logit row i of the last step."""
        ...

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        """Set the first tokens of a slot."""
        ...

    def write_blocks(self, slot: int, column: int, blocks: Ints) -> None:
        """Set KV blocks of a slot, from a column of its row of the block table on."""
        ...

    def publish(self, name: str, slot: int) -> None:
        """Let the next step, or ``give_masks``, see a changed row of ``allowed`` or ``bias``."""
        ...

    @property
    def can_await_masks(self) -> bool:
        """Whether a step may be started behind another one before its masks are known."""
        ...

    def give_masks(self) -> None:
        """Let the step that was started last, which awaits masks, see the rows published since.

        The machine waits for that until its limit. Raises MachineFault.
        """
        ...

    def run(self, step: Step, steps: int = 1, started: Callable[[], None] | None = None) -> None:
        """Run ``step`` and return when it is complete.

        Calls ``started`` once the machine runs, and before work that takes long.
        Raises MachineFault when it fails. Later steps can still run, except after MachineLost.
        """
        ...

    def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
        """Whether such steps would wait for a program that is being compiled ahead.

        Greedy steps whose logits the host does not read never do.
        """
        ...

    def can_queue(self, step: Step, steps: int = 1) -> bool:
        """Whether ``start`` can put a step behind the one in progress without a delay."""
        ...

    def start(
        self, step: Step, steps: int = 1, started: Callable[[], None] | None = None
    ) -> Launch | None:
        """Start ``step`` behind the one in progress, if there is one; there may not be two.

        None if it is complete already. ``Launch.finish`` raises faults that ``run`` would raise.
        Raises MasksNeeded if ``step`` awaits masks and would have to be waited for.
        """
        ...


@dataclass(slots=True)
class Admission:
    """The data written to memory when a sequence gets a slot: tokens, KV blocks, parameters."""

    slot: int
    tokens: Ints
    blocks: Ints
    real: Floats
    integer: Ints
    restriction: Restriction | None = None


@dataclass(slots=True)
class Plan:
    """One launch: what the host writes first, the step, and the results once it has run.

    Memory changes only in ``PlanExecutor.execute``, so a plan can be made while the one before it
    runs.
    """

    step: Step
    steps: int  # steps of this launch; more than one only for pure decode
    samplers: tuple[Sequence, ...]  # sequence i samples its next token from logit row i
    generation: int  # number of faults before this plan was made
    admissions: list[Admission] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # the sequence of each admission
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, column, KV block
    enabled: list[int] = field(default_factory=list)  # slots whose prompt is scored: choose now
    with_logprobs: bool = False  # whether a sampler wants log-probabilities
    # Whether a sampler's mask depends on its output, and so on what the plan before it chooses.
    needs_tokens: bool = False
    # (sequence, begin, end): positions begin .. end - 1 of a prompt. The samplers' logit rows come
    # before theirs.
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)

    # While it is in progress: the launch, the tokens that it will choose (None: not found out), and
    # by slot whether that belongs to another sequence now.
    launch: Launch | None = None
    expected: Expected | None = None
    gone: Bools | None = None
    started: float = 0.0  # by time.perf_counter

    # Set when it is complete: the chosen tokens [samplers, steps], whether each is a stop token,
    # whether one of a sampler's is, and the requested logits by logit row.
    tokens: Ints | None = None
    stopped: Bools | None = None
    ended: Bools | None = None
    logits: dict[int, Floats] = field(default_factory=dict)
    # Sequences whose grammar the token completes; sequences that cannot go on, with a sentence.
    complete: set[Sequence] = field(default_factory=set)
    failed: dict[Sequence, str] = field(default_factory=dict)
    error: BaseException | None = None

    def drop(self, ended: Bools) -> None:
        """Remove the rows of slots whose sequence has ended since the plan was made."""
        step = self.step
        gone = ended[step.row_sequence]
        if not np.count_nonzero(gone):
            return
        kept, self.expected = ~gone, None
        logit_kept = kept[step.logit_row]
        index = np.cumsum(kept, dtype=np.int32) - 1
        # Scored prompts have not chosen a token yet, so all of their rows stay.
        choosing = logit_kept[: len(self.samplers)].tolist()
        self.samplers = tuple(s for s, k in zip(self.samplers, choosing, strict=True) if k)
        self.needs_tokens = self.needs_tokens and any(s.dynamic for s in self.samplers)
        positions = step.row_position[kept]
        self.step = Step(
            step.row_sequence[kept],
            positions,
            index[step.logit_row[logit_kept]],
            int(positions.max(initial=-1)) + 1,
            step.sampled,
            step.distinct or None,
            step.wants_logits,
        )
