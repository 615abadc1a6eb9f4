"""Programs by bucket: compiled once, on demand or ahead of it by a thread in the background."""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Final

from megavm.scheduler.llama.graph import Bucket
from megavm.vm.program import Program

Compile = Callable[[Bucket], Program]
Task = Callable[[], object]

# While a thread works in the background: Python's switch interval, after which a thread that waits
# for the interpreter gets it.
SWITCH_SECONDS: Final = 5e-5

logger = logging.getLogger("megavm")


class Programs:
    """The programs of a model. Any thread may call all methods.

    Two threads compile different buckets at the same time, but never the same one: the second waits
    for the first. Iteration yields the buckets whose programs are ready.

    The thread in the background ends when all is compiled, or when this object is closed or
    garbage-collected, once it has compiled the program that it is compiling. Python waits for that
    before it ends: a thread that it stops inside of native code can abort the process.
    """

    def __init__(self) -> None:
        self._known: dict[Bucket, Future[Program | None]] = {}
        self._lock = threading.Lock()  # guards _known
        self._work = _Work()
        self._end = weakref.finalize(self, self._work.close)

    def __iter__(self) -> Iterator[Bucket]:
        with self._lock:
            return iter([bucket for bucket, future in self._known.items() if future.done()])

    def add(self, bucket: Bucket, program: Program) -> None:
        """Keep a program that is compiled already."""
        future: Future[Program | None] = Future()
        future.set_result(program)
        with self._lock:
            self._known[bucket] = future

    def get(self, bucket: Bucket, compile: Compile) -> Program:
        """The program of a bucket; ``compile`` makes it unless it is ready or being compiled.

        Raises what ``compile`` raises. An error of the thread in the background is not raised:
        this thread then compiles the program itself.
        """
        while True:
            program = _get(self._known, self._lock, bucket, compile)
            if program is not None:
                return program

    def prepare(self, buckets: Iterable[Bucket], compile: Compile, *, last: bool = False) -> None:
        """Compile programs in the background, in this order and before those still queued.

        ``last``: behind those that are queued now or later.

        An error is logged. ``get`` then tries again, and the thread in the background once, if it
        is asked again.
        """
        known, lock = self._known, self._lock
        items = ((b, partial(_get, known, lock, b, compile)) for b in buckets)
        self._work.put(items, last=last)

    def is_coming(self, bucket: Bucket) -> bool:
        """Whether the thread in the background compiles this program, or will."""
        if not self._work.has(bucket):
            return False
        with self._lock:
            future = self._known.get(bucket)
        return future is None or not future.done()

    def close(self) -> None:
        """Drop what is queued. Does not wait for the program that is being compiled."""
        self._end()


def _get(
    known: dict[Bucket, Future[Program | None]],
    lock: threading.Lock,
    bucket: Bucket,
    compile: Compile,
) -> Program | None:
    """The program of a bucket; None when another thread failed to compile it."""
    with lock:
        future = known.get(bucket)
        mine = future is None
        if future is None:
            future = known[bucket] = Future()
    if not mine:
        return future.result()
    try:
        program = compile(bucket)
    except BaseException:
        with lock:
            del known[bucket]
        future.set_result(None)
        raise
    future.set_result(program)
    return program


class _Work:
    """The queue of the thread in the background. The thread refers to nothing else.

    It lives while there is work, and is no daemon: until Python 3.13, a daemon that takes the GIL
    when the interpreter has ended is unwound, and libraries like numpy take it in destructors,
    where that aborts the process.
    """

    def __init__(self) -> None:
        self._queue: dict[Bucket, Task] = {}
        self._current: Bucket | None = None  # taken from the queue, and not done
        self._asked: set[Bucket] = set()  # taken from the queue, and not to be tried again
        self._failed: set[Bucket] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, items: Iterable[tuple[Bucket, Task]], last: bool = False) -> None:
        with self._lock:
            new = {bucket: task for bucket, task in items if bucket not in self._asked}
            self._queue = {**self._queue, **new} if last else {**new, **self._queue}
            if self._queue and self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="megavm-programs")
                self._thread.start()

    def has(self, bucket: Bucket) -> bool:
        with self._lock:
            return not self._closed and (bucket in self._queue or bucket == self._current)

    def close(self) -> None:
        # Without the lock: a garbage collection may call this in a thread that holds it.
        self._closed = True

    def _run(self) -> None:
        main = threading.main_thread()
        while True:
            with self._lock:
                self._current = None
                if self._closed or not self._queue or not main.is_alive():
                    self._thread = None
                    return
                bucket = self._current = next(iter(self._queue))
                task = self._queue.pop(bucket)
                self._asked.add(bucket)
            try:
                with _POLITE:
                    task()
            except Exception:
                with self._lock:
                    if bucket not in self._failed:
                        self._asked.discard(bucket)
                    self._failed.add(bucket)
                logger.exception("the program of %s cannot be compiled ahead of its use", bucket)


class _Politeness:
    """While entered by any thread, others get the interpreter soon after they ask for it.

    There is one, as there is one switch interval.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_SECONDS))
            self._count += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


_POLITE: Final = _Politeness()
