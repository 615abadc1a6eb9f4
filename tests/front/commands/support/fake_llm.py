"""An `LLM` that answers at once, in place of the one that loads a model."""

from __future__ import annotations

import math
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Completion:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    logprobs: Any = None
    error: str | None = None


@dataclass
class Output:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    timings: dict[str, float] = field(default_factory=lambda: {"decode_seconds": 0.5})

    @property
    def error(self) -> str | None:
        return next((output.error for output in self.outputs if output.error), None)


@dataclass
class Piece:
    index: int
    text: str
    token_id: int | None
    finish_reason: str | None = None


class FakeTokenizer:
    available = True
    chats = True

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)

    def chat_prompt(self, messages: list[dict[str, str]]) -> str:
        return "".join(message["content"] for message in messages)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def require_chat(self) -> None:
        if not self.chats:
            raise ValueError("the model has no chat template")


class FakeLLM:
    """Answers "w0 w1 ..." and remembers what it was asked."""

    made: list[FakeLLM]
    failure: BaseException | None = None
    broken_off: str | None = None
    max_prompt_len = 1000  # characters
    generation: dict[str, Any]

    def __init__(self, model: str, **keywords: Any) -> None:
        self.model = model
        self.keywords = keywords
        self.calls: list[tuple[Any, Any]] = []
        self.tokenizer = FakeTokenizer()
        limits = types.SimpleNamespace(max_prompt_len=self.max_prompt_len)
        self.engine = types.SimpleNamespace(limits=limits)
        self.checkpoint = types.SimpleNamespace(generation=self.generation)
        FakeLLM.made.append(self)
        if model == "nothing":
            raise ValueError("no such directory: nothing\nsecond line")

    def _tokens(self, params: Any) -> range:
        if FakeLLM.failure is not None:
            raise FakeLLM.failure
        return range(min(params.max_tokens or 3, 3))

    def generate(self, prompts: Any, params: Any) -> list[Output]:
        self.calls.append((prompts, params))
        tokens = self._tokens(params)
        logprobs = [{i: -0.5, 7: -math.inf} for i in tokens] if params.logprobs else None
        text = " ".join(f"w{i}" for i in tokens)
        completions = [
            Completion(n, text, list(tokens), logprobs=logprobs, error=FakeLLM.broken_off)
            for n in range(params.n)
        ]
        prompt, ids = (prompts, [5]) if isinstance(prompts, str) else (None, prompts)
        return [Output(prompt, ids, completions)]

    def stream(self, prompt: Any, params: Any) -> Iterator[Piece]:
        self.calls.append((prompt, params))
        for token in self._tokens(params):
            for index in range(params.n):
                yield Piece(index, f"w{token} ", token)
        yield Piece(0, "", None, "error" if FakeLLM.broken_off else "length")

    def stream_chat(self, messages: Any, params: Any) -> Iterator[Piece]:
        yield from self.stream([dict(message) for message in messages], params)


def last_params() -> Any:
    """The sampling parameters of the last call."""
    return FakeLLM.made[-1].calls[-1][1]
