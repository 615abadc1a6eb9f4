"""A compiler of programs that waits where a test says so, and steps that need them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.graph import Bucket
from megavm.vm.program import Program

PROGRAM = Program.build([], [], [[]])
SECONDS = 60.0  # after which a test has failed


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


class Slow:
    """A compiler that notes what it compiles, and waits for ``go_on`` where the test says so."""

    def __init__(self, *held: Bucket) -> None:
        self.held = held
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.compiled: list[Bucket] = []
        self.fails: set[str] = set()  # names of threads

    def __call__(self, bucket: Bucket) -> Program:
        self.compiled.append(bucket)
        if bucket in self.held:
            self.began.set()
            assert self.go_on.wait(SECONDS)
        if threading.current_thread().name in self.fails:
            raise ValueError(f"no program for {bucket.rows} rows")
        return PROGRAM


def ended() -> bool:
    return all(thread.name != "megavm-programs" for thread in threading.enumerate())


def step(rows: int) -> Step:
    """The first tokens of a prompt, and the logits of the last."""
    places = np.arange(rows, dtype=np.int32)
    return Step(np.zeros(rows, np.int32), places, places[-1:], rows)
