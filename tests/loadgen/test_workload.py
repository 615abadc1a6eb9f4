"""Prompts and lengths."""

from __future__ import annotations

import json
import random
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from megavm.loadgen.workload import FIRST_TOKEN_ID, Lengths, random_prompts, sharegpt_prompts

FIXED = Lengths.parse("5")


def draws(text: str, count: int = 4000) -> list[int]:
    rng, lengths = random.Random(1), Lengths.parse(text)
    return [lengths.draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution() -> None:
    assert set(draws("7")) == {7}
    assert set(draws("3:5")) == {3, 4, 5}
    normal = draws("normal:100:10")
    assert statistics.mean(normal) == pytest.approx(100, abs=1)
    assert statistics.stdev(normal) == pytest.approx(10, abs=1)
    assert min(draws("normal:2:50")) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "5:3", "0:3", "a:b", "normal:0:1", "normal:5", "normal:nan:1"]
)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length such as"):
        Lengths.parse(text)


def test_prompts_are_random_and_the_same_for_the_same_seed() -> None:
    def draw(seed: int, text: bool) -> list[Any]:
        lengths = Lengths.parse("1:50")
        prompts = random_prompts(lengths, FIXED, text=text, vocab_size=200, seed=seed)
        return list(islice(prompts, 20))

    for text in (True, False):
        assert draw(1, text) == draw(1, text)
        assert draw(1, text) != draw(2, text)
    for prompt in draw(3, False):
        assert len(prompt.content) == prompt.input_tokens
        assert all(FIRST_TOKEN_ID <= token < 200 for token in prompt.content)
        assert prompt.output_tokens == 5
    assert all(len(p.content.split()) == p.input_tokens for p in draw(3, True))


def test_a_vocabulary_without_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 10"):
        random_prompts(FIXED, FIXED, text=False, vocab_size=10, seed=0)


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def conversation(question: Any, answer: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"id": "x", "conversations": turns}


def test_conversations_become_prompts(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.json",
        [
            conversation("what is a letter?", "one of " * 10),
            conversation("what is another?", "one " * 10),
            conversation("hi", "too short a question"),
            conversation("a question that has too long an answer", "a" * 400),
            conversation(None, "no question at all"),
            {"conversations": [{"value": "no answer"}]},
            "nothing",
        ],
    )
    prompts = list(islice(sharegpt_prompts(path, output_lengths=None, longest=90, seed=1), 4))
    found = {(p.content, p.input_tokens, p.output_tokens) for p in prompts}
    assert found == {("what is a letter?", 5, 18), ("what is another?", 4, 10)}
    fixed = sharegpt_prompts(path, output_lengths=FIXED, longest=90, seed=1)
    assert {p.output_tokens for p in islice(fixed, 4)} == {5}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{oops", "not a JSON file"),
        ({}, "not a list of conversations"),
        ([], "has 0 conversations"),
        ([conversation("hi", "ho")], "has 1 conversations .* none of them of 4 to 2048 tokens"),
    ],
)
def test_a_file_without_conversations_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    path = write(tmp_path / "s.json", value)
    with pytest.raises(ValueError, match=said):
        sharegpt_prompts(path, output_lengths=None, longest=2048, seed=0)
