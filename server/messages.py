"""POST /v1/messages: Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from megavm.server.answers import check_generation
from megavm.server.blocks import Block, BlockAnswer, Event
from megavm.server.chat import answer_chat, encode_chat
from megavm.server.engine.generation import Batch
from megavm.server.errors import ApiError, json_response, renamed, to_json
from megavm.server.messages_request import FIELDS, CountTokensRequest, MessagesRequest
from megavm.server.protocol import check_model, read_body
from megavm.server.service import Service

_REASONS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(BlockAnswer):
    """See `Answer`."""

    id_prefix = "msg_"
    _started = False

    def content(self, choice: dict[str, Any]) -> dict[str, Any]:
        cut = choice["finish_reason"] == "length"
        return self._message([_block(block, cut) for block in self.blocks], **_stop(choice))

    def render(self, batch: Batch) -> bytes:
        # The first event has the tokens of the prompt that were cached: known with the first token.
        begin = b"" if self._started else self.lines(self._start())
        return begin + super().render(batch)

    def opened(self, block: Block) -> Iterator[Event]:
        empty = Block(block.index, block.call_id, block.name)
        yield _of_block("start", block, content_block=_block(empty))

    def extended(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if block.call_id is None:
            delta = {"type": "text_delta", "text": piece}
        else:
            delta = {"type": "input_json_delta", "partial_json": piece}
        yield _of_block("delta", block, delta=delta)

    def closed(self, block: Block, choice: dict[str, Any]) -> Iterator[Event]:
        yield _of_block("stop", block)

    def ended(self, choice: dict[str, Any]) -> Iterator[Event]:
        yield {"type": "message_delta", "delta": _stop(choice), "usage": self._message_usage()}
        yield {"type": "message_stop"}

    def failed(self, error: ApiError) -> Iterator[Event]:
        yield error.anthropic_body()

    def _start(self) -> Iterator[Event]:
        self._started = True
        message = self._message([], stop_reason=None, stop_sequence=None)
        yield {"type": "message_start", "message": message}
        yield {"type": "ping"}

    def _message(self, content: list[dict[str, Any]], **stop: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            **stop,
            "usage": self._message_usage(),
        }

    def _message_usage(self) -> dict[str, Any]:
        usage = self.usage
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _stop(choice: dict[str, Any]) -> dict[str, Any]:
    """Why the answer has ended."""
    reason, sequence = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(sequence, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _block(block: Block, cut: bool = False) -> dict[str, Any]:
    """A block of the content; `cut`: max_tokens has ended the answer, maybe within it."""
    if block.call_id is None:
        return {"type": "text", "text": block.text}
    given = _arguments(block.text, cut)
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": given}


def _arguments(text: str, cut: bool) -> dict[str, Any]:
    """The arguments of a call; none if the model has not written a JSON object."""
    try:
        found = from_json(
            text, allow_inf_nan=False, allow_partial="trailing-strings" if cut else False
        )
        to_json(found)  # a number such as 1e400 is read, but cannot be written
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _of_block(what: str, block: Block, **content: Any) -> Event:
    return {"type": f"content_block_{what}", "index": block.index, **content}


async def create_message(request: Request, service: Service) -> Response:
    """Answer the request.

    Raises:
        ApiError: the request is invalid, or the server cannot answer it.
    """
    service.admit(1)
    given = await read_body(request, MessagesRequest)
    given.check_supported()
    with renamed(FIELDS):
        body = given.chat()
        params = check_generation(request, service, body)
        return await answer_chat(request, service, body, params, MessagesAnswer)


async def count_tokens(request: Request, service: Service) -> Response:
    """Tokens of the prompt of a request.

    Raises:
        ApiError: the request is invalid.
    """
    service.model  # noqa: B018 - raises ApiError while the model is not ready
    given = await read_body(request, CountTokensRequest)
    given.check_supported()
    check_model(given.model, service.settings.model_names)
    with renamed(FIELDS):
        body = given.chat()
        body.check_supported()
    return json_response({"input_tokens": len(await encode_chat(request, service, body))})
