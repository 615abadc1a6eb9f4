"""`megavm generate`: the prompt, the output and the options of the sampler and the machine."""

from __future__ import annotations

import json

import pytest
from command_line import Run
from fake_llm import FakeLLM, FakeTokenizer, last_params

import megavm


def test_generate_prints_the_completion_alone(run: Run) -> None:
    result = run("generate", "m", "hello")
    assert (result.code, result.out, result.err) == (0, "w0 w1 w2\n", "")
    assert FakeLLM.made[-1].calls[-1][0] == "hello"


def test_generate_echoes_the_prompt_when_asked(run: Run) -> None:
    assert run("generate", "m", "hello ", "--echo").out == "hello w0 w1 w2\n"
    assert run("generate", "m", "hello ", "--echo", "--stream").out == "hello w0 w1 w2 \n"
    assert run("generate", "m", "--prompt-ids", "1,2", "--echo").out == "bcw0 w1 w2\n"


def test_generate_reads_the_prompt_from_stdin(run: Run) -> None:
    assert run("generate", "m", "-", stdin="one\ntwo ü\r\n").code == 0
    assert FakeLLM.made[-1].calls[-1][0] == "one\ntwo ü"


def test_operands_may_stand_behind_options(run: Run) -> None:
    assert run("generate", "m", "--seed", "1", "once").code == 0
    assert run("generate", "m", "--echo", "-", stdin="upon a time").code == 0
    assert [made.calls[-1][0] for made in FakeLLM.made] == ["once", "upon a time"]


def test_generate_takes_token_ids(run: Run) -> None:
    assert run("generate", "m", "--prompt-ids", "1, 2,3").code == 0
    assert FakeLLM.made[-1].calls[-1][0] == [1, 2, 3]


def test_generate_with_json_prints_exactly_one_object(run: Run) -> None:
    result = run("generate", "m", "hello", "--json", "--max-tokens", "2")
    assert result.out.count("\n") == 1
    value = json.loads(result.out)
    assert value["text"] == "w0 w1"
    assert value["token_ids"] == [0, 1]
    assert value["finish_reason"] == "length"
    assert value["prompt_token_ids"] == [5]
    assert value["prompt"] == "hello"
    assert value["timings"]["decode_seconds"] == 0.5
    assert value["timings"]["load_seconds"] >= 0
    assert "outputs" not in value


def test_json_has_every_completion_and_no_infinity(run: Run) -> None:
    result = run("generate", "m", "hello", "--json", "-n", "2", "--logprobs", "2")
    value = json.loads(result.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [output["index"] for output in value["outputs"]] == [0, 1]
    assert value["logprobs"][0] == {"0": -0.5, "7": -9999.0}


def test_several_completions_are_told_apart(run: Run) -> None:
    expected = "--- completion 1 of 2 ---\nw0 w1 w2\n--- completion 2 of 2 ---\nw0 w1 w2\n"
    assert run("generate", "m", "hello", "-n", "2").out == expected
    streamed = run("generate", "m", "hello", "-n", "2", "--stream").out
    assert streamed.replace(" \n", "\n") == expected


def test_every_sampling_option_reaches_the_parameters(run: Run) -> None:
    options = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 3 --min-p 0.1 --seed 9 "
        "--repetition-penalty 1.1 --presence-penalty -1 --frequency-penalty 0.25 --stop a --stop b "
        "--stop-token-ids 4,5 --min-tokens 2 --ignore-eos --logprobs 3 -n 2 --json"
    )
    assert run("generate", "m", "hello", *options.split()).code == 0
    params = last_params()
    assert params == megavm.SamplingParams(
        n=2,
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        min_p=0.1,
        seed=9,
        repetition_penalty=1.1,
        presence_penalty=-1,
        frequency_penalty=0.25,
        stop=["a", "b"],
        stop_token_ids=[4, 5],
        min_tokens=2,
        ignore_eos=True,
        logprobs=3,
    )


def test_machine_options_reach_the_model(run: Run) -> None:
    options = "--machine reference --dtype float32 --max-model-len 8k --max-num-seqs 3 --workers 2"
    run("generate", "m", "hello", *options.split())
    keywords = FakeLLM.made[-1].keywords
    assert keywords.pop("progress") is None
    assert keywords == {
        "machine": "reference",
        "dtype": "float32",
        "max_model_len": 8000,
        "max_num_seqs": 3,
        "workers": 2,
    }
    run("generate", "m", "hello")
    assert FakeLLM.made[-1].keywords == {"machine": "auto", "dtype": "auto", "progress": None}


def test_the_generation_config_counts_where_no_option_is_given(run: Run) -> None:
    FakeLLM.generation = {"temperature": 0.25, "top_k": 9, "eos_token_id": ()}
    run("generate", "m", "hello", "--top-k", "2")
    assert (last_params().temperature, last_params().top_k) == (0.25, 2)


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("8k", 8000), ("8K", 8192), ("1m", 1_000_000), ("2M", 2 << 20), ("1", 1)],
)
def test_lengths_may_have_a_suffix(run: Run, text: str, value: int) -> None:
    run("generate", "m", "hello", "--max-model-len", text)
    assert FakeLLM.made[-1].keywords["max_model_len"] == value


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hello", "--temperature", "-1"], "temperature"),
        (["hello", "--temperature", "nan"], "temperature"),
        (["hello", "--temperature", "hot"], "'hot' is not a number"),
        (["hello", "--top-p", "0"], "top_p"),
        (["hello", "--max-tokens", "0"], "max_tokens"),
        (["hello", "--max-tokens", "1.5"], "--max-tokens"),
        (["hello", "-n", "0"], "n must be"),
        (["hello", "--stop", ""], "stop"),
        (["hello", "--json", "--logprobs", "50"], "logprobs"),
        (["hello", "--logprobs", "5"], "add --json"),
        (["hello", "--json", "--stream"], "--stream"),
        (["hello", "--json", "--echo"], "--echo"),
        (["hello", "--machine", "tpu"], "'tpu'"),
        (["hello", "--max-model-len", "0"], "--max-model-len"),
        (["hello", "--max-model-len", "8kk"], "'8kk'"),
        (["hello", "--max-model-len", "9" * 5000], "is not a positive number"),
        (["hello", "--workers", "-1"], "--workers"),
        (["hello", "--nonsense"], "--nonsense (see megavm generate --help)"),
        (["hello", "--max-tok", "3"], "--max-tok"),
        (["hello", "world"], "unrecognized arguments: world"),
        (["hello", "--seed", "1", "world"], "unrecognized arguments: world"),
        (["--nonsense", "hello"], "unrecognized arguments: --nonsense hello"),
        (["hello", "--prompt-ids", "1"], "not both"),
        (["--prompt-ids", ""], "--prompt-ids"),
        (["--prompt-ids", "1,x"], "'1,x'"),
        ([""], "the prompt is empty"),
        (["-"], "the prompt is empty"),
        ([], "give a PROMPT"),
    ],
)
def test_bad_input_is_one_sentence_before_a_model_is_loaded(
    run: Run, arguments: list[str], said: str
) -> None:
    assert said in run("generate", "m", *arguments).error
    assert FakeLLM.made == []


def test_a_prompt_that_is_not_utf8_is_refused(run: Run) -> None:
    assert "UTF-8" in run("generate", "m", "-", stdin=b"\xff\xfe").error


def test_without_a_tokenizer_token_ids_are_printed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeTokenizer, "available", False)
    assert run("generate", "m", "--prompt-ids", "4").out == "0 1 2\n"
    assert run("generate", "m", "--prompt-ids", "4", "--stream").out == "0 1 2 \n"
