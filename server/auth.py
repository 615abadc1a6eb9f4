"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """The accepted API keys; if there are none, every client is allowed.

    Keys are compared by their SHA-256, in constant time.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def allow(self, authorization: bytes) -> bool:
        """Whether the `Authorization` header (b"" if absent) holds an accepted key."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        shown = _digest(key.strip())
        known = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(known)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
