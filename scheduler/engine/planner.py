"""Planning: choose the rows of the next step, admit waiting sequences, and preempt running ones.

State that changes every step lives in numpy arrays indexed by slot. A step in which no sequence
joins, leaves or needs a KV block therefore costs a few vector operations, whatever the batch size.

A plan may be made while the launch before it still runs. It assumes that every sequence continues;
``Plan.drop`` removes the rows of sequences that have ended. Launches run in the order of their
plans, and but for masks the host writes to memory only between launches. Slots and KV blocks of a
finished sequence can therefore be reused at once, even if a running launch still writes to them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from megavm.scheduler.engine.blocks import BlockManager
from megavm.scheduler.engine.pace import StepPace
from megavm.scheduler.engine.sequence import Sequence, State
from megavm.scheduler.engine.step import Admission, Ints, Plan, Step


def check_sequences(max_num_seqs: int, max_num_batched_tokens: int) -> None:
    """Raise ValueError when the sequences that decode do not fit into a step."""
    if max_num_batched_tokens < max_num_seqs:
        raise ValueError(
            f"max_num_batched_tokens is {max_num_batched_tokens}, less than max_num_seqs, "
            f"{max_num_seqs}: every sequence needs a row of the step"
        )


class Planner:
    """Decides what the next step does with the waiting and running sequences.

    ``pace`` limits the rows of prompts in steps in which sequences decode, and the steps of a
    launch. ``holds`` says whether a waiting sequence must let others pass for now.

    ``failed`` collects sequences that cannot run, each with an error message; they hold no slot and
    no KV blocks any more.

    Raises ValueError when ``max_num_seqs`` decoding sequences do not fit into a step.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_logit_rows: int,
        blocks: BlockManager,
        steps_per_launch: int,
        pace: StepPace,
        holds: Callable[[Sequence], bool] = lambda sequence: False,
    ) -> None:
        check_sequences(max_num_seqs, max_num_batched_tokens)
        if max_logit_rows < max_num_seqs:
            raise ValueError(
                f"max_logit_rows is {max_logit_rows}, less than max_num_seqs, {max_num_seqs}: every"
                " sequence needs its logits"
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_logit_rows = max_logit_rows
        self.blocks = blocks
        self.steps_per_launch = steps_per_launch
        self.pace = pace
        self.holds = holds
        self.preemptions = 0
        self.generation = 0
        self._rows = np.arange(max_num_batched_tokens, dtype=np.int32)
        # An admission leaves this many free blocks for the running sequences.
        self._watermark = blocks.num_blocks // 100
        self._clear()

    def _clear(self) -> None:
        """Forget all sequences and their slots."""
        max_num_seqs = self.max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.failed: list[tuple[Sequence, str]] = []
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        # By slot: position of the next row, tokens that its KV blocks hold, last position.
        self._position = np.zeros(max_num_seqs, dtype=np.int32)
        self._capacity = np.zeros(max_num_seqs, dtype=np.int32)
        self._last_row = np.zeros(max_num_seqs, dtype=np.int32)
        # Decoding sequences in row order, and their slots. None: the list is out of date.
        self._decoders: tuple[Sequence, ...] | None = ()
        # How many of them need more than their largest logit, need the host after every step
        # because of their masks, want log-probabilities, and may end before their last position.
        self._sampled = self._dynamic = self._with_logprobs = self._may_stop = 0
        self._slots = np.zeros(0, dtype=np.int32)
        # Digests of blocks that prefilling sequences will publish.
        self._computing: set[bytes] = set()

    # Joining and leaving.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state, and free its slot and KV blocks."""
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        else:
            self._give_back(sequence)
        sequence.state = State.FINISHED

    def _give_back(self, sequence: Sequence) -> None:
        if sequence.state is State.PREFILLING:
            del self._prefilling[sequence]
            self._computing.difference_update(sequence.digests)
        else:
            # The KV blocks of its output. The last token's keys and values are not computed.
            self._publish(sequence, len(sequence.prompt), sequence.num_tokens - 1)
        if sequence.state is State.DECODING:
            self._leave(sequence)
        del self.running[sequence]
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_planned = 0

    def _join(self, sequence: Sequence) -> None:
        """Add a sequence to those that decode."""
        self._decoding[sequence] = None
        self._count(sequence, 1)

    def _leave(self, sequence: Sequence) -> None:
        """Remove a sequence from those that decode."""
        del self._decoding[sequence]
        self._count(sequence, -1)

    def _count(self, sequence: Sequence, change: int) -> None:
        self._decoders = None
        self._sampled += change * sequence.sampled
        self._dynamic += change * sequence.dynamic
        self._with_logprobs += change * sequence.with_logprobs
        self._may_stop += change * sequence.may_stop

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue; its keys and values are computed again.

        Tokens that a running launch chooses for it still arrive: ``expected`` counts them.
        """
        if sequence.state is State.DECODING:
            sequence.expected = int(self._position[sequence.slot]) + 1
        self._give_back(sequence)
        sequence.state = State.WAITING
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def postpone(self, sequence: Sequence) -> None:
        """Put a sequence back at the head of the queue and undo its admission.

        The plan that admitted it must not have been executed.
        """
        self._give_back(sequence)
        sequence.state = State.WAITING
        if not sequence.output:
            sequence.request.times.admitted = 0.0
        self.waiting.appendleft(sequence)

    def borrow(self, tokens: int) -> tuple[int, list[int]]:
        """Take a slot and KV blocks for ``tokens`` tokens outside of plans; preempts sequences.

        No launch may be running. ``return_borrowed`` gives slot and blocks back.
        """
        count = self.blocks.blocks_for(tokens)
        while not self._free_slots or self.blocks.num_free < count:
            self._preempt(next(reversed(self.running)))
        return self._free_slots.pop(), [self.blocks.allocate() for _ in range(count)]

    def forget_contents(self) -> None:
        """Forget the contents of all KV blocks, as after a fault. No sequence may be running."""
        self.blocks.forget_all()
        self._computing.clear()
        self.generation += 1
        for sequence in self.waiting:
            sequence.expected = 0

    def reset(self, waiting: Iterable[Sequence]) -> None:
        """Begin anew with these waiting sequences; all others and all KV blocks are forgotten.

        No launch may be running. For when nobody knows what an interrupt has left undone.
        """
        self._clear()
        self.blocks.reset()
        self.waiting.extend(waiting)
        self.forget_contents()

    def return_borrowed(self, slot: int, blocks: list[int]) -> None:
        """Free the slot and KV blocks that ``borrow`` returned."""
        self.blocks.release(blocks)
        self._free_slots.append(slot)

    # Planning.

    def plan(self) -> Plan | None:
        """The next launch, or None when nothing can run now."""
        if not (self._decoding or self._prefilling or self.waiting):
            return None
        plan = Plan(Step(self._rows[:0], self._rows[:0], self._rows[:0], 0), 1, (), self.generation)
        preemptions = self.preemptions
        self._plan_decode(plan)
        if self._prefilling or (self.waiting and self.preemptions == preemptions):
            self._plan_prefill(plan, admit=self.preemptions == preemptions)
        return plan if plan.step.num_rows else None

    def _plan_decode(self, plan: Plan) -> None:
        """Plan one row for every decoding sequence, and the KV blocks that it needs."""
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
        # Before those that need no further row leave.
        plan.with_logprobs, sampled = self._with_logprobs > 0, self._sampled > 0
        plan.needs_tokens = self._dynamic > 0
        following = positions + steps
        self._position[slots] = following
        last = following > self._last_row[slots]
        if last.any():
            for i in np.flatnonzero(last).tolist():
                self._drain(decoders[i])
        plan.samplers = decoders
        context = int(positions.max()) + 1
        rows = self._rows[: len(slots)]
        wants = plan.with_logprobs
        plan.step = Step(
            slots, positions, rows, context, sampled, distinct=True, wants_logits=wants
        )

    def _list_decoders(self) -> tuple[tuple[Sequence, ...], Ints]:
        if self._decoders is None:
            self._decoders = tuple(self._decoding)
            self._slots = np.array([s.slot for s in self._decoders], dtype=np.int32)
        return self._decoders, self._slots

    def _num_steps(self) -> int:
        """Steps of the next launch.

        Several only if no sequence can join or end during the launch, lack KV blocks, or need the
        host between two steps; fewer if they take long, because a request may come.
        """
        steps = self.steps_per_launch
        if steps == 1 or self._prefilling:
            return 1
        _, slots = self._list_decoders()
        need_host = self._dynamic or self._with_logprobs
        if need_host or (self.waiting and not self._is_full()):
            return 1
        position, last = self._position[slots], self._last_row[slots]
        steps = min(steps, int((last - position).min()) + 1)
        steps = self.pace.most_steps(len(slots), steps)
        size = self.blocks.block_size
        needed = -((self._capacity[slots] - position - steps) // size)
        return steps if int(needed.clip(0).sum()) <= self.blocks.num_free else 1

    def _is_full(self) -> bool:
        """Whether no sequence can join before one that decodes has reached its last position."""
        all_decode = len(self._decoding) == len(self.running)
        return all_decode and not (self._free_slots or self._may_stop)

    def _drain(self, sequence: Sequence) -> None:
        """Plan no further rows for a sequence; its last token is still to be collected."""
        self._leave(sequence)
        sequence.state = State.DRAINING

    def _grow(self, sequence: Sequence, tokens: int, plan: Plan) -> None:
        """Give a sequence KV blocks for ``tokens`` tokens; preempt the last admitted if needed."""
        while len(sequence.blocks) * self.blocks.block_size < tokens:
            if self.blocks.num_free == 0 and not self._make_room(sequence):
                return
            block = self.blocks.allocate()
            plan.new_blocks.append((sequence.slot, len(sequence.blocks), block))
            sequence.blocks.append(block)
        self._capacity[sequence.slot] = len(sequence.blocks) * self.blocks.block_size

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempt the sequence admitted last; False if ``sequence`` itself gets no block."""
        victim = next(s for s in reversed(self.running) if s.state is not State.DRAINING)
        if victim is not sequence:
            self._preempt(victim)
            return True
        if len(self.running) > 1:
            self._preempt(sequence)
            return False
        # The sequence holds the whole cache. If a running launch still chooses tokens for it, wait
        # for them: one of them may end it regularly.
        planned = int(self._position[sequence.slot]) + 1 - len(sequence.prompt)
        if planned > len(sequence.output):
            sequence.exhausted = self._cache_full(sequence, planned)
            sequence.max_output = planned
            self._drain(sequence)
        else:
            self._fail(sequence, self._cache_full(sequence, len(sequence.output)))
        return False

    def _cache_full(self, sequence: Sequence, tokens: int) -> str:
        """Why a sequence ends that has so many new tokens."""
        blocks = self.blocks
        return (
            f"the KV cache is full: {blocks.num_blocks} blocks of {blocks.block_size} tokens do not"
            f" hold the {len(sequence.prompt)} tokens of the prompt and more than"
            f" {tokens} new ones"
        )

    def _fail(self, sequence: Sequence, error: str) -> None:
        self.remove(sequence)
        self.failed.append((sequence, error))

    def _plan_prefill(self, plan: Plan, admit: bool) -> None:
        """Fill the rows that decoding leaves with chunks of prompts, in order of arrival."""
        step = plan.step
        sequences, positions = [step.row_sequence], [step.row_position]
        logit_rows, score_rows = [step.logit_row], []
        samplers = list(plan.samplers)
        rows, context = step.num_rows, step.context
        published: list[tuple[Sequence, int, int]] = []
        budget, logit_budget = self.max_num_batched_tokens, self.max_logit_rows - len(samplers)
        if rows > 0:
            budget = self.pace.most_rows(rows, budget)
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
                # The last row chooses the first token; a later step runs it.
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
        # Publish only after all rows are planned: prompts of one step must not share blocks that
        # the same step computes.
        for sequence, begin, end in published:
            self._publish(sequence, begin, end)
            if end == sequence.num_tokens:
                self._begin_decoding(sequence)
        if len(sequences) > 1:
            plan.samplers = tuple(samplers)
            plan.with_logprobs = any(s.with_logprobs for s in samplers)
            plan.needs_tokens = any(s.dynamic for s in samplers)
            # A step that chooses nothing runs by a program of its sequences' later steps.
            choosing = samplers or [sequence for sequence, _, _ in published]
            plan.step = Step(
                np.concatenate(sequences),
                np.concatenate(positions),
                np.concatenate(logit_rows + score_rows),
                context,
                any(s.sampled for s in choosing),
                # Every sequence has its decode row or one chunk.
                distinct=rows == step.num_rows + len(published),
                wants_logits=bool(plan.scored) or any(s.with_logprobs for s in choosing),
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
            self._join(sequence)

    def _admit(self, plan: Plan) -> Sequence | None:
        """Give the first waiting sequence that is not held a slot and KV blocks for all its tokens.

        None if that is not possible now.
        """
        blocks = self.blocks
        while self._free_slots:
            sequence = next((s for s in self.waiting if not self._is_held(s)), None)
            if sequence is None:
                return None
            if sequence.num_tokens < sequence.expected or sequence.must_wait:
                return None
            needed = blocks.blocks_for(sequence.num_tokens)
            if needed > blocks.num_blocks:
                self._fail(sequence, self._cache_full(sequence, len(sequence.output)))
                continue
            known = self._match(sequence)
            if known is None:
                return None
            reserve = self._watermark if self.running else 0
            if needed - len(known) + reserve > blocks.num_free - blocks.num_idle(known):
                return None
            self.waiting.remove(sequence)
            return self._seat(sequence, known, needed, plan)
        return None

    def _is_held(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence lets others pass, or waits for one that does."""
        first = sequence.request.sequences[0]
        return self.holds(sequence) or (sequence.must_wait and self.holds(first))

    def _match(self, sequence: Sequence) -> list[int] | None:
        """Cached KV blocks of the sequence's first tokens.

        None if another sequence is computing the next block: admission then waits for it.
        """
        blocks = self.blocks
        if not blocks.prefix_caching or sequence.scoring:
            return []
        # The last token must always be computed: sampling needs its logits.
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
        admission = Admission(
            sequence.slot, sequence.token_ids(), table, real, integer, request.restriction
        )
        plan.admissions.append(admission)
        plan.admitted.append(sequence)
        return sequence
