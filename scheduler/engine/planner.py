"""Which rows the next step has: who decodes, whose prompt goes on, who is admitted, who must wait.

What differs from step to step lives in numpy arrays indexed by slot, so that a step in which nobody
joins, leaves or needs a KV block costs a few vector operations whatever the batch.

A plan may be made while the one before it still runs. It then takes for granted that every sequence
goes on; those that turn out to have ended lose their rows in ``Plan.drop``. Launches run in the
order of their plans and all writes to memory happen between them, so slots and KV blocks of a
finished sequence can be given away at once, even if a launch that is under way still writes to
them.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from megavm.scheduler.engine.blocks import BlockManager
from megavm.scheduler.engine.sequence import Sequence, State
from megavm.scheduler.engine.step import Admission, Ints, Plan, Step


class Planner:
    """The waiting and running sequences, and what the next step does with them.

    ``failed`` collects sequences that planning found impossible, each with its sentence; they hold
    nothing any more.

    Raises ValueError when a batch of decoding sequences would not fit a step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_logit_rows: int,
        blocks: BlockManager,
        steps_per_launch: int = 1,
    ) -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs, "
                f"{max_num_seqs}: every sequence needs a row of the step"
            )
        if max_logit_rows < max_num_seqs:
            raise ValueError(
                f"max_logit_rows is {max_logit_rows}, less than max_num_seqs, {max_num_seqs}: every"
                " sequence needs its logits"
            )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_logit_rows = max_logit_rows
        self.blocks = blocks
        self.steps_per_launch = steps_per_launch
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.failed: list[tuple[Sequence, str]] = []
        self.preemptions = 0
        self.generation = 0
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # By slot: the next row's position, the tokens its blocks hold, the last row it may have.
        self._position = np.zeros(max_num_seqs, dtype=np.int32)
        self._capacity = np.zeros(max_num_seqs, dtype=np.int32)
        self._last_row = np.zeros(max_num_seqs, dtype=np.int32)
        # The decoding sequences in row order and their slots; None when they must be listed again.
        self._decoders: tuple[Sequence, ...] | None = ()
        self._slots = np.zeros(0, dtype=np.int32)
        self._rows = np.arange(max_num_batched_tokens, dtype=np.int32)
        # Contents of blocks that prefilling sequences are going to publish.
        self._computing: set[bytes] = set()
        # Free blocks that an admission leaves to the sequences that are running.
        self._watermark = blocks.num_blocks // 100

    # Joining and leaving.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, whatever it does, and free what it holds."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._give_back(sequence)
        sequence.state = State.FINISHED

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.state is State.PREFILLING:
            del self._prefilling[sequence]
            self._computing.difference_update(sequence.digests)
        elif sequence.state is State.DECODING:
            del self._decoding[sequence]
            self._decoders = None
        del self.running[sequence]
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_planned = 0

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the head of the queue; its keys and values will be computed again.

        Tokens that a launch under way chooses for it are still to come.
        """
        if sequence.state is State.DECODING:
            sequence.expected = int(self._position[sequence.slot]) + 1
        self._give_back(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def postpone(self, sequence: Sequence) -> None:
        """Back to the head of the queue, as if the plan that admitted it had not been made.

        Only when that plan has not been executed.
        """
        self._give_back(sequence)
        sequence.state = State.WAITING
        if not sequence.output:
            sequence.request.times.admitted = 0.0
        self.waiting.appendleft(sequence)

    def borrow(self, tokens: int) -> tuple[int, list[int]]:
        """A slot and KV blocks for ``tokens`` tokens outside all planning; it preempts others.

        Only when no launch is under way. ``return_borrowed`` gives them back.
        """
        count = self.blocks.blocks_for(tokens)
        while not self._free_slots or self.blocks.num_free < count:
            self._preempt(next(reversed(self.running)))
        return self._free_slots.pop(), [self.blocks.allocate() for _ in range(count)]

    def forget_contents(self) -> None:
        """What the KV blocks hold is not to be relied on any more; nothing may be running."""
        self.blocks.forget_all()
        self._computing.clear()
        self.generation += 1
        for sequence in self.waiting:
            sequence.expected = 0

    def return_borrowed(self, slot: int, blocks: list[int]) -> None:
        """Free what ``borrow`` gave."""
        self.blocks.release(blocks)
        self._free_slots.append(slot)

    # Planning.

    def plan(self) -> Plan | None:
        """The next launch, or None when there is nothing to run now."""
        plan = Plan(Step(self._rows[:0], self._rows[:0], self._rows[:0], 0), 1, (), self.generation)
        preemptions = self.preemptions
        self._plan_decode(plan)
        if self._prefilling or (self.waiting and self.preemptions == preemptions):
            self._plan_prefill(plan, admit=self.preemptions == preemptions)
        return plan if plan.step.num_rows else None

    def _plan_decode(self, plan: Plan) -> None:
        """One row for every decoding sequence, and the KV blocks that they need for it."""
        if not self._decoding:
            return
        plan.steps = steps = self._num_steps()
        decoders, slots = self._list_decoders()
        positions = self._position[slots]
        short = positions + steps > self._capacity[slots]
        if short.any():
            for i in np.flatnonzero(short).tolist():
                if decoders[i].state is State.DECODING:
                    self._grow(decoders[i], int(positions[i]) + steps, plan)
            if self._decoders is None:
                decoders, slots = self._list_decoders()
                positions = self._position[slots]
                if not decoders:
                    return
        following = positions + steps
        self._position[slots] = following
        last = following > self._last_row[slots]
        if last.any():
            for i in np.flatnonzero(last).tolist():
                self._drain(decoders[i])
        plan.samplers = decoders
        plan.step = Step(slots, positions, self._rows[: len(slots)], int(positions.max()) + 1)

    def _list_decoders(self) -> tuple[tuple[Sequence, ...], Ints]:
        if self._decoders is None:
            self._decoders = tuple(self._decoding)
            self._slots = np.array([s.slot for s in self._decoders], dtype=np.int32)
        return self._decoders, self._slots

    def _num_steps(self) -> int:
        """Passes of the next launch: several only if nobody joins, ends or lacks blocks in it."""
        steps = self.steps_per_launch
        if steps == 1 or self._prefilling or self.waiting:
            return 1
        decoders, slots = self._list_decoders()
        if any(s.request.params.logprobs is not None for s in decoders):
            return 1
        position, last = self._position[slots], self._last_row[slots]
        steps = min(steps, int((last - position).min()) + 1)
        size = self.blocks.block_size
        needed = -((self._capacity[slots] - position - steps) // size)
        return steps if int(needed.clip(0).sum()) <= self.blocks.num_free else 1

    def _drain(self, sequence: Sequence) -> None:
        """Give it no further rows."""
        del self._decoding[sequence]
        self._decoders = None
        sequence.state = State.DRAINING

    def _grow(self, sequence: Sequence, tokens: int, plan: Plan) -> None:
        """KV blocks for ``tokens`` tokens, if need be taken from the sequences admitted last."""
        while len(sequence.blocks) * self.blocks.block_size < tokens:
            if self.blocks.num_free == 0 and not self._make_room(sequence):
                return
            block = self.blocks.allocate()
            plan.new_blocks.append((sequence.slot, len(sequence.blocks), block))
            sequence.blocks.append(block)
        self._capacity[sequence.slot] = len(sequence.blocks) * self.blocks.block_size

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt whoever was admitted last; False if that ends this sequence's stay."""
        victim = next(s for s in reversed(self.running) if s.state is not State.DRAINING)
        if victim is not sequence:
            self._preempt(victim)
            return True
        if len(self.running) > 1:
            self._preempt(sequence)
            return False
        # It has the whole cache to itself. The tokens that are on their way may still end it.
        error = self._cache_full(sequence)
        coming = int(self._position[sequence.slot]) + 1 - len(sequence.prompt)
        if coming > len(sequence.output):
            sequence.exhausted, sequence.max_output = error, coming
            self._drain(sequence)
        else:
            self._fail(sequence, error)
        return False

    def _cache_full(self, sequence: Sequence) -> str:
        blocks = self.blocks
        return (
            f"the KV cache is full: {blocks.num_blocks} blocks of {blocks.block_size} tokens do not"
            f" hold the {len(sequence.prompt)} tokens of the prompt and more than"
            f" {len(sequence.output)} new ones"
        )

    def _fail(self, sequence: Sequence, error: str) -> None:
        self.remove(sequence)
        self.failed.append((sequence, error))

    def _plan_prefill(self, plan: Plan, admit: bool) -> None:
        """Chunks of prompts in the rows that decoding leaves, in order of arrival."""
        step = plan.step
        sequences, positions = [step.row_sequence], [step.row_position]
        logit_rows, score_rows = [step.logit_row], []
        samplers = list(plan.samplers)
        rows, context = step.num_rows, step.context
        published: list[tuple[Sequence, int, int]] = []
        budget, logit_budget = self.max_num_batched_tokens, self.max_logit_rows - len(samplers)
        candidates = iter(list(self._prefilling))
        while rows < budget and logit_budget:
            sequence = next(candidates, None)
            if sequence is None:
                sequence = self._admit(plan) if admit else None
                if sequence is None:
                    break
            begin, known = sequence.num_planned, sequence.num_tokens
            end = min(known, begin + budget - rows)
            if sequence.scoring and begin < known - 1:
                # The last row, which chooses, has a step of its own.
                end = min(end, known - 1, begin + logit_budget)
                score_rows.append(np.arange(rows, rows + end - begin, dtype=np.int32))
                plan.scored.append((sequence, begin, end))
                logit_budget -= end - begin
            elif sequence.scoring:
                plan.enabled.append(sequence.slot)
                sequence.scoring = False
            sequences.append(np.full(end - begin, sequence.slot, dtype=np.int32))
            positions.append(np.arange(begin, end, dtype=np.int32))
            rows += end - begin
            context = max(context, end)
            sequence.num_planned = end
            published.append((sequence, begin, end))
            if end == known:
                logit_rows.append(np.array([rows - 1], dtype=np.int32))
                samplers.append(sequence)
                logit_budget -= 1
        # Contents become known only now: rows of one step must not rely on each other's prompts.
        for sequence, begin, end in published:
            self._publish(sequence, begin, end)
            if end == sequence.num_tokens:
                self._begin_decoding(sequence)
        if len(sequences) > 1:
            plan.samplers = tuple(samplers)
            plan.step = Step(
                np.concatenate(sequences),
                np.concatenate(positions),
                np.concatenate(logit_rows + score_rows),
                context,
            )

    def _publish(self, sequence: Sequence, begin: int, end: int) -> None:
        if not self.blocks.prefix_caching:
            return
        size = self.blocks.block_size
        sequence.extend_digests(size, end // size)
        for i in range(begin // size, end // size):
            self.blocks.publish(sequence.blocks[i], sequence.digests[i])
            self._computing.discard(sequence.digests[i])

    def _begin_decoding(self, sequence: Sequence) -> None:
        del self._prefilling[sequence]
        slot = sequence.slot
        self._position[slot] = sequence.num_tokens
        self._capacity[slot] = len(sequence.blocks) * self.blocks.block_size
        self._last_row[slot] = sequence.last_row
        if sequence.num_tokens > sequence.last_row:
            sequence.state = State.DRAINING
        else:
            sequence.state = State.DECODING
            self._decoding[sequence] = None
            self._decoders = None

    def _admit(self, plan: Plan) -> Sequence | None:
        """Give the first waiting sequence a slot and KV blocks for all its tokens, if possible."""
        blocks = self.blocks
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            if sequence.num_tokens < sequence.expected or sequence.must_wait:
                return None
            needed = blocks.blocks_for(sequence.num_tokens)
            if needed > blocks.num_blocks:
                self._fail(sequence, self._cache_full(sequence))
                continue
            known = self._match(sequence)
            if known is None:
                return None
            reserve = self._watermark if self.running else 0
            if needed - len(known) + reserve > blocks.num_free - blocks.num_idle(known):
                return None
            return self._seat(self.waiting.popleft(), known, needed, plan)
        return None

    def _match(self, sequence: Sequence) -> list[int] | None:
        """KV blocks that hold its first tokens, or None if more are being computed just now."""
        blocks = self.blocks
        if not blocks.prefix_caching or sequence.scoring:
            return []
        # At least one token must be computed, for its logits.
        count = (sequence.num_tokens - 1) // blocks.block_size
        sequence.extend_digests(blocks.block_size, count)
        digests = sequence.digests[:count]
        known = blocks.match(digests)
        if len(known) < count and digests[len(known)] in self._computing:
            return None
        return known

    def _seat(self, sequence: Sequence, known: list[int], needed: int, plan: Plan) -> Sequence:
        blocks = self.blocks
        if blocks.prefix_caching:
            if not sequence.scoring:
                blocks.counters.queries += (sequence.num_tokens - 1) // blocks.block_size
            blocks.counters.hits += len(known)
            self._computing.update(sequence.digests[len(known) :])
        blocks.share(known)
        sequence.blocks = known + [blocks.allocate() for _ in range(needed - len(known))]
        sequence.num_planned = len(known) * blocks.block_size
        sequence.slot = self._free_slots.pop()
        sequence.state = State.PREFILLING
        self.running[sequence] = None
        self._prefilling[sequence] = None
        request = sequence.request
        if not request.times.admitted:
            request.times.admitted = time.perf_counter()
            request.cached_tokens = sequence.num_planned
        table = np.array(sequence.blocks, dtype=np.int32)
        real, integer = sequence.parameters()
        plan.admissions.append(Admission(sequence.slot, sequence.token_ids(), table, real, integer))
        plan.admitted.append(sequence)
        return sequence

    def publish_decoded(self, sequence: Sequence) -> None:
        """After a token was collected: make a block known that its predecessor has filled."""
        size = self.blocks.block_size
        computed = sequence.num_tokens - 1
        if computed % size == 0 and 0 < computed // size <= len(sequence.blocks):
            index = computed // size - 1
            sequence.extend_digests(size, index + 1)
            self.blocks.publish(sequence.blocks[index], sequence.digests[index])
