"""The settings of a server, chosen by its operator."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from megavm.server.hosts import check_pattern

MAX_BODY_BYTES: Final = 4 << 20
MAX_N: Final = 128
MAX_QUEUE: Final = 256
MAX_CONNECTIONS: Final = 8192
REQUEST_TIMEOUT: Final = 600.0
HEADER_TIMEOUT: Final = 60.0
SHUTDOWN_TIMEOUT: Final = 30.0
KEEP_ALIVE: Final = 75
_ORIGIN: Final = re.compile(r"[A-Za-z][\w+.-]*://[^\s/?#]+")  # as browsers send it


@dataclass(frozen=True)
class Settings:
    """Names, keys and limits of one server.

    Attributes:
        model_names: names under which clients may request the model; answers show the first.
        api_keys: a client must send one of them; if empty, every client is allowed.
        allowed_origins: other origins whose web pages may use the server ("*": all).
        allowed_hosts: names by which clients may reach the server (None: all), see hosts.py.
        max_body_bytes: largest body of a request.
        max_n: largest number of completions per prompt.
        max_queue: largest number of sequences that wait while the batch is full.
        max_connections: largest number of open connections.
        request_timeout: seconds that a request may take, including waiting.
        header_timeout: seconds until the headers of a request must be complete.
        shutdown_timeout: seconds that running requests get when the server shuts down.
        ssl_certfile: certificate (chain) for HTTPS; None: HTTP.
        ssl_keyfile: private key of the certificate; None: it is in the same file.
        tool_call_parser: name of the parser of tool calls (tools/parsers.py); None: the one that
            the model's chat template asks for.
        log_prompts: whether prompts are written to the log.

    Raises:
        ValueError: there is no name, a key is empty, a host or an origin is not one, a certificate
            is missing, or a limit is out of range.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    max_n: int = MAX_N
    max_queue: int = MAX_QUEUE
    max_connections: int = MAX_CONNECTIONS
    request_timeout: float = REQUEST_TIMEOUT
    header_timeout: float = HEADER_TIMEOUT
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    tool_call_parser: str | None = None
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("the model that is served needs a name")
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        for pattern in self.allowed_hosts or ():
            check_pattern(pattern)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise ValueError(f"the key {self.ssl_keyfile} needs a certificate: give --ssl-certfile")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"the origin {origin!r} must be * or scheme://host, maybe with a port, such as"
                    " https://example.org"
                )
        for name, least in (
            ("max_body_bytes", 1),
            ("max_n", 1),
            ("max_queue", 0),
            ("max_connections", 1),
            ("shutdown_timeout", 0),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        for name in ("request_timeout", "header_timeout"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
