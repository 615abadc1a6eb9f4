"""POST /v1/chat/completions: answer conversations."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.server.answers import Answer, Choice, Token, read_generation, respond
from megavm.server.logprobs import chat_logprobs
from megavm.server.protocol import ChatRequest
from megavm.server.service import Service


class ChatAnswer(Answer):
    """See `Answer`. The first event of a choice carries the role."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        with_logprobs = self.generation.params.logprobs is not None
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, self.tokenizer) if with_logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def part_choice(self, token: Token) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if token.is_first else {}
        if token.text or token.is_first or token.finish_reason is None:
            delta["content"] = token.text
        entries = [token.logprobs] if token.logprobs is not None else None
        return {
            "index": token.choice,
            "delta": delta,
            "logprobs": None if entries is None else chat_logprobs(entries, self.tokenizer),
            "finish_reason": token.finish_reason,
            "stop_reason": token.stop_reason,
        }


async def chat(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    body, params = await read_generation(request, service, ChatRequest)
    service.admit(params.n)
    text = await service.render_chat(body, len(await request.body()))
    # The chat template has already inserted the special tokens.
    ids = await service.encode(text, "messages", bool(body.add_special_tokens))
    prompts = service.check_prompts([ids], params, "messages")
    restriction = await service.restriction(body, params)
    generation = service.generation(prompts, params, whole=not body.stream, restriction=restriction)
    return await respond(request, service, body, ChatAnswer(service, body, generation))
