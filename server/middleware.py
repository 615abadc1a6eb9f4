"""Middleware for every request: request id, host, API key, limit of the body, log line."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Final

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megavm.server.auth import ApiKeys
from megavm.server.errors import (
    ApiError,
    ambiguous_length,
    fault,
    note_error,
    shorten,
    timed_out,
    too_large,
    unauthorized,
    unknown_host,
)
from megavm.server.hosts import AllowedHosts
from megavm.server.ids import new_id
from megavm.server.logs import NOTES, log, logger
from megavm.server.service import Service
from megavm.server.sse import ClientDisconnected

REQUEST_ID: Final = "x-request-id"
_GOOD_ID: Final = re.compile(r"[!-~]{1,128}")
_GUARDED: Final = ("/v1/", "/tokenize", "/detokenize")
_CLIENT_LEFT: Final = 499  # in the log, as in nginx: the client left before the answer
_PROBES: Final = {"/health", "/ready", "/ping", "/metrics"}


class Gate:
    """Wraps an ASGI application; turns every exception into an answer with an error object.

    `posts`: routes by path whose endpoints take a request and nothing else. A POST request calls
    them without the application, whose layers take a fifth of the interpreter's time for a request.
    """

    def __init__(self, app: ASGIApp, service: Service, posts: Mapping[str, APIRoute]) -> None:
        self._app = app
        self._service = service
        self._posts = posts
        self._keys = ApiKeys(service.settings.api_keys)
        self._hosts = AllowedHosts(service.settings.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, headers = time.perf_counter(), Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else new_id()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        scope[NOTES] = {}
        try:
            await self._answer(scope, headers, receive, send_with_id)
        except (ClientDisconnect, ClientDisconnected):
            status = status or _CLIENT_LEFT
        except Exception as error:
            answer = error if isinstance(error, ApiError) else fault()
            if not isinstance(error, ApiError):
                logger.exception("a request failed")
            note_error(scope, answer)
            if not status:
                await answer.response(scope)(scope, receive, send_with_id)
        finally:
            self._log(scope, request_id, status, time.perf_counter() - began)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        host = headers.get("host", "")
        if not self._hosts.allow(host):
            raise unknown_host(host)
        if "content-length" in headers and "transfer-encoding" in headers:
            raise ambiguous_length()
        if not scope["path"].startswith(_GUARDED):
            await self._app(scope, receive, send)
            return
        names = ("authorization", "x-api-key")  # OpenAI's clients send one, Anthropic's the other
        if not self._keys.allow(*(headers.get(name, "").encode("latin-1") for name in names)):
            raise unauthorized()
        self._service.enter()
        try:
            receive = self._limit(headers, receive)
            route = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
            if route is None:
                await self._app(scope, receive, send)
            else:
                scope["route"] = route
                response = await route.endpoint(Request(scope, receive))
                await response(scope, receive, send)
        finally:
            self._service.leave()

    def _limit(self, headers: Headers, receive: Receive) -> Receive:
        """Wrap `receive`: it raises ApiError when the body is too large or arrives too slowly."""
        settings = self._service.settings
        limit, read, seconds = settings.max_body_bytes, 0, settings.request_timeout
        deadline: float | None = asyncio.get_running_loop().time() + seconds
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large(limit)

        async def limited() -> Message:
            nonlocal read, deadline
            if deadline is None:
                return await receive()
            try:
                message = await self._service.read(receive, deadline)
            except TimeoutError as error:
                raise timed_out(seconds) from error
            read += len(message.get("body", b""))
            if read > limit:
                raise too_large(limit)
            if not message.get("more_body"):
                deadline = None  # the body is complete; only a disconnect can follow
            return message

        return limited

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        path = scope["path"]
        route = getattr(scope.get("route"), "path", "other")
        self._service.metrics.count_answer(route, status)
        notes: dict[str, Any] = scope[NOTES]
        log(
            logging.DEBUG if path in _PROBES else logging.INFO,
            "request",
            id=request_id,
            client=_address(scope),
            method=scope["method"],
            path=shorten(path),
            status=status,
            seconds=seconds,
            **notes,
        )


def _address(scope: Scope) -> str | None:
    """The client's address; without a port if a proxy has named the client."""
    host, port = scope.get("client") or (None, 0)
    if host is None or not port:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
