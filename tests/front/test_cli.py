"""The command `megavm`: what it prints where, what it refuses, and how it ends."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import megavm
from megavm import cli, doctor
from megavm.commands.chat import Chat
from megavm.commands.terminal import Progress

PACKAGE = Path(megavm.__file__).parent
# "generate", ..., "trace", "trace report", ...
COMMANDS = tuple(
    name
    for command, parser in cli.build_parser().commands.items()
    for name in (command, *(f"{command} {action}" for action in parser.commands))
)


@dataclass
class Completion:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str = "length"
    stop_reason: str | int | None = None
    logprobs: Any = None
    error: str | None = None


@dataclass
class Output:
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    timings: dict[str, float] = field(default_factory=lambda: {"decode_seconds": 0.5})

    @property
    def error(self) -> str | None:
        return next((output.error for output in self.outputs if output.error), None)


@dataclass
class Piece:
    index: int
    text: str
    token_id: int | None
    finish_reason: str | None = None


class FakeTokenizer:
    available = True
    chats = True

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)

    def require_chat(self) -> None:
        if not self.chats:
            raise ValueError("the model has no chat template")


class FakeLLM:
    """Answers "w0 w1 ..." and remembers what it was asked."""

    made: list[FakeLLM]
    failure: BaseException | None = None
    broken_off: str | None = None
    generation: dict[str, Any]

    def __init__(self, model: str, **keywords: Any) -> None:
        self.model = model
        self.keywords = keywords
        self.calls: list[tuple[Any, Any]] = []
        self.tokenizer = FakeTokenizer()
        self.checkpoint = types.SimpleNamespace(generation=self.generation)
        FakeLLM.made.append(self)
        if model == "nothing":
            raise ValueError("no such directory: nothing\nsecond line")

    def _tokens(self, params: Any) -> range:
        if FakeLLM.failure is not None:
            raise FakeLLM.failure
        return range(min(params.max_tokens or 3, 3))

    def generate(self, prompts: Any, params: Any) -> list[Output]:
        self.calls.append((prompts, params))
        tokens = self._tokens(params)
        logprobs = [{i: -0.5, 7: -math.inf} for i in tokens] if params.logprobs else None
        text = " ".join(f"w{i}" for i in tokens)
        completions = [
            Completion(n, text, list(tokens), logprobs=logprobs, error=FakeLLM.broken_off)
            for n in range(params.n)
        ]
        prompt, ids = (prompts, [5]) if isinstance(prompts, str) else (None, prompts)
        return [Output(prompt, ids, completions)]

    def stream(self, prompt: Any, params: Any) -> Iterator[Piece]:
        self.calls.append((prompt, params))
        for token in self._tokens(params):
            for index in range(params.n):
                yield Piece(index, f"w{token} ", token)
        yield Piece(0, "", None, "error" if FakeLLM.broken_off else "length")

    def stream_chat(self, messages: Any, params: Any) -> Iterator[Piece]:
        yield from self.stream([dict(message) for message in messages], params)


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("megavm.llm")
    module.LLM = FakeLLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megavm.llm", module)
    for variable in [name for name in os.environ if name.startswith("MEGAVM_")]:
        monkeypatch.delenv(variable)
    FakeLLM.made = []
    FakeLLM.failure = None
    FakeLLM.broken_off = None
    FakeLLM.generation = {"eos_token_id": ()}


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of a refused command."""
        assert self.code == 2
        assert self.out == ""
        assert re.fullmatch(r"megavm: error: [^\n]+\n", self.err), self.err
        return self.err


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        data = stdin.encode() if isinstance(stdin, str) else (stdin or b"")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()  # what the test itself printed before
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return run


def last_params() -> Any:
    return FakeLLM.made[-1].calls[-1][1]


# --- generate -----------------------------------------------------------------------------------


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


# --- errors and exit codes ----------------------------------------------------------------------


class OwnFault(RuntimeError):
    """As a machine raises it: several lines, of which the cause is one sentence."""

    def __init__(self) -> None:
        super().__init__("worker 3 waits\n  instruction 7")
        self.cause = "worker 3 waits"


OwnFault.__module__ = "megavm.vm.machine"


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ValueError("two\nlines"), "two lines"),
        (OwnFault(), "worker 3 waits\n"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "directory: x.json"),
        (MemoryError(), "not enough memory"),
        (RuntimeError("[enforce fail] can't allocate memory: 10 bytes"), "not enough memory"),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), "package torch"),
        (ImportError("no _native", name="megavm.vm"), "incomplete"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_known_fault_is_one_sentence(
    run: Run, failure: Exception, said: str, stream: bool
) -> None:
    FakeLLM.failure = failure
    result = run("generate", "m", "hello", *(["--stream"] if stream else []))
    assert said in result.error


def test_a_generation_that_breaks_off_is_printed_and_ends_with_an_error(run: Run) -> None:
    FakeLLM.broken_off = "worker 3 waits"
    for arguments, printed in (([], "w0 w1 w2\n"), (["--stream"], "w0 w1 w2 \n")):
        result = run("generate", "m", "hello", *arguments)
        assert (result.code, result.out) == (2, printed)
        assert result.err.startswith("megavm: error: ")
    result = run("generate", "m", "hello", "--json")
    assert result.code == 2
    assert json.loads(result.out)["error"] == "worker 3 waits"
    assert run("chat", "m", stdin="hello\n").code == 2


def test_a_bug_keeps_its_traceback(run: Run) -> None:
    FakeLLM.failure = KeyError("oops")
    with pytest.raises(KeyError):
        run("generate", "m", "hello")


def test_a_model_that_cannot_be_loaded_is_one_sentence(run: Run) -> None:
    assert "no such directory: nothing second line" in run("generate", "nothing", "hello").error


def test_an_interrupt_is_quiet(run: Run) -> None:
    FakeLLM.failure = KeyboardInterrupt()
    result = run("generate", "m", "hello")
    assert (result.code, result.out, result.err) == (130, "", "")


def test_a_command_that_does_not_exist_is_refused(run: Run) -> None:
    assert "'dance'" in run("dance").error


# --- environment --------------------------------------------------------------------------------


def test_every_option_can_be_set_in_the_environment_and_the_flag_wins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {
        "MEGAVM_MACHINE": "reference",
        "MEGAVM_MAX_TOKENS": "2",
        "MEGAVM_TEMPERATURE": "0.5",
        "MEGAVM_STOP": "x, y",
        "MEGAVM_IGNORE_EOS": "1",
        "MEGAVM_MAX_MODEL_LEN": "1K",
        "MEGAVM_N": "2",
        "MEGAVM_STREAM": "false",
    }.items():
        monkeypatch.setenv(variable, value)
    run("generate", "m", "hello", "--temperature", "0.75", "--machine", "cpu")
    params = last_params()
    assert (params.max_tokens, params.temperature, params.n) == (2, 0.75, 2)
    assert params.stop == ("x, y",)
    assert params.ignore_eos
    assert FakeLLM.made[-1].keywords["machine"] == "cpu"
    assert FakeLLM.made[-1].keywords["max_model_len"] == 1024
    run("generate", "m", "hello", "--stop", "z")
    assert last_params().stop == ("z",)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEGAVM_MAX_TOKENS", "many"),
        ("MEGAVM_MACHINE", "tpu"),
        ("MEGAVM_JSON", "maybe"),
        ("MEGAVM_MAX_MODEL_LEN", "-1"),
    ],
)
def test_a_bad_variable_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    error = run("generate", "m", "hello").error
    assert variable in error
    assert value in error


# --- chat ---------------------------------------------------------------------------------------


def chat_calls() -> list[list[tuple[str, str]]]:
    return [
        [(message["role"], message["content"]) for message in messages]
        for messages, _ in FakeLLM.made[-1].calls
    ]


def test_chat_answers_each_line_and_remembers(run: Run) -> None:
    result = run("chat", "m", "--system", "be kind", stdin="hello\n\nbye\n")
    assert result.code == 0
    assert result.out == "w0 w1 w2 \nw0 w1 w2 \n"
    assert result.err.count("tokens/s") == 2
    system, answer = ("system", "be kind"), ("assistant", "w0 w1 w2 ")
    assert chat_calls() == [
        [system, ("user", "hello")],
        [system, ("user", "hello"), answer, ("user", "bye")],
    ]
    assert last_params().max_tokens is None


def test_chat_is_quiet_when_asked(run: Run) -> None:
    assert run("chat", "m", "--quiet", stdin="hello\n").err == ""


def test_chat_talks_to_the_shipped_model_by_default(run: Run) -> None:
    run("chat", stdin="/bye\n")
    assert FakeLLM.made[-1].model == "stories"


def test_chat_reads_messages_of_several_lines(run: Run) -> None:
    run("chat", "m", stdin='"""one\n\n two"""\n"""\n/bye\n"""\n"""open\nend')
    assert [calls[-1][1] for calls in chat_calls()] == ["one\n\n two", " /bye", "open\nend"]


def test_chat_commands_change_the_conversation(run: Run) -> None:
    result = run(
        "chat",
        "m",
        stdin="/set parameter temperature 0.5\n/set parameter stop a b\n/set system be brief\n"
        "hello\n/clear\nagain\n/show\n/help\n/bye\nnever read\n",
    )
    assert result.code == 0
    assert chat_calls() == [
        [("system", "be brief"), ("user", "hello")],
        [("system", "be brief"), ("user", "again")],
    ]
    assert last_params().temperature == 0.5
    assert last_params().stop == ("a b",)
    assert re.search(r"temperature +0\.5", result.out)
    assert "/set parameter NAME VALUE" in result.out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/dance", "'/dance' is not a command"),
        ("/set parameter temperature hot", "temperature: 'hot' is not a number"),
        ("/set parameter temperature -3", "temperature must be"),
        ("/set parameter colour red", "no parameter 'colour'"),
        ("/set parameter temperature", "not a command"),
    ],
)
def test_a_bad_chat_command_over_a_pipe_ends_it(run: Run, line: str, said: str) -> None:
    assert said in run("chat", "m", stdin=f"{line}\nhello\n").error
    assert FakeLLM.made[-1].calls == []


def test_on_a_terminal_an_error_leaves_the_conversation_as_it_was(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["hello", "/dance", "fail", "again"])

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        FakeLLM.failure = ValueError("too long") if line == "fail" else None
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Chat, "_is_interactive", staticmethod(lambda: True))
    result = run("chat", "m")
    assert result.code == 0
    assert result.err.count("megavm: error: ") == 2
    assert [calls[-1][1] for calls in chat_calls()] == ["hello", "fail", "again"]
    assert len(chat_calls()[-1]) == 3


def test_chat_without_a_template_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeTokenizer, "chats", False)
    assert "no chat template" in run("chat", "m", stdin="hello\n").error


# --- program, info, doctor ----------------------------------------------------------------------


def test_program_passes_its_options_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def describe_program(model: str, **keywords: Any) -> str:
        asked.update(keywords, model=model)
        return "a program"

    module = types.ModuleType("megavm.scheduler.run.inspect")
    module.describe_program = describe_program  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megavm.scheduler.run.inspect", module)
    options = "--rows 4 --sequences 2 --context 1K --workers 3 --verify --disassemble --save x"
    assert run("program", "m", *options.split()).out == "a program\n"
    assert asked == {
        "model": "m",
        "machine": "auto",
        "dtype": "auto",
        "rows": 4,
        "sequences": 2,
        "context": 1024,
        "workers": 3,
        "assignment": "balanced",
        "exchange": None,
        "disassemble": True,
        "verify": True,
        "save": "x",
    }


def write_model(directory: Path) -> Path:
    """A directory with a small random model and no tokenizer."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype=torch.bfloat16,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def test_a_program_for_a_longer_context_than_the_model_has_is_refused(
    run: Run, tmp_path: Path
) -> None:
    directory = write_model(tmp_path)  # of 2048 positions
    assert "context is 4096" in run("program", str(directory), "--context", "4K").error


def test_info_gives_the_sizes_of_a_model(run: Run, tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    value = json.loads(run("info", str(directory), "--json").out)
    parameters = 50 * 16 + 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3 + 32) + 16
    assert value["parameters"] == parameters
    assert value["weight_bytes"] == 2 * parameters
    assert value["kv_bytes_per_token"] == 2 * 2 * 2 * 2 * 4
    assert value["config"]["num_layers"] == 2
    assert not value["tokenizer"]["available"]
    wide = json.loads(run("info", str(directory), "--json", "--dtype", "float32").out)
    assert wide["kv_bytes_per_token"] == 2 * value["kv_bytes_per_token"]
    text = run("info", str(directory)).out
    assert re.search(rf"parameters +{parameters:,}", text)
    assert re.search(r"tokenizer +none", text)


def test_info_refuses_a_broken_model(run: Run, tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in run("info", str(directory)).error
    assert "no such directory" in run("info", str(tmp_path / "nothing")).error


def test_doctor_says_what_runs_here_and_why_not(run: Run) -> None:
    report = json.loads(run("doctor", "--json").out)
    assert set(report["machines"]) == {"reference", "cpu", "cuda"}
    assert report["machines"]["reference"]["available"]
    for machine in report["machines"].values():
        assert machine["available"] == (machine["reasons"] == [])
    assert report["cpu"]["usable"] >= 1
    assert report["memory"]["total"] is None or report["memory"]["total"] > 1 << 28
    text = run("doctor").out
    assert re.search(r"^reference +yes", text, re.MULTILINE)
    assert "what --machine auto takes" in text


def test_doctor_works_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTENSION", "megavm.vm.nothing_such")
    monkeypatch.setattr(doctor, "_read_lines", lambda path: [])
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine()
    assert report["auto"] is None
    assert "torch cannot be imported" in report["machines"]["cpu"]["reasons"]
    assert "the compiled extension is missing" in report["machines"]["cpu"]["reasons"]
    assert "not usable" in doctor.format_report(report)


def test_doctor_describes_the_gpus_that_libcuda_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """The driver API of a machine with one GPU, as ctypes would call it."""

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDriverGetVersion(self, out: Any) -> int:
            out._obj.value = 13000
            return 0

        def cuDeviceGetCount(self, out: Any) -> int:
            out._obj.value = 1
            return 0

        def cuDeviceGet(self, out: Any, index: int) -> int:
            out._obj.value = index
            return 0

        def cuDeviceGetName(self, out: Any, size: int, device: int) -> int:
            out.value = b"NVIDIA H200"
            return 0

        def cuDeviceTotalMem_v2(self, out: Any, device: int) -> int:
            out._obj.value = 140 << 30
            return 0

        def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
            out._obj.value = {75: 9, 76: 0, 16: 132}[attribute]
            return 0

    monkeypatch.setattr("shutil.which", lambda name: None)  # no nvidia-smi, even where there is one
    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    report = doctor.examine()
    assert report["gpu"]["driver"] == "CUDA 13.0"
    assert report["gpu"]["devices"] == [
        {"name": "NVIDIA H200", "memory": 140 << 30, "compute_capability": "9.0", "sms": 132}
    ]
    assert "NVIDIA H200, 140.0 GiB" in doctor.format_report(report)
    monkeypatch.setattr(Library, "cuInit", lambda self, flags: 100)
    assert "cuInit failed with CUDA error 100" in doctor.examine()["gpu"]["error"]


# --- the process --------------------------------------------------------------------------------


def start(*arguments: str, **keywords: Any) -> subprocess.Popen[str]:
    """The command as a process of its own, with `FakeLLM` nowhere in it."""
    command = [sys.executable, "-m", "megavm", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=PACKAGE.parent, **keywords
    )


def on_a_terminal(*arguments: str) -> str:
    """What the command writes to stderr where that is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megavm", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        pieces = []
        with contextlib.suppress(OSError):  # how Linux says that the other end is closed
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)
        os.close(ours)
        assert process.wait(60) == 0
    return b"".join(pieces).decode()


def test_on_a_terminal_loading_shows_its_phases_a_bar_and_their_seconds() -> None:
    generate = ("generate", "stories", "Once", "--max-tokens", "2")
    screen = on_a_terminal(*generate)
    *overwritten, last = screen.replace("\x1b[K", "").split("\r")
    assert "finding the model" in overwritten
    assert any(re.match(r"reading weights \[#+\.*\] \d+/\d+  \d+\.\d s", s) for s in overwritten)
    assert any(re.match(r"\[loaded stories in \d+\.\d s: starting \d", s) for s in overwritten)
    assert screen.count("\n") == 1
    assert last == ""
    assert on_a_terminal(*generate, "--quiet") == ""


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (20, "reading weights 12/"),
        (36, "reading weights 12/48  0.0 s"),
        (40, "reading weights [##......] 12/48  0.0 s"),
        (80, f"reading weights [{'#' * 7}{'.' * 23}] 12/48  0.0 s"),
    ],
)
def test_progress_fits_the_terminal_and_keeps_its_numbers(
    monkeypatch: pytest.MonkeyPatch, columns: int, shown: str
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            return 2

    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    Progress(quiet=False)("reading weights", 12, 48)
    assert screen.getvalue() == f"\r\x1b[K{shown}"
    assert len(shown) < columns


def test_help_lists_the_commands_and_answers_at_once() -> None:
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        process = start("--help")
        out, err = process.communicate()
        times.append(time.perf_counter() - begin)
        assert (process.returncode, err) == (0, "")
        assert all(command.split()[0] in out for command in COMMANDS)
    assert min(times) < 0.150


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from megavm.cli import main; main(['generate', '--help']);"
        "heavy = {'torch', 'numpy', 'tokenizers', 'jinja2', 'huggingface_hub', 'json',"
        " 'importlib.metadata', 'subprocess', 'asyncio', 'pathlib'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_help_text_fits_a_terminal(run: Run, command: str) -> None:
    result = run(*command.split(), "--help")
    assert result.code == 0
    assert result.out.startswith("usage: megavm")
    assert max(map(len, result.out.splitlines())) <= 100


def test_version_is_that_of_the_package(run: Run) -> None:
    assert run("--version").out == f"megavm {megavm.__version__}\n"
    assert re.fullmatch(r"\d+[\w.+]*", megavm.__version__)


def test_without_a_command_the_help_is_printed(run: Run) -> None:
    result = run()
    assert result.code == 0
    assert "generate" in result.out


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import sys, megavm; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(megavm))
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = megavm.nothing_such


_SLOW = """
import sys, time, types
from megavm import cli

class LLM:
    def __init__(self, *arguments, **keywords):
        self.tokenizer = types.SimpleNamespace(available=True)
        self.checkpoint = types.SimpleNamespace(generation={})
    def stream(self, prompt, params):
        for token in range(100_000):
            yield types.SimpleNamespace(
                index=0, text=f"w{token} ", token_id=token, finish_reason=None
            )
            if len(sys.argv) > 1:
                time.sleep(0.01)

module = types.ModuleType("megavm.llm")
module.LLM = LLM
sys.modules["megavm.llm"] = module
sys.exit(cli.main(["generate", "m", "hello", "--stream"]))
"""


def test_a_reader_that_goes_away_ends_the_command_quietly() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(5) == "w0 w1"
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(10) == 141


def test_ctrl_c_ends_the_command_quietly_with_130() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SLOW, "slowly"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "w0"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
        assert err == ""
        assert process.returncode == 130
