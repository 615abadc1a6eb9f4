"""Weights and generation settings of a model directory, and what they cost in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_directories import PLAIN, rewrite_tensors, sentence, write_model
from safetensors.torch import load_file

from megavm.scheduler.llama import checkpoint as checkpoint_module
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import expected_tensors


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


@pytest.mark.parametrize("rows", [0, 1])
def test_a_head_that_differs_from_the_embeddings_is_not_tied(tmp_path: Path, rows: int) -> None:
    write_model(tmp_path, tie_word_embeddings=True)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = torch.cat([-embedding, embedding[:rows]])

    rewrite_tensors(tmp_path, change)
    opened = Checkpoint.open(tmp_path)
    if rows:  # it could not be the head
        with pytest.raises(ValueError, match=r"tensor lm_head\.weight in .* has shape"):
            opened.check()
        return
    opened.check()
    assert not opened.config.tie_word_embeddings
    head = opened.tensor("lm_head.weight")
    assert torch.equal(head, -opened.tensor("model.embed_tokens.weight"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(head, theirs.lm_head.weight)


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        ({"do_sample": "false"}, 'do_sample="false"'),
        ({"eos_token_id": list(range(40))}, "eos_token_id holds 40 tokens, at most 32"),
    ],
)
def test_wrong_generation_defaults_are_refused(
    tmp_path: Path, generation: dict[str, Any], said: str
) -> None:
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(ValueError, match=rf"generation_config\.json: .*{said}"):
        Checkpoint.open(tmp_path)


def test_tensors_that_a_model_does_not_use_are_tolerated(tmp_path: Path) -> None:
    write_model(tmp_path)
    extra = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))
    opened = Checkpoint.open(tmp_path)
    opened.check()
    assert list(opened.extra_tensors()) == [extra]


@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
    ],
)
def test_weights_that_the_model_would_skip_are_refused(tmp_path: Path, extra: str) -> None:
    """A layer more than config.json says, a norm that no Llama has, scales of small integers."""
    write_model(tmp_path, num_hidden_layers=2)
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({extra: torch.ones(4)}))
    message = sentence(Checkpoint.open(tmp_path).check)
    assert f"holds tensor {extra}, which a Llama with this config.json has not" in message
    assert "num_hidden_layers=2" in message


def test_tensors_of_other_modules_are_tolerated(tmp_path: Path) -> None:
    write_model(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors.update({"score.weight": torch.ones(4)}))
    Checkpoint.open(tmp_path).check()


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
