"""Weight files that are truncated, false or missing are refused, in which words."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path

import pytest
import torch
from model_directories import PLAIN, check, rewrite_tensors, sentence, write_index, write_model
from safetensors.torch import load_file

from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import LlamaConfig, expected_tensors


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
