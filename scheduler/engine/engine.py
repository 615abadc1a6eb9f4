"""The engine: requests in, tokens out, with continuous batching.

One step is three calls::

    plan = engine.plan()            choose rows, slots and KV blocks; touches no memory
    engine.executor.execute(plan)   write the plan to memory, run the machine (without the GIL)
    deltas = engine.collect(plan)   tokens to text, check stop conditions, free blocks

``step`` makes all three. With ``overlap`` it keeps one launch running and one queued behind it:
while the machine runs launch n, the host collects launch n - 1 and plans launch n + 1. This works
because sampled tokens stay in memory, where the next launch reads them; a plan depends only on
their number.

On a GPU, launch n + 1 begins behind launch n before the host has read the tokens of n, so the
machine does not wait for the host (``begin`` and ``end`` of PlanExecutor, the two halves of
``execute``). A row of n + 1 whose sequence has ended in n is then computed for nothing, and its
token is not read. Launches that need what n has chosen wait: see ``PlanExecutor._can_queue``. With
masks that depend on it, n + 1 begins right before the host waits for n, and gets them while it runs
(``Step.awaits_masks``).

On such a machine one thread does all of this (``StepQueue``). On one that keeps a thread busy while
it runs, plans are executed in another thread (``StepThread``), but for those that find it idle: the
caller begins them, and if no launch can follow, as with a prompt that chooses one token, also
completes them.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final

import numpy as np

from megavm.scheduler.engine._append import Appender
from megavm.scheduler.engine.blocks import BlockManager
from megavm.scheduler.engine.counters import EngineCounters
from megavm.scheduler.engine.executor import PlanExecutor
from megavm.scheduler.engine.logprobs import token_logprobs
from megavm.scheduler.engine.pace import StepPace
from megavm.scheduler.engine.planner import Planner
from megavm.scheduler.engine.prompt_limits import PromptLimits
from megavm.scheduler.engine.restriction import Restriction
from megavm.scheduler.engine.sequence import (
    Delta,
    Request,
    Sequence,
    State,
    TokenIds,
)
from megavm.scheduler.engine.step import Floats, Ints, Plan, Step, StepRunner
from megavm.scheduler.engine.step_queue import StepQueue
from megavm.scheduler.engine.step_thread import StepThread
from megavm.scheduler.engine.text import Decoder, TextStream
from megavm.vm.machine import MachineFault, MachineLost

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams

_REST_SECONDS: Final = 0.002  # a step sleeps so long if nothing can run
_APPENDER = Appender(Sequence, Delta, State.FINISHED)


class Engine:
    """Runs requests in continuous batches. All methods must be called by one thread.

    A fault of the machine ends the running requests; waiting requests run in later steps.
    ``last_fault`` is the cause of the last fault. When ``lost`` is set, the machine runs nothing
    any more and waiting requests have ended too.

    ``new_decoder`` makes the decoder of one sequence; without it deltas have no text and stop
    strings are refused. ``seed`` seeds the generator of seeds for requests without one.
    ``steps_per_launch``: most steps of a launch of pure decode; the host sees their tokens, one per
    step and sequence, after the launch. ``launch_limit``: seconds that such a launch should take if
    it has several, with few sequences and as far as StepPace knows: a request that comes waits for
    two launches.

    ``tpot_limit``: seconds that a step may take in which sequences decode. Chunks of prompts beside
    them are cut so that it does, as far as StepPace knows. None: prompts fill the step.

    Raises ValueError when ``steps_per_launch`` or a limit is not positive or the runner's sizes do
    not fit each other.
    """

    def __init__(
        self,
        runner: StepRunner,
        *,
        eos_token_ids: Many[int] = (),
        new_decoder: Callable[[Request], Decoder] | None = None,
        seed: int = 0,
        prefix_caching: bool = True,
        overlap: bool = True,
        steps_per_launch: int = 1,
        launch_limit: float | None = None,
        tpot_limit: float | None = None,
    ) -> None:
        if steps_per_launch < 1:
            raise ValueError(f"steps_per_launch is {steps_per_launch}, expected at least 1")
        self.runner = runner
        self.eos_token_ids = tuple(eos_token_ids)
        self.limits = PromptLimits(
            runner.max_model_len,
            runner.num_blocks,
            runner.block_size,
            runner.vocab_size,
            self.eos_token_ids,
            new_decoder is not None,
        )
        self.blocks = BlockManager(runner.num_blocks, runner.block_size, prefix_caching)
        self.planner = Planner(
            runner.max_num_seqs,
            runner.max_num_batched_tokens,
            runner.max_logit_rows,
            self.blocks,
            steps_per_launch,
            StepPace(tpot_limit, launch_limit),
            lambda sequence: runner.is_coming(
                sampled=sequence.sampled, wants_logits=sequence.wants_logits
            ),
        )
        self.counters = EngineCounters()
        self._new_decoder = new_decoder
        self._random = random.Random(seed)
        self._overlap = overlap
        self._steps: StepQueue | StepThread | None = None
        self._requests: dict[Hashable, Request] = {}
        self._next_id = 0
        self._ready: list[Delta] = []  # deltas that the next step returns
        self.last_fault = ""
        self.lost = False
        self._outstanding: deque[Plan] = deque()  # plans that are not collected yet
        self._recovering = False  # an interrupt came while ``_recover`` ran
        self.executor = PlanExecutor(runner, self.planner, self.counters)

    # Requests.

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has work to do or deltas to return."""
        return bool(
            self._ready or self._outstanding or self.planner.running or self.planner.waiting
        )

    @property
    def num_running(self) -> int:
        """Sequences that hold a slot."""
        return len(self.planner.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot or for KV blocks."""
        return len(self.planner.waiting)

    def add(
        self,
        prompt: TokenIds,
        params: SamplingParams,
        id: Hashable = None,
        restriction: Restriction | None = None,
    ) -> Request:
        """Queue a request; later steps return its deltas.

        ``restriction``: what ``params`` say about the tokens that may be chosen, compiled
        (megavm.restrictions). A grammar ends a sequence as soon as nothing may follow.

        Raises ValueError when it can never run, or when another request has the same id.
        """
        return self.queue(self.limits.validate(prompt, params), params, id, restriction)

    def queue(
        self,
        tokens: Ints,
        params: SamplingParams,
        id: Hashable = None,
        restriction: Restriction | None = None,
    ) -> Request:
        """``add`` for a prompt that ``limits.validate`` has returned for these parameters.

        Raises ValueError when another request has the same id.
        """
        if id is None:
            id, self._next_id = self._next_id, self._next_id + 1
        if id in self._requests:
            raise ValueError(f"a request with the id {id!r} is being worked on already")
        request = Request(id, tokens, params, restriction=restriction)
        seed = self._random.getrandbits(64) if params.seed is None else params.seed
        room = self.runner.max_model_len - len(tokens)
        max_output = room if params.max_tokens is None else min(params.max_tokens, room)
        digests: list[bytes] = []
        sequences = []
        for index in range(params.n):
            text = None
            if self._new_decoder is not None:
                decoder = self._new_decoder(request)
                stops, include = params.stop_strings, params.include_stop_str_in_output
                text = TextStream(decoder, stops, include)
            sequence = Sequence(
                request, index, seed, max_output, self.eos_token_ids, text, list(digests)
            )
            if index == 0 and self.blocks.prefix_caching:
                sequence.extend_digests(
                    self.blocks.block_size, len(tokens) // self.blocks.block_size
                )
                digests = sequence.digests
            sequences.append(sequence)
        request.sequences = tuple(sequences)
        try:
            self._requests[request.id] = request
            for sequence in sequences:
                self.planner.add(sequence)
        except BaseException:  # an interrupt: nobody will wait for it
            self._requests.pop(request.id, None)
            for sequence in self.planner.waiting.copy():
                if sequence.request is request:
                    self.planner.waiting.remove(sequence)
            raise
        return request

    def abort(self, id: Hashable) -> bool:
        """End a request now and free its slots and KV blocks; False if the id is not active.

        The next step returns its last deltas, with the finish reason "abort".
        """
        request = self._requests.get(id)
        if request is None:
            return False
        with self._interruptible():
            for sequence in request.unfinished:
                self._ready.append(self._end(sequence, sequence.finish("abort")))
        return True

    def _end(self, sequence: Sequence, delta: Delta) -> Delta:
        self.planner.remove(sequence)
        request = sequence.request
        if not request.unfinished:
            self._requests.pop(request.id, None)
        return delta

    # Steps.

    def step(self) -> list[Delta]:
        """Work until one launch has ended and return its deltas; [] if there is no work.

        With overlap the next launch is already running when this returns.
        """
        with self._interruptible():
            if not self._overlap:
                return self._plain_step()
            if not self._outstanding and (deltas := self._first_step()) is not None:
                return deltas
            self._launch()
            if self._steps is None or not self._steps.pending:
                return self._take_ready()
            self._ready = self.collect(self._steps.wait())
            self._launch()
            return self._take_ready()

    def _first_step(self) -> list[Delta] | None:
        """Begin a launch in this thread, as none is running: to wake a StepThread would delay it.

        If nothing can be planned behind it, end it as well and return its deltas, as ``step`` does.
        Else submit both, for ``step`` to go on, and return None.
        """
        plan = self.plan()
        if plan is None:
            return self._rest()
        begun = self.executor.begin(plan)
        following = self.plan()
        if following is not None:
            self._submit(plan, begun)
            self._submit(following)
            return None
        if begun:
            self.executor.end(plan)
        self._ready = self.collect(plan)
        self._launch()
        return self._take_ready()

    def _plain_step(self) -> list[Delta]:
        plan = self.plan()
        if plan is None:
            return self._rest()
        self.executor.execute(plan)
        return self.collect(plan)

    def _rest(self) -> list[Delta]:
        """What ``step`` returns if nothing can run now."""
        if self.planner.waiting and not self._ready:
            # All are held: the thread that compiles needs the interpreter more than the caller.
            time.sleep(_REST_SECONDS)
        return self._take_ready()

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """After an error inside of it, such as an interrupt, begin anew (``_recover``)."""
        try:
            if self._recovering:
                self._recover(KeyboardInterrupt())
            yield
        except BaseException as error:
            self._recover(error)
            raise

    def _recover(self, error: BaseException) -> None:
        """End what runs, and begin with empty slots and KV blocks.

        Nobody knows what the error has left undone, so nothing is undone: requests end unless their
        sequences only wait.
        """
        self._recovering = True
        if self._steps is not None:
            self._steps.clear()
        self._end_launches()
        self._outstanding.clear()
        lost, waiting, ending = self.lost or isinstance(error, MachineLost), [], []
        for request in self._requests.values():
            rest = request.unfinished
            if rest and not lost and all(sequence.holds_nothing for sequence in rest):
                waiting += rest
            else:
                ending.append((request, rest))
        if ending:
            self._note_fault(error)
        for request, rest in ending:
            for sequence in rest:
                self._ready.append(self._stopped(sequence))
                sequence.state = State.FINISHED
            del self._requests[request.id]
        self.planner.reset(waiting)
        self._recovering = False

    def _launch(self) -> None:
        """Keep one launch running and one queued behind it."""
        while len(self._outstanding) < 2:
            plan = self.plan()
            if plan is None:
                return
            self._submit(plan)

    def _submit(self, plan: Plan, begun: bool | None = None) -> None:
        if self._steps is None:
            self._steps = StepQueue() if self.runner.runs_behind else StepThread()
        self._steps.submit(self.executor, plan, begun)

    def _end_launches(self) -> None:
        """Wait for what runs; its results are not collected."""
        for plan in self._outstanding:
            if plan.launch is not None:
                self.executor.end(plan)
        self.executor.forget()

    def _take_ready(self) -> list[Delta]:
        ready, self._ready = self._ready, []
        return ready

    def plan(self) -> Plan | None:
        """Plan the next launch; None if nothing can run now.

        Launches are executed and collected in the order of their plans. At most one earlier plan
        may still be uncollected; raises RuntimeError when two are.
        """
        if len(self._outstanding) > 1:
            raise RuntimeError("two plans are not collected yet: collect the first")
        begin = time.perf_counter()
        plan = self.planner.plan()
        for sequence, error in self.planner.failed:
            self._ready.append(sequence.finish("error", error))
            if not sequence.request.unfinished:
                self._requests.pop(sequence.request.id, None)
        self.planner.failed.clear()
        if plan is not None:
            self._outstanding.append(plan)
        self.counters.plan_seconds += time.perf_counter() - begin
        return plan

    def collect(self, plan: Plan) -> list[Delta]:
        """Append the tokens of an executed plan to their sequences; free those that have ended.

        A fault of the machine ends every running request with an error; waiting requests stay
        queued unless the machine is lost. After the same cleanup, raises any other error that
        ``execute`` met.
        """
        begin = time.perf_counter()
        self._outstanding.popleft()
        ready = self._take_ready()
        if plan.error is not None:
            self._ready = ready
            self._clear_fault(plan.error)
            return self._take_ready()
        if plan.tokens is None or plan.stopped is None or plan.ended is None:
            return ready  # not executed, because the launch before it failed
        counters = self.counters
        counters.launches += 1
        counters.steps += plan.steps
        counters.rows += plan.step.num_rows * plan.steps
        failed, before = plan.failed, len(ready)
        rest = list(range(len(plan.samplers)))
        if not (plan.logits or plan.complete or failed):
            # Most tokens of a large batch are in the middle of their sequence.
            deltas, rest = _APPENDER.append_inside(plan.samplers, plan.tokens, plan.ended)
            ready += deltas
            counters.output_tokens += len(deltas) * plan.steps
            before = len(ready)
        for i in rest:
            sequence = plan.samplers[i]
            if sequence.state is State.FINISHED or (failed and sequence in failed):
                continue
            tokens, stopped = plan.tokens[i].tolist(), plan.stopped[i].tolist()
            logits = plan.logits.get(i) if plan.logits else None
            complete = bool(plan.complete) and sequence in plan.complete
            ready.append(self._extend(sequence, tokens, stopped, logits, complete))
        for sequence, cause in failed.items():
            if sequence.state is not State.FINISHED:
                ready.append(self._end(sequence, sequence.finish("error", cause)))
        counters.output_tokens += sum(len(delta.token_ids) for delta in ready[before:])
        self._score(plan)
        counters.collect_seconds += time.perf_counter() - begin
        return ready

    def _extend(
        self,
        sequence: Sequence,
        tokens: list[int],
        stopped: list[bool],
        logits: Floats | None,
        complete: bool,
    ) -> Delta:
        """Append the tokens that one launch chose for one sequence, up to the sequence's end.

        ``complete``: nothing may follow the (only) token.
        """
        if not sequence.output:
            self.counters.prompt_tokens += len(sequence.prompt)
        whole: Delta | None = None
        logprobs = None
        for token, stop in zip(tokens, stopped, strict=True):
            if logits is not None:
                logprobs = token_logprobs(logits, token, sequence.request.params.logprobs or 0)
            delta = sequence.append(token, stop, logprobs, complete)
            if whole is None:
                whole = delta
            else:
                whole.extend(delta)
            if delta.finish_reason is not None:
                self._end(sequence, whole)
                break
        assert whole is not None, "a launch has at least one step"
        return whole

    def _score(self, plan: Plan) -> None:
        """Log-probabilities of prompt tokens, each from the logits of the position before it."""
        row = len(plan.samplers)
        for sequence, begin, end in plan.scored:
            request = sequence.request
            prompt, count = request.prompt, request.params.prompt_logprobs or 0
            assert request.prompt_logprobs is not None, "only prompts that asked for it are scored"
            for position in range(begin + 1, end + 1):
                entry = token_logprobs(plan.logits[row], int(prompt[position]), count)
                request.prompt_logprobs[position] = entry
                row += 1

    def _clear_fault(self, error: BaseException) -> None:
        """After a failed launch: ``_end_running``, and raise what is no fault of the machine."""
        self._end_running(error)
        if not isinstance(error, MachineFault):
            raise error

    def _end_running(self, error: BaseException) -> None:
        """End the running requests and distrust all contents of memory."""
        self._note_fault(error)
        planner = self.planner
        # Sequences admitted by a plan behind the failed launch. That plan is never executed, so
        # they go back to the queue.
        unborn = {s for plan in self._outstanding for s in plan.admitted if s in planner.running}
        ending = dict.fromkeys(s.request for s in planner.running if s not in unborn)
        if self.lost:
            ending = dict.fromkeys(self._requests.values())
        for request in ending:
            for sequence in request.unfinished:
                self._ready.append(self._end(sequence, self._stopped(sequence)))
        for sequence in reversed(list(planner.running)):
            planner.postpone(sequence)
        planner.forget_contents()
        self.executor.fault = None

    def _note_fault(self, error: BaseException) -> None:
        self.counters.faults += 1
        self.last_fault = _cause(error)
        self.lost = self.lost or isinstance(error, MachineLost)

    def _stopped(self, sequence: Sequence) -> Delta:
        """The last delta of a sequence that the last fault ends."""
        return sequence.finish("error", f"the machine stopped: {self.last_fault}")

    # Logits of every position.

    def logits(self, token_ids: TokenIds) -> Floats:
        """Raw logits of every position of a text: float32 [n, vocabulary]. Samples no token.

        Waits for running launches; the next step returns their deltas. Raises ValueError when the
        text is empty, too long or holds an unknown token, and MachineFault when a step fails.
        """
        tokens = self.limits.check_tokens(token_ids)
        length, runner = len(tokens), self.runner
        room = min(runner.max_model_len, self.blocks.num_blocks * self.blocks.block_size)
        if length > room:
            raise ValueError(
                f"the text has {length} tokens; the context of {runner.max_model_len} and the KV"
                f" cache of {runner.num_blocks} blocks of {runner.block_size} hold {room}"
            )
        self.drain()
        result = np.empty((length, runner.vocab_size), dtype=np.float32)
        with self._interruptible():
            slot, held = self.planner.borrow(length)
            runner.write_tokens(slot, tokens)
            runner.write_blocks(slot, 0, np.array(held, dtype=np.int32))
            runner.sampling_integer[slot] = 0
            size = min(runner.max_logit_rows, runner.max_num_batched_tokens)
            for begin in range(0, length, size):
                end = min(begin + size, length)
                rows = np.arange(end - begin, dtype=np.int32)
                runner.run(Step(np.full_like(rows, slot), rows + begin, rows, end))
                result[begin:end] = runner.logits[: end - begin]
            self.planner.return_borrowed(slot, held)
        return result

    def drain(self) -> None:
        """Wait until no launch is running; the next step returns their deltas.

        Raises RuntimeError when a plan made by the caller is not collected.
        """
        with self._interruptible():
            while self._steps is not None and self._steps.pending:
                self._ready = self.collect(self._steps.wait())
        if self._outstanding:
            raise RuntimeError("a plan is not collected yet")

    def close(self) -> None:
        """Abort everything and end the thread. The engine cannot be used afterwards."""
        for id in list(self._requests):
            self.abort(id)
        if self._steps is not None:
            self._steps.close()
            self._steps = None
        self._end_launches()


def _cause(error: BaseException) -> str:
    """Why a launch failed, in the words for a client."""
    if isinstance(error, MachineFault):
        return error.cause
    if isinstance(error, KeyboardInterrupt):
        return "the run was interrupted"
    return f"{type(error).__name__}: {error}"
