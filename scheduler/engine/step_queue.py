"""Executes plans in the caller's thread, on machines that run a launch while the caller goes on."""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from megavm.scheduler.engine.step import Plan


class Executor(Protocol):
    """Executes plans (PlanExecutor). ``begin`` and ``end`` must not raise."""

    def can_begin(self, plan: Plan, *, ending: bool = False) -> bool:
        """Whether ``begin`` takes no longer than the host needs to describe a launch.

        It would if it waited for the plan in progress, or for a program. ``ending``: whether the
        plan in progress is ended at once then; only so may a launch begin that needs its tokens.
        """
        ...

    def begin(self, plan: Plan) -> bool:
        """Begin to execute a plan; whether ``end`` must be called to complete it."""
        ...

    def end(self, plan: Plan) -> None:
        """Complete a plan: wait for the machine and read the results."""
        ...


@dataclass(slots=True)
class _Queued:
    plan: Plan
    begun: bool | None  # the result of ``begin``; None: not called yet


class StepQueue:
    """Plans in the order in which they are executed, with the methods of StepThread.

    The machine runs launches while the caller works, so that another thread would bring nothing. It
    would cost: whenever one of the two has something for the other, this one must be woken and get
    Python's interpreter, which the threads of a server want too.

    A plan begins as soon as that takes no time (``Executor.can_begin``), at the latest when it is
    waited for. When ``wait`` returns a plan, the next one has begun if it could. The caller may
    take its time then: no launch waits for anything from the host.
    """

    def __init__(self) -> None:
        self._plans: deque[_Queued] = deque()
        self._executor: weakref.ref[Executor] | None = None

    @property
    def pending(self) -> int:
        """Number of plans submitted and not yet returned by ``wait``."""
        return len(self._plans)

    def submit(self, executor: Executor, plan: Plan, begun: bool | None = None) -> None:
        """Queue a plan. ``begun``: what ``begin`` has returned, if the caller has begun it."""
        self._executor = weakref.ref(executor)
        with self._interruptible():
            self._plans.append(_Queued(plan, begun))
            self._begin(executor)

    def wait(self) -> Plan:
        """Execute the oldest submitted plan to its end, and return it."""
        executor = None if self._executor is None else self._executor()
        assert executor is not None, "the executor waits for its plans"
        with self._interruptible():
            first = self._plans[0]
            if first.begun is None:
                first.begun = executor.begin(first.plan)
            self._begin(executor, ending=True)
            if first.begun:
                executor.end(first.plan)
            self._plans.popleft()
            self._begin(executor)
        return first.plan

    @contextlib.contextmanager
    def _interruptible(self) -> Iterator[None]:
        """After an interrupt, nobody knows what has begun: forget all plans."""
        try:
            yield
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Forget all plans; those in progress must be ended by the executor."""
        self._plans.clear()

    def close(self) -> None:
        """See ``clear``."""
        self.clear()

    def _begin(self, executor: Executor, *, ending: bool = False) -> None:
        """Begin all plans that can begin now."""
        for queued in self._plans:
            if queued.begun is None:
                if not executor.can_begin(queued.plan, ending=ending):
                    return
                queued.begun = executor.begin(queued.plan)
