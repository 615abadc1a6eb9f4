"""The model that a server serves: how it is loaded, whether it is to be had, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, TypeVar

from megavm.server.engine_loop import EngineEnded, EngineLoop, Generation
from megavm.server.errors import bad_request, queue_full, unavailable
from megavm.server.logs import log
from megavm.server.metrics import Metrics
from megavm.server.settings import Settings
from megavm.tokenizer import LONG_TEXT

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.sampling_params import SamplingParams
    from megavm.scheduler.engine.step import Ints
    from megavm.scheduler.run.runner import Progress
    from megavm.tokenizer import Message, Tokenizer

Result = TypeVar("Result")
LoadModel = Callable[["Progress"], "LLM"]

_USUAL_ROWS: Final = 64  # of a step; the programs of larger ones are compiled when they come
_LAST_WORDS_SECONDS: Final = 5.0  # for answers to be sent after the engine has stopped


class Status(Enum):
    """Whether requests are taken."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4 and so on, and `most` itself."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class _Unwanted(Exception):
    """The server is to end before its model is there."""


class Service:
    """One model behind the endpoints. Methods are for the thread of the event loop.

    Attributes:
        settings: the operator's.
        metrics: of this server.
        progress: what loading is at.
        failure: why the model could not be loaded, or cannot run any more.
        created: when the server was made, in seconds since 1970.
    """

    def __init__(self, load_model: LoadModel, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_names[0], self._engine)
        self.progress = "starting"
        self.failure: BaseException | None = None
        self.created = int(time.time())
        self._load_model = load_model
        self._status = Status.LOADING
        self._llm: LLM | None = None
        self._loop: EngineLoop | None = None
        self._loading: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()  # loading has ended, one way or the other
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        # One thread: long prompts wait for each other, and leave the processor to the machine.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="megavm-reader")

    # Life.

    @property
    def status(self) -> Status:
        """Whether requests are taken."""
        if self._loop is not None and self._loop.broken is not None:
            return Status.FAILED
        return self._status

    @property
    def llm(self) -> LLM:
        """The model.

        Raises:
            ApiError: requests are not taken now.
        """
        self._require_ready()
        assert self._llm is not None
        return self._llm

    @property
    def engine_loop(self) -> EngineLoop:
        """The engine's thread.

        Raises:
            ApiError: requests are not taken now.
        """
        self._require_ready()
        assert self._loop is not None
        return self._loop

    def _engine(self) -> Any:
        return None if self._loop is None else self._loop.engine

    def _require_ready(self) -> None:
        status = self.status
        if status is Status.LOADING:
            raise unavailable(f"The model is being loaded: {self.progress}.", "loading")
        if status is Status.DRAINING:
            raise unavailable("The server is shutting down.", "draining")
        if status is Status.FAILED:
            cause = self.failure if self._loop is None else self._loop.broken
            raise unavailable(f"The server cannot go on: {cause}", "failed")

    def start(self) -> None:
        """Begin to load the model."""
        self._loading = asyncio.create_task(self._load())

    @property
    def is_loading(self) -> bool:
        """Whether the model is still being loaded, be it in vain."""
        return not self._ended.is_set()

    async def loaded(self) -> None:
        """Wait until loading has ended; `failure` says whether well."""
        await self._ended.wait()

    async def _load(self) -> None:
        began = time.perf_counter()
        try:
            llm = await asyncio.to_thread(self._load_and_warm_up)
        except _Unwanted:
            log(logging.INFO, "loading was given up")
        except Exception as error:
            self.failure = error
            self._status = Status.FAILED
        else:
            self._llm = llm
            self._loop = EngineLoop(llm.engine, self.metrics.of_engine)
            if self._status is Status.LOADING:
                self._status = Status.READY
            log(logging.INFO, "loaded", seconds=time.perf_counter() - began)
        finally:
            self._ended.set()

    def _load_and_warm_up(self) -> LLM:
        """The model, with the programs of usual sizes, for which requests need not wait then."""
        llm = self._load_model(self._report)
        runner = llm.runner
        prompts = _powers_of_two(min(runner.max_num_batched_tokens, _USUAL_ROWS))
        batches = _powers_of_two(min(runner.max_num_seqs, _USUAL_ROWS))
        buckets = [runner.bucket(rows, 1, 1) for rows in prompts]
        buckets += [runner.bucket(rows, rows, 1, decode=True) for rows in batches]
        for done, bucket in enumerate(buckets):
            self._report("compiling programs", done, len(buckets))
            runner.program(bucket)
        return llm

    async def broken(self) -> None:
        """Wait until the engine of the loaded model has ended and clients know; see `failure`."""
        loop = self.engine_loop
        await loop.ended.wait()
        self.failure = EngineEnded(loop.broken or "", loop.engine.lost)
        log(logging.CRITICAL, "ending", cause=loop.broken, requests=self._in_flight)
        await self._wait_idle(_LAST_WORDS_SECONDS)

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._status is not Status.LOADING:
            raise _Unwanted
        if self.progress.partition(" (")[0] != phase:
            log(logging.INFO, "loading", phase=phase)
        self.progress = f"{phase} ({done} of {total})" if total > 1 else phase

    async def drain(self) -> None:
        """Take no more requests, and let those that run end within the shutdown timeout.

        Those that have not ended then end with an error.
        """
        if self._status is not Status.FAILED:
            self._status = Status.DRAINING
        log(logging.INFO, "draining", requests=self._in_flight)
        timeout = self.settings.shutdown_timeout
        if await self._wait_idle(timeout):
            return
        log(logging.WARNING, "aborting", requests=self._in_flight)
        self.abort()
        await self._wait_idle(_LAST_WORDS_SECONDS)

    def abort(self) -> None:
        """End what runs with an error."""
        if self._loop is not None:
            self._loop.fail_all(unavailable("The server is shutting down.", "draining"))

    async def _wait_idle(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        return self._idle.is_set()

    async def close(self) -> None:
        """End the engine's thread and give up the model."""
        if self._loading is not None:
            await self._loading
        if self._loop is not None:
            await self._loop.stop()
        if self._llm is not None and not self._llm.engine.lost:
            self._llm.close()
        self._reader.shutdown(wait=False, cancel_futures=True)

    def enter(self) -> None:
        """A request is being answered that `drain` should wait for."""
        self._in_flight += 1
        self._idle.clear()

    def leave(self) -> None:
        """It has been answered."""
        self._in_flight -= 1
        if not self._in_flight:
            self._idle.set()

    # Requests.

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.llm.tokenizer

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, prompt included."""
        llm = self.llm
        blocks = llm.engine.blocks
        return min(llm.max_model_len, blocks.num_blocks * blocks.block_size + 1)

    async def encode(
        self, text: str, field: str | None, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a text, which `field` of a request holds.

        Raises:
            ApiError: the text cannot be encoded.
        """
        encode = self.tokenizer.encode
        return await self._read(len(text), field, encode, text, add_special_tokens)

    async def decode(self, ids: Sequence[int], field: str) -> str:
        """The text of token ids, which `field` of a request holds.

        Raises:
            ApiError: an id is none.
        """
        return await self._read(len(ids), field, self.tokenizer.decode, ids, False)

    async def encode_prompts(
        self, prompts: Sequence[str | list[int]], field: str
    ) -> list[list[int]]:
        """Token ids of prompts, which `field` of a request holds; some may be token ids already.

        Raises:
            ApiError: a text cannot be encoded.
        """
        encode = self.tokenizer.encode

        def encode_all() -> list[list[int]]:
            return [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._read(size, field, encode_all)

    async def decode_prompts(self, prompts: Sequence[str | list[int]], field: str) -> list[str]:
        """Texts of prompts, which `field` of a request holds, without special tokens.

        Raises:
            ApiError: an id is none.
        """
        decode = self.tokenizer.decode

        def decode_all() -> list[str]:
            return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]

        size = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return await self._read(size, field, decode_all)

    async def _read(
        self, size: int, field: str | None, function: Callable[..., Result], *given: object
    ) -> Result:
        """`call` for what a request holds: a ValueError is the fault of its `field`."""
        try:
            return await self.call(size, function, *given)
        except ValueError as error:
            # Where the model lies on this computer is nothing that a client need know.
            directory, name = str(self.tokenizer.directory), self.settings.model_names[0]
            raise bad_request(str(error).replace(directory, name), field) from error

    async def call(self, size: int, function: Callable[..., Result], *given: object) -> Result:
        """Call a function whose time depends on `size`, in a thread if that is much.

        `size` is in characters or tokens.
        """
        if size <= LONG_TEXT:
            return function(*given)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reader, function, *given)

    async def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool, size: int
    ) -> str:
        """The prompt that the chat template makes of messages, of about `size` characters.

        Raises:
            ApiError: it does not.
        """
        render = self.tokenizer.chat_prompt
        return await self._read(size, "messages", render, messages, add_generation_prompt)

    @property
    def max_sequences(self) -> int:
        """Sequences that may run or wait at the same time."""
        return self.llm.runner.max_num_seqs + self.settings.max_queue

    def admit(self, sequences: int) -> None:
        """Check that there is room for as many more sequences.

        Raises:
            ApiError: the queue is full, or there never is so much room.
        """
        limit, present = self.max_sequences, self.engine_loop.num_sequences
        if sequences > limit:
            raise bad_request(
                f"the request asks for {sequences} completions at once, {limit} are possible"
            )
        if present + sequences > limit:
            raise queue_full(present, limit)

    def check_prompts(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, field: str
    ) -> list[Ints]:
        """The prompts, which `field` of a request holds, as the engine takes them.

        Raises:
            ApiError: one of them cannot be continued.
        """
        checked = []
        for i, prompt in enumerate(prompts):
            try:
                checked.append(self.llm.engine.validate(prompt, params))
            except ValueError as error:
                where = f"{field} {i}: " if len(prompts) > 1 else ""
                raise bad_request(f"{where}{error}", field) from error
        return checked

    def generation(
        self, prompts: Sequence[Ints], params: SamplingParams, *, whole: bool
    ) -> Generation:
        """Queue what a request asks for, with prompts that were checked.

        Raises:
            ApiError: the queue is full.
        """
        self.admit(len(prompts) * params.n)
        generation = Generation(prompts, params, whole)
        self.engine_loop.submit(generation)
        return generation

    def close_generation(self, generation: Generation) -> None:
        """Forget a generation and abort what has not ended."""
        if self._loop is not None:
            self._loop.close(generation)
