"""Requests and runners that the engine refuses, in which words."""

from __future__ import annotations

from typing import Any

import pytest
import toy_runner as toy
from engine_runs import assert_idle, greedy, make_engine, run_all

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine


def test_a_third_plan_without_a_collect_is_refused() -> None:
    engine = make_engine()
    engine.add([1, 2, 3], greedy())
    engine.plan()
    engine.plan()
    with pytest.raises(RuntimeError, match="two plans are not collected yet"):
        engine.plan()


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 40], r"token id 40 at position 1 is outside the vocabulary \[0, 40\)"),
        ([-1], "token id -1 at position 0"),
        ([1.5], "not a list of token ids"),
        ([[1], [2]], "not a list of token ids"),
        ([[1], [2, 3]], "not a list of token ids"),
        ([1 << 70], "not a list of token ids"),
        (["a"], "not a list of token ids"),
        ([1] * 64, "the prompt has 64 tokens; the context of 64 must hold it"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(prompt: list[Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, SamplingParams())
    assert_idle(engine)


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    engine = make_engine(toy.ToyRunner(num_blocks=5, block_size=4))
    with pytest.raises(ValueError, match=r"has 21 tokens; the KV cache has room for 20 \(5 blocks"):
        engine.add([1] * 21, SamplingParams())


def test_too_many_stop_tokens_are_refused() -> None:
    engine = make_engine()
    ids = list(range(6, 37))  # 11 is an end of sequence as well
    with pytest.raises(ValueError, match="are 33 tokens, at most 32"):
        engine.add([1], SamplingParams(stop_token_ids=[*ids, 37]))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = Engine(toy.ToyRunner())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.add([1], SamplingParams(stop="a"))


def test_an_id_is_used_once_at_a_time() -> None:
    engine = make_engine()
    engine.add([1], greedy(), "x")
    with pytest.raises(ValueError, match="a request with the id 'x' is being worked on already"):
        engine.add([1], greedy(), "x")
    run_all(engine)
    engine.add([1], greedy(), "x")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3, less than max_num_seqs, 4"),
        ({"max_logit_rows": 2}, "max_logit_rows is 2, less than max_num_seqs, 4"),
    ],
)
def test_a_runner_too_small_for_its_sequences_is_refused(
    sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(toy.ToyRunner(**sizes))
