"""A runner without a model: its next token depends on every token that the KV cache gives it.

It is strict where a machine could not be: a key that is read must have been written, at that
position, by an earlier step or by a row of the same sequence; a row may not write where another
sequence of the step reads; all sizes are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megavm.instructions.sample import (
    INTEGER_COLUMNS,
    MASK_BITS,
    REAL_COLUMNS,
    Integer,
    Real,
)
from megavm.scheduler.engine.step import Ints, MasksNeeded, Step
from megavm.vm.machine import MachineFault, MachineLost

_WORD = (1 << 64) - 1


def mix(state: int, value: int) -> int:
    """A hash of 64 bits."""
    z = (state * 31 + value * 0x9E3779B97F4A7C15 + 0x1234567) & _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    return z ^ z >> 31


def toy_logits(tokens: list[int], vocab_size: int) -> np.ndarray:
    """Logits after ``tokens``: float32 [vocab_size]."""
    state = 7
    for token in tokens:
        state = mix(state, token)
    generator = np.random.default_rng(state)
    return generator.standard_normal(vocab_size, dtype=np.float32) * 3


def toy_token(
    tokens: list[int],
    logits: np.ndarray,
    real: np.ndarray,
    integer: np.ndarray,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
) -> int:
    """The next token: greedy, or drawn from (seed, position)."""
    adjusted = logits.copy()
    if integer[Integer.BIASED] and bias is not None:
        adjusted += bias
    if integer[Integer.MASKED] and allowed is not None:
        bits = np.unpackbits(allowed.view(np.uint8), bitorder="little")[: len(adjusted)]
        assert bits.any(), "no token is allowed"
        adjusted[bits == 0] = -np.inf
    if len(tokens) < integer[Integer.MIN_LENGTH]:
        stops = integer[Integer.STOP : Integer.STOP + integer[Integer.NUM_STOP]]
        adjusted[[t for t in stops if t < len(adjusted)]] = -np.inf
    if real[Real.TEMPERATURE] > 0:
        low, high = integer[Integer.SEED_LOW : Integer.SEED_HIGH + 1].view(np.uint32).tolist()
        noise = np.random.default_rng([low, high, len(tokens)]).gumbel(size=len(adjusted))
        adjusted = adjusted / real[Real.TEMPERATURE] + noise
    return int(adjusted.argmax())


def takes_largest(real: np.ndarray, integer: np.ndarray, length: int) -> bool:
    """Whether the choice after ``length`` tokens is the largest logit, whatever the logits are."""
    neutral = {
        Real.TEMPERATURE: 0.0,
        Real.REPETITION_PENALTY: 1.0,
        Real.PRESENCE_PENALTY: 0.0,
        Real.FREQUENCY_PENALTY: 0.0,
    }
    masks_stop = length < integer[Integer.MIN_LENGTH] and integer[Integer.NUM_STOP] > 0
    restricted = integer[Integer.MASKED] or integer[Integer.BIASED]
    same = all(real[column] == value for column, value in neutral.items())
    return bool(same and not masks_stop and not restricted)


@dataclass
class ToyRunner:
    """See the module.

    ``part_rows``: steps run in parts of so many rows, unless it is 0.

    ``sampled_coming``: programs that sample are being compiled ahead.

    ``queues``: steps run late, behind each other, in a memory apart from the host's, as on a GPU.
    ``awaits_masks``: such steps may begin before their masks are known; ``least_rows``: steps of
    fewer rows cannot queue, as if they had no program. ``given``: how often masks
    came afterwards. ``unmasked``: steps that ran without theirs.

    ``faults``, ``bugs`` and ``interrupts`` list the numbers of the runs that end in a MachineFault,
    a KeyError and a KeyboardInterrupt; from run ``lost`` on all end in a MachineLost.
    """

    max_num_seqs: int = 4
    max_model_len: int = 64
    max_num_batched_tokens: int = 16
    num_blocks: int = 32
    block_size: int = 4
    vocab_size: int = 40
    max_logit_rows: int = 0
    faults: tuple[int, ...] = ()
    bugs: tuple[int, ...] = ()
    interrupts: tuple[int, ...] = ()
    lost: int | None = None
    queues: bool = False
    awaits_masks: bool = True
    least_rows: int = 0
    given: int = 0
    unmasked: int = 0
    part_rows: int = 0
    sampled_coming: bool = False
    machine_seconds: float = 0.0
    late_launches: int = 0
    steps_seen: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_logit_rows = self.max_logit_rows or self.max_num_seqs
        self.tokens = np.full((self.max_num_seqs, self.max_model_len + 1), -1, dtype=np.int32)
        columns = -(-self.max_model_len // self.block_size)
        self.block_table = np.full((self.max_num_seqs, columns), -1, dtype=np.int32)
        self.sampling_real = np.zeros((self.max_num_seqs, REAL_COLUMNS), dtype=np.float32)
        self.sampling_integer = np.zeros((self.max_num_seqs, INTEGER_COLUMNS), dtype=np.int32)
        words = -(-self.vocab_size // MASK_BITS)
        self.allowed = np.zeros((self.max_num_seqs, words), dtype=np.int32)
        self.bias = np.zeros((self.max_num_seqs, self.vocab_size), dtype=np.float32)
        # What a machine sees of them: rows that were published.
        self._seen = {"allowed": self.allowed.copy(), "bias": self.bias.copy()}
        self.logits = np.zeros((self.max_logit_rows, self.vocab_size), dtype=np.float32)
        # Of each KV slot: the position it was written for, the token, the step that wrote it.
        self.kv = np.full((self.num_blocks, self.block_size, 3), -1, dtype=np.int64)
        self.epoch = 0
        self.runs = 0
        self.on_device = {name: getattr(self, name).copy() for name in ToyLaunch.WRITTEN}
        self.launches: list[ToyLaunch] = []  # in progress
        self.most_launches = 0
        # Of the next step: what its copies bring to the device.
        self._written: list[tuple[str, int, int, np.ndarray]] = []
        self._published: list[tuple[str, int, np.ndarray]] = []

    def write_tokens(self, slot: int, tokens: np.ndarray) -> None:
        self._write_words("tokens", slot, 0, tokens)

    def write_blocks(self, slot: int, column: int, blocks: np.ndarray) -> None:
        self._write_words("block_table", slot, column, blocks)

    def _write_words(self, name: str, slot: int, column: int, words: np.ndarray) -> None:
        assert words.dtype == np.int32
        getattr(self, name)[slot, column : column + len(words)] = words
        self._written.append((name, slot, column, words.copy()))

    def publish(self, name: str, slot: int) -> None:
        row = getattr(self, name)[slot].copy()
        if self.queues:
            self._published.append((name, slot, row))
        else:
            self._seen[name][slot] = row

    @property
    def can_await_masks(self) -> bool:
        return self.queues and self.awaits_masks

    def give_masks(self) -> None:
        launch = self.launches[-1] if self.launches else None
        if launch is not None and launch.awaits_masks:
            launch.awaits_masks = False
            launch.published += self._published
            self._published = []
            self.given += 1

    def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
        return sampled and self.sampled_coming

    @property
    def runs_behind(self) -> bool:
        return self.queues

    def can_queue(self, step: Step, steps: int = 1) -> bool:
        return self.queues and step.num_rows >= self.least_rows

    def start(
        self, step: Step, steps: int = 1, started: Callable[[], None] | None = None
    ) -> ToyLaunch | None:
        if not self.queues:
            self.run(step, steps, started)
            return None
        if started is not None:
            started()
        queues = self.can_queue(step, steps)
        if step.awaits_masks and not queues:
            raise MasksNeeded
        inputs = {name: getattr(self, name).copy() for name in ToyLaunch.INPUTS}
        launch = ToyLaunch(self, step, steps, inputs, self._written, self._published)
        self._written, self._published = [], []
        self.launches.append(launch)
        self.most_launches = max(self.most_launches, len(self.launches))
        assert len(self.launches) <= 2
        # Steps whose rows have become fewer since ``can_queue`` run behind the one in progress.
        if queues or len(self.launches) == 2:
            return launch
        launch.finish()
        return None

    def run(self, step: Step, steps: int = 1, started: Callable[[], None] | None = None) -> None:
        self.runs += 1
        if started is not None:
            started()
        assert steps >= 1
        if self.runs - 1 in self.bugs:
            raise KeyError("a bug in the runner")
        if self.lost is not None and self.runs > self.lost:
            raise MachineLost("the context is lost")
        if self.runs - 1 in self.interrupts:
            self.kv[...] = -1
            raise KeyboardInterrupt
        if self.runs - 1 in self.faults:
            self.kv[...] = -1  # what was in memory is lost
            raise MachineFault("worker 0 gave up")
        self.steps_seen.append(step)
        size = self.part_rows or step.num_rows
        for number, part in enumerate(step.parts(size)):
            places = np.flatnonzero(step.logit_row // size == number).astype(np.int32)
            for offset in range(steps):
                self._step(part, offset, steps, places)

    def _step(self, step: Step, offset: int, steps: int, places: Ints) -> None:
        self.epoch += 1
        rows, logit_rows = step.num_rows, len(step.logit_row)
        assert 0 < rows <= self.max_num_batched_tokens
        assert max(places, default=0) < self.max_logit_rows
        for array in (step.row_sequence, step.row_position, step.logit_row):
            assert array.dtype == np.int32
            assert array.ndim == 1
        assert len(step.row_position) == rows
        assert steps == 1 or logit_rows == rows
        context = int(step.row_position.max()) + 1
        assert step.context == context or (self.part_rows and step.context > context)
        assert ((step.row_sequence >= 0) & (step.row_sequence < self.max_num_seqs)).all()
        assert ((step.row_position >= 0) & (step.row_position < self.max_model_len)).all()
        assert len(set(step.logit_row.tolist())) == logit_rows
        slots = step.row_sequence.tolist()
        assert step.distinct in (None, len(set(slots)) == rows)
        positions = (step.row_position + offset).tolist()
        self._write(slots, positions)
        self._check_sharing(slots, positions)
        contexts = [
            self._read(s, p, slots, positions) for s, p in zip(slots, positions, strict=True)
        ]
        chosen = []
        for i, row in zip(places.tolist(), step.logit_row.tolist(), strict=True):
            slot, tokens = slots[row], contexts[row]
            logits = toy_logits(tokens, self.vocab_size)
            self.logits[i] = logits if step.wants_logits else np.nan
            if self.sampling_integer[slot, Integer.ENABLED]:
                real, integer = self.sampling_real[slot], self.sampling_integer[slot]
                largest = takes_largest(real, integer, len(tokens))
                assert step.sampled or largest, "a greedy step ignores parameters"
                allowed, bias = (self._seen[name][slot] for name in ("allowed", "bias"))
                token = toy_token(tokens, logits, real, integer, allowed, bias)
                chosen.append((slot, positions[row] + 1, token))
        assert len({slot for slot, _, _ in chosen}) == len(chosen), "two choices for one sequence"
        for slot, position, token in chosen:
            self.tokens[slot, position] = token

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.block_size)
        block = int(self.block_table[slot, column])
        assert 0 <= block < self.num_blocks, f"no KV block for position {position} of slot {slot}"
        return block, offset

    def _write(self, slots: list[int], positions: list[int]) -> None:
        written = set()
        for slot, position in zip(slots, positions, strict=True):
            place = self._place(slot, position)
            assert place not in written, f"two rows write to KV slot {place}"
            written.add(place)
            token = int(self.tokens[slot, position])
            assert 0 <= token < self.vocab_size, f"token {token} at {position} of slot {slot}"
            self.kv[place] = (position, token, self.epoch)

    def _check_sharing(self, slots: list[int], positions: list[int]) -> None:
        """No sequence of the step may write to a block that another one of the step reads."""
        users: dict[int, set[int]] = {}
        for slot, position in zip(slots, positions, strict=True):
            for column in range(position // self.block_size + 1):
                users.setdefault(int(self.block_table[slot, column]), set()).add(slot)
        for slot, position in zip(slots, positions, strict=True):
            block, _ = self._place(slot, position)
            assert users[block] == {slot}, f"slot {slot} writes KV block {block} of {users[block]}"

    def _read(self, slot: int, position: int, slots: list[int], positions: list[int]) -> list[int]:
        own = {p for s, p in zip(slots, positions, strict=True) if s == slot}
        tokens = []
        for p in range(position + 1):
            written_for, token, epoch = self.kv[self._place(slot, p)].tolist()
            assert written_for == p, f"slot {slot} reads position {written_for}, expected {p}"
            assert epoch < self.epoch or p in own, f"position {p} was written by another sequence"
            tokens.append(token)
        return tokens


class ToyLaunch:
    """A step that runs when its end is waited for, or the end of one behind it."""

    INPUTS = ("sampling_real", "sampling_integer")
    WRITTEN = ("tokens", "block_table")

    def __init__(
        self,
        runner: ToyRunner,
        step: Step,
        steps: int,
        inputs: dict[str, np.ndarray],
        written: list[tuple[str, int, int, np.ndarray]],
        published: list[tuple[str, int, np.ndarray]],
    ) -> None:
        self.runner = runner
        self.step = step
        self.steps = steps
        self.inputs = inputs
        self.written = written
        self.published = published
        self.awaits_masks = step.awaits_masks
        self.error: BaseException | None = None
        self.ran = False

    def run(self) -> None:
        """On the device: with the inputs of the time of the start."""
        runner = self.runner
        runner.unmasked += self.awaits_masks  # step memory releases it
        for name, slot, column, words in self.written:
            runner.on_device[name][slot, column : column + len(words)] = words
        for name, slot, row in self.published:
            runner._seen[name][slot] = row
        on_host = {name: getattr(runner, name) for name in (*self.WRITTEN, *self.INPUTS)}
        for name, values in (runner.on_device | self.inputs).items():
            setattr(runner, name, values)
        try:
            runner.run(self.step, self.steps)
        except BaseException as error:
            self.error = error
        finally:
            for name, values in on_host.items():
                setattr(runner, name, values)
            self.ran = True

    def end(self) -> None:
        while self in self.runner.launches:
            launch = self.runner.launches.pop(0)
            launch.run()

    def finish(self, gone: np.ndarray | None = None) -> None:
        assert not self.ran, "the step has ended already"
        self.end()
        if self.error is not None:
            raise self.error
        step, runner = self.step, self.runner
        for row in step.logit_row.tolist():
            slot, position = int(step.row_sequence[row]), int(step.row_position[row])
            if gone is None or not gone[slot]:
                columns = slice(position + 1, position + 1 + self.steps)
                runner.tokens[slot, columns] = runner.on_device["tokens"][slot, columns]

    def cancel(self) -> None:
        self.end()


class ToyDecoder:
    """Token t becomes the letters of t; those divisible by 7 give theirs with the next."""

    def __init__(self, request: Any = None) -> None:
        self.pending = ""
        self.plain: dict[int, str] = {}

    def step(self, token_id: int) -> str:
        self.pending += piece(token_id)
        if token_id % 7 == 0:
            return ""
        text, self.pending = self.pending, ""
        return text

    def flush(self) -> str:
        text, self.pending = self.pending, ""
        return text


def piece(token_id: int) -> str:
    """One or two letters, few different ones, so that stop strings occur."""
    letters = "abcd"
    if token_id % 3:
        return letters[token_id % 4]
    return letters[token_id % 4] + letters[token_id // 3 % 4]
