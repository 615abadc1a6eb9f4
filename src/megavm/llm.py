"""The Python API: a loaded model that generates, chats, streams and computes logits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, Literal, Self

import numpy as np
import numpy.typing as npt
import torch

from megavm.batch import Batch, Prompt
from megavm.chat_template import Message
from megavm.fair_lock import FairLock
from megavm.garbage import frozen_heap
from megavm.outputs import Chunk, GenerationError, Logprob, RequestOutput
from megavm.profiler.environment import describe_machine
from megavm.profiler.recorder import Recorder
from megavm.prompts import (
    PromptIndex,
    Prompts,
    check_flags,
    check_positive,
    describe,
    is_token_ids,
    read_params,
    read_prompts,
)
from megavm.restrictions import RestrictionCompiler
from megavm.sampling_params import SamplingParams, is_integer, is_number
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.scheduler.engine.planner import check_sequences
from megavm.scheduler.engine.restriction import Restriction
from megavm.scheduler.engine.sequence import Delta, Request, TokenIds, needs_sampling
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import (
    Limits,
    default_logit_rows,
    step_tensors,
)
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.llama.parallel import Exchange, Parallel
from megavm.scheduler.run.buckets import choose_dtype
from megavm.scheduler.run.kv_cache_size import (
    check_block_size,
    check_memory,
    cpu_bytes,
    default_bytes,
    gpu_bytes,
    kv_cache_size,
)
from megavm.scheduler.run.machines import choose_machine
from megavm.scheduler.run.runner import Progress, Runner
from megavm.stream_decoder import StreamDecoder
from megavm.tokenizer import Tokenizer
from megavm.vm.cuda import machine as cuda_machine
from megavm.vm.target import TARGETS

Machine = Literal["auto", "cpu", "cuda", "reference"]
Dtype = Literal["auto", "bfloat16", "float32"]
DECODER_CONTEXT: Final = 16  # last tokens of the prompt that decoders get as context


class LLM:
    """A Llama model on a machine.

        with LLM("stories") as llm:
            print(llm.generate("Once upon a time",
            SamplingParams(max_tokens=64))[0].outputs[0].text)

    Several threads may call the methods; their requests share one batch.

    Args:
        model: a Hugging Face model directory, the name of a model that comes with megavm
            ("stories"), or a model id on the Hugging Face hub.
        machine: what executes programs; "auto" takes a GPU that `megavm doctor` finds usable, else
            the CPU.
        dtype: type of weights and KV cache; "auto" takes the stored type (bfloat16 for float16).
        max_model_len: tokens of the longest sequence, prompt included; None takes the model's
            limit, or less if the KV cache cannot hold that many.
        max_num_seqs: sequences that run at the same time; others wait. None is 64 on a GPU and 16
            elsewhere, or `max_num_batched_tokens` if that is less.
        max_num_batched_tokens: tokens of one step; longer prompts are computed in chunks. None is
            2048 on a GPU and 512 elsewhere.
        kv_cache_bytes, num_blocks: size of the KV cache; give at most one. By default as many
            blocks as `max_num_seqs` sequences of `max_model_len` tokens need, but at most 85 % of
            the memory that the weights leave on GPUs, or on the CPU at most 4 GiB and a quarter of
            that.
        block_size: tokens of a KV block; None is 64 on a GPU and 16 elsewhere.
        workers: workers of the machine, of each rank; None takes the machine's default.
        tensor_parallel_size: number of ranks that divide the model; it must divide the KV heads.
            Machine "cpu" runs ranks as groups of threads, "cuda" on as many GPUs, from GPU 0 on.
        tensor_parallel_exchange: how ranks put a layer together. With "all_gather" each number is
            one rank's sum, so that results have the bits of one rank where work is cut alike (see
            `fixed_order`), and two GPUs are faster; "all_reduce" adds sums of all ranks.
        fixed_order: add up every sum in an order that depends on the model and the rows of a step,
            but neither on `workers` nor on `tensor_parallel_size`: steps of the same rows then
            have the same bits with any of them. It is slower, because work is cut less finely. Not
            for machine "reference", nor with "all_reduce".
        chat_template: a file with a Jinja template that takes the place of the model's.
        seed: seed of the generator of seeds for requests that have none.
        prefix_caching: keep keys and values of finished sequences for prompts with the same prefix.
        overlap: plan the next step while one runs; None does so on a GPU only, because on the CPU
            planning would compete with the machine's threads.
        steps_per_launch: most tokens that a sequence may get before its stop conditions are
            checked. None: 1 on the CPU; on a GPU as many as take about 5 ms, at most 8, since a
            request that comes waits for two launches (longer with more than 50 sequences).
        tpot_limit_ms: milliseconds that a step should take at most while sequences decode: chunks
            of prompts beside them become smaller, down to 16 tokens, as measured steps demand.
            None: prompts fill the step, which is best for throughput.
        progress: called as progress(phase, done, total) while loading.

    Raises:
        ValueError: the model, the machine or a number is not usable; one sentence says why.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        machine: Machine = "auto",
        dtype: Dtype = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        block_size: int | None = None,
        workers: int | None = None,
        tensor_parallel_size: int = 1,
        tensor_parallel_exchange: Exchange = "all_gather",
        fixed_order: bool = False,
        chat_template: str | os.PathLike[str] | None = None,
        seed: int = 0,
        prefix_caching: bool = True,
        overlap: bool | None = None,
        steps_per_launch: int | None = None,
        tpot_limit_ms: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        report: Callable[[str, int, int], None] = progress or (lambda phase, done, total: None)
        check_positive(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
            block_size=block_size,
            workers=workers,
            tensor_parallel_size=tensor_parallel_size,
            steps_per_launch=steps_per_launch,
        )
        check_flags(
            fixed_order=fixed_order,
            prefix_caching=prefix_caching,
            overlap=overlap is not None and overlap,
        )
        if not is_integer(seed):
            raise ValueError(f"seed must be an integer, not {seed!r}")
        if tpot_limit_ms is not None and not (is_number(tpot_limit_ms) and tpot_limit_ms > 0):
            raise ValueError(f"tpot_limit_ms must be a positive number, not {tpot_limit_ms!r}")
        parallel = Parallel(tensor_parallel_size, tensor_parallel_exchange)
        report("finding the model", 0, 1)
        directory = resolve(os.fspath(model) if isinstance(model, os.PathLike) else model)
        report("reading the configuration", 0, 1)
        self.checkpoint = Checkpoint.open(directory)
        self.checkpoint.check()
        config = self.checkpoint.config
        machine_name = choose_machine(machine)
        on_gpu, target = machine_name == "cuda", TARGETS[machine_name]
        if block_size is None:
            block_size = target.block_size
        launch_limit = None if steps_per_launch else target.launch_seconds
        steps_per_launch = steps_per_launch or target.steps_per_launch
        if max_num_batched_tokens is None:
            max_num_batched_tokens = target.max_num_batched_tokens
        if max_num_seqs is None:
            max_num_seqs = min(target.max_num_seqs, max_num_batched_tokens)
        check_sequences(max_num_seqs, max_num_batched_tokens)
        chosen_dtype = choose_dtype(config, dtype)
        itemsize = chosen_dtype.size
        free = gpu_bytes if on_gpu else cpu_bytes
        available = free(config, itemsize, tensor_parallel_size)
        self.max_model_len, blocks = kv_cache_size(
            config,
            available_bytes=default_bytes(target, available),
            block_bytes=config.kv_elements_per_token * block_size * itemsize,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_bytes=kv_cache_bytes,
            num_blocks=num_blocks,
        )
        limits = Limits(
            max_num_seqs=max_num_seqs,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_logit_rows=default_logit_rows(max_num_seqs, max_num_batched_tokens),
            num_blocks=blocks,
            block_size=block_size,
        )
        check_block_size(config, limits, chosen_dtype, target)
        check_memory(
            step_tensors(limits, config.vocab_size).values(),
            blocks * config.kv_elements_per_token * block_size * itemsize,
            available,
        )
        report("reading the tokenizer", 0, 1)
        self.tokenizer = Tokenizer(directory, chat_template)
        self.runner = Runner.for_checkpoint(
            self.checkpoint,
            limits,
            machine=machine_name,
            dtype=dtype,
            workers=workers,
            parallel=parallel,
            fixed_order=fixed_order,
            sampled=self.samples_by_default,
            progress=report,
        )
        report("compiling the program of one token", 0, 1)
        self.runner.programs.program(
            self.runner.programs.bucket(1, 1, 1, sampled=self.samples_by_default)
        )
        self.engine = Engine(
            self.runner,
            eos_token_ids=self.checkpoint.eos_token_ids,
            new_decoder=_new_decoder(self.tokenizer) if self.tokenizer.available else None,
            seed=seed,
            prefix_caching=prefix_caching,
            overlap=target.overlap if overlap is None else overlap,
            steps_per_launch=steps_per_launch,
            launch_limit=launch_limit,
            tpot_limit=None if tpot_limit_ms is None else tpot_limit_ms / 1e3,
        )
        self.restrictions = RestrictionCompiler(
            self.tokenizer, config.vocab_size, self.checkpoint.eos_token_ids
        )
        self._limits = self.engine.limits
        self._lock = FairLock()  # whoever waits comes between two steps of another thread
        self._undelivered: deque[Delta] = deque()
        self._sinks: dict[Hashable, Callable[[Delta], None]] = {}
        self._batches: list[Batch] = []  # one for each running call of generate
        self._closed = False
        if isinstance(self.runner.machine, cuda_machine.CudaMachine):
            self.runner.machine.report = None  # loading ends here: `progress` is called no more
        report("ready", 1, 1)

    def close(self) -> None:
        """Abort all requests and release the memory. The LLM cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self.engine.close()
                self.runner.close()
                self._sinks.clear()
                del self.engine, self.runner
                torch.cuda.empty_cache()  # other processes get it too

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Generation.

    def default_params(self, **given: Any) -> SamplingParams:
        """The given parameters, else those of generation_config.json, else vLLM's defaults.

        generation_config.json may set temperature, top_p, top_k, min_p, repetition_penalty, and
        do_sample=false, which means temperature 0.

        Raises:
            ValueError: a value is out of range.
        """
        return SamplingParams.from_generation_config(self.checkpoint.generation, **given)

    @property
    def samples_by_default(self) -> bool:
        """Whether `default_params` need more than the largest logit, such as a temperature."""
        try:
            params = self.default_params()
        except ValueError:  # requests that give all values can run nevertheless
            return True
        return needs_sampling(params, self.checkpoint.eos_token_ids)

    def generate(
        self, prompts: Prompts, params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue one prompt or several at once; results are in the order of the prompts.

        A prompt is a text or a list of token ids. `params` is one SamplingParams for all prompts or
        a list with one per prompt; the default is `default_params()`. A request that fails while it
        runs has `error` set in its output; others are not affected. A fault of the machine fails
        all running requests; waiting requests and later calls still run.

        Raises:
            ValueError: a prompt or its parameters are invalid; nothing has run.
        """
        self._check_open()
        texts, ids, many = read_prompts(prompts, self.tokenizer)
        return self._generate(texts, ids, self._read_params(params, len(ids)), many)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several at once, through the model's chat template.

        A message is {"role": "user", "content": "..."}. The default of `params` is
        `default_params(max_tokens=None)`: an answer may continue to the end of the context. The
        other parameters are those of `Tokenizer.chat_prompt`.

        Raises:
            ValueError: as for `generate`, or the template refuses the conversation.
        """
        if not isinstance(messages, list | tuple) or not messages:
            raise ValueError("messages must be a list of messages, or a list of such lists")
        self._check_open()
        many = all(isinstance(m, list | tuple) for m in messages)
        conversations: Any = messages if many else [messages]
        texts, ids = [], []
        for i, conversation in enumerate(conversations):
            with PromptIndex(i if many else None, "conversation"):
                text = self.tokenizer.chat_prompt(
                    conversation,
                    add_generation_prompt,
                    tools,
                    continue_final_message=continue_final_message,
                    chat_template_kwargs=chat_template_kwargs,
                )
                texts.append(text)
                ids.append(self.tokenizer.encode(text, add_special_tokens=False))
        if params is None:
            params = self.default_params(max_tokens=None)
        return self._generate(texts, ids, self._read_params(params, len(ids)), many)

    def stream(
        self, prompt: str | TokenIds, params: SamplingParams | None = None
    ) -> Generator[Chunk, None, None]:
        """Continue one prompt; yields every token as soon as it is generated.

        Closing the generator aborts the request. Other requests may run between two chunks.

        Raises:
            ValueError: the prompt or its parameters are invalid; raised by this call.
            GenerationError: raised by the generator when the request fails.
        """
        self._check_open()
        _, ids, many = read_prompts(prompt, self.tokenizer)
        if many:
            raise ValueError("stream takes one prompt, a text or a list of token ids")
        return self._stream(ids[0], params)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Generator[Chunk, None, None]:
        """Answer a conversation; yields every token as soon as it is generated.

        Parameters are those of `chat`.

        Raises:
            ValueError: as for `chat`.
            GenerationError: as for `stream`.
        """
        self._check_open()
        text = self.tokenizer.chat_prompt(
            messages,
            add_generation_prompt,
            tools,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return self._stream(ids, self.default_params(max_tokens=None) if params is None else params)

    def logits(self, token_ids: TokenIds) -> npt.NDArray[np.float32]:
        """Logits of the next token after each of the n tokens: float32 [n, vocabulary].

        Raises:
            ValueError: there are no tokens, too many, or one outside the vocabulary.
            MachineFault: the machine failed.
        """
        self._check_open()
        if not is_token_ids(token_ids):
            raise ValueError(f"logits takes a list of token ids, not {describe(token_ids)}")
        with self._lock:
            self._check_open()
            return self.engine.logits(token_ids)

    def record(self, recorder: Recorder | None) -> None:
        """Trace every step from now on into `recorder`; None ends the recording.

        Raises:
            ValueError: the machine cannot trace, this is no Recorder, or this LLM is closed.
        """
        self._check_open()
        if not isinstance(recorder, Recorder | None):
            raise ValueError(f"record takes a Recorder or None, not {describe(recorder)}")
        if recorder is not None:
            recorder.machine |= describe_machine(self.runner.machine)
            recorder.model |= self._model_facts()
        self.runner.record(recorder)

    def _model_facts(self) -> dict[str, Any]:
        config = self.checkpoint.config
        return {
            "name": self.checkpoint.directory.name,
            "parameters": config.num_parameters,
            "layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "dtype": self.runner.dtype.name,
            "max_model_len": self.max_model_len,
        }

    # Running.

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this LLM is closed")

    def _read_params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        return read_params(self.default_params() if params is None else params, count)

    @frozen_heap()
    def _generate(
        self,
        texts: Sequence[str | None],
        prompts: Sequence[TokenIds],
        params: Sequence[SamplingParams],
        many: bool,
    ) -> list[RequestOutput]:
        checked: list[Prompt] = []
        for i, (text, prompt, one) in enumerate(zip(texts, prompts, params, strict=True)):
            with PromptIndex(i if many else None, "prompt"):
                tokens = self._limits.validate(prompt, one)
                if i > 0 and one is checked[-1].params:
                    restriction = checked[-1].restriction
                else:
                    restriction = self.restrictions.compile(one)
            checked.append(Prompt(text, tokens, one, restriction))
        with self._lock:
            self._check_open()
            ahead = 2 * self.runner.max_num_batched_tokens
            batch = Batch(self.engine, checked, ahead, self._logprobs)
            self._batches.append(batch)
        try:
            while not batch.ended:
                self._step(lambda: batch.ended)
        finally:
            with self._lock:
                self._batches.remove(batch)
            self._forget([collector.request for collector in batch.collectors])
        return [c.result for c in batch.collectors if c.result is not None]

    def _stream(
        self, prompt: TokenIds, params: SamplingParams | None
    ) -> Generator[Chunk, None, None]:
        one = self._read_params(params, 1)[0]
        prompt = self._limits.validate(prompt, one)
        return self._chunks(prompt, one, self.restrictions.compile(one))

    def _chunks(
        self,
        prompt: npt.NDArray[np.int32],
        params: SamplingParams,
        restriction: Restriction | None,
    ) -> Generator[Chunk, None, None]:
        deltas: deque[Delta] = deque()
        with self._lock:
            self._check_open()
            request = self.engine.queue(prompt, params, restriction=restriction)
            self._sinks[request.id] = deltas.append
        try:
            missing = params.n
            while missing:
                while not deltas:
                    self._step(lambda: bool(deltas))
                delta = deltas.popleft()
                yield from self._split(delta)
                if delta.error is not None:
                    raise GenerationError(delta.error)
                missing -= delta.finish_reason is not None
        finally:
            self._forget([request])

    def _split(self, delta: Delta) -> Iterable[Chunk]:
        """One chunk per token of a delta; one chunk without a token if the delta has none."""
        tokens: list[int | None] = [*delta.token_ids] or [None]
        pieces = zip_longest(tokens, delta.pieces, delta.logprobs)
        for i, (token, piece, logprobs) in enumerate(pieces):
            last = i == len(tokens) - 1
            yield Chunk(
                index=delta.index,
                text=piece,
                token_id=token,
                logprobs=None if logprobs is None else self._logprobs(logprobs),
                finish_reason=delta.finish_reason if last else None,
                stop_reason=delta.stop_reason if last else None,
            )

    def _step(self, has_enough: Callable[[], bool]) -> None:
        """Run one step of the engine and pass its deltas to the requests that wait for them.

        Do nothing if a step of another thread has brought what the caller waits for.
        """
        with self._lock:
            if has_enough():
                return
            if self._closed:
                raise GenerationError("this LLM was closed while a request was running")
            for batch in self._batches:
                for collector in batch.queue():
                    self._sinks[collector.request.id] = collector.add
            if not (self._undelivered or self.engine.has_work):
                raise GenerationError("an interrupt of another thread has lost the results")
            if not self._undelivered:
                self._undelivered.extend(self.engine.step())
            self._deliver()

    def _deliver(self) -> None:
        """Pass on the deltas of a step, also those that an interrupt has left."""
        while self._undelivered:
            delta = self._undelivered.popleft()
            try:
                sink = self._sinks.get(delta.request.id)
                if sink is not None:
                    sink(delta)
            except BaseException:  # maybe it has arrived, maybe not: its request ends
                self.engine.abort(delta.request.id)
                raise

    def _forget(self, requests: Iterable[Request]) -> None:
        """Drop the sinks of requests, and abort requests that have not ended."""
        with self._lock:
            for request in requests:
                self._sinks.pop(request.id, None)
                if not self._closed:
                    self.engine.abort(request.id)
                request.sequences = ()  # see batch.Collector

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """Log-probabilities in vLLM's format: the chosen token first, then the most likely."""
        result = {entry.token_id: self._logprob(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top, 1):
            if token != entry.token_id:
                result[token] = self._logprob(token, logprob, rank)
        return result

    def _logprob(self, token: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self.tokenizer.available:
            text = self.tokenizer.decode([token], skip_special_tokens=False)
        return Logprob(logprob, rank, text)


def _new_decoder(tokenizer: Tokenizer) -> Callable[[Request], StreamDecoder]:
    """A function that makes the decoder of one sequence of a request."""

    def new_decoder(request: Request) -> StreamDecoder:
        context = request.prompt[-DECODER_CONTEXT:].tolist()
        params = request.params
        return StreamDecoder(
            tokenizer, params.skip_special_tokens, context, params.kept_special_token_ids
        )

    return new_decoder
