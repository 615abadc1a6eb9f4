"""A thread that executes plans in order, while the caller makes the next one."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from megavm.scheduler.engine.step import Plan

Execute = Callable[[Plan, Callable[[], None]], None]
Plans = queue.SimpleQueue[tuple[Execute, Plan] | None]


class StepThread:
    """One thread and its queue of plans. Only one other thread may submit and wait.

    A plan is returned once the machine runs the plan behind it, if there is one: the work of the
    waiting thread would otherwise delay that launch, as only one thread of Python runs at a time.

    The thread refers to its owner only while it executes a plan, and ends when this object is
    closed or garbage-collected.
    """

    def __init__(self) -> None:
        self._plans: Plans = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        self._pending = 0
        self._thread = threading.Thread(
            target=_loop, args=(self._plans, self._done), name="megavm-steps", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._plans.put, None)

    @property
    def pending(self) -> int:
        """Number of plans submitted and not yet returned by ``wait``."""
        return self._pending

    def submit(self, execute: Execute, plan: Plan) -> None:
        """Queue the call ``execute(plan, started)``, which must not raise.

        It may call ``started`` once the machine runs, or to say that this takes long.
        """
        self._plans.put((execute, plan))
        self._pending += 1

    def wait(self) -> Plan:
        """Wait for the oldest submitted plan to be executed, and return it."""
        plan = self._done.get()
        self._pending -= 1
        return plan

    def close(self) -> None:
        """Execute the queued plans and end the thread."""
        self._end()
        self._thread.join()


def _loop(plans: Plans, done: queue.SimpleQueue[Plan]) -> None:
    held: list[Plan] = []  # executed, but not returned before the next one runs

    def release() -> None:
        while held:
            done.put(held.pop())

    while True:
        if plans.empty():
            release()
        item = plans.get()
        if item is None:
            break
        execute, plan = item
        execute(plan, release)
        release()
        held.append(plan)
        del item, execute, plan  # keep neither the engine nor the plan alive while waiting
    release()
