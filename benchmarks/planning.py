"""The host's time for a decode step: plan it, write and read memory, collect its tokens.

    python benchmarks/planning.py [--steps 2000] [--save]

A runner that only puts a token into memory replaces the machine, so only the host's work is
measured, in CPU time of its thread. The tokens are those of English text, each sequence at another
place of it. ``plan_us``: planning, which must precede a launch (design: under 100 us for one
sequence, under 1000 us for 64). ``execute_us``: the host's work between two launches.
``collect_us``: work that overlaps with the next launch: stop conditions, text (the shipped model's
tokenizer), freed blocks. Prompts differ in length, so that some sequence needs a KV block at every
step, as in a server.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from environment import save
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Request
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.hub import resolve
from megavm.stream_decoder import StreamDecoder
from megavm.tokenizer import Tokenizer

BATCHES = (1, 8, 64, 256)
PLAN_LIMIT_US = {1: 100.0, 64: 1000.0}


class EchoRunner:
    """The memory of a model, and a machine that chooses the next token of a text.

    ``text``: int32, repeated without end; slot s reads it from token s on.
    """

    def __init__(
        self, sequences: int, length: int, vocab_size: int, text: npt.NDArray[np.int32]
    ) -> None:
        self.max_num_seqs = sequences
        self.max_model_len = length
        self.max_num_batched_tokens = max(sequences, 512)
        self.max_logit_rows = sequences
        self.block_size = 16
        self.num_blocks = sequences * -(-length // self.block_size)
        self.vocab_size = vocab_size
        self.tokens = np.zeros((sequences, length + 1), dtype=np.int32)
        self.block_table = np.zeros((sequences, -(-length // 16)), dtype=np.int32)
        self.sampling_real = np.zeros((sequences, REAL_COLUMNS), dtype=np.float32)
        self.sampling_integer = np.zeros((sequences, INTEGER_COLUMNS), dtype=np.int32)
        self.allowed = np.zeros((1, 1), dtype=np.int32)
        self.bias = np.zeros((1, 1), dtype=np.float32)
        self.logits = np.zeros((1, 1), dtype=np.float32)
        self.text = text
        self.machine_seconds = 0.0
        self.late_launches = 0
        self.runs_behind = False

    def write_tokens(self, slot: int, tokens: npt.NDArray[np.int32]) -> None:
        """As ``Runner.write_tokens``."""
        self.tokens[slot, : len(tokens)] = tokens

    def write_blocks(self, slot: int, column: int, blocks: npt.NDArray[np.int32]) -> None:
        """As ``Runner.write_blocks``."""
        self.block_table[slot, column : column + len(blocks)] = blocks

    def publish(self, name: str, slot: int) -> None:
        """As ``Runner.publish``; this runner reads no masks."""

    def run(self, step: Step, steps: int = 1, started: Callable[[], None] | None = None) -> None:
        """Choose the tokens; adds its own time to ``machine_seconds``."""
        begin = time.thread_time()
        slots = step.row_sequence[step.logit_row]
        positions = step.row_position[step.logit_row]
        self.tokens[slots, positions + 1] = self.text[(slots + positions) % len(self.text)]
        self.machine_seconds += time.thread_time() - begin

    can_await_masks = False

    def give_masks(self) -> None:
        """As ``Runner.give_masks``; no step awaits masks."""

    def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
        """As ``Runner.is_coming``; this runner compiles nothing."""
        return False

    def can_queue(self, step: Step, steps: int = 1) -> bool:
        """As ``Runner.can_queue``."""
        return False

    def start(self, step: Step, steps: int = 1, started: Callable[[], None] | None = None) -> None:
        """As ``Runner.start`` on a CPU."""
        self.run(step, steps, started)


def measure(batch: int, steps: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Times of ``steps`` decode steps of ``batch`` sequences, in microseconds."""

    def new_decoder(request: Request) -> StreamDecoder:
        return StreamDecoder(tokenizer)

    text = np.array(tokenizer.encode(__doc__ or "", add_special_tokens=False), dtype=np.int32)
    runner = EchoRunner(batch, steps + 64, tokenizer.vocab_size, text)
    engine = Engine(runner, eos_token_ids=(1,), new_decoder=new_decoder, overlap=False)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    for i in range(batch):
        engine.add([2 + i % 100] * (1 + i % 16), params)
    times: dict[str, list[float]] = {"plan_us": [], "execute_us": [], "collect_us": []}
    gc.collect()
    for number in range(steps):
        begin = time.thread_time()
        plan = engine.plan()
        planned = time.thread_time()
        if plan is None:
            raise RuntimeError(f"nothing to run at step {number}")
        elsewhere = runner.machine_seconds
        engine.executor.execute(plan)
        executed = time.thread_time()
        elsewhere = runner.machine_seconds - elsewhere
        engine.collect(plan)
        collected = time.thread_time()
        if len(plan.samplers) == batch and plan.step.num_rows == batch and number > 32:
            times["plan_us"].append(1e6 * (planned - begin))
            times["execute_us"].append(1e6 * (executed - planned - elsewhere))
            times["collect_us"].append(1e6 * (collected - executed))
    engine.close()
    result: dict[str, Any] = {"batch": batch, "steps": len(times["plan_us"])}
    for name, values in times.items():
        values.sort()
        result[name] = {
            "median": round(statistics.median(values), 2),
            "mean": round(statistics.fmean(values), 2),
            "p99": round(values[int(0.99 * (len(values) - 1))], 2),
        }
    return result


def main() -> int:
    """Measure and print a table; returns 1 if planning is slower than the design allows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--save", action="store_true", help="write results/planning.json")
    arguments = parser.parse_args()
    tokenizer = Tokenizer(resolve("stories"))
    results = [measure(batch, arguments.steps, tokenizer) for batch in BATCHES]
    print(f"{'batch':>6} {'plan us':>18} {'execute us':>18} {'collect us':>18}   (median, p99)")
    for result in results:
        row = "".join(
            f"{result[name]['median']:10.1f} {result[name]['p99']:7.1f} "
            for name in ("plan_us", "execute_us", "collect_us")
        )
        print(f"{result['batch']:6} {row}")
    late = [
        r["batch"] for r in results if r["plan_us"]["median"] > PLAN_LIMIT_US.get(r["batch"], 1e9)
    ]
    for batch in late:
        print(f"planning at batch {batch} is slower than {PLAN_LIMIT_US[batch]} us")
    if arguments.save:
        limits = {str(batch): limit for batch, limit in PLAN_LIMIT_US.items()}
        report = {"limits_us": limits, "within_limits": not late, "results": results}
        print(f"saved {save('planning', {'load_average': os.getloadavg()[0], **report})}")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
