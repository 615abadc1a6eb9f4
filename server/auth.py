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

    def allow(self, authorization: bytes, api_key: bytes = b"") -> bool:
        """Whether an accepted key is in the `Authorization` or the `x-api-key` header (b"" if
        absent)."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(b" ")
        bearer = key.strip() if scheme.lower() == b"bearer" else b""
        return any([self._knows(bearer), self._knows(api_key.strip())])

    def _knows(self, key: bytes) -> bool:
        shown = _digest(key)
        known = [hmac.compare_digest(shown, digest) for digest in self._digests]
        return bool(key) and any(known)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
