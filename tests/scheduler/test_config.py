"""config.json: what is read as transformers reads it, and what is refused in which words."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_directories import PLAIN, sentence

from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import (
    LlamaConfig,
    RopeScaling,
    expected_tensors,
    rope_inverse_frequencies,
)


@pytest.mark.parametrize("seed", range(12))
def test_config_of_a_transformers_model_is_read_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    heads = draw.choice([1, 2, 4, 6])
    kv_heads = draw.choice([k for k in range(1, heads + 1) if heads % k == 0])
    head_dim = draw.choice([None, 8, 20])
    rope = draw.choice(
        [
            None,
            {"rope_type": "default", "rope_theta": 123456.0},
            {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4},
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ]
    )
    theirs: Any = transformers.LlamaConfig(
        vocab_size=draw.randint(50, 300),
        hidden_size=heads * 16,
        intermediate_size=draw.randint(10, 99),
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_parameters=rope,
        tie_word_embeddings=draw.random() < 0.5,
        attention_bias=draw.random() < 0.5,
        mlp_bias=draw.random() < 0.5,
        dtype=draw.choice(["float32", "bfloat16", "float16"]),
    )
    model: Any = transformers.LlamaForCausalLM(theirs)
    model.to(theirs.dtype)
    model.save_pretrained(tmp_path)
    opened = Checkpoint.open(tmp_path)
    opened.check()
    ours = opened.config
    assert (ours.vocab_size, ours.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (ours.num_heads, ours.num_kv_heads) == (heads, kv_heads)
    assert ours.head_dim == theirs.head_dim
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling.kind == theirs.rope_parameters["rope_type"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.dtype == str(theirs.dtype).removeprefix("torch.")
    assert ours.num_parameters == model.num_parameters()
    state = model.state_dict()
    assert set(expected_tensors(ours)) == set(state)
    for name, value in state.items():
        assert torch.equal(opened.tensor(name), value), name


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = LlamaConfig.from_dict({**PLAIN, "rope_theta": 500000.0, "rope_scaling": scaling})
    new_keys = {
        key: value for key, value in PLAIN.items() if key not in ("rope_theta", "torch_dtype")
    }
    parameters = {**scaling, "rope_theta": 500000.0}
    new = LlamaConfig.from_dict({**new_keys, "rope_parameters": parameters, "dtype": "float32"})
    assert old == new
    assert old.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 64)
    oldest = LlamaConfig.from_dict({**PLAIN, "rope_scaling": {"type": "linear", "factor": 4}})
    assert oldest.rope_scaling == RopeScaling("linear", 4.0)


def test_defaults_are_those_of_transformers() -> None:
    keys = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    raw = {key: PLAIN[key] for key in (*keys, "num_attention_heads", "architectures")}
    config = LlamaConfig.from_dict(raw)
    theirs: Any = transformers.LlamaConfig(**raw)
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.max_position_embeddings == theirs.max_position_embeddings
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False,) * 3


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ("architectures", "MistralForCausalLM")),
        ({"architectures": []}, ("architectures", "[]")),
        ({"architectures": None, "model_type": "qwen3"}, ("model_type", "qwen3")),
        ({"architectures": None, "model_type": None}, ("architectures", "missing")),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu")),
        ({"hidden_act": ["silu"]}, ("hidden_act",)),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, ("rope_type", "yarn")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, ("rope_scaling.type", "dynamic")),
        ({"rope_parameters": {"rope_type": "longrope"}}, ("rope_parameters", "longrope")),
        ({"rope_scaling": {"rope_type": "linear"}}, ("rope_scaling.factor", "missing")),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ("rope_scaling.factor=0",)),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ('factor="2"',)),
        ({"rope_scaling": {"type": ["linear"]}}, ("rope_scaling.type",)),
        ({"rope_scaling": [2.0]}, ("rope_scaling", "[2.0]")),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, ("high_freq_factor=1.0",)),
        ({"rope_parameters": {"full_attention": {}}}, ("rope_parameters", "full_attention")),
        ({"rope_theta": 0}, ("rope_theta=0",)),
        ({"rope_theta": math.inf}, ("rope_theta=inf",)),
        ({"rope_theta": 10**400}, ("rope_theta=1000",)),
        ({"partial_rotary_factor": 0.5}, ("partial_rotary_factor=0.5",)),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ("partial_rotary_factor=0.5",)),
        ({"pretraining_tp": 2}, ("pretraining_tp=2",)),
        ({"sliding_window": 4096}, ("sliding_window=4096",)),
        ({"layer_types": ["sliding_attention"] * 2}, ("layer_types", "sliding_attention")),
        ({"head_dim": 7}, ("head_dim=7",)),
        ({"head_dim": True}, ("head_dim=True",)),
        ({"hidden_size": 30}, ("hidden_size=30", "num_attention_heads=4")),
        ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
        ({"num_key_value_heads": 0}, ("num_key_value_heads=0",)),
        ({"vocab_size": None}, ("vocab_size", "missing")),
        ({"vocab_size": -1}, ("vocab_size=-1",)),
        ({"vocab_size": 67.0}, ("vocab_size=67.0",)),
        ({"vocab_size": "67"}, ('vocab_size="67"',)),
        ({"hidden_size": 1 << 60}, ("hidden_size", str(1 << 60))),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "1000000000")),
        ({"rms_norm_eps": "small"}, ("rms_norm_eps", "small")),
        ({"rms_norm_eps": math.nan}, ("rms_norm_eps=nan",)),
        ({"tie_word_embeddings": 1}, ("tie_word_embeddings=1",)),
        ({"attention_bias": "no"}, ("attention_bias", "no")),
        ({"torch_dtype": "float64"}, ("torch_dtype", "float64")),
        ({"dtype": ["bfloat16"]}, ("dtype", "bfloat16")),
        ({"eos_token_id": "</s>"}, ("eos_token_id", "</s>")),
        ({"eos_token_id": [1, -2]}, ("eos_token_id", "-2")),
    ],
)
def test_an_unsupported_config_is_refused_by_key_and_value(
    changes: dict[str, Any], named: tuple[str, ...]
) -> None:
    message = sentence(lambda: LlamaConfig.from_dict({**PLAIN, **changes}))
    assert all(part in message for part in named), message


def test_any_value_under_any_config_key_is_read_or_refused() -> None:
    draw = random.Random(5)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        3,
        1 << 70,
        0.5,
        math.nan,
        "x",
        "",
        [],
        [1],
        {},
        {"type": 3},
        [[]],
    ]
    keys = [*PLAIN, "head_dim", "rope_scaling", "rope_parameters", "eos_token_id", "dtype"]
    for _ in range(2000):
        changes = {draw.choice(keys): draw.choice(values) for _ in range(draw.randint(1, 3))}
        try:
            config = LlamaConfig.from_dict({**PLAIN, **changes})
        except ValueError:
            continue
        assert rope_inverse_frequencies(config).shape == (config.head_dim // 2,)


@pytest.mark.parametrize(
    "content",
    [b"", b"[1, 2]", b"{", b'{"a": ' + b"9" * 5000 + b"}", b"\xff\xfe", b"[" * 100_000, b"null"],
)
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in sentence(lambda: Checkpoint.open(tmp_path))


@pytest.mark.parametrize("own", [None, 32])
def test_the_original_context_of_the_model_comes_before_that_of_its_rope(own: int | None) -> None:
    rope = {**LLAMA3, "rope_theta": 500000.0}
    raw = {**PLAIN, "rope_parameters": rope, "original_max_position_embeddings": 16}
    if own is not None:
        rope["original_max_position_embeddings"] = own
    raw.pop("rope_theta", None)
    raw.pop("torch_dtype", None)
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(raw)))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    assert torch.equal(rope_inverse_frequencies(LlamaConfig.from_dict(raw)), module.inv_freq)


@pytest.mark.parametrize("head_dim", [2, 20, 64, 128])
@pytest.mark.parametrize("theta", [10000, 500000.0, 1234567.8])
@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.7},
        {**LLAMA3, "original_max_position_embeddings": 8192},
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 100},
        {**LLAMA3, "low_freq_factor": 2.0},
    ],
    ids=["default", "linear", "llama3", "llama3-short", "llama3-without-original-context"],
)
def test_rope_frequencies_are_those_of_transformers_bit_for_bit(
    head_dim: int, theta: float, scaling: dict[str, Any]
) -> None:
    raw = {key: value for key, value in PLAIN.items() if key not in ("rope_theta", "torch_dtype")}
    raw |= {"head_dim": head_dim, "rope_parameters": {**scaling, "rope_theta": theta}}
    theirs = transformers.LlamaConfig(**json.loads(json.dumps(raw)))
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = rope_inverse_frequencies(LlamaConfig.from_dict(raw))
    assert ours.dtype == torch.float32
    assert torch.equal(ours, module.inv_freq)
