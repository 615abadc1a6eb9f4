"""Logits and greedy tokens equal those of transformers, whatever the shape and the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megavm import LLM, SamplingParams
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Limits
from megavm.scheduler.run.runner import Runner
from megavm.vm.machine import Machine

Make = Callable[..., tuple[Path, Any]]
Logits = dict[int, npt.NDArray[np.float32]]

MAX_LEN = 40
BLOCK = 4


@st.composite
def llama_configs(draw: st.DrawFn, least: int = 1) -> dict[str, Any]:
    """Shapes of the family: MHA, GQA, MQA, odd vocabularies, ties, biases, rotary variants.

    ``least``: hidden and intermediate size and vocabulary are at least this.
    """
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    heads = kv_heads * draw(st.sampled_from([1, 2, 4]))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": draw(st.sampled_from([1e4, 5e5]))}
    kind = draw(st.sampled_from(["default", "linear", "llama3"]))
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": 4.0}
    if kind == "llama3":
        rope |= {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    return {
        "vocab_size": draw(st.integers(max(least, 3), 300)),
        "hidden_size": draw(st.integers(-(-least // heads), 160 // heads))
        * heads,  # transformers insists
        "intermediate_size": draw(st.integers(least, 200)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 6, 16, 34, 64])),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "rope_parameters": rope,
    }


compile_options = st.builds(
    CompileOptions,
    workers=st.integers(1, 5),
    assignment=st.sampled_from(["balanced", "round_robin", "dynamic"]),
    exchange=st.sampled_from(["barrier", "preferred", "tagged"]),
    fuse_norm=st.booleans(),
    waves=st.integers(1, 2),
    min_chunk=st.sampled_from([4, 256]),
    part_of_k=st.sampled_from([0, 64]),
)


def make_runner(
    directory: Path, options: CompileOptions, dtype: str, machine: str = "cpu"
) -> Runner:
    limits = Limits(
        max_num_seqs=4,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=32,
        max_logit_rows=32,
        num_blocks=4 * MAX_LEN // BLOCK,
        block_size=BLOCK,
    )
    return Runner.for_checkpoint(
        Checkpoint.open(directory),
        limits,
        machine=machine,
        dtype=dtype,
        workers=options.workers,
        options=options,
    )


def feed(
    runner: Runner, prompts: list[list[int]], rng: np.random.Generator, together: bool = True
) -> list[npt.NDArray[np.float32]]:
    """Logits of every position of every prompt, run in random chunks, mixed or in turn."""
    blocks = rng.permutation(runner.num_blocks).astype(np.int32)
    for slot, own in enumerate(blocks.reshape(runner.max_num_seqs, -1)):
        runner.write_blocks(slot, 0, own)
    for slot, prompt in enumerate(prompts):
        runner.write_tokens(slot, np.array(prompt, np.int32))
    done = [0] * len(prompts)
    logits = [np.zeros((len(p), runner.vocab_size), np.float32) for p in prompts]
    while any(d < len(p) for d, p in zip(done, prompts, strict=True)):
        waiting = [s for s, p in enumerate(prompts) if done[s] < len(p)]
        chosen = [s for s in waiting if rng.random() < 0.7] or waiting[:1]
        rows: list[tuple[int, int]] = []
        for slot in chosen if together else waiting[:1]:
            room = min(len(prompts[slot]) - done[slot], 32 - len(rows))
            count = min(room, int(rng.choice([1, 1, 3, 17])))
            rows += [(slot, done[slot] + i) for i in range(count)]
            done[slot] += count
        sequence, position = np.array(rows, np.int32).T
        wanted = np.arange(len(rows), dtype=np.int32)
        runner.run(Step(sequence, position, wanted, int(position.max()) + 1))
        for i, (slot, at) in enumerate(rows):
            logits[slot][at] = runner.logits[i]
    return logits


def oracle(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([p])).logits[0].float() for p in prompts]


def draw_prompts(rng: np.random.Generator, vocabulary: int) -> list[list[int]]:
    lengths = rng.integers(1, 24, rng.integers(1, 5))
    return [[int(t) for t in rng.integers(0, vocabulary, n)] for n in lengths]


PROPERTY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@PROPERTY
@given(config=llama_configs(), options=compile_options, seed=st.integers(0, 2**16))
def test_float32_logits_equal_transformers_in_mixed_chunked_batches(
    make_llama: Make, config: dict[str, Any], options: CompileOptions, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    directory, model = make_llama(seed, **config)
    prompts = draw_prompts(rng, config["vocab_size"])
    ours = feed(make_runner(directory, options, "float32"), prompts, rng)
    for logits, want in zip(ours, oracle(model, prompts), strict=True):
        scale = float(want.abs().max()) + 1e-3
        assert np.abs(logits - want.numpy()).max() <= 2e-5 * scale


@PROPERTY
@given(config=llama_configs(least=48), options=compile_options, seed=st.integers(0, 2**16))
def test_bfloat16_logits_are_closer_to_float32_than_native_bfloat16(
    make_llama: Make, config: dict[str, Any], options: CompileOptions, seed: int
) -> None:
    # Below ``least`` the errors are few enough numbers for luck to decide.
    rng = np.random.default_rng(seed)
    directory, _ = make_llama(seed, "bfloat16", **config)
    prompts = [[int(t) for t in rng.integers(0, config["vocab_size"], 24)] for _ in range(4)]
    ours = feed(make_runner(directory, options, "bfloat16"), prompts, rng)
    # Loaded, not cast: a cast would round the rotary frequencies as well.
    native_logits, exact = (
        oracle(transformers.LlamaForCausalLM.from_pretrained(directory, dtype=d).eval(), prompts)
        for d in (torch.bfloat16, torch.float32)
    )
    squares = [0.0, 0.0]
    for mine, theirs, want in zip(ours, native_logits, exact, strict=True):
        squares[0] += float((torch.from_numpy(mine) - want).square().sum())
        squares[1] += float((theirs - want).square().sum())
    assert squares[0] <= squares[1]


@PROPERTY
@given(
    config=llama_configs(),
    # One split of the context, whole products, norms done by the same: sums in one order.
    options=compile_options.map(lambda o: replace(o, min_chunk=256, part_of_k=0)),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 2**16),
)
def test_logits_of_a_batch_are_bit_for_bit_those_of_each_sequence_alone(
    make_llama: Make, config: dict[str, Any], options: CompileOptions, dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    directory, _ = make_llama(seed, **config)
    prompts = draw_prompts(rng, config["vocab_size"])
    together = feed(make_runner(directory, options, dtype), prompts, rng)
    alone = make_runner(directory, CompileOptions(1, fuse_norm=options.fuse_norm), dtype)
    for logits, prompt in zip(together, prompts, strict=True):
        (single,) = feed(alone, [prompt], rng, together=False)
        np.testing.assert_array_equal(logits, single)


SMALL: Final = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(("length", "rows", "more"), [(530, 768, 1024), (1300, 1536, 2048)])
def test_logits_of_a_prompt_do_not_depend_on_the_rows_of_its_program(
    make_llama: Make, length: int, rows: int, more: int
) -> None:
    directory, model = make_llama(
        11,
        **SMALL,
        max_position_embeddings=2048,
    )
    runner = Runner.for_checkpoint(
        Checkpoint.open(directory),
        Limits(1, 2048, 2048, 64, 2048 // BLOCK, BLOCK),
        machine="cpu",
        dtype="float32",
        workers=3,
    )
    prompt = np.random.default_rng(length).integers(0, 151, length).astype(np.int32)
    runner.write_tokens(0, prompt)
    runner.write_blocks(0, 0, np.arange(runner.num_blocks, dtype=np.int32))
    places = np.arange(length, dtype=np.int32)
    wanted = places[-64:]
    step = Step(np.zeros_like(places), places, wanted, length)
    own = runner.programs.bucket(length, 64, length)
    assert own.rows == rows
    logits = []
    for bucket in (own, replace(own, rows=more)):
        runner.run(step, bucket=bucket)
        logits.append(runner.logits[:64].copy())
    np.testing.assert_array_equal(logits[0], logits[1])
    (want,) = oracle(model, [prompt.tolist()])
    apart = np.abs(logits[0] - want[wanted].numpy()).max()
    assert apart <= 2e-5 * float(want.abs().max())


@pytest.mark.parametrize("exchange", ["barrier", "preferred", "tagged"])
def test_greedy_tokens_of_many_steps_in_one_launch_equal_transformers(
    make_llama: Make, machine: Machine, exchange: Any
) -> None:
    directory, model = make_llama(
        5,
        **SMALL,
        max_position_embeddings=64,
    )
    options = CompileOptions(3, exchange=exchange)
    runner = make_runner(directory, options, "float32", machine.name)
    rng = np.random.default_rng(0)
    prompts = [[int(t) for t in rng.integers(0, 151, n)] for n in (3, 9, 5)]
    feed(runner, prompts, rng)
    runner.sampling_integer[:, 0] = 1
    runner.sampling_real[:] = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    last = np.array([len(p) - 1 for p in prompts], np.int32)
    rows = np.arange(3, dtype=np.int32)
    runner.run(Step(rows, last, rows, 9), steps=20)
    for slot, prompt in enumerate(prompts):
        with torch.no_grad():
            want = model.generate(
                torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=-1
            )[0]
        assert runner.tokens[slot, : len(want)].tolist() == want.tolist()


def test_log_probabilities_of_prompts_equal_the_log_softmax_of_transformers(
    make_llama: Make,
) -> None:
    directory, model = make_llama(
        7,
        **SMALL,
        max_position_embeddings=128,
    )
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 151, 40).tolist()
    prompts = [[*shared, *rng.integers(0, 151, n).tolist()] for n in (1, 7, 50)]
    # Prompts are cut into chunks of at most 12 tokens, and their beginning is in the prefix cache.
    with LLM(directory, dtype="float32", max_num_batched_tokens=12, max_num_seqs=4) as llm:
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4))
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=4, prompt_logprobs=3)
        outputs = llm.generate(prompts, params)
        assert [o.timings["cached_prompt_tokens"] for o in outputs] == [0, 0, 0]
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad():
            want = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1).numpy()
        assert output.prompt_logprobs is not None
        first, *entries = output.prompt_logprobs
        assert first is None
        for token, values, entry in zip(prompt[1:], want, entries, strict=False):
            assert entry is not None
            best = np.argsort(-values)[:3].tolist()
            assert set(entry) == {token, *best}
            for known, found in entry.items():
                assert abs(found.logprob - values[known]) < 1e-4
                assert found.rank == 1 + int((values > values[known]).sum())
