"""`megavm bench serve`: its options, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_server import FIRST_SECONDS, FakeServer

from megavm import cli

Bench = Callable[..., tuple[int, str, str]]


@pytest.fixture
def bench(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, server: FakeServer
) -> Bench:
    """Runs a command line against the fake server: exit code, stdout, stderr."""
    for variable in [name for name in os.environ if name.startswith("MEGAVM_")]:
        monkeypatch.delenv(variable)

    def bench(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["bench", "serve", "--base-url", server.url, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return bench


def test_a_run_prints_a_table_and_writes_json(
    bench: Bench, server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    code, out, _ = bench(
        *("--num-prompts", "6", "--max-concurrency", "3", "--input-len", "4:9"),
        *("--output-len", "3", "--warmup", "2", "--json", str(path)),
        *("--goodput", "ttft:10000", "e2el:20000"),
    )
    assert code == 0
    report = json.loads(path.read_text())
    assert (report["completed"], report["failed"], report["model_id"]) == (6, 0, "steady")
    assert report["total_output_tokens"] == 18
    assert report["mean_ttft_ms"] >= 1e3 * FIRST_SECONDS
    assert report["request_goodput"] == report["request_throughput"]
    assert re.search(r"Successful requests: +6\n", out)
    assert f"{report['p99_itl_ms']:.2f}" in out
    # One probe of a token, two to warm up, six that count.
    assert [body["max_tokens"] for body in server.bodies] == [1] + [3] * 8
    assert all(4 <= len(body["prompt"]) <= 9 for body in server.bodies)
    prompts = {tuple(body["prompt"]) for body in server.bodies}
    assert len(prompts) == 9


def test_a_chat_is_asked_in_words(bench: Bench, server: FakeServer) -> None:
    code, _, _ = bench("--endpoint", "chat", "--num-prompts", "2", "--output-len", "2")
    assert code == 0
    assert len(server.bodies[1]["messages"][0]["content"].split()) == 128


def test_conversations_come_from_a_file(bench: Bench, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    turns = [{"from": "human", "value": "tell me a story"}, {"from": "gpt", "value": "once " * 4}]
    path.write_text(json.dumps([{"conversations": turns}]))
    assert bench("--sharegpt", str(path), "--num-prompts", "2")[0] == 0
    assert server.bodies[2]["prompt"] == "tell me a story"
    assert server.bodies[2]["max_tokens"] == 5


def test_failures_are_in_the_table(bench: Bench, server: FakeServer) -> None:
    code, out, err = bench("--model", "full_later", "--num-prompts", "3", "--output-len", "2")
    assert code == 2
    assert "3 x 429: The queue is full." in out
    assert err.endswith("megavm: error: no request was answered\n")


def test_a_server_that_refuses_is_one_sentence(bench: Bench) -> None:
    code, out, err = bench("--model", "detail")
    assert (code, out) == (2, "")
    assert "/v1/completions refuses a request (400): " in err


def test_every_option_can_be_set_in_the_environment(
    bench: Bench, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAVM_NUM_PROMPTS", "2")
    monkeypatch.setenv("MEGAVM_OUTPUT_LEN", "1:1")
    monkeypatch.setenv("MEGAVM_API_KEY", "secret")
    monkeypatch.setenv("MEGAVM_GOODPUT", "ttft:1 e2el:2")
    code, out, _ = bench()
    assert code == 0
    assert re.search(r"Request goodput \(req/s\): +0.00\n", out)
    assert len(server.bodies) == 3
    assert server.headers[-1]["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--base-url", "localhost:8000"], "is not an address such as http://127.0.0.1:8000"),
        (["--base-url", "http:///v1"], "is not an address such as http://127.0.0.1:8000"),
        (["--extra-body", "[1]"], "--extra-body '[1]' is not a JSON object"),
        (["--extra-body", "{oops"], "is not a JSON object"),
        (["--input-len", "5:3"], "'5:3' is not a length such as"),
        (["--request-rate", "0"], "--request-rate: '0' is not a number above 0"),
        (["--burstiness", "inf"], "'inf' is not a number above 0"),
        (["--request-rate", "inf", "--duration", "5"], "needs --num-prompts"),
        (["--endpoint", "chat", "--prompts", "tokens"], "chat takes no token ids"),
        (["--sharegpt", "x.json", "--input-len", "5"], "--sharegpt has the prompts"),
        (["--sharegpt", "/nowhere/x.json"], "No such file or directory: /nowhere/x.json"),
        (["--goodput", "itl:5"], "'itl:5' is not a limit such as ttft:50"),
        (["--warmup", "-1"], "--warmup is -1"),
        (["--vocab-size", "5"], "vocab_size is 5"),
        (["--nonsense"], "--nonsense (see megavm bench serve --help)"),
    ],
)
def test_bad_input_is_one_sentence_before_anything_is_sent(
    bench: Bench, server: FakeServer, arguments: list[str], said: str
) -> None:
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"megavm: error: [^\n]+\n", err), err
    assert said in err
    assert server.bodies == []


def test_without_its_package_a_sentence_says_what_to_install(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert bench()[2] == (
        "megavm: error: megavm bench needs the package aiohttp: pip install 'megavm[bench]'\n"
    )


def test_bench_alone_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 0
    assert "serve" in capsys.readouterr().out


def test_an_interrupt_prints_the_results_so_far(server: FakeServer) -> None:
    command = [sys.executable, "-m", "megavm", "bench", "serve", "--base-url", server.url]
    command += ["--max-concurrency", "2", "--duration", "60", "--output-len", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 30
    while len(server.bodies) < 8 and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert re.search(r"Successful requests: +[1-9]", out), (out, err)
    assert "interrupted: " in err


def test_bench_needs_no_torch() -> None:
    code = (
        "import sys, megavm.loadgen.report, megavm.commands.bench\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_report_that_could_not_be_written_is_refused_before_the_run(
    bench: Bench, server: FakeServer, tmp_path: Path
) -> None:
    code, out, err = bench("--num-prompts", "1", "--json", str(tmp_path / "missing" / "run.json"))
    assert (code, out, server.bodies) == (2, "", [])
    assert "is in a directory that does not exist" in err
