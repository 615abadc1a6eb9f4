"""An OpenAI-compatible server whose timing is known. The model's name says how it behaves."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Final

from aiohttp import web

FIRST_SECONDS: Final = 0.1
GAP_SECONDS: Final = 0.02
USAGE_SECONDS: Final = 0.1
WRITTEN: Final[list[float]] = []  # when the last steady answer's tokens were written
DONE: Final = b"data: [DONE]\n\n"

Write = Callable[[bytes], Awaitable[None]]
Body = dict[str, Any]


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def chunk(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    """A chunk of /v1/completions."""
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]})


def delta(finish: str | None = None, **fields: Any) -> bytes:
    """A chunk of /v1/chat/completions."""
    return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts})


async def steady(body: Body, write: Write) -> None:
    """The first token after 100 ms, then one every 20 ms, and a usage chunk 100 ms later."""
    count = body.get("max_tokens") or body["max_completion_tokens"]
    chat = "messages" in body
    WRITTEN.clear()
    await asyncio.sleep(FIRST_SECONDS)
    for i in range(count):
        if i:
            await asyncio.sleep(GAP_SECONDS)
        finish = "length" if i == count - 1 else None
        role = {"role": "assistant"} if i == 0 else {}
        WRITTEN.append(time.perf_counter())
        await write(delta(finish, content="a", **role) if chat else chunk("a", finish))
    await asyncio.sleep(USAGE_SECONDS)
    await write(usage(7, count))
    await write(DONE)


async def fast(body: Body, write: Write) -> None:
    await write(b"".join(chunk("a") for _ in range(3)))
    await write(chunk("a", "length") + usage(3, 4) + DONE)


async def no_usage(body: Body, write: Write) -> None:
    await write(b": a comment\n\n" + chunk("a") + chunk("b") + chunk("", "stop") + DONE)


async def empty_text(body: Body, write: Write) -> None:
    """Tokens without text are parts of characters, the last chunk is no token."""
    for text in ("", "", "ü"):
        await asyncio.sleep(GAP_SECONDS)
        await write(chunk(text))
    await write(chunk("", "stop") + DONE)


async def end_of_text(body: Body, write: Write) -> None:
    """The last token has no text and comes with the finish_reason."""
    await write(chunk("a"))
    await asyncio.sleep(GAP_SECONDS)
    await write(chunk("", "stop") + usage(3, 2) + DONE)


async def role_first(body: Body, write: Write) -> None:
    """The role at once, the first token after 100 ms."""
    await write(delta(role="assistant", content=""))
    await asyncio.sleep(FIRST_SECONDS)
    await write(delta(content="a") + delta("stop") + usage(5, 1) + DONE)


async def reasoning(body: Body, write: Write) -> None:
    await write(delta(reasoning_content="hm") + delta(content="a") + delta("stop") + DONE)


async def no_done(body: Body, write: Write) -> None:
    await write(chunk("a") + chunk("b", "length"))


async def no_end(body: Body, write: Write) -> None:
    await write(chunk("a") + chunk("b"))


async def no_token(body: Body, write: Write) -> None:
    await write(usage(3, 0) + DONE)


async def end_at_once(body: Body, write: Write) -> None:
    await write(chunk("", "stop") + DONE)


async def error_event(body: Body, write: Write) -> None:
    error = {"message": "worker 3 waits", "type": "server_error", "code": 500}
    await write(chunk("a") + event({"error": error}) + DONE)


async def not_json(body: Body, write: Write) -> None:
    await write(chunk("a") + b"data: {oops\n\n" + DONE)


async def strange(body: Body, write: Write) -> None:
    await write(event({"choices": ["a"], "usage": "many"}) + DONE)


async def split(body: Body, write: Write) -> None:
    """Bytes in pieces that end anywhere, carriage returns, and no newline at the end."""
    whole = (chunk("ü") + chunk("b", "length") + usage(9, 2) + DONE).replace(b"\n", b"\r\n")
    for i in range(0, len(whole), 7):
        await write(whole[: len(whole) - 4][i : i + 7])
        await asyncio.sleep(0.001)


async def hang(body: Body, write: Write) -> None:
    await write(chunk("a"))
    await asyncio.sleep(30)


async def cut(body: Body, write: Write) -> None:
    """Breaks the connection off in the middle."""
    await write(chunk("a"))
    await asyncio.sleep(GAP_SECONDS)
    raise ConnectionResetError


BEHAVIOURS: Final = {
    behaviour.__name__: behaviour
    for behaviour in (
        *(steady, fast, no_usage, empty_text, end_of_text, role_first, reasoning, no_done, no_end),
        *(no_token, end_at_once, error_event, not_json, strange, split, hang, cut),
    )
}
ERRORS: Final[dict[str, tuple[int, bytes]]] = {
    "full": (429, b'{"error": {"message": "The queue is full.", "type": "rate_limit"}}'),
    "fault": (500, b"Internal Server Error"),
    "flat": (422, b'{"error": "bad input", "error_type": "validation"}'),
    "detail": (400, b'{"detail": [{"msg": "max_tokens is missing"}]}'),
    "plain_json": (200, b'{"choices": []}'),
}


class FakeServer:
    """Serves in a thread. `bodies` are the requests that it got."""

    def __init__(self) -> None:
        self.bodies: list[Body] = []
        self.headers: list[Mapping[str, str]] = []
        self.models: list[str] = ["steady"]
        self.loading = 0
        self.most_at_once = 0
        self.url = ""
        self._at_once = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> FakeServer:
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        application = web.Application()
        application.router.add_get("/v1/models", self._models)
        application.router.add_post("/v1/completions", self._answer)
        application.router.add_post("/v1/chat/completions", self._answer)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        left = asyncio.all_tasks() - {asyncio.current_task()}  # answers that hang
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _models(self, request: web.Request) -> web.Response:
        if self.loading:
            self.loading -= 1
            return web.Response(status=503, body=b'{"error": {"message": "Loading the model."}}')
        return web.json_response({"object": "list", "data": [{"id": m} for m in self.models]})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(request.headers)
        model = body["model"]
        if model == "full_later":  # ready, and then too much
            model = "fast" if len(self.bodies) == 1 else "full"
        if model in ERRORS:
            status, text = ERRORS[model]
            return web.Response(status=status, body=text, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            await BEHAVIOURS[model](body, response.write)
        except ConnectionResetError:
            if request.transport is not None:
                request.transport.close()
        finally:
            self._at_once -= 1
        return response
