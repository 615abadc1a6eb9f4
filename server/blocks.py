"""Answers of a chat as blocks, for the interfaces whose answers are lists of blocks.

OpenAI's responses and Anthropic's messages hold an answer as a list: a text, then calls of tools.
Both are made from what chat completions would answer, in one piece or streamed, so that they need
no path of their own to the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megavm.server.answers import Choice
from megavm.server.chat import ChatAnswer
from megavm.server.engine.generation import Batch, Generation
from megavm.server.errors import ApiError, to_json
from megavm.server.ids import new_id
from megavm.server.protocol import ChatRequest
from megavm.server.service import Service
from megavm.server.sse import named_line
from megavm.server.tools.answer import NewMessage

Event = dict[str, Any]


@dataclass
class Block:
    """A text, or a call of a tool with its arguments as JSON, as far as it has been generated.

    Attributes:
        index: its place in the answer.
        call_id, name: of the call; None for a text.
        logprobs: chat completions' objects of the tokens, if they were asked for.
        id: a number that no other block has, in hexadecimal.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    id: str = field(default_factory=new_id)

    @property
    def text(self) -> str:
        """The text, or the arguments."""
        return "".join(self.pieces)


class BlockAnswer(ChatAnswer):
    """The answer to a request for one completion, as a list of blocks; see `Answer`.

    In a stream all blocks but the last have ended, and text opens a block when there is some.

    Attributes:
        blocks: the blocks so far.
    """

    def __init__(
        self,
        service: Service,
        body: ChatRequest,
        generation: Generation,
        new_message: NewMessage | None = None,
    ) -> None:
        super().__init__(service, body, generation, new_message)
        self.blocks: list[Block] = []
        self._is_open = False
        self._held: list[dict[str, Any]] = []  # log-probabilities of tokens without text yet
        self._last: dict[str, Any] = {}  # chat completions' choice at the end of the stream

    @abstractmethod
    def content(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The whole answer. `choice` has chat completions' finish_reason and stop_reason."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[Event]:
        """The events of a block that begins."""

    @abstractmethod
    def extended(self, block: Block, piece: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """The events of a piece of text or arguments, with what is known of its tokens."""

    @abstractmethod
    def closed(self, block: Block, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of a block that has ended; `choice` ends the answer if it has a
        finish_reason."""

    @abstractmethod
    def ended(self, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of the end; `choice` as in `content`."""

    @abstractmethod
    def failed(self, error: ApiError) -> Iterator[Event]:
        """The events of an answer that ends with an error."""

    def write(self, choices: list[Choice]) -> bytes:
        choice = self.whole_choice(choices[0])
        message = choice["message"]
        if message["content"]:
            entries = (choice["logprobs"] or {}).get("content") or []
            self.blocks.append(Block(0, pieces=[message["content"]], logprobs=entries))
        for call in message.get("tool_calls") or ():
            self.blocks.append(self._call(call, call["function"]["arguments"]))
        return to_json(self.content(choice)).encode()

    def render(self, batch: Batch) -> bytes:
        events: list[Event] = []
        for index, delta in batch:
            for token in self.tokens(index, delta):
                events += self._events(self.part_choice(token))
        return self.lines(events)

    def end(self) -> bytes:
        return self.lines(self.ended(self._last))

    def fail(self, error: ApiError) -> bytes:
        return self.lines(self.failed(error))

    def _events(self, choice: dict[str, Any]) -> Iterator[Event]:
        """The events of one event of chat completions."""
        delta, entries = choice["delta"], (choice["logprobs"] or {}).get("content") or []
        self._held += entries
        calls = delta.get("tool_calls") or []
        for call in calls:
            if not call.get("id") and (more := call["function"].get("arguments")):
                yield from self._extend(more)
        if text := delta.get("content"):
            if not self._is_open or self.blocks[-1].call_id is not None:
                yield from self._begin(Block(len(self.blocks)), choice)
            yield from self._extend(text)
        for call in calls:
            if call.get("id"):
                yield from self._begin(self._call(call), choice)
                if arguments := call["function"].get("arguments"):
                    yield from self._extend(arguments)
        if choice["finish_reason"] is not None:
            self._last = choice
            yield from self._close(choice)

    def _begin(self, block: Block, choice: dict[str, Any]) -> Iterator[Event]:
        yield from self._close({**choice, "finish_reason": None})
        self.blocks.append(block)
        self._is_open = True
        yield from self.opened(block)

    def _extend(self, piece: str) -> Iterator[Event]:
        block, self._held, held = self.blocks[-1], [], self._held
        block.pieces.append(piece)
        block.logprobs += held
        yield from self.extended(block, piece, held)

    def _close(self, choice: dict[str, Any]) -> Iterator[Event]:
        if self._is_open:
            self._is_open = False
            self.blocks[-1].logprobs += self._held
            self._held = []
            yield from self.closed(self.blocks[-1], choice)

    def _call(self, call: dict[str, Any], arguments: str = "") -> Block:
        pieces = [arguments] if arguments else []
        return Block(len(self.blocks), call["id"], call["function"]["name"], pieces)

    @staticmethod
    def lines(events: Iterable[Event]) -> bytes:
        """Events as they are sent."""
        return "".join(map(named_line, events)).encode()
