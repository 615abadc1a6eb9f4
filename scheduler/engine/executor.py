"""Executes plans: writes them to memory, starts their launches, and reads what these chose."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from megavm.instructions.sample import Integer
from megavm.scheduler.engine.counters import EngineCounters
from megavm.scheduler.engine.planner import Planner
from megavm.scheduler.engine.slots import Slots
from megavm.scheduler.engine.step import Launch, MasksNeeded, Plan, StepRunner


class PlanExecutor:
    """Executes the plans of an engine in their order, at most one behind the one in progress.

    One thread must make all calls of its methods; it need not be that of the engine, and may change
    while no plan is pending there.

    Attributes:

    - ``fault``: what a launch has failed with, until the engine has collected it.
    - ``in_progress``: the last plan, until it has ended.
    """

    def __init__(self, runner: StepRunner, planner: Planner, counters: EngineCounters) -> None:
        self.fault: BaseException | None = None
        self.in_progress: Plan | None = None
        self._runner = runner
        self._planner = planner
        self._counters = counters
        self._slots = Slots(runner)
        self._last_end = 0.0  # when the last step ended, by time.perf_counter
        # Before the first step.
        self._machine_seconds, self._late_launches = runner.machine_seconds, runner.late_launches

    def execute(self, plan: Plan) -> None:
        """Write ``plan`` to memory, run it, and store the results in the plan.

        Does not raise.
        """
        if self.begin(plan):
            self.end(plan)

    def forget(self) -> None:
        """Forget the plan in progress, which has ended, and what has failed."""
        self.fault = self.in_progress = None

    def can_begin(self, plan: Plan, *, ending: bool = False) -> bool:
        """Whether ``begin`` waits neither for the plan in progress nor for a program.

        ``ending``: the plan in progress is ended at once then.
        """
        if self.in_progress is not None:
            return self._can_queue(plan, self.in_progress, ending)
        return self._runner.can_queue(plan.step, plan.steps)

    def begin(
        self,
        plan: Plan,
        settle: Callable[[], None] = lambda: None,
        started: Callable[[], None] | None = None,
    ) -> bool:
        """Write ``plan`` to memory and start it; whether ``end`` must be called to complete it.

        The plan before it may be in progress. If this one cannot run behind it, ``settle`` is
        called, which must ``end`` that one. ``started``: see ``StepRunner.run``. Does not raise.

        A plan whose masks depend on the one in progress needs them soon: ``end`` that one.
        """
        if self.in_progress is not None and not self._can_queue(plan, self.in_progress, True):
            self._settle(settle)
        if self.fault is not None or plan.generation != self._planner.generation:
            return False  # the launch before it failed, and this one needs its results
        try:
            if plan.admissions and (running := self.in_progress) is not None:
                # Its further choices in these slots belong to sequences that have ended.
                if running.gone is None:
                    running.gone = np.zeros_like(self._slots.ended)
                running.gone[[admission.slot for admission in plan.admissions]] = True
            self._slots.write(plan)
            plan.drop(self._slots.ended)
            # Masks that depend on the tokens of the plan in progress come when it has ended.
            plan.step.awaits_masks = self.in_progress is not None and plan.needs_tokens
            if plan.needs_tokens and not plan.step.awaits_masks:
                self._slots.write_masks(plan)
            plan.started = time.perf_counter()
            if plan.step.num_rows:
                plan.launch = self._start(plan, settle, started)
            if plan.launch is None:
                settle()
                if self.fault is None:
                    self._complete(plan, plan.step.num_rows, plan.started)
            else:
                self.in_progress = plan
                self._slots.expect(plan)
        except BaseException as error:
            settle()
            self._fail(plan, error)
        return plan.launch is not None

    def _start(
        self, plan: Plan, settle: Callable[[], None], started: Callable[[], None] | None
    ) -> Launch | None:
        try:
            return self._runner.start(plan.step, plan.steps, started)
        except MasksNeeded:
            # Its rows have become fewer, and it is another program's now.
            self._settle(settle)
        plan.step.awaits_masks = False
        if self.fault is not None:
            return None
        plan.drop(self._slots.ended)
        if not plan.step.num_rows:
            return None
        self._slots.write_masks(plan)
        return self._runner.start(plan.step, plan.steps, started)

    def _settle(self, settle: Callable[[], None]) -> None:
        """End the plan in progress; ``settle`` may have done so (``begin``)."""
        settle()
        if self.in_progress is not None:
            self.end(self.in_progress)

    def end(self, plan: Plan) -> None:
        """Wait for a plan that has begun, and store the results in it. Does not raise.

        Does nothing if ``begin`` of the next plan has ended it.
        """
        launch = plan.launch
        if launch is None:
            return
        if self.in_progress is plan:
            self.in_progress = None
        try:
            if self.fault is not None or plan.generation != self._planner.generation:
                launch.cancel()
                return
            launch.finish(plan.gone)
            rows = plan.step.num_rows
            if plan.gone is not None:
                plan.drop(plan.gone)
            self._complete(plan, rows, max(plan.started, self._last_end))
        except BaseException as error:
            self._fail(plan, error)
        finally:
            plan.launch = None
            self._give_masks()

    def _give_masks(self) -> None:
        """Write the masks of the plan in progress if it awaits them: the one before has ended."""
        plan = self.in_progress
        if plan is None or not plan.step.awaits_masks:
            return
        try:
            if self.fault is None and plan.generation == self._planner.generation:
                self._slots.write_masks(plan)
        except BaseException as error:
            self._fail(plan, error)
        try:
            self._runner.give_masks()
        except BaseException as error:
            self._fail(plan, error)

    def _complete(self, plan: Plan, rows: int, begin: float) -> None:
        """Read the results of a plan of ``rows`` rows that has run since ``begin``."""
        if rows:
            self._last_end = time.perf_counter()
        before = self._counters.run_seconds
        self._counters.run_seconds = self._runner.machine_seconds - self._machine_seconds
        machine = self._counters.run_seconds - before
        self._counters.late_launches = self._runner.late_launches - self._late_launches
        if rows:
            # What the machine took: a launch ends for the host when it has begun the next one.
            self._planner.pace.note(rows, machine / plan.steps)
            self._planner.pace.note_launch(self._last_end - begin, machine)
        self._slots.read(plan)

    def _fail(self, plan: Plan, error: BaseException) -> None:
        # ``collect`` fails the requests, and raises errors that are no fault of the machine, such
        # as Ctrl-C.
        if self.fault is None:
            plan.error = self.fault = error

    def _can_queue(self, plan: Plan, running: Plan, ending: bool) -> bool:
        """Whether a plan may start before the tokens of the one in progress are known.

        Rows of sequences that end there are computed for nothing then. ``ending``: see
        ``can_begin``.
        """
        if self.fault is not None or running.generation != self._planner.generation:
            return False
        if any(p.with_logprobs or p.scored for p in (running, plan)):
            return False  # there is one tensor of logits
        if plan.needs_tokens and not (ending and self._runner.can_await_masks):
            return False
        if plan.steps > 1 and plan.step.num_rows == 1:
            # It may end, and a request that comes then would wait for several steps of nothing.
            slot = plan.step.row_sequence[0]
            if self._runner.sampling_integer[slot, Integer.NUM_STOP]:
                return False
        return self._runner.can_queue(plan.step, plan.steps)
