"""Ids of requests and of what answers hold."""

from __future__ import annotations

import random

_random = random.Random()


def new_id() -> str:
    """32 random hexadecimal digits, like those of a UUID, which nobody may rely on to be secret.

    Reading the system's randomness instead, as `uuid4` does, releases the GIL: with the engine's
    thread at work the event loop then waits for it, at every request.
    """
    return f"{_random.getrandbits(128):032x}"
