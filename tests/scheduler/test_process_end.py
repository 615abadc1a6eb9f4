"""Python ends after the work of its threads: else native code in them can abort the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

WORK = """
import time
import numpy as np

def work():
    # Takes the GIL in a destructor, at the end of each call.
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        np.unique(np.arange(1000) % 100)
    print("worked")
"""

COMPILING = """
import threading
from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run.programs import Programs

programs, began = Programs(), threading.Event()

def compile(bucket):
    began.set()
    work()

programs.prepare([Bucket(rows, rows, 256) for rows in (1, 2)], compile)
began.wait()
"""

STEPPING = """
from megavm.scheduler.engine.step import Plan, Step
from megavm.scheduler.engine.step_thread import StepThread

class Executor:
    def begin(self, plan, settle, started):
        work()
        return False

    def end(self, plan):
        pass

nothing = np.zeros(0, dtype=np.int32)
thread, executor = StepThread(), Executor()
thread.submit(executor, Plan(Step(nothing, nothing, nothing, 0), 1, (), 0))
time.sleep(0.1)
"""


@pytest.mark.parametrize("begin", [COMPILING, STEPPING], ids=["compiling", "stepping"])
def test_a_process_ends_after_what_its_threads_are_doing(begin: str) -> None:
    done = subprocess.run([sys.executable, "-c", WORK + begin], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "worked\n"  # and not what is queued behind it
