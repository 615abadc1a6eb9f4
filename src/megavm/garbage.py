"""What is there already is left out of garbage collections while texts are generated."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_OBJECTS_BETWEEN_COLLECTIONS: Final = 10_000
_FEW: Final = 10_000  # Python 3.12 freezes 375 objects when it starts
_lock = threading.Lock()
_depth = 0
_froze = False


def is_frozen() -> bool:
    """Whether somebody has frozen the heap (`gc.freeze`)."""
    return gc.get_freeze_count() >= _FEW


def freeze_heap() -> None:
    """Leave the objects of a loaded model out of garbage collections for ever; collect rarely.

    Collections stop all threads, and an ended request leaves few objects in cycles. But 50,000
    objects take 25 ms, and the launch behind the running one covers 5.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Leave the objects that there are out of garbage collections, in all threads (`gc.freeze`).

    With torch loaded there are so many that a full collection takes 0.1 s, in which the engine
    stands still. Later objects are collected as ever. What the caller has frozen stays so, unless
    it is hardly more than what Python itself freezes (`is_frozen`).
    """
    global _depth, _froze
    with _lock:
        if _depth == 0:
            _froze = not is_frozen()
            if _froze:
                gc.freeze()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0 and _froze:
                gc.unfreeze()
