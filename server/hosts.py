"""Host names by which clients may reach the server: the defence against DNS rebinding.

A web page can let a name of its own point to 127.0.0.1, and then its scripts may use a server there
as if it were the page's. The browser still sends that name in the `Host` header.

starlette's TrustedHostMiddleware does not fit: its answer is not OpenAI's error object and is not
logged, and it cannot allow all IP addresses, which no page can rebind.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
_PATTERN: Final = re.compile(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", re.ASCII)


class AllowedHosts:
    """The names in the `Host` header that are answered; None: all.

    *.example.com are all names that end with .example.com, * are all names. localhost and IP
    addresses are always allowed.
    """

    def __init__(self, patterns: Iterable[str] | None) -> None:
        chosen = {"*"} if patterns is None else {pattern.lower() for pattern in patterns}
        self._any = "*" in chosen
        self._names = {"localhost", *(p for p in chosen if not p.startswith("*"))}
        self._endings = (".localhost", *(p[1:] for p in chosen if p.startswith("*.")))

    def allow(self, host: str) -> bool:
        """Whether a `Host` header is answered; "" if there is none, which no browser sends."""
        if self._any or not host:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = found[1].lower().removesuffix(".")
        return name in self._names or name.endswith(self._endings) or is_address(name)


def check_pattern(pattern: str) -> None:
    """Raise ValueError if `pattern` is not one that AllowedHosts takes."""
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(
            f"an allowed host must be a name such as example.com or *.example.com, not {pattern!r}"
        )


def is_address(name: str) -> bool:
    """Whether a host is an IP address, not a name."""
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
