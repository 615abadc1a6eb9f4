"""The FastAPI application: the route of every endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

import megavm
from megavm.profiler import viewer
from megavm.profiler.trace import TraceError
from megavm.server import metrics
from megavm.server.chat import chat
from megavm.server.completions import complete
from megavm.server.engine.client import Transport
from megavm.server.errors import (
    ApiError,
    add_error_handlers,
    bad_request,
    json_response,
    list_to_json,
    to_json,
    unknown_model,
)
from megavm.server.messages import count_tokens, create_message
from megavm.server.messages_request import CountTokensRequest, MessagesRequest
from megavm.server.middleware import REQUEST_ID, Gate
from megavm.server.profile import Profiler
from megavm.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ProfileRequest,
    TokenizeRequest,
    check_model,
    read_body,
)
from megavm.server.responses import respond_to
from megavm.server.responses_request import ResponsesRequest
from megavm.server.service import Service, Status
from megavm.server.settings import Settings

Endpoint = TypeVar("Endpoint", bound=Callable[[], Awaitable[Response]])

PLAYGROUND: Final = Path(__file__).parent / "pages" / "playground.html"
_SCHEMAS: Final = "#/components/schemas/{model}"
_BODIES: Final[tuple[type[Body], ...]] = (
    CompletionRequest,
    ChatRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
    DetokenizeRequest,
    ProfileRequest,
)
_STATUS_OF_HEALTH: Final = {Status.DRAINING: 503, Status.FAILED: 503}


def create_app(transport: Transport, settings: Settings) -> FastAPI:
    """The application. It loads the model when it starts; `app.state.service` is its Service.

    `transport` carries messages to the engine: EngineThread or EngineProcess.
    """
    service = Service(transport, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = FastAPI(
        title="megavm",
        version=megavm.__version__,
        lifespan=lifespan,
        docs_url=None,  # FastAPI's two pages load scripts from other hosts
        redoc_url=None,
    )
    app.state.service = service
    posts: dict[str, APIRoute] = {}
    app.add_middleware(Gate, service=service, posts=posts)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID],
        )
    add_error_handlers(app)
    _add_openai(app, service)
    _add_anthropic(app, service)
    _add_tokenizer(app, service)
    _add_state(app, service)
    _add_pages(app)
    for route in app.routes:
        if isinstance(route, APIRoute) and "POST" in (route.methods or ()):
            posts[route.path] = route
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _add_openai(app: FastAPI, service: Service) -> None:
    profiler = Profiler(service)

    @app.post("/v1/completions", **_takes("CompletionRequest"))
    async def completions(request: Request) -> Response:
        """Continue texts."""
        return await complete(request, service)

    @app.post("/v1/chat/completions", **_takes("ChatRequest"))
    async def chat_completions(request: Request) -> Response:
        """Answer conversations."""
        return await chat(request, service)

    @app.post("/v1/responses", **_takes("ResponsesRequest"))
    async def responses(request: Request) -> Response:
        """Answer conversations, in OpenAI's newer form; nothing is stored."""
        return await respond_to(request, service)

    @app.post("/v1/profile", **_takes("ProfileRequest"))
    async def profile(request: Request) -> Response:
        """Record a trace of the next steps."""
        return await profiler.profile(request)

    @app.get("/v1/models", **_answers())
    async def models() -> Response:
        """The model, listed under each of its names."""
        cards = [_card(service, name) for name in service.settings.model_names]
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{name:path}", **_answers())
    async def model(name: str) -> Response:
        """The model."""
        if name not in service.settings.model_names:
            raise unknown_model(name)
        return json_response(_card(service, name))


def _add_anthropic(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", **_takes("MessagesRequest", error="AnthropicError"))
    async def messages(request: Request) -> Response:
        """Answer conversations, in Anthropic's form."""
        return await create_message(request, service)

    @app.post("/v1/messages/count_tokens", **_takes("CountTokensRequest", error="AnthropicError"))
    async def tokens_of_messages(request: Request) -> Response:
        """Tokens of the prompt of such a request."""
        return await count_tokens(request, service)


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "megavm",
        "root": service.settings.model_names[0],
        "parent": None,
        "max_model_len": service.model.facts.limits.max_model_len,
    }


def _add_tokenizer(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", **_takes("TokenizeRequest"))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, or of a conversation after the chat template."""
        model = service.model
        body = await read_body(request, TokenizeRequest)
        body.check_supported()
        check_model(body.model, service.settings.model_names)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give either prompt or messages", "prompt")
        if body.messages is not None:
            text = await service.render_chat(body, len(await request.body()))
            ids = await service.encode(text, "messages", bool(body.add_special_tokens))
        else:
            special = body.add_special_tokens is not False
            ids = await service.encode(body.prompt or "", "prompt", special)

        def write() -> str:
            strings = "null"
            if body.return_token_strs:
                strings = list_to_json([model.tokenizer.token_text(i) for i in ids])
            facts = {"count": len(ids), "max_model_len": model.facts.limits.max_model_len}
            head = to_json(facts).removesuffix("}")
            return f'{head},"tokens":{list_to_json(ids)},"token_strs":{strings}}}'

        return Response(await service.call(len(ids), write), media_type="application/json")

    @app.post("/detokenize", **_takes("DetokenizeRequest"))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        service.model  # noqa: B018 - raises ApiError while the model is not ready
        body = await read_body(request, DetokenizeRequest)
        check_model(body.model, service.settings.model_names)
        if not isinstance(body.tokens, list):
            raise bad_request("tokens must be a list of token ids", "tokens")
        return json_response({"prompt": await service.decode(body.tokens, "tokens")})


def _add_state(app: FastAPI, service: Service) -> None:
    @_get(app, "/health", **_answers())
    async def health() -> Response:
        """Whether the server is alive: 503 when it is shutting down or has failed."""
        status = service.status
        return json_response({"status": status.value}, _STATUS_OF_HEALTH.get(status, 200))

    @_get(app, "/ping", **_answers())
    async def ping() -> Response:
        """The same as /health."""
        return await health()

    @_get(app, "/ready", **_answers())
    async def ready() -> Response:
        """Whether the server takes requests: 503 with the progress while the model loads."""
        status = service.status
        content = {"status": status.value}
        if status is Status.LOADING:
            content["progress"] = service.progress
        return json_response(content, 200 if status is Status.READY else 503)

    @_get(app, "/version", **_answers())
    async def version() -> Response:
        """megavm's version."""
        return json_response({"version": megavm.__version__})

    @_get(app, "/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        """All metrics, for Prometheus."""
        return Response(await service.metrics_text(), media_type=metrics.CONTENT_TYPE)


def _add_pages(app: FastAPI) -> None:
    def page(content: bytes | str) -> Response:
        return HTMLResponse(
            content,
            headers={"cache-control": "no-cache", "x-content-type-options": "nosniff"},
        )

    @_get(app, "/", include_in_schema=False)
    async def playground() -> Response:
        """A chat in the browser."""
        if not PLAYGROUND.is_file():
            raise ApiError(404, f"The page {PLAYGROUND.name} is not installed.")
        return page(PLAYGROUND.read_bytes())

    @_get(app, "/profiler", include_in_schema=False)
    async def profiler() -> Response:
        """The profiler's page, which opens traces and records them."""
        try:
            return page(viewer.server_page("v1/profile"))
        except TraceError as error:
            raise ApiError(404, "The profiler's page is not installed.") from error


def _get(app: FastAPI, path: str, **options: Any) -> Callable[[Endpoint], Endpoint]:
    """Decorator: add a route for GET with these options, and one for HEAD outside the schema."""

    def add(endpoint: Endpoint) -> Endpoint:
        app.head(path, include_in_schema=False)(endpoint)
        return app.get(path, **options)(endpoint)

    return add


def _takes(body: str, error: str = "Error") -> dict[str, Any]:
    """Options of a route that reads a body; `body` names its pydantic model, `error` a schema."""
    schema = {"$ref": _SCHEMAS.format(model=body)}
    content = {"application/json": {"schema": schema}}
    return {
        **_answers(error),
        "openapi_extra": {"requestBody": {"content": content, "required": True}},
    }


def _answers(error: str = "Error") -> dict[str, Any]:
    """Options of a route that answers with JSON, and with an object of the schema `error`."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS.format(model=error)}}}
    answer = {"description": "An error.", "content": content}
    return {"response_model": None, "responses": {"4XX": answer, "5XX": answer}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, including the bodies that endpoints parse without FastAPI."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, bodies = models_json_schema(
            [(body, "validation") for body in _BODIES], ref_template=_SCHEMAS
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas |= {
            **bodies["$defs"],
            "Error": _ERROR_SCHEMA,
            "AnthropicError": _ANTHROPIC_ERROR_SCHEMA,
        }
        app.openapi_schema = document
    return app.openapi_schema


_ERROR_SCHEMA: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR_SCHEMA: Final = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
