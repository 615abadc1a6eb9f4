"""Building the answers of completions and chat completions: the code that both share."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.logprobs import TokenLogprobs
from megavm.server.engine.generation import Batch, Generation, Part
from megavm.server.errors import ApiError, timed_out, to_json
from megavm.server.ids import new_id
from megavm.server.logprobs import prompt_logprobs
from megavm.server.logs import note
from megavm.server.protocol import AnyGeneration, GenerationRequest, check_model, read_body
from megavm.server.service import Service
from megavm.server.sse import DONE, EventStream, Template, line, until_disconnect


@dataclass
class Choice:
    """One continuation, as far as it has been generated."""

    index: int
    prompt: int  # which prompt it continues
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """All pieces together."""
        return "".join(self.pieces)

    @property
    def likelihood(self) -> float:
        """Mean log-probability of its tokens, by which OpenAI's `best_of` chooses."""
        values = [entry.logprob for entry in self.logprobs]
        return sum(values) / len(values) if values else 0.0


@dataclass(frozen=True)
class Token:
    """The contents of one event of a stream: a token, or the end of a continuation without one."""

    choice: int
    text: str
    token_ids: list[int]
    logprobs: TokenLogprobs | None
    is_first: bool
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_tokens: int | None = None  # tokens of the continuation so far; None: not said


class Answer(ABC):
    """The answer to one request, as one JSON object or as a stream (sse.Renderer).

    Attributes:
        id: the answer's id.
        model: the name that the client has for the model.
    """

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    part_object: ClassVar[str]

    def __init__(self, service: Service, body: GenerationRequest, generation: Generation) -> None:
        self.id = f"{self.id_prefix}{new_id()}"
        self.generation = generation
        self.tokenizer = service.tokenizer
        self._service = service
        self.model = body.model or service.settings.model_names[0]
        self._created = int(time.time())
        self._with_ids = bool(body.return_token_ids)
        self._include_usage = body.include_usage
        self._continuous_usage = body.continuous_usage
        self._silent = body.wanted_max_tokens() == 0  # one token is generated but not shown
        self._wanted = (body.n or 1) if body.chooses_best else None
        self._with_prompt_logprobs = body.prompt_logprobs is not None
        self._num_tokens = [0] * generation.num_sequences
        self._begun: set[int] = set()  # choices that an event has been made for
        self._templates: dict[int, Template | None] = {}  # of choices that have begun

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """An element of "choices" in an answer that is not streamed."""

    def whole_extra(self) -> dict[str, Any]:
        """Further keys of an answer that is not streamed."""
        return {}

    def prompt_logprobs(self, prompt: int) -> dict[str, Any]:
        """The key with the log-probabilities of a prompt, if the client asked for them."""
        entries = self.generation.read[prompt].logprobs
        if not self._with_prompt_logprobs or entries is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(entries, self.tokenizer)}

    @abstractmethod
    def part_choice(self, token: Token) -> dict[str, Any]:
        """The only element of "choices" in an event of a stream."""

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object: tokens of the prompts and of the answer so far."""
        cached = sum(read.cached_tokens for read in self.generation.read)
        tokens = sum(self._num_tokens) + self.generation.written
        return {
            **_usage(sum(map(len, self.generation.prompts)), tokens),
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "choices": choices,
        }

    # Without a stream.

    async def whole(self) -> bytes:
        """Wait for the end of the generation; the JSON of the answer.

        Raises:
            ApiError: the generation failed.
        """
        per_prompt = self.generation.params.n
        choices = [Choice(i, i // per_prompt) for i in range(self.generation.num_sequences)]
        while batch := await self.generation.next_batch():
            for index, part in batch:
                choice = choices[index]
                choice.finish_reason, choice.stop_reason = self._end(part)
                if not self._silent:
                    choice.token_ids += part.token_ids
                    choice.pieces += part.pieces
                    choice.logprobs += part.logprobs
        self._num_tokens = [len(choice.token_ids) for choice in choices]
        # Serialising log-probabilities takes long, so count those of echoed prompts too.
        params, tokens = self.generation.params, sum(self._num_tokens)
        if params.prompt_logprobs is not None:
            tokens += params.n * sum(map(len, self.generation.prompts))
        size = tokens * (1 + max(params.logprobs or 0, params.prompt_logprobs or 0))
        return await self._service.call(size, self.write, self._best(choices))

    def _best(self, choices: list[Choice]) -> list[Choice]:
        """The most likely choices of each prompt if `best_of` asks for that, numbered anew."""
        if self._wanted is None:
            return choices
        chosen = []
        for prompt in range(len(self.generation.prompts)):
            own = [choice for choice in choices if choice.prompt == prompt]
            chosen += sorted(own, key=lambda choice: -choice.likelihood)[: self._wanted]
        return [replace(choice, index=i) for i, choice in enumerate(chosen)]

    def write(self, choices: list[Choice]) -> bytes:
        """The JSON of the answer, choice by choice: one call for all would block other threads."""
        wholes = [to_json({**self.whole_choice(c), **self._ids(c.token_ids)}) for c in choices]
        envelope = {**self._envelope(self.whole_object, []), "usage": self.usage}
        head, tail = to_json({**envelope, **self.whole_extra()}).split('"choices":[]')
        return f'{head}"choices":[{",".join(wholes)}]{tail}'.encode()

    # As a stream.

    def begin(self) -> bytes:
        """No event: the first one comes with the first token."""
        return b""

    def render(self, batch: Batch) -> bytes:
        """One event per token. Events that differ only in their text come from a template."""
        lines: list[str] = []
        for index, part in batch:
            template = self._templates.get(index)
            plain = part.finish_reason is None and not part.logprobs and not self._with_ids
            if template is None or not plain:
                lines += [line(self._part(token)) for token in self.tokens(index, part)]
                if index not in self._templates:
                    self._templates[index] = self._template(index)
                continue
            before, new = self._count(index, part)
            if self._continuous_usage:
                usages = (self._usage_of(index, before + i + 1) for i in range(new))
                lines += map(template.line_with_usage, part.pieces, usages)
            else:
                lines += map(template.line, part.pieces)
        return "".join(lines).encode()

    @property
    def template(self) -> Template | None:
        """See sse.Renderer. Only an answer with a single choice has one."""
        generation = self.generation
        if generation.num_sequences > 1 or generation.params.logprobs is not None:
            return None
        if self._with_ids or self._continuous_usage or self._silent:
            return None
        return self._templates.get(0)

    def tokens(self, index: int, part: Part) -> Iterator[Token]:
        """The tokens of a part; one without token id if the part has none. Counts them."""
        before, new = self._count(index, part)
        final = len(part.pieces) - 1
        for i, piece in enumerate(part.pieces):
            reason, stop_reason = self._end(part) if i == final else (None, None)
            yield Token(
                index,
                "" if self._silent else piece,
                [] if self._silent else part.token_ids[i : i + 1],
                part.logprobs[i] if part.logprobs and not self._silent else None,
                index not in self._begun,
                reason,
                stop_reason,
                before + min(i + 1, new),
            )
            self._begun.add(index)

    def _count(self, index: int, part: Part) -> tuple[int, int]:
        """(tokens of a choice before the part, tokens of the part); adds the second."""
        before, new = self._num_tokens[index], 0 if self._silent else len(part.token_ids)
        self._num_tokens[index] += new
        return before, new

    def end(self) -> bytes:
        """The event with the usage, if the client asked for it, and [DONE]."""
        if not self._include_usage:
            return DONE
        usage = line({**self._envelope(self.part_object, []), "usage": self.usage})
        return usage.encode() + DONE

    def fail(self, error: ApiError) -> bytes:
        """An event with the error, and [DONE]."""
        return line(error.body()).encode() + DONE

    def _ids(self, token_ids: list[int]) -> dict[str, Any]:
        return {"token_ids": token_ids} if self._with_ids else {}

    def _end(self, part: Part) -> tuple[str | None, int | str | None]:
        """(finish_reason, stop_reason) for the client; None while the continuation goes on."""
        if self._silent and part.finish_reason is not None:
            return "length", None
        return part.finish_reason, part.stop_reason

    def _part(self, token: Token) -> dict[str, Any]:
        choice = {**self.part_choice(token), **self._ids(token.token_ids)}
        content = self._envelope(self.part_object, [choice])
        if not self._include_usage:
            return content
        usage = None
        if self._continuous_usage and token.num_tokens is not None:
            usage = self._usage_of(token.choice, token.num_tokens)
        return {**content, "usage": usage}  # usage is the last key: see Template

    def _usage_of(self, choice: int, num_tokens: int) -> dict[str, Any]:
        """The usage of one choice alone, as vLLM sends it beside a token."""
        return _usage(len(self.generation.prompts[choice // self.generation.params.n]), num_tokens)

    def _template(self, index: int) -> Template | None:
        """The template of a choice's plain events; None if every event must be made."""
        return Template(lambda text: self._part(Token(index, text, [], None, is_first=False)))


def _usage(prompt: int, completion: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


async def read_generation(
    request: Request, service: Service, kind: type[AnyGeneration]
) -> tuple[AnyGeneration, SamplingParams]:
    """The body of a completion or chat request, and its sampling parameters.

    Raises:
        ApiError: the server takes no requests now, or the body is invalid.
    """
    service.admit(1)  # refuse before reading the body if the queue is full
    body = await read_body(request, kind)
    return body, check_generation(request, service, body)


def check_generation(request: Request, service: Service, body: GenerationRequest) -> SamplingParams:
    """The sampling parameters of a body; also checks its model, and logs its prompt if asked to.

    Raises:
        ApiError: the body is invalid.
    """
    settings = service.settings
    check_model(body.model, settings.model_names)
    if settings.log_prompts:
        note(request.scope, **{body.source: getattr(body, body.source)})
    return body.sampling_params(service.sampling_params, settings.max_n)


async def respond(
    request: Request, service: Service, body: GenerationRequest, answer: Answer
) -> Response:
    """The response to a request whose generation is queued; closes the generation at its end.

    Raises:
        ApiError: the generation failed or took too long.
        ClientDisconnected: the client went away.
    """
    generation, timeout = answer.generation, service.settings.request_timeout

    def close() -> None:
        service.close_generation(generation)
        usage = answer.usage
        note(
            request.scope,
            answer=answer.id,
            stream=bool(body.stream),
            prompt_tokens=usage["prompt_tokens"],
            completion_tokens=usage["completion_tokens"],
            ignored=body.ignored_fields() or None,
        )

    if body.stream:
        return EventStream(generation, answer, close, timeout, service.plain_writer)
    try:
        async with asyncio.timeout(timeout):
            content = await until_disconnect(request.receive, answer.whole())
            return Response(content, media_type="application/json")
    except TimeoutError as error:
        raise timed_out(timeout) from error
    finally:
        close()
