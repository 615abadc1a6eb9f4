"""Full garbage collections wait while texts are generated."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_NEVER: Final = 2**31 - 1

_lock = threading.Lock()
_depth = 0
_threshold = 0  # of full collections, before the first of those that hold them off


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Hold off full garbage collections, in all threads; young objects are still collected.

    A full one looks at every object, 0.1 s with torch loaded, and the engine stands still. Cycles
    that have become old remain until then.
    """
    global _depth, _threshold
    with _lock:
        if _depth == 0:
            young, middle, _threshold = gc.get_threshold()
            gc.set_threshold(young, middle, _NEVER)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                young, middle, _ = gc.get_threshold()
                gc.set_threshold(young, middle, _threshold)
