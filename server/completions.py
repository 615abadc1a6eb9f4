"""POST /v1/completions: continue texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.server.answers import Answer, Choice, Token, read_generation, respond
from megavm.server.engine.generation import Generation
from megavm.server.logprobs import CompletionLogprobs
from megavm.server.protocol import CompletionRequest, read_prompts
from megavm.server.service import Service


class CompletionAnswer(Answer):
    """See `Answer`. `texts`: the prompts as text if they are echoed, else None."""

    id_prefix = "cmpl-"
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
        self._num_alternatives = body.logprobs or 0
        self._logprobs: dict[int, CompletionLogprobs] = {}  # by choice, for streams

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self._with_logprobs:
            entries = [*self._echoed_logprobs(choice.prompt), *choice.logprobs]
            logprobs = CompletionLogprobs(self.tokenizer).object(entries)
        return {
            "index": choice.index,
            "text": self._echoed_text(choice.prompt) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self.prompt_logprobs(choice.prompt),
        }

    def part_choice(self, token: Token) -> dict[str, Any]:
        text, entries = token.text, [token.logprobs] if token.logprobs is not None else []
        if token.is_first:
            prompt = token.choice // self.generation.params.n
            text = self._echoed_text(prompt) + text
            entries = [*self._echoed_logprobs(prompt), *entries]
            self._logprobs[token.choice] = CompletionLogprobs(self.tokenizer)
        logprobs = self._logprobs[token.choice].object(entries) if self._with_logprobs else None
        return {
            "index": token.choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
        }

    def _echoed_text(self, prompt: int) -> str:
        return "" if self._texts is None else self._texts[prompt]

    def _echoed_logprobs(self, prompt: int) -> list[Any]:
        """One entry per token of an echoed prompt; the first is only a token id."""
        if self._texts is None or not self._with_logprobs:
            return []
        generation, count = self.generation, self._num_alternatives
        logprobs = generation.read[prompt].logprobs
        assert logprobs is not None, "they are asked for where a prompt is echoed"
        entries = (entry for entry in logprobs[1:] if entry is not None)
        first = int(generation.prompts[prompt][0])
        return [first, *(replace(entry, top=entry.top[:count]) for entry in entries)]


async def complete(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    body, params = await read_generation(request, service, CompletionRequest)
    if body.echo and body.logprobs is not None:
        most = max(body.logprobs, body.prompt_logprobs or 0)
        params = replace(params, prompt_logprobs=most)
    prompts = read_prompts(body.prompt, service.max_sequences)
    service.admit(len(prompts) * params.n)
    special = body.add_special_tokens is not False
    service.check_texts(prompts, params, "prompt")
    ids = await service.encode_prompts(prompts, "prompt", special)
    checked = service.check_prompts(ids, params, body)
    texts = None
    if body.echo:
        # A truncated text is echoed as its remaining tokens say it.
        rest = [
            prompt if len(kept) == len(whole) else kept.tolist()
            for prompt, whole, kept in zip(prompts, ids, checked, strict=True)
        ]
        texts = await service.decode_prompts(rest, "prompt")
    generation = await service.generate(body, checked, params)
    return await respond(request, service, body, CompletionAnswer(service, body, generation, texts))
