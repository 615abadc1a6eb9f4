"""Batches whose requests end one after the other: every answer is what transformers computes.

While they end, steps have fewer live rows than the program that runs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megavm.llm import LLM
from megavm.sampling_params import SamplingParams
from megavm.vm.cuda.machine import reason_unavailable

Make = Callable[..., tuple[Path, Any]]
MachineName = Literal["cpu", "cuda"]
TIE = 1e-3  # logits that are closer than this may be chosen either way

REPORTED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
}

MACHINES = pytest.mark.parametrize("machine", ["cpu", "cuda"])


def skip_without(machine: MachineName) -> None:
    reason = reason_unavailable() if machine == "cuda" else None
    if reason is not None:
        pytest.skip(f"machine cuda is not available: {reason}")


def random_shape(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    kv_heads = pick.choice([1, 1, 2, 4])
    heads = kv_heads * pick.choice([1, 2, 4])
    return {
        "vocab_size": pick.randint(32, 512),
        "hidden_size": heads * pick.choice([8, 16, 24]),
        "intermediate_size": pick.choice([48, 96, 128, 200]),
        "num_hidden_layers": pick.randint(1, 3),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": pick.choice([8, 16, 32, 64]),
        "max_position_embeddings": 512,
        "tie_word_embeddings": pick.random() < 0.3,
    }


def wrong_answers(model: Any, llm: LLM, seed: int) -> list[str]:
    """Run 16 prompts of staggered lengths; what differs from transformers, in words."""
    pick = random.Random(seed)
    vocabulary = model.config.vocab_size
    prompts = [[pick.randrange(vocabulary) for _ in range(pick.randint(1, 9))] for _ in range(16)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=10 + 7 * i, ignore_eos=True) for i in range(16)
    ]
    wrong = []
    for i, output in enumerate(llm.generate(prompts, params)):
        if output.error is not None:
            wrong.append(f"request {i} failed: {output.error}")
            continue
        tokens = output.outputs[0].token_ids
        if len(tokens) != params[i].max_tokens:
            wrong.append(f"request {i} has {len(tokens)} tokens")
        ids = torch.tensor([prompts[i] + list(tokens)])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompts[i]) - 1 : -1].float()
        short = logits.max(dim=1).values - logits[torch.arange(len(tokens)), list(tokens)]
        if bool((short > TIE).any()):
            first = int((short > TIE).nonzero()[0])
            wrong.append(f"request {i} chose another token at {first}")
    return wrong


@MACHINES
def test_the_reported_model_is_right_each_time(machine: MachineName, make_llama: Make) -> None:
    """Once 12 of 16 answers were wrong on a GPU, and the machine stopped."""
    skip_without(machine)
    directory, model = make_llama(seed=3, **REPORTED)
    with LLM(str(directory), machine=machine, max_num_seqs=16) as llm:
        for seed in range(20 if machine == "cuda" else 2):
            assert not wrong_answers(model, llm, seed)


@MACHINES
@pytest.mark.parametrize("seed", range(30))
def test_small_llamas_are_right_while_requests_end(
    seed: int, machine: MachineName, make_llama: Make
) -> None:
    skip_without(machine)
    if machine == "cpu" and seed >= 6:
        pytest.skip("a few are enough without a GPU: scripts/fuzz-llamas runs more")
    directory, model = make_llama(seed=seed, **random_shape(seed))
    with LLM(str(directory), machine=machine, max_num_seqs=16) as llm:
        assert not wrong_answers(model, llm, seed)
