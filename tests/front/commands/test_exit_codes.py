"""How a command ends: faults as one sentence, interrupts, and a reader of stdout that goes away."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys

import pytest
from command_line import Run
from fake_llm import FakeLLM


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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("generate stories x >&-", "stdout is closed: the result cannot be printed"),
        ("generate stories x --stream >&-", "stdout is closed: the result cannot be printed"),
        ("info stories >&-", "stdout is closed: the result cannot be printed"),
        ("chat stories <&-", "stdin is closed: there are no messages to read"),
        ("chat stories </dev/null >&-", "stdout is closed: the result cannot be printed"),
    ],
)
def test_a_closed_stream_is_one_sentence(words: str, said: str) -> None:
    done = _in_a_shell(words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"megavm: error: {said}\n"


def test_an_error_is_not_printed_as_a_result_if_stderr_is_closed() -> None:
    done = _in_a_shell("generate no/such/model x 2>&-")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "")


def test_a_server_needs_no_standard_streams() -> None:
    done = _in_a_shell("serve no/such/model --port 0 <&- >&-")
    assert done.returncode == 2
    assert "no/such/model" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def _in_a_shell(words: str) -> subprocess.CompletedProcess[str]:
    command = f"{shlex.quote(sys.executable)} -m megavm {words}"
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
