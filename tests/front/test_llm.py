"""The Python API: results do not depend on the batch, and bad input loses nothing."""

from __future__ import annotations

import gc
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megavm import LLM, SamplingParams
from megavm.batch import Batch, Prompt
from megavm.outputs import Chunk, GenerationError, RequestOutput
from megavm.scheduler.engine.logprobs import log_softmax
from megavm.scheduler.engine.step import Plan
from megavm.scheduler.engine.step_thread import StepThread
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.hub import resolve

TEXTS = [
    "Once upon a time",
    "The little fox",
    "One fine day, a girl named Anna went to the market. She wanted to buy a red apple for her",
    "A",
    "There was a big storm, and the old bear was afraid.",
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # Small steps, so that prompts are cut into chunks and sequences wait for each other.
    options: Any = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "overlap": True}
    with LLM("stories", dtype="float32", **options) as model:
        yield model
        assert model.engine.blocks.num_held == 0
        model.engine.blocks.check()


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **values})


def ids(output: RequestOutput, index: int = 0) -> list[int]:
    return output.outputs[index].token_ids


def test_a_batch_gives_each_prompt_what_it_gets_alone(llm: LLM) -> None:
    together = llm.generate(TEXTS, greedy())
    assert [o.prompt for o in together] == TEXTS
    for text, output in zip(TEXTS, together, strict=True):
        assert output.prompt_token_ids == llm.tokenizer.encode(text)
        assert output.outputs == llm.generate(text, greedy())[0].outputs


def test_a_batch_is_queued_beside_its_first_steps(llm: LLM) -> None:
    prompts = [[2 + i, 5, 7] for i in range(40)]
    planner, queued = llm.engine.planner, []
    plan = planner.plan

    def noted() -> Plan | None:
        queued.append(len(planner.waiting))
        return plan()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "plan", noted)
        together = llm.generate(prompts, greedy(max_tokens=5))
    assert 2 <= max(queued) <= 8  # prompts for two steps of 12 tokens
    for prompt, output in zip(prompts, together, strict=True):
        assert output.outputs == llm.generate(prompt, greedy(max_tokens=5))[0].outputs
    waited = [output.timings["queue_seconds"] for output in together]
    assert waited[-1] > waited[0]


def test_prompts_that_end_without_a_seat_do_not_hold_back_the_next_ones(llm: LLM) -> None:
    tokens = np.arange(5, dtype=np.int32)
    batch = Batch(llm.engine, [Prompt(None, tokens, greedy(), None)] * 8, 8, llm._logprobs)
    requests = [collector.request for collector in batch.queue()]
    assert len(requests) == 2
    assert batch.queue() == []
    assert llm.engine.abort(requests[0].id)
    (third,) = batch.queue()
    assert not batch.ended
    for request in (requests[1], third.request):
        llm.engine.abort(request.id)
    while llm.engine.has_work:
        llm.engine.step()


@pytest.mark.parametrize(
    "options",
    [
        {"prefix_caching": False, "overlap": False},
        {"num_blocks": 16, "block_size": 8},
        {"steps_per_launch": 4},
        {"steps_per_launch": 3, "overlap": True},
        {"max_num_batched_tokens": 256, "workers": 1},
    ],
)
def test_how_the_engine_is_set_up_does_not_change_what_comes_out(
    llm: LLM, options: dict[str, Any]
) -> None:
    params = [greedy(), greedy(temperature=1.0, seed=5, ignore_eos=True, max_tokens=40)]
    prompts = [TEXTS[0], TEXTS[2]] * 2
    with LLM("stories", dtype="float32", max_num_seqs=4, **options) as other:
        found = other.generate(prompts, params * 2)
        if "num_blocks" in options:
            assert other.engine.planner.preemptions > 0
    for output, expected in zip(found, llm.generate(prompts, params * 2), strict=True):
        assert output.outputs == expected.outputs


def test_the_text_is_what_the_tokens_decode_to(llm: LLM) -> None:
    for output in llm.generate(TEXTS, greedy(ignore_eos=True)):
        whole = llm.tokenizer.decode([*output.prompt_token_ids, *ids(output)])
        assert whole == llm.tokenizer.decode(output.prompt_token_ids) + output.outputs[0].text
        assert output.outputs[0].finish_reason == "length"
        assert len(ids(output)) == 24


def test_token_ids_and_text_are_the_same_prompt(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(TEXTS[1])
    expected = ids(llm.generate(TEXTS[1], greedy())[0])
    for given in (prompt, [prompt], tuple(prompt), np.array(prompt), [np.array(prompt, np.int64)]):
        output = llm.generate(given, greedy())[0]
        assert (ids(output), output.prompt) == (expected, None)


def test_a_stream_brings_the_tokens_and_the_text_of_generate(llm: LLM) -> None:
    params = greedy(temperature=1.0, seed=3, n=2, max_tokens=30, logprobs=1)
    expected = llm.generate(TEXTS[0], params)[0].outputs
    chunks = list(llm.stream(TEXTS[0], params))
    for completion in expected:
        own = [c for c in chunks if c.index == completion.index]
        assert "".join(c.text for c in own) == completion.text
        assert [c.token_id for c in own] == completion.token_ids
        assert [c.logprobs for c in own] == completion.logprobs
        assert [c.finish_reason for c in own][:-1] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == completion.finish_reason


def test_a_stream_is_interrupted_by_nothing_and_frees_everything_when_it_is_closed(
    llm: LLM,
) -> None:
    params = greedy(max_tokens=400, ignore_eos=True)
    stream = llm.stream(TEXTS[0], params)
    begin = [next(stream).token_id for _ in range(5)]
    other = llm.generate(TEXTS[1], greedy())[0]
    assert ids(other) == ids(llm.generate(TEXTS[1], greedy())[0])
    begin += [next(stream).token_id for _ in range(5)]
    assert begin == ids(llm.generate(TEXTS[0], greedy(max_tokens=10, ignore_eos=True))[0])
    assert llm.engine.blocks.num_held > 0
    stream.close()
    assert llm.engine.blocks.num_held == 0


def test_an_abandoned_stream_frees_everything(llm: LLM) -> None:
    for i, _ in enumerate(llm.stream(TEXTS[0], greedy(max_tokens=400, ignore_eos=True))):
        if i == 3:
            break
    assert llm.engine.blocks.num_held == 0


def test_a_seed_gives_the_same_text_whatever_else_is_in_the_batch(llm: LLM) -> None:
    params = greedy(temperature=1.0, seed=11)
    alone = ids(llm.generate(TEXTS[0], params)[0])
    mixed = [greedy(temperature=1.2, seed=i) for i in range(4)] + [params]
    assert ids(llm.generate([*TEXTS[1:], TEXTS[0]], mixed)[-1]) == alone
    assert ids(llm.generate(TEXTS[0], greedy(temperature=1.0, seed=12))[0]) != alone
    several = llm.generate(TEXTS[0], greedy(temperature=1.0, seed=11, n=3))[0]
    assert ids(several, 0) == alone
    assert len({tuple(ids(several, i)) for i in range(3)}) == 3


def test_without_a_seed_texts_differ_and_the_llms_seed_repeats_them() -> None:
    def texts(seed: int) -> list[str]:
        with LLM("stories", seed=seed) as model:
            outputs = model.generate([TEXTS[0]] * 2, SamplingParams(max_tokens=24))
        return [o.outputs[0].text for o in outputs]

    first = texts(1)
    assert first[0] != first[1]
    assert texts(1) == first
    assert texts(2) != first


def test_logits_are_those_that_greedy_tokens_come_from(llm: LLM) -> None:
    output = llm.generate(TEXTS[0], greedy(ignore_eos=True))[0]
    tokens = [*output.prompt_token_ids, *ids(output)]
    logits = llm.logits(tokens)
    assert logits.shape == (len(tokens), llm.checkpoint.config.vocab_size)
    assert logits.dtype == np.float32
    start = len(output.prompt_token_ids)
    assert logits[start - 1 : -1].argmax(-1).tolist() == ids(output)
    np.testing.assert_allclose(llm.logits(tokens[:5]), logits[:5], atol=1e-4)


def test_logprobs_are_the_log_softmax_of_the_logits(llm: LLM) -> None:
    params = greedy(temperature=1.5, seed=1, max_tokens=12, logprobs=3, ignore_eos=True)
    outputs = llm.generate([TEXTS[0], TEXTS[1]], params)
    for output in outputs:
        tokens = [*output.prompt_token_ids, *ids(output)]
        expected = log_softmax(llm.logits(tokens))[len(output.prompt_token_ids) - 1 :]
        entries = output.outputs[0].logprobs
        assert entries is not None
        assert len(entries) == 12
        for token, entry, row in zip(ids(output), entries, expected, strict=False):
            assert next(iter(entry)) == token
            assert set(entry) == {token, *np.argsort(-row)[:3].tolist()}
            for key, value in entry.items():
                assert value.logprob == pytest.approx(row[key], abs=1e-4)
                assert value.rank == 1 + int((row > row[key]).sum())
                assert value.decoded_token == llm.tokenizer.decode([key], False)


def test_logprobs_are_there_only_when_they_were_asked_for(llm: LLM) -> None:
    assert llm.generate(TEXTS[0], greedy())[0].outputs[0].logprobs is None
    none = llm.generate(TEXTS[0], greedy(logprobs=0, max_tokens=3))[0].outputs[0]
    assert none.logprobs is not None
    assert [list(entry) for entry in none.logprobs] == [[t] for t in none.token_ids]


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    whole = llm.generate(TEXTS[0], greedy(max_tokens=40))[0].outputs[0].text
    stop = whole[30:37]
    output = llm.generate(TEXTS[0], greedy(max_tokens=40, stop=["@@", stop]))[0].outputs[0]
    assert output.text == whole[: whole.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    pieces = [c.text for c in llm.stream(TEXTS[0], greedy(max_tokens=40, stop=stop))]
    assert "".join(pieces) == output.text
    kept = greedy(max_tokens=40, stop=stop, include_stop_str_in_output=True)
    assert llm.generate(TEXTS[0], kept)[0].outputs[0].text == output.text + stop


def test_a_stop_token_is_in_the_tokens_and_not_in_the_text(llm: LLM) -> None:
    tokens = ids(llm.generate(TEXTS[0], greedy())[0])
    stop = tokens[9]
    output = llm.generate(TEXTS[0], greedy(stop_token_ids=[stop]))[0].outputs[0]
    assert output.token_ids == tokens[: tokens.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    prompt = llm.tokenizer.encode(TEXTS[0])
    text = llm.tokenizer.decode([*prompt, *output.token_ids[:-1]])
    assert text == llm.tokenizer.decode(prompt) + output.text


def test_a_story_ends_by_itself(llm: LLM) -> None:
    output = llm.generate(TEXTS[0], greedy(max_tokens=None))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert output.token_ids[-1] in llm.checkpoint.eos_token_ids
    longer = greedy(min_tokens=len(output.token_ids) + 5, max_tokens=len(output.token_ids) + 9)
    tokens = ids(llm.generate(TEXTS[0], longer)[0])
    assert len(tokens) >= len(output.token_ids) + 5
    assert not set(llm.checkpoint.eos_token_ids) & set(tokens[: len(output.token_ids) + 4])


def test_a_chat_is_its_template_continued(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Tell me a story."}]
    output = llm.chat(messages, greedy())[0]
    assert output.prompt == llm.tokenizer.chat_prompt(messages)
    prompt = llm.tokenizer.encode(output.prompt or "", add_special_tokens=False)
    assert output.prompt_token_ids == prompt
    assert ids(output) == ids(llm.generate(prompt, greedy())[0])
    chunks = list(llm.stream_chat(messages, greedy()))
    assert [c.token_id for c in chunks] == ids(output)
    assert [ids(o) for o in llm.chat([messages, messages], greedy())] == [ids(output)] * 2
    assert llm.chat(messages)[0].outputs[0].finish_reason == "stop"


def test_without_params_the_models_own_count(llm: LLM) -> None:
    assert llm.default_params().temperature == llm.checkpoint.generation["temperature"]
    assert llm.default_params(temperature=0.0).temperature == 0.0
    assert len(ids(llm.generate(TEXTS[0])[0])) == 16


@pytest.mark.parametrize(
    ("generation", "samples"),
    [
        ({"do_sample": False}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.6}, True),
        ({"temperature": None}, True),
        ({"do_sample": False, "repetition_penalty": 1.1}, True),
        ({"temperature": -1.0}, True),
    ],
)
def test_the_models_own_parameters_sample_or_not(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, generation: dict[str, Any], samples: bool
) -> None:
    for key, value in generation.items():
        monkeypatch.setitem(llm.checkpoint.generation, key, value)
    assert llm.samples_by_default == samples


def test_the_program_of_one_token_is_of_the_kind_of_the_models_own_parameters() -> None:
    with LLM("stories", machine="cpu", workers=1, max_num_seqs=1) as llm:
        assert {bucket.sampled for bucket in llm.runner.programs.compiled} == {True}


def test_timings_are_positive_and_in_order(llm: LLM) -> None:
    output = llm.generate(TEXTS[2], greedy())[0]
    timings = output.timings
    assert 0 <= timings["queue_seconds"] <= timings["time_to_first_token_seconds"]
    assert timings["time_to_first_token_seconds"] < timings["total_seconds"]
    assert timings["output_tokens"] == len(ids(output))
    assert timings["output_tokens_per_second"] > 0


def test_several_threads_may_use_one_llm(llm: LLM) -> None:
    expected = [ids(llm.generate(text, greedy())[0]) for text in TEXTS]
    found: list[list[int]] = [[] for _ in TEXTS]

    def generate(i: int) -> None:
        found[i] = ids(llm.generate(TEXTS[i], greedy())[0])

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_reference_machine_says_the_same(llm: LLM) -> None:
    with LLM("stories", machine="reference", dtype="float32", max_model_len=64) as reference:
        found = reference.generate(TEXTS[:2], greedy(max_tokens=3))
    for output, expected in zip(found, llm.generate(TEXTS[:2], greedy(max_tokens=3)), strict=True):
        assert ids(output) == ids(expected)


# Bad input.


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        ([[]], "prompt 0: the prompt is empty"),
        (["A", ""], "prompt 1: the prompt is empty"),
        ([1, 2, 2048], r"token id 2048 at position 2 is outside the vocabulary \[0, 2048\)"),
        ([[1], [1, -1]], "prompt 1: token id -1 at position 1"),
        ([[1], [5] * 1024], "prompt 1: the prompt has 1024 tokens; the context of 1024"),
        (["A", [1]], "prompt 1: it is token ids, prompt 0 is a text"),
        ([[1], "A"], "prompt 1: it is a text, prompt 0 is token ids"),
        ([1, "A"], "prompt 0: a prompt must be a text or a list of token ids, not a int"),
        ([[1], [1, "A"]], "prompt 1: a prompt must be .* not a list that holds a str"),
        ([[1.5]], "prompt 0: a prompt must be .* not a list that holds a float"),
        ([True, False], "prompt 0: a prompt must be .* not a bool"),
        (None, "a prompt must be a text or a list of token ids, not a NoneType"),
        (b"A", "not a bytes"),
        (5, "not a int"),
        ({"prompt": "A"}, "not a dict"),
        (np.zeros((2, 2), np.int32), "not a ndarray"),
        ("\ud800", "not valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    launches = llm.engine.counters.launches
    with pytest.raises(ValueError, match=message) as error:
        llm.generate(prompts, greedy())
    assert "\n" not in str(error.value)
    assert llm.engine.counters.launches == launches
    # A delta of a stream that was closed before may be left.
    assert llm.engine.num_waiting == llm.engine.num_running == 0


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([greedy()], "1 SamplingParams for 2 prompts"),
        ({"temperature": 0}, "params must be SamplingParams, not a dict"),
        ([greedy(), 1], "params must be SamplingParams, not a int"),
        (greedy(stop_token_ids=list(range(100, 131))), "are 33 tokens, at most 32 are possible"),
    ],
)
def test_bad_parameters_are_refused(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["A", "B"], params)
    assert llm.engine.num_waiting == llm.engine.num_running == 0


def test_bad_streams_are_refused_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.stream("")
    several: Any = ["A", "B"]
    with pytest.raises(ValueError, match="stream takes one prompt"):
        llm.stream(several)
    with pytest.raises(ValueError, match="token id 5000"):
        llm.stream([5000])
    with pytest.raises(ValueError, match="messages must hold at least one message"):
        llm.stream_chat([])


@pytest.mark.parametrize("messages", [[], "hello", [5], [{"role": "user"}, 3], [[]]])
def test_bad_conversations_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValueError, match="message"):
        llm.chat(messages)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "the prompt is empty"),
        ([2048], "token id 2048"),
        ([1] * 1025, "the text has 1025 tokens"),
        ("A", "logits takes a list of token ids, not a text"),
        ([1.0], "logits takes a list of token ids"),
    ],
)
def test_logits_of_bad_input_are_refused(llm: LLM, tokens: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.logits(tokens)


def test_a_full_cache_fails_its_own_request_only() -> None:
    sizes: dict[str, Any] = {"num_blocks": 8, "block_size": 16, "max_model_len": 1024}
    with LLM("stories", dtype="float32", max_num_seqs=4, **sizes) as small:
        with pytest.raises(ValueError, match="prompt 1: the prompt has 129 tokens; the KV cache"):
            small.generate([[1], [5] * 129], greedy())
        params = [greedy(max_tokens=None, ignore_eos=True), greedy(), greedy()]
        outputs = small.generate(TEXTS[:3], params)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "the KV cache is full: 8 blocks of 16 tokens" in (outputs[0].error or "")
        assert len(ids(outputs[0])) > 100
        alone = [small.generate(text, greedy())[0] for text in TEXTS[1:3]]
        assert [ids(o) for o in outputs[1:]] == [ids(o) for o in alone]
        assert [o.error for o in outputs[1:]] == [None, None]
        chunks: list[Chunk] = []
        with pytest.raises(GenerationError, match="the KV cache is full"):
            chunks.extend(small.stream(TEXTS[0], params[0]))
        assert small.engine.blocks.num_held == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"machine": "cuda"},
            "cuda",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"machine": "tpu"}, "machine 'tpu' is unknown"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        (
            {"max_model_len": 4096},
            "max_model_len is 4096, the model's max_position_embeddings 1024",
        ),
        (
            {"kv_cache_bytes": 1 << 50},
            r"the KV cache takes 1048576\.0 GiB .* the memory for them has",
        ),
        ({"max_num_seqs": 0}, "max_num_seqs must be a positive integer, not 0"),
        ({"block_size": 2.5}, "block_size must be a positive integer, not 2.5"),
        (
            {"machine": "cpu", "block_size": 1 << 14, "num_blocks": 1},
            "block_size is 16384: to attend to so many keys",
        ),
        ({"num_blocks": 8, "kv_cache_bytes": 1 << 20}, "both give the size of the KV cache"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes is 100, less than one KV block"),
        (
            {"max_num_seqs": 8, "max_num_batched_tokens": 4},
            "max_num_batched_tokens is 4, less than",
        ),
        ({"steps_per_launch": 0}, "steps_per_launch must be a positive integer"),
        ({"tpot_limit_ms": 0.0}, "tpot_limit_ms must be a positive number, not 0.0"),
    ],
)
def test_a_bad_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("stories", **options)


def test_the_largest_block_that_an_error_names_can_be_used() -> None:
    with pytest.raises(ValueError, match=r"a worker has [\d,]+; \d+ is the largest") as caught:
        LLM("stories", machine="cpu", block_size=1 << 14, num_blocks=1)
    largest = int(str(caught.value).split("; ")[1].split()[0])
    prompt, params = list(range(5, 305)), SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for size, blocks in ((largest, 1), (16, 64)):
        sizes: dict[str, Any] = {"block_size": size, "num_blocks": blocks, "max_model_len": 400}
        with LLM("stories", machine="cpu", **sizes) as llm:
            found.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
    assert found[0] == found[1]
    with pytest.raises(ValueError, match=f"block_size is {largest + 1}:"):
        LLM("stories", machine="cpu", block_size=largest + 1, num_blocks=1)


@pytest.mark.parametrize("model", ["", "no/such/model-here", "./nowhere", 5])
def test_a_model_that_is_not_there_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"model|directory"):
        LLM(model)


def test_a_model_without_a_tokenizer_takes_and_gives_token_ids(tmp_path: Path, llm: LLM) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(resolve("stories") / name, tmp_path)
    prompt = llm.tokenizer.encode(TEXTS[0])
    with LLM(tmp_path, dtype="float32", max_model_len=128) as bare:
        output = bare.generate(prompt, greedy())[0]
        assert ids(output) == ids(llm.generate(prompt, greedy())[0])
        assert output.outputs[0].text == ""
        with pytest.raises(ValueError, match=r"no tokenizer\.json"):
            bare.generate(TEXTS[0])
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            bare.generate(prompt, greedy(stop="x"))


def test_loading_reports_its_phases() -> None:
    seen: list[tuple[str, int, int]] = []
    with LLM("stories", max_model_len=64, progress=lambda *phase: seen.append(phase)):
        pass
    phases = list(dict.fromkeys(phase for phase, _, _ in seen))
    assert phases[0] == "finding the model"
    assert "reading weights" in phases
    assert seen[-1] == ("ready", 1, 1)
    assert all(0 <= done <= total for _, done, total in seen)


def test_the_size_of_the_cache_can_be_given_in_bytes() -> None:
    config = Checkpoint.open(resolve("stories")).config
    block = config.kv_elements_per_token * 16 * 2
    with LLM("stories", kv_cache_bytes=5 * block + 1, block_size=16) as small:
        assert small.runner.num_blocks == 5
        assert small.max_model_len == 81  # a longer sequence could never run


def test_a_closed_llm_refuses_work_and_ends_its_streams() -> None:
    model = LLM("stories", max_model_len=64)
    stream = model.stream(TEXTS[0], greedy(max_tokens=40, ignore_eos=True))
    next(stream)
    model.close()
    model.close()
    with pytest.raises(ValueError, match="this LLM is closed"):
        model.generate("A")
    with pytest.raises(ValueError, match="this LLM is closed"):
        model.logits([1])
    with pytest.raises(GenerationError, match="closed"):
        list(stream)


def test_a_closed_llm_holds_no_memory() -> None:
    """At once, not when Python collects garbage: the next model needs it."""
    with LLM("stories", max_model_len=64) as model:
        model.generate("A", greedy())
        weights = [weakref.ref(parts[0]) for parts in model.runner.memory._storage.values()]
        gc.disable()
    try:
        assert len(weights) > 10
        assert not any(weight() is not None for weight in weights)
    finally:
        gc.enable()


def test_a_dropped_llm_gives_up_its_thread() -> None:
    before = threading.active_count()
    # On a GPU there is none.
    model = LLM("stories", machine="cpu", max_model_len=64, overlap=True)
    model.generate("A", greedy())
    assert threading.active_count() > before
    thread = model.engine._steps
    assert isinstance(thread, StepThread)
    worker = thread._thread
    del model, thread
    worker.join(5)
    assert not worker.is_alive()


def test_logprobs_of_a_prompt_are_those_of_its_logits(llm: LLM) -> None:
    params = greedy(prompt_logprobs=2, n=2)
    outputs = llm.generate(TEXTS, params)
    for output, plain in zip(outputs, llm.generate(TEXTS, greedy(n=2)), strict=True):
        assert output.outputs == plain.outputs
        assert plain.prompt_logprobs is None
        assert output.prompt_logprobs is not None
        first, *others = output.prompt_logprobs
        assert first is None
        tokens = output.prompt_token_ids
        values = log_softmax(llm.logits(tokens))
        for token, before, entry in zip(tokens[1:], values, others, strict=False):
            assert entry is not None
            assert entry[token].logprob == before[token]
            assert max(e.logprob for e in entry.values()) == before.max()


def test_each_token_of_a_launch_brings_its_own_text(llm: LLM) -> None:
    params = greedy(ignore_eos=True, stop=["zzz"])
    with LLM("stories", dtype="float32", steps_per_launch=4) as other:
        assert list(other.stream(TEXTS[0], params)) == list(llm.stream(TEXTS[0], params))


def test_a_truncated_prompt_is_its_last_tokens(llm: LLM) -> None:
    tokens = llm.tokenizer.encode(TEXTS[2])
    output = llm.generate(TEXTS[2], greedy(truncate_prompt_tokens=9))[0]
    assert output.prompt_token_ids == tokens[-9:]
    assert ids(output) == ids(llm.generate(tokens[-9:], greedy())[0])
    whole = llm.generate(TEXTS[2], greedy(truncate_prompt_tokens=1000))[0]
    assert whole.prompt_token_ids == tokens
    long = [5] * 3000
    output = llm.generate(long, greedy(truncate_prompt_tokens=-1, max_tokens=8, ignore_eos=True))[0]
    assert len(output.prompt_token_ids) == llm.max_model_len - 8
    assert len(ids(output)) == 8
    with pytest.raises(ValueError, match=r"max_tokens=1024 leaves no room for a prompt in .* 1024"):
        llm.generate(long, greedy(truncate_prompt_tokens=-1, max_tokens=1024))


def test_a_chat_goes_on_with_its_last_message(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The fox"}]
    output = llm.chat(messages, greedy(), continue_final_message=True)[0]
    assert output.prompt == f"{llm.chat(messages[:1], greedy(max_tokens=1))[0].prompt}The fox"
    chunks = llm.stream_chat(messages, greedy(), continue_final_message=True)
    assert "".join(c.text for c in chunks) == output.outputs[0].text
    with pytest.raises(ValueError, match="exclude each other"):
        llm.chat(messages, add_generation_prompt=True, continue_final_message=True)
