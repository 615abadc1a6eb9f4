"""Slots: the part of memory that the host writes before a step and reads after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megavm.instructions.sample import Integer
from megavm.scheduler.engine.restriction import Restriction
from megavm.scheduler.engine.step import Bools, Ints, Plan, StepRunner


class Slots:
    """Writes plans to the slots of a runner, and reads the chosen tokens.

    Attributes:

    - ``ended``: bool [max_num_seqs], by slot: whether its sequence is known to have ended.
    """

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.ended: Bools = np.zeros(runner.max_num_seqs, dtype=np.bool_)
        # Stop conditions of the slots read last; steady decode steps have the same.
        self._stops: Stops | None = None

    def write(self, plan: Plan) -> None:
        """Write a plan to memory, but for masks that depend on the output (``write_masks``)."""
        runner = self._runner
        if plan.admissions:
            self._stops = None
        for admission in plan.admissions:
            slot = admission.slot
            runner.write_tokens(slot, admission.tokens)
            runner.write_blocks(slot, 0, admission.blocks)
            runner.sampling_real[slot] = admission.real
            runner.sampling_integer[slot] = admission.integer
            self.ended[slot] = False
            if admission.restriction is not None:
                self._write_restriction(slot, admission.restriction)
        for slot, column, block in plan.new_blocks:
            runner.write_blocks(slot, column, np.array([block], dtype=np.int32))
        for slot in plan.enabled:
            runner.sampling_integer[slot, Integer.ENABLED] = 1

    def _write_restriction(self, slot: int, restriction: Restriction) -> None:
        """Write what stays as it is while a sequence runs."""
        runner = self._runner
        if restriction.bias:
            restriction.write_bias(runner.bias[slot])
            runner.publish("bias", slot)
        if restriction.allowed is not None and not restriction.dynamic:
            runner.allowed[slot] = restriction.allowed
            runner.publish("allowed", slot)

    def write_masks(self, plan: Plan) -> None:
        """Write the masks that depend on the output, which the launch before has extended.

        A sequence for which no token is left has failed; what it chooses is not read. Its rows run
        nevertheless: other sequences may count on the keys and values of its prompt, which the
        planner has put into the prefix cache.
        """
        step, runner = plan.step, self._runner
        for sequence, row in zip(plan.samplers, step.logit_row.tolist(), strict=False):
            slot = int(step.row_sequence[row])
            if sequence.follower is None or self.ended[slot]:
                continue
            begin, end = len(sequence.prompt), int(step.row_position[row]) + 1
            output = runner.tokens[slot, begin:end]
            cause = sequence.follower.follow(output)
            cause = cause or sequence.follower.fill(output, runner.allowed[slot])
            if cause:
                self.ended[slot] = True
                plan.failed[sequence] = cause
                runner.allowed[slot] = -1
            runner.publish("allowed", slot)

    def expect(self, plan: Plan) -> None:
        """Find where the plan's tokens will be, and what ends its sequences.

        ``read`` needs it. A machine that works meanwhile need not be waited for.
        """
        step, count = plan.step, len(plan.samplers)
        slots, positions = step.row_sequence, step.row_position
        if count < step.num_rows:  # else every row chooses a token, in order
            choosing = step.logit_row[:count]
            slots, positions = slots[choosing], positions[choosing]
        following = positions + 1
        columns = following[:, None]
        if plan.steps > 1:
            columns = columns + np.arange(plan.steps, dtype=np.int32)[None]
        if self._stops is None or self._stops.slots is not slots:
            self._stops = Stops.of(slots, self._runner.sampling_integer)
        plan.expected = Expected(slots, columns, self._stops)

    def read(self, plan: Plan) -> None:
        """Copy the chosen tokens from memory before another launch can change them."""
        if plan.expected is None:
            self.expect(plan)
        assert plan.expected is not None
        step, runner, count = plan.step, self._runner, len(plan.samplers)
        slots, columns, stops = plan.expected
        plan.tokens = tokens = runner.tokens[slots[:, None], columns]
        plan.stopped = stops.stopped(tokens, columns)
        plan.ended = ended = np.logical_or.reduce(plan.stopped, axis=1)
        if ended.any():
            self.ended[slots] |= ended
        if plan.needs_tokens:
            self._follow(plan, slots, columns[:, 0])
        for i, sequence in enumerate(plan.samplers if plan.with_logprobs else ()):
            if sequence.with_logprobs:
                plan.logits[i] = runner.logits[i].copy()
        for i in range(count, len(step.logit_row)):
            plan.logits[i] = runner.logits[i].copy()

    def _follow(self, plan: Plan, slots: Ints, following: Ints) -> None:
        """Find the sequences whose grammar the chosen tokens complete. Launches have one step."""
        for i, sequence in enumerate(plan.samplers):
            if sequence.follower is None or self.ended[slots[i]]:
                continue
            begin, end = len(sequence.prompt), int(following[i]) + 1
            cause = sequence.follower.follow(self._runner.tokens[slots[i], begin:end])
            if cause:
                plan.failed[sequence] = cause
            elif sequence.follower.complete:
                plan.complete.add(sequence)
            else:
                continue
            self.ended[slots[i]] = True


@dataclass(frozen=True, slots=True)
class Stops:
    """When the sequences of slots end at a token.

    ``slots`` int32 [n]; ``ids`` int32 [n, most stop tokens of a slot], filled up with -1;
    ``min_length`` int32 [n, 1]: tokens of prompt and output before which a stop token ends nothing.
    """

    slots: Ints
    ids: Ints
    min_length: Ints

    @classmethod
    def of(cls, slots: Ints, sampling: Ints) -> Stops:
        """From the rows of ``sampling_integer``."""
        rows = sampling[slots]
        most = int(rows[:, Integer.NUM_STOP].max(initial=0))
        ids = np.ascontiguousarray(rows[:, Integer.STOP : Integer.STOP + most])
        return cls(slots, ids, rows[:, Integer.MIN_LENGTH, None])

    def stopped(self, tokens: Ints, columns: Ints) -> Bools:
        """Whether each of ``tokens`` [n, steps], at ``columns`` of the table, ends its sequence."""
        ended = np.zeros(tokens.shape, dtype=np.bool_)
        if not self.ids.size:
            return ended
        for column in range(self.ids.shape[1]):
            ended |= self.ids[:, column, None] == tokens
        return ended & (columns >= self.min_length) if ended.any() else ended


class Expected(NamedTuple):
    """The tokens that a plan will choose: of ``slots``, at ``columns`` [n, steps] of the table."""

    slots: Ints
    columns: Ints
    stops: Stops
