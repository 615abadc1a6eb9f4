"""POST /v1/responses: OpenAI's responses, of a server that stores none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.server.answers import check_generation
from megavm.server.blocks import Block, BlockAnswer, Event
from megavm.server.chat import answer_chat
from megavm.server.engine.generation import Generation
from megavm.server.errors import ApiError, renamed
from megavm.server.protocol import ChatRequest, read_body
from megavm.server.responses_request import FIELDS, ResponsesRequest
from megavm.server.service import Service
from megavm.server.tools.answer import NewMessage


class ResponsesAnswer(BlockAnswer):
    """See `Answer`. `given` is the request as the client wrote it, `body` as a chat request."""

    id_prefix = "resp_"

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        generation: Generation,
        new_message: NewMessage | None = None,
        *,
        given: ResponsesRequest,
    ) -> None:
        super().__init__(service, body, generation, new_message)
        self._given = given
        self._number = 0  # of the next event
        self._began = int(time.time())

    def content(self, choice: dict[str, Any]) -> dict[str, Any]:
        if not self.blocks:
            self.blocks.append(Block(0))  # an answer without text is an empty text
        incomplete = choice["finish_reason"] == "length"
        output = [_item(block, "completed") for block in self.blocks[:-1]]
        output.append(_item(self.blocks[-1], _status(choice)))
        reason = {"reason": "max_output_tokens"} if incomplete else None
        return self._response(
            _status(choice), output=output, incomplete_details=reason, usage=self._response_usage()
        )

    def begin(self) -> bytes:
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self.lines(self._event(kind, response=response) for kind in kinds)

    def opened(self, block: Block) -> Iterator[Event]:
        yield self._of_block("response.output_item.added", block, item=_item(block, "in_progress"))
        if block.call_id is None:
            yield self._of_text("response.content_part.added", block, part=_part(block))

    def extended(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if block.call_id is None:
            yield self._of_text("response.output_text.delta", block, delta=piece, logprobs=logprobs)
        else:
            kind = "response.function_call_arguments.delta"
            yield self._of_item(kind, block, delta=piece)

    def closed(self, block: Block, choice: dict[str, Any]) -> Iterator[Event]:
        if block.call_id is None:
            kind = "response.output_text.done"
            yield self._of_text(kind, block, text=block.text, logprobs=list(block.logprobs))
            yield self._of_text("response.content_part.done", block, part=_part(block))
        else:
            kind = "response.function_call_arguments.done"
            yield self._of_item(kind, block, name=block.name, arguments=block.text)
        item = _item(block, _status(choice))
        yield self._of_block("response.output_item.done", block, item=item)

    def ended(self, choice: dict[str, Any]) -> Iterator[Event]:
        if not self.blocks:
            self.blocks.append(Block(0))
            yield from self.opened(self.blocks[0])
            yield from self.closed(self.blocks[0], choice)
        yield self._event(f"response.{_status(choice)}", response=self.content(choice))

    def failed(self, error: ApiError) -> Iterator[Event]:
        output = [_item(block, "incomplete") for block in self.blocks]
        # The only one of OpenAI's codes that says that the request is wrong.
        code = "invalid_prompt" if error.status == 400 else "server_error"
        cause = {"code": code, "message": error.message}
        response = self._response("failed", output=output, error=cause)
        yield self._event("response.failed", response=response)

    def _response(self, status: str, **more: Any) -> dict[str, Any]:
        given, params = self._given, self.generation.params
        text = given.text.model_dump(exclude_none=True) if given.text is not None else {}
        effort = None if given.reasoning is None else given.reasoning.effort
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._began,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata or {},
            "model": self.model,
            "output": [],
            "parallel_tool_calls": given.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": effort, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": given.tool_choice or "auto",
            "tools": given.tools or [],
            "top_logprobs": given.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **more,
        }

    def _response_usage(self) -> dict[str, Any]:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        }

    def _event(self, kind: str, **content: Any) -> Event:
        number, self._number = self._number, self._number + 1
        return {"type": kind, "sequence_number": number, **content}

    def _of_block(self, kind: str, block: Block, **content: Any) -> Event:
        return self._event(kind, output_index=block.index, **content)

    def _of_item(self, kind: str, block: Block, **content: Any) -> Event:
        return self._of_block(kind, block, item_id=_item_id(block), **content)

    def _of_text(self, kind: str, block: Block, **content: Any) -> Event:
        return self._of_item(kind, block, content_index=0, **content)


def _status(choice: dict[str, Any]) -> str:
    return "incomplete" if choice["finish_reason"] == "length" else "completed"


def _item_id(block: Block) -> str:
    return ("msg_" if block.call_id is None else "fc_") + block.id


def _item(block: Block, status: str) -> dict[str, Any]:
    """An item of the output."""
    item = {"id": _item_id(block), "status": status}
    if block.call_id is not None:
        call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}
    # An item begins without parts; they are added one by one.
    content = [] if status == "in_progress" else [_part(block)]
    return {**item, "type": "message", "role": "assistant", "content": content}


def _part(block: Block) -> dict[str, Any]:
    """The only part of a message."""
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": list(block.logprobs),
    }


async def respond_to(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    service.admit(1)
    given = await read_body(request, ResponsesRequest)
    given.check_supported()
    with renamed(FIELDS):
        body = given.chat()
        params = check_generation(request, service, body)
        new_answer = partial(ResponsesAnswer, given=given)
        return await answer_chat(request, service, body, params, new_answer)
