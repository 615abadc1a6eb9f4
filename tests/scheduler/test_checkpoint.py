"""Model directories: what is read, what is refused in which words, and what it costs in memory."""

from __future__ import annotations

import contextlib
import json
import math
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megavm.scheduler.llama import checkpoint as checkpoint_module
from megavm.scheduler.llama import hub as hub_module
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import (
    LlamaConfig,
    RopeScaling,
    expected_tensors,
    rope_inverse_frequencies,
)
from megavm.scheduler.llama.hub import resolve

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def write_model(directory: Path, shards: int = 1, **changes: Any) -> Path:
    """A random model of `PLAIN`'s shape, written without transformers."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = {**PLAIN, **changes}
    (directory / "config.json").write_text(json.dumps(raw))
    config = LlamaConfig.from_dict(raw)
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, config.dtype)
    tensors = {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in expected_tensors(config).items()
        if not (config.tie_word_embeddings and name == "lm_head.weight")
    }
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {key: tensors[key] for key in sorted(tensors)[shard::shards]}
        save_file(part, directory / name)
        weight_map.update(dict.fromkeys(part, name))
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: object) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def rewrite_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {
        name: value.clone() for name, value in load_file(directory / "model.safetensors").items()
    }
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def sentence(action: Callable[[], object]) -> str:
    """The message of the ValueError that `action` raises, which must be one line."""
    with pytest.raises(ValueError, match=r"^[^\n]+\Z") as caught:
        action()
    return str(caught.value)


def check(directory: Path) -> None:
    Checkpoint.open(directory).check()


# --- config.json --------------------------------------------------------------------------------


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


@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_config_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in sentence(lambda: Checkpoint.open(tmp_path))


# --- rotary frequencies -------------------------------------------------------------------------


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


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_those_that_were_saved(tmp_path: Path, shards: int, dtype: str) -> None:
    write_model(tmp_path, shards=shards, torch_dtype=dtype, attention_bias=True, mlp_bias=True)
    opened = Checkpoint.open(tmp_path)
    opened.check()
    saved: dict[str, torch.Tensor] = {}
    for path in tmp_path.glob("*.safetensors"):
        saved |= load_file(path)
    for name, shape in expected_tensors(opened.config).items():
        tensor = opened.tensor(name)
        assert tensor.shape == shape
        assert torch.equal(tensor, saved[name])
        for wanted in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(opened.tensor(name, wanted), saved[name].to(wanted))
    assert opened.stored_bytes() == sum(value.nbytes for value in saved.values())


def test_a_conversion_in_several_pieces_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "_CONVERSION_BYTES", 100)
    write_model(tmp_path, torch_dtype="float16")
    opened = Checkpoint.open(tmp_path)
    for name in expected_tensors(opened.config):
        assert torch.equal(opened.tensor(name, torch.float32), opened.tensor(name).float())


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_tied_embeddings_may_be_stored_under_either_name(tmp_path: Path, stored: str) -> None:
    write_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if stored != "model.embed_tokens.weight":
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        if stored == "lm_head.weight":
            del tensors["model.embed_tokens.weight"]

    rewrite_tensors(tmp_path, change)
    opened = Checkpoint.open(tmp_path)
    opened.check()
    embedding = opened.tensor("model.embed_tokens.weight")
    assert torch.equal(embedding, opened.tensor("lm_head.weight"))
    assert opened.stored_bytes() == 4 * opened.config.num_parameters


def test_tensors_that_a_model_does_not_use_are_tolerated(tmp_path: Path) -> None:
    write_model(tmp_path)
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))
    opened = Checkpoint.open(tmp_path)
    opened.check()
    assert list(opened.extra_tensors()) == [extra]


def test_a_bias_that_config_json_does_not_announce_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    name = "model.layers.1.self_attn.q_proj.bias"
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(32)}))
    message = sentence(lambda: check(tmp_path))
    assert name in message
    assert "attention_bias=False" in message


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    rewrite_tensors(tmp_path, lambda tensors: tensors.pop(name))
    opened = Checkpoint.open(tmp_path)
    assert name in sentence(opened.check)
    assert name in sentence(lambda: opened.tensor(name))
    assert opened.tensor("model.norm.weight").shape == (32,)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write_model(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(32, 32)}))
    message = sentence(lambda: check(tmp_path))
    assert all(part in message for part in (name, "model.safetensors", "[32, 32]", "[16, 32]"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_a_weight_in_a_dtype_that_is_not_read_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    write_model(tmp_path)
    rewrite_tensors(
        tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(32).to(dtype)})
    )
    message = sentence(lambda: check(tmp_path))
    assert "model.norm.weight" in message
    assert "BF16, F32 and F16" in message


def test_an_unknown_weight_name_is_refused(tmp_path: Path) -> None:
    opened = Checkpoint.open(write_model(tmp_path))
    assert "model.layers.2.input_layernorm.weight" in sentence(
        lambda: opened.tensor("model.layers.2.input_layernorm.weight")
    )


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    cuts = {0, 1, 7, 8, 9, header - 1, header, header + 1, len(whole) - 1}
    cuts |= {random.Random(1).randrange(len(whole)) for _ in range(60)}
    for cut in cuts:
        path.write_bytes(whole[:cut])
        message = sentence(lambda: check(tmp_path))
        assert "truncated" in message, (cut, message)
        assert "model.safetensors" in message
    path.write_bytes(whole + b"\0")
    assert "corrupt" in sentence(lambda: check(tmp_path))


def test_a_header_of_random_bytes_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = bytearray(path.read_bytes())
    header = int.from_bytes(whole[:8], "little")
    draw = random.Random(2)
    for _ in range(40):
        broken = whole[:8] + draw.randbytes(header) + whole[8 + header :]
        path.write_bytes(broken)
        assert "model.safetensors" in sentence(lambda: check(tmp_path))
    for _ in range(300):  # a changed byte is refused, or harmless, as in a space
        broken = bytearray(whole)
        broken[8 + draw.randrange(header)] = draw.randrange(256)
        path.write_bytes(broken)
        with contextlib.suppress(ValueError):
            check(tmp_path)


@pytest.mark.parametrize("length", [0, 1, 100_000_001, 1 << 40, (1 << 64) - 1])
def test_an_absurd_header_length_is_refused_without_allocating_it(
    tmp_path: Path, length: int
) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
    assert "model.safetensors" in sentence(lambda: check(tmp_path))


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{}",
        '{"a": 1}',
        '{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1e300]}}',
        '{"a": {"dtype": "F32", "shape": [9223372036854775807, 4], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
        ' "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},'
        ' "b": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
        "[" * 5000,
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: str) -> None:
    write_model(tmp_path)
    data = struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4
    (tmp_path / "model.safetensors").write_bytes(data)
    message = sentence(lambda: check(tmp_path))
    assert "model.safetensors" in message


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    path = tmp_path / "model.safetensors"
    expected = {name: value.clone() for name, value in load_file(path).items()}
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    padded = whole[8 : 8 + length] + b" "
    path.write_bytes(struct.pack("<Q", length + 1) + padded + whole[8 + length :])
    opened = Checkpoint.open(tmp_path)
    for name, value in expected.items():
        assert torch.equal(opened.tensor(name), value)
        assert torch.equal(opened.tensor(name, torch.bfloat16), value.bfloat16())


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "a\\b.safetensors",
     "\u0000.safetensors", "model.bin", "", 3, None, ["a.safetensors"]],
)  # fmt: skip
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: object) -> None:
    directory = write_model(tmp_path / "model", shards=2)
    write_model(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "secret.safetensors")
    write_index(directory, dict.fromkeys(expected_tensors(LlamaConfig.from_dict(PLAIN)), name))
    message = sentence(lambda: check(directory))
    assert "model.safetensors.index.json" in message
    assert "beside it" in message


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_an_index_without_a_map_is_refused(tmp_path: Path, weight_map: object) -> None:
    write_model(tmp_path, shards=2)
    write_index(tmp_path, weight_map)
    assert "weight_map" in sentence(lambda: check(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_model(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in sentence(lambda: check(tmp_path))


def test_a_directory_without_weights_says_what_is_read(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "safetensors only" in sentence(lambda: check(tmp_path))
    assert "no such directory" in sentence(lambda: Checkpoint.open(tmp_path / "nothing"))
    (tmp_path / "config.json").unlink()
    assert "no config.json" in sentence(lambda: Checkpoint.open(tmp_path))


def test_the_stored_dtype_counts_where_config_json_names_none(tmp_path: Path) -> None:
    write_model(tmp_path, torch_dtype="bfloat16")
    raw = {key: value for key, value in PLAIN.items() if key != "torch_dtype"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Checkpoint.open(tmp_path).config.dtype == "bfloat16"


def test_writing_to_a_tensor_never_reaches_the_file(tmp_path: Path) -> None:
    write_model(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    Checkpoint.open(tmp_path).tensor("model.norm.weight").zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before


# --- generation_config.json ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (2, 5)),
        ({}, (2, 5)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": [7, 8], "temperature": 0.6}, (7, 8)),
        ({"eos_token_id": None}, (2, 5)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    tmp_path: Path, generation: object, expected: tuple[int, ...]
) -> None:
    write_model(tmp_path, eos_token_id=[2, 5])
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    opened = Checkpoint.open(tmp_path)
    assert opened.eos_token_ids == opened.generation["eos_token_id"] == expected
    assert opened.generation.get("temperature") in (None, 0.6)


@pytest.mark.parametrize("key", ["temperature", "top_k", "eos_token_id"])
def test_a_generation_config_of_wrong_type_is_refused_by_key(tmp_path: Path, key: str) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({key: "high"}))
    message = sentence(lambda: Checkpoint.open(tmp_path))
    assert "generation_config.json" in message
    assert key in message


# --- memory -------------------------------------------------------------------------------------

_MEASURE = """
import re, sys, torch
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import expected_tensors

def resident(field):
    return int(re.search(field + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.ones(1 << 16).bfloat16().float().sum()
opened = Checkpoint.open(sys.argv[1])
opened.check()
names = list(expected_tensors(opened.config))
opened.tensor(names[-1])
base = resident("VmRSS")
tensors = {name: opened.tensor(name) for name in names}
mapped = resident("VmRSS") - base
tensors["model.layers.0.mlp.up_proj.weight"].sum()
touched = resident("VmRSS") - base
opened.release("model.layers.0.mlp.up_proj.weight")
released = resident("VmRSS") - base
del tensors
converted = {name: opened.tensor(name, torch.float32) for name in names}
peak = resident("VmHWM") - base
print(mapped, touched, released, peak, sum(t.nbytes for t in converted.values()) / 2**20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_untouched_tensors_cost_nothing_and_a_conversion_makes_no_second_copy(
    tmp_path: Path,
) -> None:
    directory = write_model(
        tmp_path,
        vocab_size=16384,
        hidden_size=1024,
        intermediate_size=8192,
        num_attention_heads=8,
        torch_dtype="bfloat16",
    )
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    mapped, touched, released, peak, size = map(float, done.stdout.split())
    assert mapped < 4  # MiB, of 170 stored
    assert 12 < touched < 24  # one tensor of 16 MiB
    assert released < 6
    assert peak < 1.1 * size


# --- resolve ------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Replaces the hub: `hub(error=...)` fails, `hub(directory=...)` downloads a copy of it."""
    calls: list[str] = []

    def install(
        error: Exception | None = None, directory: Path | None = None, cached: Path | None = None
    ) -> list[str]:
        def snapshot_download(model: str, **keywords: Any) -> str:
            calls.append(model)
            if error is not None:
                raise error
            return str(directory)

        def try_to_load_from_cache(model: str, name: str) -> str | None:
            return None if cached is None else str(cached / name)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", try_to_load_from_cache)
        return calls

    monkeypatch.chdir(tmp_path)
    return install


def hub_error(name: str, status: int) -> Exception:
    """An error of huggingface_hub, made without a request."""
    kind = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind)
    error.args = (f"{status} for url: ...\nAccess to this model is restricted.",)
    error.response = type("Response", (), {"status_code": status})()
    return error  # type: ignore[no-any-return]


def test_an_existing_directory_never_touches_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    write_model(tmp_path / "org" / "name")
    assert resolve("org/name") == tmp_path / "org" / "name"
    assert resolve(str(tmp_path / "org/name")) == tmp_path / "org" / "name"
    assert calls == []


def test_a_local_directory_is_resolved_without_importing_the_hub(tmp_path: Path) -> None:
    code = (
        "import sys; from megavm.scheduler.llama.hub import resolve; resolve(sys.argv[1]);"
        "sys.exit('huggingface_hub' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_shipped_name_resolves_before_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    monkeypatch.setattr(hub_module, "SHIPPED_MODELS", tmp_path / "shipped")
    write_model(tmp_path / "shipped" / "stories")
    assert resolve("stories") == tmp_path / "shipped" / "stories"
    assert calls == []
    (tmp_path / "stories").mkdir()
    assert resolve("stories") == tmp_path / "stories"


def test_a_complete_cache_is_used_without_asking_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    cached = write_model(tmp_path / "snapshots" / "abc", shards=2)
    (cached / "tokenizer.json").write_text("{}")
    calls = hub(error=AssertionError("the hub was asked"), cached=cached)
    assert resolve("org/name") == cached
    assert calls == []


def test_an_incomplete_cache_is_completed_and_used_as_it_is_when_offline(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    cached = write_model(tmp_path / "snapshots" / "abc", shards=2)
    calls = hub(error=huggingface_hub.errors.OfflineModeIsEnabled("offline"), cached=cached)
    assert resolve("org/name") == cached
    assert calls == ["org/name"]
    (cached / "model-00002-of-00002.safetensors").unlink()
    assert "offline" in sentence(lambda: resolve("org/name"))


def test_a_model_of_the_hub_is_downloaded_in_two_steps(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    calls = hub(directory=downloaded)
    assert resolve("org/name") == downloaded
    assert len(calls) == 2


def test_an_unsupported_model_of_the_hub_is_refused_before_its_weights(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    raw = {**PLAIN, "architectures": ["MambaForCausalLM"]}
    (downloaded / "config.json").write_text(json.dumps(raw))
    calls = hub(directory=downloaded)
    assert "MambaForCausalLM" in sentence(lambda: resolve("org/name"))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("GatedRepoError", 403, "accept the licence at https://huggingface.co/org/name"),
        ("HfHubHTTPError", 401, "hf auth login"),
        ("RepositoryNotFoundError", 401, "no model org/name"),
        ("HfHubHTTPError", 500, "cannot download org/name"),
        ("LocalEntryNotFoundError", 0, "offline"),
    ],
)
def test_a_failed_download_says_what_to_do(
    hub: Callable[..., list[str]], name: str, status: int, said: str
) -> None:
    hub(error=hub_error(name, status))
    assert said in sentence(lambda: resolve("org/name"))


def test_a_repository_without_safetensors_is_refused(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    (downloaded / "model.safetensors").unlink()
    hub(directory=downloaded)
    assert "has no model.safetensors" in sentence(lambda: resolve("org/name"))


@pytest.mark.parametrize("model", ["", " ", "./nothing", "/nothing", "a/b/c", "../up", "x" * 5000])
def test_what_cannot_be_a_model_id_is_not_looked_for_on_the_hub(
    hub: Callable[..., list[str]], model: str
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    assert sentence(lambda: resolve(model))
    assert calls == []


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a file" in sentence(lambda: resolve(str(tmp_path / "model.gguf")))


def test_offline_mode_is_respected(tmp_path: Path) -> None:
    code = (
        "from megavm.scheduler.llama.hub import resolve\n"
        "try: resolve('org/name-that-is-not-cached')\n"
        "except ValueError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    assert "offline" in done.stdout
