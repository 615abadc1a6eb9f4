"""LoadGate: no program is loaded while a launch waits for the host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

# Longer than a launch waits for anything (CudaMachine.timeout).
MOST_SECONDS = 30.0


class LoadGate:
    """Keeps loads of programs and launches that wait for the host apart.

    To load a kernel the driver may wait until the kernels that run have ended, and keeps the copies
    of all threads waiting meanwhile: on an H200, 1.3 s behind a kernel of 1.5. A kernel that waits
    for such a copy would end with a fault.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads = 0  # that run, or wait for a launch
        self._awaits = False  # whether a launch waits for the host

    def hold(self) -> bool:
        """Keep loads from beginning; False if one has begun or waits."""
        with self._changed:
            if self._loads:
                return False
            self._awaits = True
            return True

    def release(self) -> None:
        """Let loads begin: the launch has what it waited for."""
        with self._changed:
            self._awaits = False
            self._changed.notify_all()

    @contextlib.contextmanager
    def load(self) -> Iterator[None]:
        """Wait for the launch that waits for the host, and let no other one begin until the end."""
        with self._changed:
            self._loads += 1
        try:
            with self._changed:
                # A launch that an interrupt has lost ends by its own limit.
                self._changed.wait_for(lambda: not self._awaits, MOST_SECONDS)
            yield
        finally:
            with self._changed:
                self._loads -= 1
