"""One request to an OpenAI-compatible server, and the arrival time of each token."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from megavm.loadgen.workload import Prompt

MAX_EXAMPLE: Final = 300  # characters of a server's answer in an error message
_MODELS_TIMEOUT: Final = 10  # seconds
_PATHS: Final = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_TEXT_FIELDS: Final = ("content", "reasoning_content", "reasoning")


@dataclass(frozen=True)
class Target:
    """The server, and the fields that all requests share. `timeout`: seconds for one request."""

    base_url: str
    model: str
    endpoint: str = "completions"
    api_key: str | None = None
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0

    @property
    def url(self) -> str:
        return self.base_url + _PATHS[self.endpoint]

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, prompt: Prompt) -> bytes:
        """The JSON body of a request with `prompt`."""
        value: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.endpoint == "chat":
            value["messages"] = [{"role": "user", "content": prompt.content}]
            value["max_completion_tokens"] = prompt.output_tokens
        else:
            value["prompt"] = prompt.content
            value["max_tokens"] = prompt.output_tokens
        if self.ignore_eos:
            value["ignore_eos"] = True
        return json.dumps({**value, **self.extra_body}).encode()


@dataclass
class Outcome:
    """The outcome of one request. Times are seconds of `time.perf_counter`.

    `failure` is None on success, else the HTTP status or the kind of failure in two words;
    `message` explains it in a sentence. `waited`: how much later than scheduled the request was
    sent. `gaps`: times between tokens.
    """

    started: float
    input_tokens: int = 0
    output_tokens: int = 0
    waited: float = 0.0
    first: float | None = None
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    failure: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float:
        """Seconds from sending the request to its first token."""
        return (self.first or self.started) - self.started

    @property
    def latency(self) -> float:
        """Seconds from sending the request to its last token."""
        return self.last - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    def fail(self, failure: str, message: str) -> None:
        self.failure = failure
        self.message = " ".join(message.split())[:MAX_EXAMPLE]


class _StreamError(Exception):
    """The stream reports an error or is malformed; the message explains it."""


class Lines:
    """Splits a stream of bytes into the payloads of its `data:` lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> list[bytes]:
        """The payloads that `block` completes, without comments and empty lines."""
        *lines, self._rest = (self._rest + block).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def end(self) -> list[bytes]:
        """The payload of a last line without a newline."""
        return self.feed(b"\n")


@dataclass(frozen=True)
class _Plain:
    """What is before and behind the text of an event with a token.

    Most events of a stream differ in their text only. To find that out takes a tenth of the time in
    which one is parsed, so that the client keeps up with more streams.
    """

    head: bytes
    tail: bytes

    @classmethod
    def of(cls, payload: bytes, choice: Mapping[str, Any]) -> _Plain | None:
        """Of an event whose choice has a token; None if its text cannot be found."""
        fields = choice.get("delta") or choice
        text = json.dumps(fields.get("text") or fields.get("content")).encode()
        head, *tail = payload.split(text)
        return cls(head + b'"', b'"' + tail[0]) if text[:1] == b'"' and len(tail) == 1 else None

    def like(self, payload: bytes) -> bool:
        """Whether an event certainly differs in its text only, which is plain ASCII."""
        head, tail = self.head, self.tail
        if not (payload.startswith(head) and payload.endswith(tail)):
            return False
        text = payload[len(head) : -len(tail)]
        return bool(text) and text.isascii() and b'"' not in text and b"\\" not in text


class _Answer:
    """Enters the events of one stream into an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._chunks = 0
        self._usage: Mapping[str, Any] = {}
        self._ended = False
        self._bare_end: float | None = None  # arrival of a chunk with only a finish_reason
        self._plain: _Plain | None = None

    def event(self, payload: bytes, now: float) -> None:
        """Enter one event that arrived at `now`. Raises _StreamError for an error event."""
        if self._plain is not None and self._plain.like(payload):
            self._token(now)
            return
        if payload == b"[DONE]":
            self._ended = True
            return
        try:
            event = json.loads(payload.decode())
        except ValueError as error:
            raise _StreamError(f"an event is not JSON: {payload[:80]!r}") from error
        if not isinstance(event, dict):
            raise _StreamError(f"an event is not an object: {payload[:80]!r}")
        if event.get("error"):
            raise _StreamError(error_sentence(event))
        if isinstance(usage := event.get("usage"), dict):
            self._usage = usage
        choices = event.get("choices")
        if not choices:
            return
        choice = choices[0] if isinstance(choices, list) else None
        if not isinstance(choice, dict) or not isinstance(choice.get("delta", {}), dict):
            raise _StreamError(f"an event has no choice that is an object: {payload[:80]!r}")
        ends = choice.get("finish_reason") is not None
        self._ended = self._ended or ends
        if carries_token(choice):
            self._token(now)
            if not (ends or event.get("usage")):
                self._plain = _Plain.of(payload, choice) or self._plain
        elif ends:
            self._bare_end = now

    def _token(self, now: float) -> None:
        outcome = self._outcome
        self._chunks += 1
        if outcome.first is None:
            outcome.first = now
        else:
            outcome.gaps.append(now - outcome.last)
        outcome.last = now

    def end(self) -> None:
        """Conclude the stream. Raises _StreamError when it is incomplete."""
        if not self._ended:
            raise _StreamError("the stream ended without a finish_reason and without [DONE]")
        # The chunk with only a finish_reason stands for the end-of-text token, which has no text.
        unseen = self._chunks == 0 or self._count("completion_tokens") == self._chunks + 1
        if self._bare_end is not None and unseen:
            self._token(self._bare_end)
        if self._outcome.first is None:
            raise _StreamError("the stream ended without a token")
        self._outcome.output_tokens = self._count("completion_tokens") or self._chunks
        self._outcome.input_tokens = self._count("prompt_tokens") or self._outcome.input_tokens

    def _count(self, name: str) -> int:
        count = self._usage.get(name)
        return count if isinstance(count, int) else 0


def carries_token(choice: Mapping[str, Any]) -> bool:
    """Whether a chunk's choice contains a token; its text may be empty (an incomplete character).

    Chunks with only a role or only a finish_reason contain none.
    """
    delta = choice.get("delta")
    fields = choice if delta is None else delta
    names = ("text",) if delta is None else _TEXT_FIELDS
    if any(fields.get(name) for name in names) or fields.get("tool_calls"):
        return True
    if choice.get("token_ids") or choice.get("logprobs"):
        return True
    has_text = any(fields.get(name) is not None for name in names)
    return has_text and "role" not in fields and choice.get("finish_reason") is None


def error_sentence(body: Any) -> str:
    """The message in an error body: OpenAI's object, FastAPI's, or a flat one."""
    if isinstance(body, dict):
        for name in ("error", "message", "detail"):
            if body.get(name):
                return error_sentence(body[name])
    return body if isinstance(body, str) else json.dumps(body)


async def send(
    session: aiohttp.ClientSession, target: Target, prompt: Prompt, *, waited: float = 0.0
) -> Outcome:
    """Send one request and read its stream to the end. Failures are in the outcome."""
    body = target.body(prompt)
    outcome = Outcome(time.perf_counter(), prompt.input_tokens, waited=waited)
    try:
        async with session.post(
            target.url,
            data=body,
            headers={"Content-Type": "application/json", **target.headers},
            timeout=aiohttp.ClientTimeout(total=target.timeout),
            allow_redirects=False,
        ) as response:
            if response.status != 200:
                outcome.fail(str(response.status), await _error(response))
            else:
                await _read(response, outcome)
    except _StreamError as error:
        outcome.fail("bad stream", str(error))
    except TimeoutError:
        outcome.fail("timeout", f"no whole answer within {target.timeout:g} s")
    except aiohttp.ClientConnectorError as error:
        outcome.fail("no connection", str(error))
    except (aiohttp.ClientError, OSError) as error:
        # The stream broke, or the connection was closed before an answer.
        outcome.fail("broken connection", f"{type(error).__name__}: {error}")
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    if "text/event-stream" not in response.headers.get("Content-Type", ""):
        kind = response.headers.get("Content-Type", "nothing")
        raise _StreamError(f"the answer is not a stream of events but {kind}")
    lines, answer = Lines(), _Answer(outcome)
    async for block in response.content.iter_any():
        now = time.perf_counter()
        for payload in lines.feed(block):
            answer.event(payload, now)
    for payload in lines.end():
        answer.event(payload, time.perf_counter())
    answer.end()


async def _error(response: aiohttp.ClientResponse) -> str:
    """The message of an error response."""
    text = (await response.read()).decode(errors="replace")
    try:
        return error_sentence(json.loads(text))
    except ValueError:
        return text.strip() or response.reason or "no reason given"


def open_session() -> aiohttp.ClientSession:
    """A session without a limit of connections; use and close it in one event loop."""
    # NOTE: servers close idle connections (uvicorn after 5 s). A request on a closing connection
    # would count as a failure of the server, so the client closes idle connections first.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4)
    return aiohttp.ClientSession(connector=connector)


async def find_model(session: aiohttp.ClientSession, base_url: str, api_key: str | None) -> str:
    """The id of the first model that the server lists.

    Raises:
        ConnectionError: the server is not ready (no connection, 429 or 503): try again.
        ValueError: the server lists no model, or refuses the request.
    """
    url = base_url + "/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        timeout = aiohttp.ClientTimeout(total=_MODELS_TIMEOUT)
        async with session.get(url, headers=headers, timeout=timeout) as response:
            if response.status in (429, 503):
                raise ConnectionError(await _error(response))
            if response.status != 200:
                raise ValueError(f"{url} answers {response.status}: {await _error(response)}")
            text = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ConnectionError(str(error) or f"no answer within {_MODELS_TIMEOUT} s") from error
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{url} answers with something that is not JSON") from error
    models = value.get("data") if isinstance(value, dict) else None
    if not models or not isinstance(models[0], dict) or not isinstance(models[0].get("id"), str):
        raise ValueError(f"{url} lists no model: give --model")
    model: str = models[0]["id"]
    return model
