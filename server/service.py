"""The model behind a server: loading, status, requests and shutdown."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.types import Message, Receive

from megavm.chat_template import check_template_kwargs
from megavm.sampling_params import SamplingParams
from megavm.server.engine.client import EngineClient, EngineEnded, Transport
from megavm.server.engine.generation import Generation
from megavm.server.engine.messages import Loading, ModelFacts
from megavm.server.errors import (
    ApiError,
    bad_request,
    context_exceeded,
    queue_full,
    shorten,
    timed_out,
    unavailable,
)
from megavm.server.logs import log
from megavm.server.metrics import Metrics
from megavm.server.protocol import (
    ChatRequest,
    GenerationRequest,
    TokenizeRequest,
    read_messages,
)
from megavm.server.settings import Settings
from megavm.server.tools.parsers import PARSERS, detect_parser
from megavm.tokenizer import LONG_TEXT, Tokenizer

if TYPE_CHECKING:
    from megavm.scheduler.engine.step import Ints
    from megavm.server.tools.parser import ToolParser

Result = TypeVar("Result")

_LAST_WORDS_SECONDS: Final = 5.0  # time to send the last answers after the engine has stopped
_METRICS_SECONDS: Final = 5.0  # an engine's process that does not answer may be stopped
_REMEMBERED_PARAMS: Final = 64  # sampling parameters of requests


class Status(Enum):
    """State of a server; it takes requests only when READY."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class ServedModel:
    """What the event loop has of the model: its tokenizer, and facts about it.

    Attributes:
        facts: what the engine has said of it.
        tokenizer: the model's tokenizer, of this process.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.tokenizer = Tokenizer(facts.directory, facts.chat_template)
        self.tokenizer.fewest_tokens("")  # reads the vocabulary, which no request should wait for

    def default_params(self, **given: Any) -> SamplingParams:
        """See `LLM.default_params`.

        Raises:
            ValueError: a value is out of range.
        """
        return SamplingParams.from_generation_config(self.facts.generation, **given)


class Service:
    """One model behind the endpoints. Call all methods in the thread of the event loop.

    Attributes:
        settings: the operator's settings.
        metrics: the server's metrics.
        progress: the current phase of loading, as text.
        failure: why the model could not be loaded, or why the engine stopped for good.
        created: when the server was made, in seconds since 1970.
    """

    def __init__(self, transport: Transport, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_names[0])
        self.progress = "starting"
        self.failure: BaseException | None = None
        self.created = int(time.time())
        self._transport = transport
        self._status = Status.LOADING
        self._model: ServedModel | None = None
        self._client: EngineClient | None = None
        self._loading: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # loading has ended, with or without success
        self._reading: set[asyncio.Timeout] = set()  # limits of bodies that are being read
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # One thread only: long prompts are read one after the other, so that tokenizing leaves
        # the cores to the machine.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="megavm-reader")
        self._params = lru_cache(_REMEMBERED_PARAMS)(self._make_params)

    # Loading, status and shutdown.

    @property
    def status(self) -> Status:
        """The state of the server."""
        if self._client is not None and self._client.broken is not None:
            return Status.FAILED
        return self._status

    @property
    def model(self) -> ServedModel:
        """The model.

        Raises:
            ApiError: the server takes no requests now.
        """
        self._require_ready()
        assert self._model is not None
        return self._model

    @property
    def engine(self) -> EngineClient:
        """The engine.

        Raises:
            ApiError: the server takes no requests now.
        """
        self._require_ready()
        assert self._client is not None
        return self._client

    def _require_ready(self) -> None:
        status = self.status
        if status is Status.READY:
            return
        if status is Status.LOADING:
            raise unavailable(f"The model is being loaded: {self.progress}.", "loading")
        if status is Status.DRAINING:
            raise _shutting_down()
        if status is Status.FAILED:
            broken = None if self._client is None else self._client.broken
            raise unavailable(f"The server cannot go on: {broken or self.failure}", "failed")

    def start(self) -> None:
        """Start to load the model."""
        self._client = EngineClient(self._transport, self._report)
        self._loading = asyncio.create_task(self._load(self._client))

    @property
    def is_loading(self) -> bool:
        """Whether loading has not ended yet, even if the server is already shutting down."""
        return not self._ended.is_set()

    @property
    def has_model(self) -> bool:
        """Whether the model was loaded, whatever has happened since."""
        return self._model is not None

    async def loaded(self) -> None:
        """Wait until loading has ended; `failure` is set if it failed."""
        await self._ended.wait()

    async def _load(self, client: EngineClient) -> None:
        began = time.perf_counter()
        try:
            facts = await client.loaded()
            if facts is None:
                log(logging.INFO, "loading was given up")
                return
            self._model = await asyncio.to_thread(ServedModel, facts)
        except Exception as error:
            self.failure = error
            self._status = Status.FAILED
        else:
            self.metrics.engine_process = facts.process
            if self._status is Status.LOADING:
                self._status = Status.READY
            log(logging.INFO, "loaded", seconds=time.perf_counter() - began)
        finally:
            self._ended.set()

    async def broken(self) -> None:
        """Wait until the engine has stopped for good and clients have their answers.

        Sets `failure`.
        """
        client = self._client
        assert client is not None, "there was a model"
        await client.ended.wait()
        self.failure = EngineEnded(client.broken)
        log(logging.CRITICAL, "ending", cause=client.broken, requests=self._in_flight)
        await self._wait_idle(_LAST_WORDS_SECONDS)

    def _report(self, loading: Loading) -> None:
        phase, done, total = loading.phase, loading.done, loading.total
        if self.progress.partition(" (")[0] != phase:
            log(logging.INFO, "loading", phase=phase)
        self.progress = f"{phase} ({done} of {total})" if total > 1 else phase

    async def metrics_text(self) -> bytes:
        """All metrics in Prometheus's text format; those of the engine when it can tell them."""
        engine = None
        if self._client is not None:
            with suppress(EngineEnded, TimeoutError):
                async with asyncio.timeout(_METRICS_SECONDS):
                    engine = await self._client.metrics()
        return self.metrics.text(engine)

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones, at most for the shutdown timeout.

        Requests that are still running then end with an error. Those whose body is not complete do
        so at once, and recordings.
        """
        if self._status is not Status.FAILED:
            self._status = Status.DRAINING
        log(logging.INFO, "draining", requests=self._in_flight)
        if self._client is not None:
            if self.is_loading:
                self._client.give_up()
            self._client.end_recordings(_shutting_down())
        for limit in self._reading:
            limit.reschedule(0)
        timeout = self.settings.shutdown_timeout
        if await self._wait_idle(timeout):
            return
        log(logging.WARNING, "aborting", requests=self._in_flight)
        self.abort()
        await self._wait_idle(_LAST_WORDS_SECONDS)

    def abort(self) -> None:
        """End all running requests with an error."""
        if self._client is not None:
            self._client.fail_all(_shutting_down())

    async def read(self, receive: Receive, deadline: float) -> Message:
        """The next message of a request whose body must be complete at `deadline`, by the clock of
        the event loop.

        Raises:
            TimeoutError: it did not come.
            ApiError: the server shuts down.
        """
        try:
            async with asyncio.timeout_at(deadline) as limit:
                self._reading.add(limit)
                try:
                    return await receive()
                finally:
                    self._reading.discard(limit)
        except TimeoutError:
            if self.status is Status.DRAINING:
                raise _shutting_down() from None
            raise

    async def _wait_idle(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    async def close(self) -> None:
        """End the engine."""
        if self._client is not None and self._loading is not None:
            if self.is_loading:
                self._client.give_up()
            await self._loading
            await self._client.close_all()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def enter(self) -> None:
        """Count a request that `drain` must wait for."""
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """Count the end of a request that has entered."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    # Requests.

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, also while the server drains.

        Raises:
            ApiError: there is no model.
        """
        return self.model.tokenizer if self._model is None else self._model.tokenizer

    def sampling_params(self, **given: Any) -> SamplingParams:
        """`LLM.default_params`; those of recent requests with the same values are used again.

        Raises:
            ValueError: a value is out of range.
        """
        try:
            return self._params(frozenset(given.items()))
        except TypeError:  # a list or a dict is among them
            return self.model.default_params(**given)

    def _make_params(self, given: frozenset[tuple[str, Any]]) -> SamplingParams:
        return self.model.default_params(**dict(given))

    @property
    def context(self) -> int:
        """Length in tokens of the longest possible sequence, prompt included."""
        return self.model.facts.limits.max_prompt_len + 1

    async def encode(
        self, text: str, field: str | None, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text; `field` names the request's field that holds it.

        Raises:
            ApiError: the text cannot be encoded.
        """
        encode = self.tokenizer.encode
        return await self._read(len(text), field, encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """The text of token ids; `field` names the request's field that holds them.

        Raises:
            ApiError: an item is not a token id.
        """
        return await self._read(len(ids), field, self.tokenizer.decode, ids, False)

    async def encode_prompts(
        self, prompts: Sequence[str | list[int]], field: str, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Token ids of prompts; prompts that are lists are returned unchanged.

        `field` names the request's field that holds them.

        Raises:
            ApiError: a text cannot be encoded.
        """
        encode = self.tokenizer.encode

        def encode_all() -> list[list[int]]:
            return [
                encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._read(size, field, encode_all)

    async def decode_prompts(self, prompts: Sequence[str | list[int]], field: str) -> list[str]:
        """Texts of prompts, without special tokens; prompts that are texts are unchanged.

        `field` names the request's field that holds them.

        Raises:
            ApiError: an item is not a token id.
        """
        decode = self.tokenizer.decode

        def decode_all() -> list[str]:
            return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]

        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await self._read(size, field, decode_all)

    async def _read(
        self, size: int, field: str | None, function: Callable[..., Result], *given: object
    ) -> Result:
        """`call` for contents of a request: turns a ValueError into an ApiError about `field`."""
        try:
            return await self.call(size, function, *given)
        except ValueError as error:
            raise self._refused(error, field) from error

    def _refused(self, error: ValueError, field: str | None) -> ApiError:
        """400 for an error about `field`: without the path of the model, and not as long as what
        the client sent."""
        directory, name = str(self.tokenizer.directory), self.settings.model_names[0]
        return bad_request(shorten(str(error).replace(directory, name)), field)

    async def call(self, size: int, function: Callable[..., Result], *given: object) -> Result:
        """Call a function whose time depends on `size` (characters or tokens).

        Calls for more than LONG_TEXT run in a thread, so that they do not block the event loop.
        """
        if size <= LONG_TEXT:
            return function(*given)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, function, *given)

    async def render_chat(self, body: ChatRequest | TokenizeRequest, size: int) -> str:
        """Render the messages and tools of a body of `size` bytes with the chat template.

        Raises:
            ApiError: there are no messages, options exclude each other, or the template fails or
                refuses them.
        """
        messages, variables = read_messages(body.messages), body.chat_template_kwargs
        continued = bool(body.continue_final_message)
        if continued and body.add_generation_prompt:
            raise bad_request(
                "continue_final_message and add_generation_prompt must not both be true",
                "continue_final_message",
            )
        try:
            check_template_kwargs(variables)
        except ValueError as error:
            raise bad_request(str(error), "chat_template_kwargs") from error
        render = partial(
            self.tokenizer.chat_prompt,
            continue_final_message=continued,
            chat_template_kwargs=variables,
        )
        given = messages, body.add_generation_prompt, body.tools
        return await self._read(size, "messages", render, *given)

    def tool_parser(self) -> type[ToolParser]:
        """The parser of the model's tool calls.

        Raises:
            ApiError: its chat template shows no tools to the model, or its format is not known.
        """
        tokenizer = self.tokenizer
        try:
            rendered = tokenizer.renders_tools
        except ValueError as error:
            raise bad_request(str(error), "tools") from error
        if not rendered:
            raise bad_request(
                "the model's chat template does not render tools; the server takes another one with"
                " --chat-template",
                "tools",
            )
        name = self.settings.tool_call_parser or detect_parser(tokenizer.chat_template)
        if name is None:
            raise bad_request(
                "the format of this model's tool calls is not known; the server takes it from"
                f" --tool-call-parser ({', '.join(PARSERS)})",
                "tools",
            )
        return PARSERS[name]

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences that may run or wait at the same time."""
        return self.model.facts.max_num_seqs + self.settings.max_queue

    def admit(self, sequences: int) -> None:
        """Check that the queue has room for this many more sequences.

        Raises:
            ApiError: the queue is full, or is too small even when empty.
        """
        present, limit = self.engine.num_sequences, self.max_sequences
        if sequences > limit:
            raise bad_request(
                f"the request asks for {sequences} completions at once, {limit} are possible"
            )
        if present + sequences > limit:
            raise queue_full(present, limit)

    def check_texts(
        self, prompts: Sequence[str | list[int]], params: SamplingParams, field: str
    ) -> None:
        """Refuse texts that are too long whatever their tokens are: tokenizing may take seconds.

        `field` names the request's field that holds them. Prompts that are lists are not checked.

        Raises:
            ApiError: a text cannot be continued.
        """
        if params.truncate_prompt_tokens is not None:
            return
        for prompt in prompts:
            fewest = self.tokenizer.fewest_tokens(prompt) if isinstance(prompt, str) else 0
            if fewest >= self.context:
                completion = params.max_tokens or 1
                raise context_exceeded(self.context, fewest, completion, field, at_least=True)

    def check_prompts(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, body: GenerationRequest
    ) -> list[Ints]:
        """The prompts of a request as validated arrays for the engine.

        Raises:
            ApiError: a prompt cannot be continued.
        """
        checked, context, limits, field = [], self.context, self.model.facts.limits, body.source
        for i, prompt in enumerate(prompts):
            try:
                given = limits.truncate(prompt, params)
            except ValueError as error:
                raise bad_request(str(error), "truncate_prompt_tokens") from error
            if len(given) >= context:
                raise context_exceeded(context, len(given), params.max_tokens or 1, field)
            try:
                checked.append(limits.validate(given, params))
            except ValueError as error:
                if parameter := body.named(str(error)):
                    raise bad_request(str(error), parameter) from error
                where = f"{field} {i}: " if len(prompts) > 1 else ""
                raise bad_request(f"{where}{error}", field) from error
        return checked

    async def generate(
        self, body: GenerationRequest, prompts: Sequence[Ints], params: SamplingParams
    ) -> Generation:
        """Queue the generation of a request, for prompts from `check_prompts`.

        The caller must close it (`close_generation`).

        Raises:
            ApiError: the queue is full, a grammar is refused or takes too long, or a token id is
                unknown.
        """
        self.admit(len(prompts) * params.n)
        generation = Generation(prompts, params, not body.stream, body.blamed)
        self.engine.submit(generation)
        if not params.restricts:
            return generation
        timeout = self.settings.request_timeout
        try:
            async with asyncio.timeout(timeout):
                await generation.accepted()
        except BaseException as error:
            self.close_generation(generation)
            if isinstance(error, TimeoutError):
                raise timed_out(timeout) from error
            if isinstance(error, ValueError):
                raise self._refused(error, body.blamed(str(error))) from error
            raise
        return generation

    @property
    def plain_writer(self) -> EngineClient | None:
        """The writer of the plain events of a queued generation, also while the server drains."""
        return self._client

    def close_generation(self, generation: Generation) -> None:
        """Forget a generation and abort its unfinished sequences."""
        if self._client is not None:
            self._client.close(generation)


def _shutting_down() -> ApiError:
    return unavailable("The server is shutting down.", "draining")
