"""API keys."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable


class ApiKeys:
    """The keys that a client may show; with none of them every client is let in.

    Keys are compared by their SHA-256, in a time that does not depend on them.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def allow(self, authorization: bytes) -> bool:
        """Whether the header `Authorization` (b"" without one) shows one of the keys."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        shown = _digest(key.strip())
        known = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return scheme.lower() == b"bearer" and any(known)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
