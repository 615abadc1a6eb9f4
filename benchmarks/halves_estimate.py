"""An estimate of what halves of rows save on several GPUs. Needs no GPU, and measures nothing.

    python benchmarks/halves_estimate.py [--model 1b 8b] [--rows 512 4096] [--ranks 2 4] [--save]

Runs the queues of a prompt's program with predicted times: those of ``Target.matrix_times`` for
products, and for attention a speed that gives the 0.54 ms a layer that were measured on one GPU
(8B, 4096 tokens; docs/techniques.md, "Many rows"). A signal reaches other ranks LATENCY after the
stores of the instruction, which pass one after the other through a link of LINK bytes a second.
Both were measured on H200s; "free links" leaves them out. All ranks are taken to be equally fast.
Kernels that are kept from computing by their own stores are not modelled, nor is memory beyond the
second-level cache. A whole step of 4096 rows of 8B takes 45 % longer here than is measured on one
H200 and on two (results/throughput_cuda_8b_1.json, throughput_cuda_8b_2.json).
"""

from __future__ import annotations

import argparse
import functools
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from environment import save
from llama_cuda import MODELS
from megavm.instructions.attention import Attention
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import Halves, default_options
from megavm.scheduler.compiler.tiling import tile_seconds
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits, llama_graph
from megavm.scheduler.llama.parallel import Exchange, Parallel
from megavm.scheduler.run.buckets import choose_bucket
from megavm.vm.isa import Instruction
from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16, TensorSpec

LATENCY = 4e-6  # seconds from a worker's last store to a counter of another rank
OWN_LATENCY = 1e-6  # seconds from a worker's last store to a counter of its own rank
ATTENTION = 1.9e12  # FLOPs a second of a worker
LAYERS = 4
EXCHANGES: tuple[Exchange, ...] = ("all_gather", "all_reduce")
TARGET = TARGETS["cuda"]
LINK = TARGET.link_bytes_per_second


def seconds_of(inst: Instruction, tensors: Sequence[TensorSpec]) -> float:
    """The predicted time of an instruction with its inputs; the prompt begins at position 0."""
    times, fields = TARGET.matrix_times, vars(inst)
    assert times is not None
    if isinstance(inst, Attention):
        share = (inst.row_begin + inst.row_end) / 2 / inst.context
        return times.tile + inst.flops(tensors) * share / ATTENTION
    if not fields.get("matrix"):
        return times.tile + inst.bytes(tensors) / times.bytes_per_second
    rows = fields["row_end"] - fields["row_begin"]
    k = tensors[fields["weight"]].columns
    return tile_seconds(rows, inst.flops(tensors) // (2 * rows * k), k, TARGET)


def sent_by(inst: Instruction, tensors: Sequence[TensorSpec]) -> int:
    """The bytes that an instruction stores on other ranks."""
    return sum(
        region.elements * spec.dtype.size * (spec.shares - 1 if region.only is None else 1)
        for region in inst.writes(tensors)
        if (spec := tensors[region.tensor]).shares > 1
    )


def run(
    program: Program,
    latency: float = LATENCY,
    link: float = LINK,
    seconds: Callable[[Instruction, Sequence[TensorSpec]], float] = seconds_of,
) -> float:
    """Seconds of a step. ``seconds``: of an instruction with its inputs."""
    instructions, tensors = program.instructions, program.tensors
    missing: dict[int, int] = defaultdict(int)
    for inst in instructions:
        if inst.signal is not None:
            missing[inst.signal] += 1
    reached: dict[int, float] = {}  # when the counter of a barrier has all its signals
    latest: dict[int, float] = defaultdict(float)
    blocked: dict[int, list[int]] = defaultdict(list)  # workers that wait for a barrier
    queues = [iter(queue.tolist()) for queue in program.queues]
    current = [next(queue, None) for queue in queues]
    free, sent = [0.0] * len(queues), 0.0
    ends: list[tuple[float, int]] = []  # (end, worker) of each instruction that runs

    def begin(worker: int) -> None:
        number = current[worker]
        if number is None:
            return
        time = free[worker]
        for wait in instructions[number].waits:
            if wait.target and wait.barrier not in reached:
                blocked[wait.barrier].append(worker)
                return
            time = max(time, reached.get(wait.barrier, 0.0) if wait.target else 0.0)
        heapq.heappush(ends, (time + seconds(instructions[number], tensors), worker))

    for worker in range(len(queues)):
        begin(worker)
    time = 0.0
    while ends:
        time, worker = heapq.heappop(ends)
        number = current[worker]
        assert number is not None
        inst = instructions[number]
        free[worker], current[worker] = time, next(queues[worker], None)
        stored = time
        if size := sent_by(inst, tensors):
            stored = sent = max(sent, time) + size / link
        if (barrier := inst.signal) is not None:
            shared = barrier < program.shared_barriers
            latest[barrier] = max(latest[barrier], stored + (latency if shared else OWN_LATENCY))
            missing[barrier] -= 1
            if not missing[barrier]:
                reached[barrier] = latest[barrier]
                for other in blocked.pop(barrier, []):
                    begin(other)
        begin(worker)
    assert not blocked, "a worker waits for ever"
    return time


def prompt(config: LlamaConfig, rows: int, parallel: Parallel, halves: Halves) -> Program:
    """The program of a step that reads one prompt."""
    options_for = functools.partial(default_options, TARGET.name, TARGET.workers)
    limits = Limits(1, rows, rows, 16, -(-rows // TARGET.block_size), TARGET.block_size)
    bucket = choose_bucket(config, limits, options_for, rows, 1, rows, parallel=parallel)
    graph = llama_graph(config, limits, bucket, BF16, parallel)
    options = replace(options_for(bucket.rows), halves=halves)
    return compile_graph(graph, options, verified=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b", "8b", "70b"])
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--save", action="store_true", help="write results/halves_estimate.json")
    arguments = parser.parse_args()
    print(f"Predicted us of a step of {LAYERS} layers, by CompileOptions.halves")
    results: list[dict[str, Any]] = []
    for model in arguments.model:
        config = replace(MODELS[model], num_layers=LAYERS)
        for rows in arguments.rows:
            for ranks in arguments.ranks:
                for exchange in EXCHANGES:
                    parallel = Parallel(ranks, exchange)
                    us: dict[str, float] = {}
                    choices: tuple[Halves, ...] = ("none", "preferred", "all")
                    for halves in choices:
                        program = prompt(config, rows, parallel, halves)
                        us[halves] = round(1e6 * run(program), 1)
                        us[f"{halves}, free links"] = round(1e6 * run(program, 0.0, np.inf), 1)
                    results.append(
                        {"model": model, "rows": rows, "ranks": ranks, "exchange": exchange}
                        | {"us": us}
                    )
                    text = ", ".join(f"{name} {value:.0f}" for name, value in us.items())
                    print(f"{model} {rows} rows, {ranks} ranks, {exchange}: {text}", flush=True)
    if arguments.save:
        print(f"saved {save('halves_estimate', {'layers': LAYERS, 'results': results})}")


if __name__ == "__main__":
    main()
