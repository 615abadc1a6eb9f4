"""A server in a process of its own, and `megavm bench serve` as its client."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any, Final

from random_llama import VOCABULARY

INPUT: Final = 160
OUTPUT: Final = 128
# By /proc: quiet is less CPU than this in a second, for the server that has nothing to do.
QUIET_SHARE: Final = 0.1
QUIET_LIMIT: Final = 60.0
START_LIMIT: Final = 240.0


def cpu_seconds(server: int) -> float:
    """CPU time of all threads of a server since its start, those of its engine's process too."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    total = 0
    for process in (server, *children):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


def settle(process: int) -> dict[str, Any]:
    """Wait until a process does nothing: no program is compiled behind its requests."""
    begin = time.perf_counter()
    while True:
        before, at = cpu_seconds(process), time.perf_counter()
        time.sleep(1.0)
        share = (cpu_seconds(process) - before) / (time.perf_counter() - at)
        waited = time.perf_counter() - begin
        if share < QUIET_SHARE or waited > QUIET_LIMIT:
            return {"seconds": round(waited, 1), "quiet": share < QUIET_SHARE}


class Server:
    """A server process; `url` is where it is, `seconds` how long its start took."""

    def __init__(self, command: list[str], log: Path) -> None:
        begin = time.perf_counter()
        with log.open("w") as stderr:
            self.process = subprocess.Popen(command, stderr=stderr)
        self.log = log
        while (found := re.search(r" ready url=(\S+)", log.read_text())) is None:
            if self.process.poll() is not None or time.perf_counter() - begin > START_LIMIT:
                self.close()
                raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.1)
        self.url, self.seconds = found[1], time.perf_counter() - begin

    def cpu_seconds(self) -> float:
        """CPU time of all threads since the start."""
        return cpu_seconds(self.process.pid)

    def settle(self) -> dict[str, Any]:
        """Wait until the server, which has no requests, does nothing."""
        return settle(self.process.pid)

    def metrics(self) -> dict[str, float]:
        """The engine's counters, and how many requests run and wait."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            text = response.read().decode()
        found = re.findall(
            r"^megavm:(engine_\w+_total|num_requests_\w+)\S* (\S+)$", text, re.MULTILINE
        )
        return {name: float(value) for name, value in found}

    def end_of_launch(self) -> tuple[dict[str, float], float]:
        """The metrics just after a launch has ended, and when that was.

        Raises RuntimeError when none ends within ten seconds.
        """
        first = self.metrics()
        limit = time.perf_counter() + 10
        while (found := self.metrics())["engine_run_seconds_total"] == first[
            "engine_run_seconds_total"
        ]:
            if time.perf_counter() > limit:
                raise RuntimeError("no launch ends")
        return found, time.perf_counter()

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def bench_command(
    url: str, concurrency: int, requests: int, seed: int, file: Path, output: int = OUTPUT
) -> list[str]:
    """`megavm bench serve`; its report goes to ``file``."""
    options = {
        "--base-url": url,
        "--max-concurrency": concurrency,
        "--num-prompts": requests,
        "--input-len": INPUT,
        "--output-len": output,
        "--vocab-size": VOCABULARY - 1,
        "--seed": seed,
        "--json": file,
    }
    words = [str(word) for pair in options.items() for word in pair]
    return [sys.executable, "-m", "megavm", "bench", "serve", *words, "--ignore-eos", "--quiet"]


def bench(url: str, concurrency: int, requests: int, seed: int, file: Path) -> dict[str, Any]:
    """The report of `megavm bench serve`. Raises RuntimeError if a request has failed."""
    command = bench_command(url, concurrency, requests, seed, file)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    if done.returncode:
        raise RuntimeError(f"the client failed:\n{done.stdout[-3000:]}")
    report: dict[str, Any] = json.loads(file.read_text())
    if report["failed"] or report["total_output_tokens"] != OUTPUT * report["completed"]:
        raise RuntimeError(f"requests failed or are too short: {report['failures']}")
    return report
