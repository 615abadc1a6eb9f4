"""POST /v1/completions: continue texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.server.answers import Answer, Choice, Token, read_generation, respond
from megavm.server.engine_loop import Generation
from megavm.server.logprobs import CompletionLogprobs
from megavm.server.protocol import CompletionRequest, read_prompts
from megavm.server.service import Service


class CompletionAnswer(Answer):
    """See `Answer`. `texts`: the prompts as text if they are echoed, else None."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    part_object = "text_completion"

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        generation: Generation,
        texts: Sequence[str] | None,
    ) -> None:
        super().__init__(service, body, generation)
        self._texts = texts
        self._with_logprobs = body.logprobs is not None
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice, for streams

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            entries = [*self._echoed_logprobs(choice.index), *choice.logprobs]
            logprobs = CompletionLogprobs(self.tokenizer).object(entries)
        return {
            "index": choice.index,
            "text": self._echoed_text(choice.index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def part_choice(self, token: Token) -> dict[str, Any]:
        text, entries = token.text, [token.logprobs] if token.logprobs is not None else []
        if token.is_first:
            text = self._echoed_text(token.choice) + text
            entries = [*self._echoed_logprobs(token.choice), *entries]
            self._logprobs[token.choice] = CompletionLogprobs(self.tokenizer)
        logprobs = self._logprobs[token.choice].object(entries) if self._with_logprobs else None
        return {
            "index": token.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
        }

    def _prompt(self, choice: int) -> int:
        return choice // self.generation.params.n

    def _echoed_text(self, choice: int) -> str:
        return "" if self._texts is None else self._texts[self._prompt(choice)]

    def _echoed_logprobs(self, choice: int) -> list[Any]:
        """One entry per token of an echoed prompt; the first is only a token id."""
        if self._texts is None or not self._with_logprobs:
            return []
        request = self.generation.requests[self._prompt(choice)]
        assert request.prompt_logprobs is not None, "they are asked for where a prompt is echoed"
        return [int(request.prompt[0]), *request.prompt_logprobs[1:]]


async def complete(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    body, params = await read_generation(request, service, CompletionRequest)
    if body.echo and params.logprobs is not None:
        params = replace(params, prompt_logprobs=params.logprobs)
    prompts = read_prompts(body.prompt, service.max_sequences)
    service.admit(len(prompts) * params.n)
    special = body.add_special_tokens is not False
    ids = await service.encode_prompts(prompts, "prompt", special)
    checked = service.check_prompts(ids, params, "prompt")
    texts = await service.decode_prompts(prompts, "prompt") if body.echo else None
    restriction = await service.restriction(body, params)
    generation = service.generation(checked, params, whole=not body.stream, restriction=restriction)
    return await respond(request, service, body, CompletionAnswer(service, body, generation, texts))
