"""Executes plans one after the other in a thread, so that the next can be made meanwhile."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

from megavm.scheduler.engine.step import Plan

Execute = Callable[[Plan], None]
Plans = queue.SimpleQueue[tuple[Execute, Plan] | None]


class StepThread:
    """One thread and the plans it has been given. Submitting and waiting is for one other thread.

    The thread refers to its owner only while it executes, and ends when this object is closed or
    dropped.
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
        """Plans submitted and not yet waited for."""
        return self._pending

    def submit(self, execute: Execute, plan: Plan) -> None:
        """Call ``execute``, which must not raise, with ``plan`` after those submitted before."""
        self._plans.put((execute, plan))
        self._pending += 1

    def wait(self) -> Plan:
        """The plan submitted first, once it has been executed."""
        plan = self._done.get()
        self._pending -= 1
        return plan

    def close(self) -> None:
        """Execute what is left and end the thread."""
        self._end()
        self._thread.join()


def _loop(plans: Plans, done: queue.SimpleQueue[Plan]) -> None:
    while (item := plans.get()) is not None:
        execute, plan = item
        execute(plan)
        done.put(plan)
        del item, execute, plan  # nothing may be kept alive while waiting
