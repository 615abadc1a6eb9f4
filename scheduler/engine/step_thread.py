"""A thread that executes plans in order, while the caller makes the next one.

For machines that keep a thread busy while they run. For others see step_queue.py.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from megavm.scheduler.engine.step import Plan


class Executor(Protocol):
    """Executes plans (Engine). Both methods must not raise."""

    def begin(self, plan: Plan, settle: Callable[[], None], started: Callable[[], None]) -> bool:
        """Begin to execute a plan; whether ``end`` must be called to complete it.

        The plan before it may still be in progress: ``settle`` completes that one. ``started`` says
        that the machine runs this plan, or that this takes long.
        """
        ...

    def end(self, plan: Plan) -> None:
        """Complete a plan: wait for the machine and read the results."""
        ...


class _Order(Enum):
    SETTLE = 1  # complete the plan in progress: none will come behind it
    END = 2


@dataclass(eq=False, slots=True)
class _Queued:
    executor: Executor | None  # while the plan is not executed
    plan: Plan
    begun: bool | None  # the result of ``begin``; None: not called yet
    returned: threading.Event = field(default_factory=threading.Event)  # whether ``wait`` may


# An event is set when all plans before it have been executed.
Plans = queue.SimpleQueue[_Queued | _Order | threading.Event]


class StepThread:
    """One thread and its queue of plans. Only one other thread may submit and wait.

    A plan that is still in progress after ``begin`` is completed when the next one has begun behind
    it. So the machine goes on to that one while this thread reads results and the other one uses
    them.

    A plan is returned once the machine runs the plan behind it, if there is one: the work of the
    waiting thread would otherwise delay that launch, as only one thread of Python runs at a time.

    The thread refers to its owner only while it executes a plan, and ends when this object is
    closed or garbage-collected, at the latest with the process.

    After an interrupt of ``submit`` or ``wait``, call ``clear``.
    """

    def __init__(self) -> None:
        self._plans: Plans = queue.SimpleQueue()
        self._submitted: deque[_Queued] = deque()  # not yet returned
        self._thread = threading.Thread(
            target=_loop, args=(self._plans,), name="megavm-steps", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._plans, self._thread)

    @property
    def pending(self) -> int:
        """Number of plans submitted and not yet returned by ``wait``."""
        return len(self._submitted)

    def submit(self, executor: Executor, plan: Plan, begun: bool | None = None) -> None:
        """Queue a plan.

        ``begun``: what ``begin`` has returned, if the caller has begun the plan. It may do so only
        while none is pending.
        """
        queued = _Queued(executor, plan, begun)
        self._plans.put(queued)
        self._submitted.append(queued)

    def wait(self) -> Plan:
        """Wait for the oldest submitted plan to be executed, and return it."""
        if len(self._submitted) < 2:
            self._plans.put(_Order.SETTLE)
        first = self._submitted[0]
        first.returned.wait()
        self._submitted.popleft()
        return first.plan

    def clear(self) -> None:
        """Execute the queued plans and forget them."""
        if self._thread.is_alive():
            executed = threading.Event()
            self._plans.put(executed)
            executed.wait()
        self._submitted.clear()

    def close(self) -> None:
        """Execute the queued plans and end the thread."""
        self._end()


def _end(plans: Plans, thread: threading.Thread) -> None:
    """End the thread. It must not be in native code when Python ends (see programs.py)."""
    plans.put(_Order.END)
    if thread is not threading.current_thread():  # which collects the garbage
        thread.join()


def _loop(plans: Plans) -> None:
    held: deque[_Queued] = deque()  # executed, but not returned before the next one runs
    running: list[tuple[weakref.ref[Executor], _Queued]] = []  # the plan in progress

    def settle() -> None:
        while running:
            owner, queued = running.pop()
            executor = owner()
            if executor is not None:
                executor.end(queued.plan)
            held.append(queued)

    def release() -> None:
        while held:
            held.popleft().returned.set()

    while True:
        if plans.empty():
            release()
        item = plans.get()
        if not isinstance(item, _Queued):
            settle()
            release()
            if isinstance(item, threading.Event):
                item.set()
            elif item is _Order.END:
                break
            continue
        executor, item.executor = item.executor, None
        assert executor is not None, "a plan is executed once"
        if item.begun is None:
            item.begun = executor.begin(item.plan, settle, release)
        settle()
        release()
        if item.begun:
            running.append((weakref.ref(executor), item))
        else:
            held.append(item)
        del item, executor  # keep neither the engine nor the plan alive while waiting
