"""Errors: an HTTP status, and an object in OpenAI's format, or in Anthropic's for its paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from megavm.server.logs import note

RETRY_AFTER_SECONDS: Final = 1
_encode: Final = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
_MAX_SHOWN: Final = 300  # characters of a message that come from the client
_PIECE: Final = 4096  # items of a list that become JSON in one call
_ANTHROPIC_PATH: Final = "/v1/messages"
# Anthropic's "type" of an error by its status, for others that of 400 or of 500.
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer with a status other than 200.

    Attributes:
        status: the HTTP status.
        message: one sentence for the user of the client.
        kind: OpenAI's "type".
        param: the field of the request that caused the error, or None.
        code: machine-readable code, or None.
        headers: additional headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def anthropic_body(self) -> dict[str, Any]:
        """Anthropic's error object."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, default)
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def response(self, scope: Mapping[str, Any]) -> Response:
        """The error as the answer to a request (its ASGI scope)."""
        body = self.anthropic_body() if is_anthropic(scope) else self.body()
        return json_response(body, self.status, self.headers)


def is_anthropic(scope: Mapping[str, Any]) -> bool:
    """Whether a request is one to Anthropic's interface."""
    path = scope["path"]
    return bool(path == _ANTHROPIC_PATH or path.startswith(_ANTHROPIC_PATH + "/"))


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """A JSON response with `content`, see `to_json`."""
    return Response(to_json(content), status, headers, media_type="application/json")


def to_json(content: Any) -> str:
    """`content` as JSON. Raises ValueError for NaN and infinity, which must not occur here."""
    return _encode(content)


def list_to_json(items: Sequence[Any]) -> str:
    """A list as JSON, made in pieces: one call for a long list would block all other threads."""
    pieces = (to_json(items[i : i + _PIECE])[1:-1] for i in range(0, len(items), _PIECE))
    return f"[{','.join(pieces)}]"


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400: the request is invalid."""
    return ApiError(400, message, param=param)


def context_exceeded(
    context: int, prompt: int, completion: int, field: str, *, at_least: bool = False
) -> ApiError:
    """400: a prompt of `prompt` tokens in `field` leaves no room for a completion.

    Clients look for OpenAI's code and for its sentence, to shorten the prompt and ask again.
    `at_least`: the prompt has as many or more; nobody has counted them.
    """
    more = "at least " if at_least else ""
    return ApiError(
        400,
        f"This model's maximum context length is {context} tokens. However, you requested"
        f" {more}{prompt + completion} tokens ({more}{prompt} in the {field}, {completion} in the"
        " completion)."
        f" Please reduce the length of the {field} or completion.",
        param=field,
        code="context_length_exceeded",
    )


def unknown_model(name: str) -> ApiError:
    """404: the server does not serve this model."""
    return ApiError(
        404,
        f"The model `{shorten(name)}` does not exist.",
        param="model",
        code="model_not_found",
    )


def unauthorized() -> ApiError:
    """401: the API key is missing or wrong."""
    return ApiError(
        401,
        "The API key is missing or wrong: send it as `Authorization: Bearer KEY` or"
        " `x-api-key: KEY`.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_host(host: str) -> ApiError:
    """403: the `Host` header names a host that the server does not answer for."""
    return ApiError(
        403,
        f"The server does not answer for the host {shorten(host)!r}: use its IP address or"
        " localhost, or start it with --allowed-host NAME.",
        code="host_not_allowed",
    )


def ambiguous_length() -> ApiError:
    """400: two headers say where the body ends. The connection ends, as RFC 9112 asks."""
    return ApiError(
        400,
        "The request has both content-length and transfer-encoding.",
        headers={"connection": "close"},
    )


def too_large(limit: int) -> ApiError:
    """413: the body has more than `limit` bytes."""
    return ApiError(
        413,
        f"The body of the request is larger than the {limit} bytes that this server reads.",
        code="request_too_large",
    )


def queue_full(waiting: int, limit: int) -> ApiError:
    """429: no room for more waiting sequences."""
    return ApiError(
        429,
        f"The queue is full: {waiting} sequences are running or waiting, {limit} may.",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def unavailable(message: str, code: str) -> ApiError:
    """503: the server takes no requests now; clients should not retry at once."""
    return ApiError(
        503,
        message,
        kind="server_error",
        code=code,
        headers={"x-should-retry": "false", "retry-after": str(RETRY_AFTER_SECONDS)},
    )


def timed_out(seconds: float) -> ApiError:
    """408: the request took longer than the request timeout."""
    message = f"The request took longer than the {seconds:g} s that this server gives one."
    return too_late(message, "request_timeout")


def too_late(message: str, code: str) -> ApiError:
    """408: a time limit has passed; clients should not retry at once."""
    headers = {"x-should-retry": "false"}
    return ApiError(408, message, kind="timeout_error", code=code, headers=headers)


def headers_too_late(seconds: float) -> ApiError:
    """408: the headers of a request were not complete in time."""
    message = f"The headers of the request were not complete within {seconds:g} s."
    return too_late(message, "header_timeout")


def too_many_connections(limit: int) -> ApiError:
    """503: the server has as many connections as it takes."""
    return ApiError(
        503,
        f"The server has {limit} connections and takes no more.",
        kind="server_error",
        code="too_many_connections",
        headers={"retry-after": str(RETRY_AFTER_SECONDS)},
    )


def failed(message: str) -> ApiError:
    """500: the server failed."""
    return ApiError(500, message, kind="server_error", code="internal_error")


def fault() -> ApiError:
    """500 for an unexpected exception: details are only in the log."""
    return failed("The server has a fault; its log says which.")


def invalid_fields(error: ValidationError | RequestValidationError) -> ApiError:
    """400 for the first invalid field of a body."""
    first = error.errors()[0]
    place = shorten(".".join(str(part) for part in first["loc"] if part != "body"))
    message = shorten(f"{first['msg']}")
    return bad_request(f"{place}: {message}" if place else message, place or None)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Context: errors about a field of the chat request that a body was converted to name the
    body's own field; `names` maps one to the other."""
    try:
        yield
    except ApiError as error:
        field = error.param or ""
        if field in names:
            error.param = names[field]
            named = rf"(^|\bthe ){field}\b"  # at the beginning, or "in the messages"
            error.message = re.sub(named, rf"\1{error.param}", error.message)
        raise


def shorten(text: str) -> str:
    """A client's text, cut to `_MAX_SHOWN` characters."""
    return text if len(text) <= _MAX_SHOWN else text[: _MAX_SHOWN - 3] + "..."


def note_error(scope: MutableMapping[str, Any], error: ApiError) -> None:
    """Add an error to the log line of a request (its ASGI scope)."""
    note(scope, param=error.param, error=error.message)


def add_error_handlers(app: FastAPI) -> None:
    """Let `app` answer errors with OpenAI's error object."""

    def answer(request: Request, error: ApiError) -> Response:
        note_error(request.scope, error)
        return error.response(request.scope)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(request, error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{error.detail}: {request.method} {shorten(request.url.path)}"
        return answer(request, ApiError(error.status_code, message, headers=error.headers))

    async def on_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(request, invalid_fields(error))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
