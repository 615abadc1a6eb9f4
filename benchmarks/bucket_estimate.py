"""An estimate of what dead rows cost by the sizes of buckets. Needs no GPU, and measures nothing.

    python benchmarks/bucket_estimate.py [--model 1b 8b] [--most 4096]

Runs the queues of a prompt's program with predicted times (halves_estimate.py), of its live rows
only. First: what the busiest worker and the mean worker have to do of a layer, in us. Then: how
much longer prompts of any length take by the buckets of a rule than if every multiple of 128 rows
were a bucket. A GPU loses less: workers that wait leave others bandwidth and power. By a program of
2048 rows, 1100 tokens of 8B take 76 % of the time of 2048 on an H200, by this estimate 97 %.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from halves_estimate import TARGET, run, seconds_of
from llama_cuda import MODELS
from megavm.instructions.attention import Attention
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.step import bucket_sizes, power_of_two
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import MAX_MATRIX_ROWS, NONE
from megavm.vm.isa import Instruction
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, TensorSpec

LEAST: Final = 512  # prompts are longer
DEAD: Final = 0.3e-6  # seconds of an instruction without a live row


def live_seconds(inst: Instruction, tensors: Sequence[TensorSpec], live: int) -> float:
    """The predicted time of an instruction of a prompt of so many tokens."""
    fields = vars(inst)
    counted = fields.get("row_count", NONE)
    of_logits = counted != NONE and tensors[counted].name.endswith("logit_count")
    counts_logits = of_logits or "logit_row" in fields
    if "row_begin" not in fields or counts_logits:
        return seconds_of(inst, tensors)
    begin, end = fields["row_begin"], fields["row_end"]
    if begin >= live:
        return DEAD
    if fields.get("matrix"):
        return seconds_of(inst, tensors)  # all rows that are multiplied at a time
    most = min(end, live)
    times = TARGET.matrix_times
    assert times is not None
    share: float = (most - begin) / (end - begin)
    if isinstance(inst, Attention):
        share *= (begin + most) / (begin + end)
    return times.tile + share * (seconds_of(inst, tensors) - times.tile)


@functools.cache
def prompt(model: str, rows: int, layers: int) -> Program:
    """The program of a prompt."""
    target = TARGET
    length = -(-rows // target.block_size) * target.block_size
    limits = Limits(1, length, rows, 64, length // target.block_size, target.block_size)
    config = replace(MODELS[model], num_layers=layers)
    graph = llama_graph(config, limits, Bucket(rows, 32, length), BF16)
    options = default_options(target.name, target.workers, rows)
    return compile_graph(graph, options, verified=False)


@functools.cache
def milliseconds(model: str, rows: int, live: int) -> float:
    """A prompt of ``live`` tokens by the program of ``rows`` rows."""

    def of(layers: int) -> float:
        program = prompt(model, rows, layers)
        return run(program, seconds=functools.partial(live_seconds, live=live))

    return 1e3 * (of(1) + (of(2) - of(1)) * (MODELS[model].num_layers - 1))


def print_busiest(model: str, rows: int, live: int) -> None:
    """What workers have to do of each operation of a layer."""
    program = prompt(model, rows, 1)
    work: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(program.queues))
    for worker, queue in enumerate(program.queues):
        for number in queue.tolist():
            inst = program.instructions[number]
            work[program.labels[number]][worker] += live_seconds(inst, program.tensors, live)
    print(f"{model}, {live} of {rows} rows, us: the busiest worker, the mean")
    for name, seconds in work.items():
        print(f"  {name:24} {1e6 * max(seconds):8.1f} {1e6 * statistics.mean(seconds):8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b", "8b"])
    parser.add_argument("--most", type=int, default=4096, help="tokens of the longest prompt")
    arguments = parser.parse_args()
    every = range(LEAST, arguments.most + 1, MAX_MATRIX_ROWS)
    rules = {
        "powers of two": {power_of_two(rows) for rows in every},
        "as they are": set(bucket_sizes(arguments.most)),
        "four from one to the next": {
            -(-rows // step) * step for rows in every for step in [power_of_two(rows) // 8]
        },
    }
    for model in arguments.model:
        print_busiest(model, 2048, 1100)
        for name, sizes in rules.items():
            used = [(rows, min(size for size in sizes if size >= rows)) for rows in every[1:]]
            longer = [
                milliseconds(model, size, rows) / milliseconds(model, rows, rows) - 1
                for rows, size in used
            ]
            print(
                f"{model}, {name}: {len({size for _, size in used})} buckets, "
                f"{100 * statistics.mean(longer):.1f} % longer, at most {100 * max(longer):.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
