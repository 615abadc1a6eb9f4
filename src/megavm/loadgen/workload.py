"""The workload: prompts, and the lengths of their answers in tokens."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Ids below this one are special tokens in many vocabularies.
FIRST_TOKEN_ID: Final = 10
# In large vocabularies a common word with its space is one token; a token has about 4 letters.
_WORDS: Final = (
    "the", "and", "time", "way", "year", "day", "thing", "man", "world", "life", "hand", "part",
    "child", "eye", "woman", "place", "work", "week", "case", "point", "house", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "word",
    "side", "kind", "head", "far", "long", "little", "own", "other", "old", "great", "high",
    "small", "large", "next", "early", "young", "few", "public", "same",
)  # fmt: skip
_LETTERS_PER_TOKEN: Final = 4
_SHORTEST_CONVERSATION: Final = 4  # tokens; shorter prompts and answers are left out


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: fixed (a), uniform in [a, b], or normal.

    The normal distribution has mean a and standard deviation b and is cut at 1.
    """

    kind: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read `128`, `64:256` (uniform, both ends included) or `normal:MEAN:STD`.

        Raises:
            ValueError: `text` is none of these, or has lengths below 1.
        """
        name, _, rest = text.partition(":")
        try:
            if name == "normal":
                mean, _, deviation = rest.partition(":")
                lengths = cls("normal", float(mean), float(deviation))
                good = lengths.a >= 1 and 0 <= lengths.b < math.inf and lengths.a < math.inf
            elif rest:
                lengths = cls("uniform", int(name), int(rest))
                good = 1 <= lengths.a <= lengths.b
            else:
                lengths = cls("fixed", int(name))
                good = lengths.a >= 1
        except ValueError:
            good = False
        if not good:
            raise ValueError(f"{text!r} is not a length such as 128, 64:256 or normal:128:32")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """One length, at least 1."""
        if self.kind == "normal":
            return max(1, round(rng.gauss(self.a, self.b)))
        if self.kind == "uniform":
            return rng.randint(int(self.a), int(self.b))
        return int(self.a)


@dataclass(frozen=True)
class Prompt:
    """One request: a text or token ids, its length (estimated for texts), tokens to generate."""

    content: str | list[int]
    input_tokens: int
    output_tokens: int


def random_prompts(
    input_lengths: Lengths, output_lengths: Lengths, *, text: bool, vocab_size: int, seed: int
) -> Iterator[Prompt]:
    """Endless prompts: random words (`text`), else random token ids from 10 to vocab_size - 1.

    The same seed gives the same prompts.

    Raises:
        ValueError: vocab_size leaves no token id to draw.
    """
    if not text and vocab_size <= FIRST_TOKEN_ID:
        raise ValueError(f"vocab_size is {vocab_size}, and random ids begin at {FIRST_TOKEN_ID}")
    return _draw_prompts(input_lengths, output_lengths, text, vocab_size, random.Random(seed))


def _draw_prompts(
    input_lengths: Lengths,
    output_lengths: Lengths,
    text: bool,
    vocab_size: int,
    rng: random.Random,
) -> Iterator[Prompt]:
    ids = range(FIRST_TOKEN_ID, vocab_size)
    while True:
        count = input_lengths.draw(rng)
        content = " ".join(rng.choices(_WORDS, k=count)) if text else rng.choices(ids, k=count)
        yield Prompt(content, count, output_lengths.draw(rng))


def sharegpt_prompts(
    path: str | os.PathLike[str],
    *,
    output_lengths: Lengths | None,
    longest: int,
    seed: int,
) -> Iterator[Prompt]:
    """Endless prompts from a file of conversations in ShareGPT's format.

    A prompt is the first message of a conversation. The number of tokens to generate is the length
    of its answer (estimated as 4 letters per token), or drawn from `output_lengths`. Left out are
    conversations whose message or answer has fewer than 4 tokens, or that have more than `longest`
    tokens together. `seed` sets the random order; after the last prompt they are shuffled again.

    Raises:
        ValueError: the file has another format, or no conversation is left.
        OSError: the file cannot be read.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a JSON file: {error}") from error
    if not isinstance(value, list):
        raise ValueError(f"{os.fspath(path)} is not a list of conversations")
    prompts = [
        Prompt(question, _estimate(question), _estimate(answer))
        for question, answer in filter(None, map(_first_turns, value))
    ]
    kept = [
        prompt
        for prompt in prompts
        if min(prompt.input_tokens, prompt.output_tokens) >= _SHORTEST_CONVERSATION
        and prompt.input_tokens + prompt.output_tokens <= longest
    ]
    if not kept:
        raise ValueError(
            f"{os.fspath(path)} has {len(prompts)} conversations with a question and an answer,"
            f" none of them of {_SHORTEST_CONVERSATION} to {longest} tokens"
        )
    return _cycle(kept, output_lengths, random.Random(seed))


def _first_turns(conversation: Any) -> tuple[str, str] | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    question, answer = (turn.get("value") if isinstance(turn, dict) else None for turn in turns[:2])
    if not isinstance(question, str) or not isinstance(answer, str):
        return None
    return question, answer


def _estimate(text: str) -> int:
    return math.ceil(len(text) / _LETTERS_PER_TOKEN)


def _cycle(
    prompts: list[Prompt], output_lengths: Lengths | None, rng: random.Random
) -> Iterator[Prompt]:
    while True:
        rng.shuffle(prompts)
        for prompt in prompts:
            length = prompt.output_tokens if output_lengths is None else output_lengths.draw(rng)
            yield Prompt(prompt.content, prompt.input_tokens, length)
