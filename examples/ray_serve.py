"""Replicas of megavm's server behind Ray Serve, with one engine each.

    pip install "ray[serve]>=2.60"
    cd examples
    serve run ray_serve:app model=stories num_replicas=2     # at http://127.0.0.1:8000
    serve run ray_serve.yaml                                 # the same, from a config file

A request passes Ray's HTTP proxy, a gateway and a replica. The gateway reads the body and names the
session that it belongs to. Ray's consistent-hash router sends all requests of a session to the same
replica, whose prefix cache holds their beginning, or to the next replica while that one is full.
Ray starts, counts, checks, drains and replaces replicas. See docs/server.md, "Several replicas".
"""

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.types import Message

from megavm import LLM
from megavm.server.app import create_app
from megavm.server.engine.transport import EngineThread
from megavm.server.errors import RETRY_AFTER_SECONDS, ApiError
from megavm.server.logs import logging_to_stderr
from megavm.server.metrics import CONTENT_TYPE
from megavm.server.middleware import REQUEST_ID
from megavm.server.service import Service
from megavm.server.settings import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_QUEUE,
    SHUTDOWN_TIMEOUT,
    Settings,
)

SESSION: Final = "x-session-id"  # header: the client's name of a session
REPLICA: Final = "x-replica-id"  # header of answers: the replica that gave it
METRICS_SECONDS: Final = 5.0
PREFIX_LENGTH: Final = 256
ROUTER: Final = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


class Arguments(BaseModel):
    """Arguments of `serve run`, and `args` of a config file.

    Attributes:
        model, machine, dtype, max_model_len, max_num_seqs, tensor_parallel_size: of LLM.
        served_model_name: what clients call the model; None: `model`.
        api_key: a key that clients must send; None: every client is allowed.
        allowed_hosts: names by which clients may reach the server beside localhost and IP
            addresses ("*": all).
        num_replicas: number of replicas, unless `max_replicas` is given.
        min_replicas, max_replicas: Ray chooses the number of replicas between these limits.
        target_ongoing_requests: requests per replica that Ray aims at when it chooses.
        max_ongoing_requests: requests that a replica takes before others go to the next one.
        shutdown_timeout: seconds that running requests get when a replica ends.
        health_check_period: seconds between two checks of a replica; it is replaced after three
            failures.
        num_cpus: cores that Ray reserves for a replica, and workers of machine "cpu".
    """

    model_config = ConfigDict(extra="forbid")

    model: str = "stories"
    machine: Literal["cpu", "cuda"] = "cpu"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    tensor_parallel_size: int = 1
    served_model_name: str | None = None
    api_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    num_replicas: int = 1
    min_replicas: int = 1
    max_replicas: int | None = None
    target_ongoing_requests: float = 16
    max_ongoing_requests: int = 64
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    health_check_period: float = 2
    num_cpus: int = 1


@serve.deployment(request_router_config=RequestRouterConfig(request_router_class=ROUTER))
class Replica:
    """One megavm server without a socket: requests come through Ray."""

    async def __init__(self, arguments: Arguments) -> None:
        options = ("machine", "dtype", "max_model_len", "max_num_seqs", "tensor_parallel_size")
        given = {name: getattr(arguments, name) for name in options}
        if arguments.machine == "cpu":
            given["workers"] = arguments.num_cpus
        settings = Settings(
            model_names=(arguments.served_model_name or arguments.model,),
            api_keys=(arguments.api_key,) if arguments.api_key else (),
            allowed_hosts=arguments.allowed_hosts,
            shutdown_timeout=arguments.shutdown_timeout,
        )
        self._engine = EngineThread(
            lambda progress: LLM(arguments.model, progress=progress, **given)
        )
        self._app = create_app(self._engine, settings)
        self._service: Service = self._app.state.service
        self._id = serve.get_replica_context().replica_id.unique_id
        self._exit = AsyncExitStack()
        self._exit.enter_context(logging_to_stderr(logging.INFO))
        await self._exit.enter_async_context(self._app.router.lifespan_context(self._app))
        await self._service.loaded()
        if self._service.failure is not None:
            raise self._service.failure
        self._broken = asyncio.create_task(self._service.broken())

    def check_health(self) -> None:
        """Raise when the engine has stopped for good and clients know it: Ray replaces the replica.

        Raises:
            RuntimeError: the engine has stopped for good.
        """
        if self._broken.done():
            raise RuntimeError(f"the engine has stopped: {self._service.failure}")

    async def __del__(self) -> None:
        """End. Ray calls this after the last request, or after the graceful shutdown timeout."""
        self._broken.cancel()
        await self._service.drain()
        await self._exit.aclose()

    async def metrics(self) -> tuple[str, str]:
        """The replica's id, and its metrics in Prometheus's text format."""
        return self._id, (await self._service.metrics_text()).decode()

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncIterator[Any]:
        """Answer an HTTP request: first yields (status, headers), then pieces of the body.

        Pieces that are ready together are yielded together.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        left = asyncio.Event()  # the client has gone

        async def receive() -> Message:
            if request:
                return request.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        answering = asyncio.create_task(self._app(scope, receive, messages.put))
        answering.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            if (start := await messages.get()) is None:
                return
            # Ray adds the id of the request itself.
            headers = [header for header in start["headers"] if header[0] != REQUEST_ID.encode()]
            yield start["status"], [*headers, (REPLICA.encode(), self._id.encode())]
            ended = False
            while not ended:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                ended = None in batch
                if piece := b"".join(message.get("body", b"") for message in batch if message):
                    yield piece
        finally:
            left.set()
            await answering


def session_of(body: bytes) -> str:
    """Name the session that a request belongs to; "" if any replica will do.

    The name is made from `prompt_cache_key` if the body has it, else from the text that later
    requests of the session repeat: a conversation up to the user's first message, or the beginning
    of a prompt.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    leading = _leading(fields) if isinstance(fields, dict) else None
    return hashlib.sha256(json.dumps(leading).encode()).hexdigest() if leading else ""


def _leading(fields: Mapping[str, Any]) -> Any:
    if key := fields.get("prompt_cache_key"):
        return key
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str | list):
        return prompt[:PREFIX_LENGTH]
    items = fields.get("messages") or fields.get("input")
    if not isinstance(items, list):
        return items
    leading = [fields.get("system"), fields.get("instructions")]
    for item in items:
        leading.append(item)
        if isinstance(item, dict) and item.get("role") == "user":
            break
    return leading


class ReplicaMetrics(Collector):
    """The metrics of several replicas, given as text by id, with the label `replica`."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        """The metrics, those of one name together."""
        merged: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                kind = (family.name, family.documentation, family.type)
                metric = merged.setdefault(family.name, Metric(*kind))
                for sample in family.samples:
                    labels = {"replica": replica, **sample.labels}
                    metric.add_sample(sample.name, labels, sample.value)
        yield from merged.values()


async def _until_left(answer: Any) -> AsyncIterator[bytes]:
    """The rest of an answer; the replica is told when the client has gone."""
    try:
        async for piece in answer:
            yield piece
    finally:
        answer.cancel()


def _queue_full() -> ApiError:
    message = f"The queue is full: {MAX_QUEUE} requests wait for a replica."
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)}
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers=headers)


def _replica_ended() -> ApiError:
    message = "The replica has ended. Send the request again."
    return ApiError(503, message, kind="server_error", code="replica_ended")


gateway = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)


@serve.deployment(max_ongoing_requests=MAX_CONNECTIONS, ray_actor_options={"num_cpus": 0})
@serve.ingress(gateway)
class Gateway:
    """Sends each request to a replica, all of a session to the same."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    @gateway.get("/metrics")
    async def metrics(self) -> Response:
        """The metrics of all replicas, with the label `replica`."""
        answers = self._replicas.broadcast("metrics").results_async(
            timeout_s=METRICS_SECONDS, return_exceptions=True
        )
        texts = dict(answer for answer in await answers if not isinstance(answer, Exception))
        registry = CollectorRegistry()
        registry.register(ReplicaMetrics(texts))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE)

    @gateway.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "OPTIONS"])
    async def forward(self, request: Request) -> Response:
        """Any other request: the answer of a replica."""
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                break  # the replica refuses a body of this length
        session = request.headers.get(SESSION) or session_of(bytes(body))
        replica = self._replicas.options(stream=True, session_id=session)
        path = "/" + request.path_params["path"]
        names = ("type", "http_version", "method", "scheme", "query_string", "headers", "client")
        scope = {name: request.scope[name] for name in names}
        scope |= {"path": path, "raw_path": path.encode(), "root_path": ""}
        answer = replica.answer.remote(scope, bytes(body))
        try:
            status, headers = await anext(answer)
        except BackPressureError:
            return _queue_full().response(scope)
        except (RayError, RayServeException, StopAsyncIteration):
            return _replica_ended().response(scope)
        response = StreamingResponse(_until_left(answer), status)
        response.raw_headers = list(headers)
        return response


def app(arguments: Arguments) -> serve.Application:
    """The application for `serve run`: a gateway in front of replicas."""
    gpus = arguments.tensor_parallel_size if arguments.machine == "cuda" else 0
    replicas = Replica.options(
        max_ongoing_requests=arguments.max_ongoing_requests,
        max_queued_requests=MAX_QUEUE,
        graceful_shutdown_timeout_s=arguments.shutdown_timeout,
        health_check_period_s=arguments.health_check_period,
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": gpus},
        **_number_of_replicas(arguments),
    ).bind(arguments)
    return Gateway.options(graceful_shutdown_timeout_s=arguments.shutdown_timeout).bind(replicas)


def _number_of_replicas(arguments: Arguments) -> dict[str, Any]:
    if arguments.max_replicas is None:
        return {"num_replicas": arguments.num_replicas}
    limits = {
        "min_replicas": arguments.min_replicas,
        "max_replicas": arguments.max_replicas,
        "target_ongoing_requests": arguments.target_ongoing_requests,
    }
    return {"autoscaling_config": limits}
