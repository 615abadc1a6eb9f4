"""A step as the machine sees it, and the plan that a step belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from megavm.scheduler.engine.sequence import Sequence

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Step:
    """One pass over a batch of tokens: decode tokens of many sequences and chunks of prefill.

    Row r stands for the token at ``row_position[r]`` of the sequence in slot ``row_sequence[r]``;
    its keys and values are written, and it attends to positions 0 .. row_position[r]. Logits are
    wanted of the rows ``logit_row``. ``context`` is the largest position + 1. In a launch of
    several steps all positions advance by one from step to step.
    """

    row_sequence: Ints
    row_position: Ints
    logit_row: Ints
    context: int

    @property
    def num_rows(self) -> int:
        """Tokens of the step."""
        return len(self.row_sequence)


@dataclass(slots=True)
class Admission:
    """What is written for a sequence that gets a slot: tokens, KV blocks, parameters."""

    slot: int
    tokens: Ints
    blocks: Ints
    real: Floats
    integer: Ints


@dataclass(slots=True)
class Plan:
    """One launch: what the host writes first, the step, and, once it has run, what came of it.

    A plan touches memory only in ``Engine.execute``, so that it can be made while the one before it
    runs.
    """

    step: Step
    steps: int  # passes of this launch; more than one only for pure decode
    samplers: tuple[Sequence, ...]  # whose next token the first logit rows choose
    generation: int  # faults of the engine before this plan was made
    admissions: list[Admission] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)  # of each admission
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # slot, column, KV block
    enabled: list[int] = field(default_factory=list)  # slots whose prompt is scored: choose now
    # Positions begin .. end - 1 of a prompt, whose logit rows follow those of the samplers.
    scored: list[tuple[Sequence, int, int]] = field(default_factory=list)

    # Filled in by execute: of each sampler, the tokens chosen, which of them are stop tokens, and
    # of each logit row the logits where they were asked for.
    tokens: Ints | None = None
    stopped: npt.NDArray[np.bool_] | None = None
    logits: dict[int, Floats] = field(default_factory=dict)
    error: BaseException | None = None

    def drop(self, ended: npt.NDArray[np.bool_]) -> None:
        """Leave out the rows of slots whose sequence has ended since the plan was made."""
        step = self.step
        gone = ended[step.row_sequence]
        if not gone.any():
            return
        kept = ~gone
        wanted = kept[step.logit_row]
        index = np.cumsum(kept, dtype=np.int32) - 1
        # What is scored has not chosen anything yet, so that none of its rows goes.
        choosing = wanted[: len(self.samplers)].tolist()
        self.samplers = tuple(s for s, k in zip(self.samplers, choosing, strict=True) if k)
        positions = step.row_position[kept]
        self.step = Step(
            step.row_sequence[kept],
            positions,
            index[step.logit_row[wanted]],
            int(positions.max(initial=-1)) + 1,
        )
