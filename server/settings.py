"""What the operator of a server decides."""

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
        model_names: what clients may call the model; the first is the one that answers show.
        api_keys: a client must show one of them; without any every client is let in.
        allowed_origins: web pages of other origins that may use the server ("*": all).
        max_body_bytes: of a request.
        max_n: completions of a prompt that one request may ask for.
        max_queue: sequences that may wait while as many run as the batch has room for.
        request_timeout: seconds that a request may take, waiting included.
        shutdown_timeout: seconds that running requests are given when the server is to end.
        log_prompts: whether prompts are written to the log.

    Raises:
        ValueError: there is no name, a key is empty, or a limit is not positive.
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
