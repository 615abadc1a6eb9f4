"""A lock for threads of which some take it again and again."""

from __future__ import annotations

import threading


class FairLock:
    """A re-entrant lock that a thread gets before those that ask for it later, itself included.

    A thread that takes `threading.RLock` again right after it has given it back mostly gets it, as
    one that waits must first wake up.

    Use it in a ``with`` statement.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._next = threading.Lock()  # held by the one thread that waits for `_lock`
        self._depth = 0  # how often the thread that holds it has entered

    def __enter__(self) -> None:
        if self._is_mine():
            self._depth += 1
            return
        try:
            with self._next:
                self._lock.acquire()
            self._depth = 1
        except BaseException:  # an interrupt, maybe when the thread had it already
            if self._is_mine():
                self._lock.release()
            raise

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._lock.release()

    def _is_mine(self) -> bool:
        return bool(self._lock._is_owned())  # type: ignore[attr-defined]
