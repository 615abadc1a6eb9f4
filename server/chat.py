"""POST /v1/chat/completions: answer conversations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.sampling_params import SamplingParams
from megavm.server.answers import Answer, Choice, Token, read_generation, respond
from megavm.server.engine.generation import Generation
from megavm.server.errors import bad_request
from megavm.server.logprobs import chat_logprobs
from megavm.server.protocol import ChatRequest
from megavm.server.service import Service
from megavm.server.sse import Template
from megavm.server.tools.answer import NewMessage, ToolMessage
from megavm.server.tools.grammars import calls_grammar, refusals_name_tools
from megavm.server.tools.parser import ToolParser
from megavm.server.tools.request import ToolChoice
from megavm.tokenizer import Tokenizer


class ChatAnswer(Answer):
    """See `Answer`. The first event of a choice carries the role.

    `new_message`: makes what reads the calls of a choice; None: there may be none.
    """

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    part_object = "chat.completion.chunk"

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        generation: Generation,
        new_message: NewMessage | None = None,
    ) -> None:
        super().__init__(service, body, generation)
        self._with_logprobs = bool(body.logprobs)
        self._new_message = new_message
        self._messages: dict[int, ToolMessage] = {}  # by choice, for streams

    def whole_extra(self) -> dict[str, Any]:
        return self.prompt_logprobs(0)

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        found = chat_logprobs(choice.logprobs, self.tokenizer) if self._with_logprobs else None
        said: dict[str, Any] = {"content": choice.text}
        reason = choice.finish_reason
        if self._new_message is not None:
            message = self._new_message()
            said = message.whole(choice.text)
            reason = message.finish_reason(reason)
        return {
            "index": choice.index,
            "message": {"role": "assistant", **said, "refusal": None},
            "logprobs": found,
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        }

    def part_choice(self, token: Token) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if token.is_first else {}
        reason = token.finish_reason
        if self._new_message is not None:
            if token.is_first:
                self._messages[token.choice] = self._new_message()
                delta["content"] = None  # of an answer that holds only calls
            message = self._messages[token.choice]
            delta |= message.delta(token.text, is_last=reason is not None)
            reason = message.finish_reason(reason)
        elif token.text or token.is_first or reason is None:
            delta["content"] = token.text
        entries = [token.logprobs] if token.logprobs is not None else None
        return {
            "index": token.choice,
            "delta": delta,
            "logprobs": None if entries is None else chat_logprobs(entries, self.tokenizer),
            "finish_reason": reason,
            "stop_reason": token.stop_reason,
        }

    def _template(self, index: int) -> Template | None:
        # The part of a call in one token depends on the tokens before it.
        return None if self._new_message is not None else super()._template(index)


NewAnswer = Callable[[Service, ChatRequest, Generation, NewMessage | None], ChatAnswer]


async def chat(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    body, params = await read_generation(request, service, ChatRequest)
    return await answer_chat(request, service, body, params, ChatAnswer)


async def encode_chat(
    request: Request, service: Service, body: ChatRequest, params: SamplingParams | None = None
) -> list[int]:
    """Token ids of the prompt of a chat. `params`: those it is continued with, if it is.

    Raises:
        ApiError: the chat template cannot render the messages, or the prompt is far too long to be
            continued.
    """
    text = await service.render_chat(body, len(await request.body()))
    if params is not None:
        service.check_texts([text], params, body.source)
    # The chat template has already inserted the special tokens.
    return await service.encode(text, body.source, bool(body.add_special_tokens))


async def answer_chat(
    request: Request,
    service: Service,
    body: ChatRequest,
    params: SamplingParams,
    new_answer: NewAnswer,
) -> Response:
    """Answer a chat in the form of `new_answer`.

    Raises:
        ApiError: the prompt is invalid or too long, or the server cannot answer it.
    """
    service.admit(params.n)
    choice, new_message = body.read_tool_choice(), None
    naming: AbstractContextManager[None] = nullcontext()
    if choice is not None:
        parser = service.tool_parser()
        new_message = partial(_new_message, parser, choice)
        params, naming = _for_tools(params, choice, parser, service.tokenizer)
    ids = await encode_chat(request, service, body, params)
    prompts = service.check_prompts([ids], params, body)
    with naming:
        generation = await service.generate(body, prompts, params)
    answer = new_answer(service, body, generation, new_message)
    return await respond(request, service, body, answer)


def _new_message(parser: type[ToolParser], choice: ToolChoice) -> ToolMessage:
    names = frozenset(function.name for function in choice.functions)
    return ToolMessage(parser(names), choice.parallel)


def _for_tools(
    params: SamplingParams, choice: ToolChoice, parser: type[ToolParser], tokenizer: Tokenizer
) -> tuple[SamplingParams, AbstractContextManager[None]]:
    """The parameters with which the model calls as it must, and the parser sees the markers.

    And a context for what queues them, so that an error names the function that is its cause.

    Raises:
        ApiError: a function's parameters are not supported, or another form is asked for too.
    """
    special = map(tokenizer.special_id, parser.special_tokens)
    kept = tuple(token for token in special if token is not None)
    try:
        form = calls_grammar(parser.form, choice, parser.special_tokens, tokenizer.special_id)
    except ValueError as error:
        raise bad_request(str(error), "tools") from error
    if form is None:
        return replace(params, kept_special_token_ids=kept), nullcontext()
    if params.structured_outputs is not None:
        raise bad_request(
            "tools that must be called, or are strict, and a form of the whole output, such as"
            " response_format, exclude each other",
            "tools",
        )
    params = replace(params, kept_special_token_ids=kept, structured_outputs=form)
    return params, refusals_name_tools(choice, form)
