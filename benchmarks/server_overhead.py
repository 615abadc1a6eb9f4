"""The HTTP server against `LLM.generate`: tokens/s and time to first token with one client.

    python benchmarks/server_overhead.py [--layers 2] [--rounds 15] [--save]

With a GPU, more tokens are timed, and --layers 16 (the full model) is fast enough.

Two models: the shipped one, and a random one with Llama-3.2-1B's layer shapes and vocabulary and
fewer layers. `megavm serve` runs in its own process; the client sends one request at a time over
one plain HTTP connection. `LLM.generate` in this process continues the same prompt with the same
options; rounds alternate.

Server and client run at the same time as the machine's workers. If the workers occupy all cores,
they compete: compare `workers` and `cores` of the result.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environment import save
from llama_cpu import make_model
from megavm import LLM, SamplingParams
from megavm.scheduler.run.machines import choose_machine

PROMPT = [5, 200, 31, 77, 450, 12, 99, 1023]
LIMITS = {"stories": 0.95, "1b": 0.98}
TTFT_LIMIT_MS = 5.0
FIRST_TOKENS = 40
PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def serving(model: str, *options: str) -> Iterator[socket.socket]:
    """Start a server process; yields a connection once it is ready, and ends it afterwards."""
    command = [sys.executable, "-m", "megavm", "serve", model, "--port", "0", "--quiet", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if " ready " in line:
                    break
                print(line, end="", file=sys.stderr)
            else:
                raise RuntimeError("the server has ended")
            address = line.partition("url=http://")[2].split()[0]
            host, _, port = address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=300) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield connection
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def request(connection: socket.socket, tokens: int, stream: bool) -> dict[str, float]:
    """Send one completion request.

    Returns the seconds until its end, and until its first token (if not streamed: its end).
    """
    body = {
        "prompt": PROMPT,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    content = json.dumps(body).encode()
    begin = time.perf_counter()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(content) + content
    )
    # Parse the answer only after the clock has stopped, so that the client's time does not count.
    end_mark = b"data: [DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}}"
    answer, first = b"", 0.0
    while not answer.endswith(end_mark):
        part = connection.recv(1 << 20)
        assert part, "the server has closed the connection"
        answer += part
        if not first and b"data: {" in answer:
            first = time.perf_counter()
    end = time.perf_counter()
    if stream:
        assert answer.count(b"data: {") == tokens, answer[:500]
    else:
        assert b'"completion_tokens":%d,' % tokens in answer, answer[:500]
    return {"seconds": end - begin, "first": (first or end) - begin}


def direct(llm: LLM, tokens: int) -> float:
    """Seconds of the same completion without a server."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(PROMPT, params)
    return time.perf_counter() - begin


def first_tokens(llm: LLM, connection: socket.socket) -> dict[str, float]:
    """Median seconds until the first token, without and with the server, in turn.

    Pauses before each, so that both include the time to wake the machine's threads.
    """
    without, served = [], []
    for _ in range(FIRST_TOKENS):
        time.sleep(PAUSE_SECONDS)
        without.append(direct(llm, 1))
        time.sleep(PAUSE_SECONDS)
        served.append(request(connection, 1, stream=True)["first"])
    return {"direct": statistics.median(without), "served": statistics.median(served)}


def measure(name: str, model: str, tokens: int, rounds: int, workers: int | None) -> dict[str, Any]:
    """Medians of all rounds, and the server's share of the direct speed."""
    options = ["--max-model-len", "1024", "--max-num-seqs", "4"]
    options += ["--workers", str(workers)] if workers else []
    times: dict[str, list[float]] = {"direct": [], "whole": [], "stream": []}
    with (
        serving(model, *options) as connection,
        LLM(model, max_model_len=1024, max_num_seqs=4, workers=workers) as llm,
    ):
        for number in range(rounds + 1):
            found = {
                "direct": direct(llm, tokens),
                "whole": request(connection, tokens, stream=False)["seconds"],
                "stream": request(connection, tokens, stream=True)["seconds"],
            }
            if number:  # the first round compiles programs and does not count
                for kind, seconds in found.items():
                    times[kind].append(seconds)
        first = first_tokens(llm, connection)
        machine, count = llm.runner.machine.name, llm.runner.programs.options(1).workers
    result: dict[str, Any] = {
        "model": name,
        "machine": machine,
        "workers": count,
        "cores": os.cpu_count(),
        "tokens": tokens,
        "rounds": rounds,
    }
    for kind, taken in times.items():
        result[f"{kind}_tokens_per_second"] = round(tokens / statistics.median(taken), 1)
    # Compare times of the same round, so that other load on the computer affects both.
    for kind in ("whole", "stream"):
        shares = [d / s for d, s in zip(times["direct"], times[kind], strict=True)]
        result[f"{kind}_share"] = round(statistics.median(shares), 4)
    result["engine_ttft_ms"] = round(1e3 * first["direct"], 3)
    result["ttft_ms"] = round(1e3 * first["served"], 3)
    result["ttft_over_engine_ms"] = round(1e3 * (first["served"] - first["direct"]), 3)
    return result


def main() -> int:
    """Measure and print; returns 1 if the server is slower than its limits."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=2, help="of the model shaped like 1B")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", choices=("stories", "1b"), help="this one only")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results")
    arguments = parser.parse_args()
    results = []
    on_gpu = choose_machine("auto") == "cuda"
    with tempfile.TemporaryDirectory() as directory:
        wanted = [arguments.model] if arguments.model else list(LIMITS)
        if "1b" in wanted:
            make_model(arguments.layers, Path(directory) / "1b")
        cores = os.cpu_count() or 1
        for name in wanted:
            model = name if name == "stories" else str(Path(directory) / name)
            for workers in (None,) if on_gpu else dict.fromkeys((None, max(cores - 1, 1))):
                tokens = 400 if name == "stories" or on_gpu else 32
                result = measure(name, model, tokens, arguments.rounds, workers)
                result["share_limit"] = LIMITS[name]
                if name == "1b":
                    result["layers"] = arguments.layers
                results.append(result)
                print(json.dumps(result))
    short = [
        r
        for r in results
        if r["whole_share"] < r["share_limit"] or r["ttft_over_engine_ms"] > TTFT_LIMIT_MS
    ]
    for result in short:
        print(f"over the limit: {result['model']} with {result['workers']} workers")
    if arguments.save:
        report = {"load_average": os.getloadavg()[0], "ttft_limit_ms": TTFT_LIMIT_MS}
        saved = "server_overhead_cuda" if on_gpu else "server_overhead"
        print(f"saved {save(saved, {**report, 'results': results})}")
    return 1 if short else 0


if __name__ == "__main__":
    raise SystemExit(main())
