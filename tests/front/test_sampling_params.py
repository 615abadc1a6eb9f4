"""SamplingParams: vLLM's names, and every bad value refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import pytest

from megavm.sampling_params import SamplingParams
from megavm.vm.config import MAX_STOP_TOKENS

INTEGERS = {
    "n",
    "top_k",
    "seed",
    "max_tokens",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
}
NUMBERS = {
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
}


def test_names_and_defaults_are_those_of_vllm() -> None:
    defaults = dataclasses.asdict(SamplingParams())
    assert defaults.pop("kept_special_token_ids") == ()  # megavm's own
    assert defaults == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": None,
        "stop": None,
        "stop_token_ids": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "truncate_prompt_tokens": None,
        "skip_special_tokens": True,
        "include_stop_str_in_output": False,
        "structured_outputs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "bad_words": None,
    }


BAD: dict[str, list[Any]] = {
    "n": [0, -1, 16385, None],
    "temperature": [-0.1, math.inf, math.nan, 10**400, None],
    "top_p": [0, 0.0, 1.01, -1, math.nan],
    "top_k": [-2, 1 << 31, 0.5, None],
    "min_p": [-0.1, 1.1, math.nan],
    "repetition_penalty": [0, -1, math.inf, math.nan],
    "presence_penalty": [-2.1, 2.1, math.nan],
    "frequency_penalty": [-2.1, 2.1, math.inf],
    "seed": [-(1 << 63) - 1, 1 << 63, 0.5],
    "max_tokens": [0, -5, 1 << 31, 1.0],
    "min_tokens": [-1, 17, None],
    "logprobs": [-1, 21, 1.5],
    "prompt_logprobs": [-1, 21, 1.5],
    "truncate_prompt_tokens": [-2, 0, 1 << 31, 1.5],
    "stop": ["", [""], ["a", 3], 3, b"a", {"a": 1}],
    "stop_token_ids": [3, [-1], [1.0], [True], "12", [1 << 31]],
    "ignore_eos": [0, 1, None, "yes"],
    "skip_special_tokens": [0, 1, None, "yes"],
    "include_stop_str_in_output": [0, 1, None, "yes"],
    "logit_bias": [5, [1], {"x": 1}, {-1: 1}, {3: 101}, {3: "1"}, {3: math.nan}],
    "allowed_token_ids": [[], [-1], [1.0], 5, [1 << 31]],
    "bad_words": ["fox", [""], [" "], [5], 5],
}
WRONG_TYPES: list[Any] = [True, "1", [1], {}]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() for value in values]
    + [(name, value) for name in sorted(INTEGERS | NUMBERS) for value in WRONG_TYPES],
)
def test_a_bad_value_is_refused_by_name_in_one_sentence(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    shown = repr(value)
    assert shown in str(caught.value) or len(shown) > 80


def test_too_many_stop_token_ids_are_refused() -> None:
    most = SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS)))
    assert most.stop_token_ids == tuple(range(MAX_STOP_TOKENS))
    with pytest.raises(ValueError, match=r"at most \d+ token ids"):
        SamplingParams(stop_token_ids=list(range(MAX_STOP_TOKENS + 1)))


@pytest.mark.parametrize(
    "values",
    [
        {"n": 4, "seed": 0},
        {"temperature": 0},
        {"top_p": 1e-9, "top_k": -1, "min_p": 1.0},
        {"repetition_penalty": 1e-9, "presence_penalty": -2, "frequency_penalty": 2},
        {"max_tokens": None, "min_tokens": 1000},
        {"max_tokens": 1, "min_tokens": 1, "logprobs": 20},
        {"stop": "end", "stop_token_ids": []},
        {"stop": (), "logprobs": 0},
    ],
)
def test_values_at_the_borders_are_accepted(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    for name, value in values.items():
        kept = getattr(params, name)
        assert kept == value or list(kept) == list([value] if isinstance(value, str) else value)


def test_numbers_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(max_tokens=numpy.int64(3), temperature=numpy.float32(0.5))  # type: ignore[arg-type]
    assert type(params.max_tokens) is int
    assert type(params.temperature) is float
    assert params.temperature == 0.5


def test_parameters_can_be_compared_and_hashed() -> None:
    one = SamplingParams(stop="a", stop_token_ids=[1, 2], temperature=0)
    other = SamplingParams(stop=["a"], stop_token_ids=(1, 2), temperature=0.0)
    assert one == other
    assert hash(one) == hash(other)
    assert one.stop_strings == ("a",)
    assert one.greedy
    assert SamplingParams().stop_strings == ()


def test_parameters_do_not_change() -> None:
    stop = ["a"]
    params = SamplingParams(stop=stop)
    stop.append("")
    assert params.stop == ("a",)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]


def test_a_generation_config_fills_in_what_is_not_given() -> None:
    generation = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": (1,), "top_k": None}
    params = SamplingParams.from_generation_config(generation, top_p=0.5, max_tokens=3)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.5, 0, 3)
    assert SamplingParams.from_generation_config({"do_sample": False, "temperature": 0.6}).greedy
    given = SamplingParams.from_generation_config({"do_sample": False}, temperature=0.3)
    assert given.temperature == 0.3
    with pytest.raises(ValueError, match=r"^generation_config\.json: top_p must"):
        SamplingParams.from_generation_config({"top_p": 7.0})
    with pytest.raises(ValueError, match=r"^max_tokens must"):
        SamplingParams.from_generation_config({"top_p": 0.5}, max_tokens=-1)
