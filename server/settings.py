"""The settings of a server, chosen by its operator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_BODY_BYTES: Final = 4 << 20
MAX_N: Final = 128
MAX_QUEUE: Final = 256
REQUEST_TIMEOUT: Final = 600.0
SHUTDOWN_TIMEOUT: Final = 30.0
KEEP_ALIVE: Final = 75


@dataclass(frozen=True)
class Settings:
    """Names, keys and limits of one server.

    Attributes:
        model_names: names under which clients may request the model; answers show the first.
        api_keys: a client must send one of them; if empty, every client is allowed.
        allowed_origins: other origins whose web pages may use the server ("*": all).
        max_body_bytes: largest body of a request.
        max_n: largest number of completions per prompt.
        max_queue: largest number of sequences that wait while the batch is full.
        request_timeout: seconds that a request may take, including waiting.
        shutdown_timeout: seconds that running requests get when the server shuts down.
        log_prompts: whether prompts are written to the log.

    Raises:
        ValueError: there is no name, a key is empty, or a limit is out of range.
    """

    model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = MAX_BODY_BYTES
    max_n: int = MAX_N
    max_queue: int = MAX_QUEUE
    request_timeout: float = REQUEST_TIMEOUT
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not self.model_names or not all(self.model_names):
            raise ValueError("the model that is served needs a name")
        if not all(self.api_keys):
            raise ValueError("an API key must not be empty")
        for name, least in (
            ("max_body_bytes", 1),
            ("max_n", 1),
            ("max_queue", 0),
            ("shutdown_timeout", 0),
        ):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not self.request_timeout > 0:
            raise ValueError(f"request_timeout must be positive, not {self.request_timeout}")
