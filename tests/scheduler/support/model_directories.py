"""Small model directories, whole and damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import LlamaConfig, expected_tensors

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
