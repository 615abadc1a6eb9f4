"""Text about the program of a model: statistics, disassembly, verification."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import Assignment, default_options
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Limits, default_logit_rows, llama_graph
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.llama.parallel import Parallel
from megavm.scheduler.run.buckets import choose_bucket, choose_dtype
from megavm.scheduler.run.machines import choose_machine, make_machine
from megavm.vm.alike import find_alike
from megavm.vm.config import PAGE_BYTES
from megavm.vm.cuda.machine import reason_unavailable
from megavm.vm.cuda.memory import kernel_memory
from megavm.vm.program import Program
from megavm.vm.specialisation import specialisation
from megavm.vm.target import TARGETS, Exchange
from megavm.vm.verify import verify as verify_program

DEFAULT_CONTEXT = 1024


def describe_program(
    model: str,
    *,
    machine: str = "auto",
    dtype: str = "auto",
    rows: int | None = None,
    sequences: int | None = None,
    context: int | None = None,
    sampled: bool = False,
    workers: int | None = None,
    tensor_parallel_size: int = 1,
    fixed_order: bool = False,
    assignment: Assignment = "balanced",
    exchange: Exchange | None = None,
    disassemble: bool = False,
    verify: bool = False,
    save: str | None = None,
) -> str:
    """Text about the program for steps of up to ``rows`` tokens of ``sequences`` sequences.

    ``rows`` defaults to ``sequences``, ``sequences`` to 1 (one decode step), ``exchange`` to the
    default of the machine. ``sampled``: of the kind that samples, else a greedy one. Reads no
    weights and needs no GPU: without a GPU, programs for "cuda" are compiled for the workers of an
    H100 or H200.

    Raises ValueError for a model or sizes that cannot be compiled.
    """
    config = Checkpoint.open(resolve(model)).config
    sequences = 1 if sequences is None else sequences
    rows = sequences if rows is None else rows
    context = min(DEFAULT_CONTEXT, config.max_position_embeddings) if context is None else context
    for name, value in (("rows", rows), ("sequences", sequences), ("context", context)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    if context > config.max_position_embeddings:
        raise ValueError(
            f"context is {context}, more than the model's {config.max_position_embeddings} tokens"
        )
    if sequences > rows:
        raise ValueError(f"sequences is {sequences}, more than the {rows} rows of the step")
    name = choose_machine(machine)
    parallel = Parallel(tensor_parallel_size)
    parallel.check(config)
    if workers is None:
        absent = name == "cuda" and reason_unavailable() is not None
        workers = TARGETS["cuda"].workers
        if not absent:
            workers = make_machine(name, ranks=1 if name == "cuda" else parallel.ranks)[1]
    options = replace(
        default_options(name, workers, rows, fixed_order=fixed_order), assignment=assignment
    )
    if exchange is not None:
        options = replace(options, exchange=exchange)
    block_size = options.target.block_size
    blocks = sequences * -(-context // block_size)
    logit_rows = default_logit_rows(sequences, rows)
    limits = Limits(sequences, context, rows, logit_rows, blocks, block_size)
    bucket = choose_bucket(
        config,
        limits,
        lambda rows: options,
        rows,
        sequences,
        context,
        decode=rows == sequences,
        parallel=parallel,
    )
    bucket = replace(bucket, sampled=sampled)
    graph = llama_graph(config, limits, bucket, choose_dtype(config, dtype), parallel)
    begin = time.perf_counter()
    program = compile_graph(graph, options, {"model": model}, verified=not verify)
    seconds = time.perf_counter() - begin
    done = "compiled" if verify else "compiled and verified"
    lines = [f"{model}: {program}", f"{done} in {seconds * 1e3:.0f} ms", ""]
    lines += _statistics(program, name)
    if verify:
        begin = time.perf_counter()
        verify_program(program, name)
        spent = time.perf_counter() - begin
        lines += [
            "",
            f"verified in {spent * 1e3:.0f} ms: no deadlock, no race, fits machine {name}",
        ]
    if disassemble:
        lines += ["", *program.disassemble()]
    if save is not None:
        program.save(save)
        lines += ["", f"saved to {save}"]
    return "\n".join(lines)


def _statistics(program: Program, machine: str) -> Iterator[str]:
    """Lines about instructions by kind, work per worker, dependencies, and a worker's memory."""
    tensors = program.tensors
    counts: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    flops: Counter[str] = Counter()
    costs = []
    for inst in program.instructions:
        name = inst.name()
        counts[name] += 1
        costs.append(inst.bytes(tensors))
        moved[name] += costs[-1]
        flops[name] += inst.flops(tensors)
    yield f"{'instruction':18}{'count':>8}{'MB moved':>12}{'MFLOP':>12}"
    for name, _ in moved.most_common():
        yield f"{name:18}{counts[name]:8}{moved[name] / 1e6:12.3f}{flops[name] / 1e6:12.2f}"
    total = (len(program), sum(moved.values()) / 1e6, sum(flops.values()) / 1e6)
    yield f"{'total':18}{total[0]:8}{total[1]:12.3f}{total[2]:12.2f}"
    yield ""
    if not program.dynamic:
        loads = [sum(costs[i] for i in queue) for queue in program.queues]
        mean = sum(loads) / len(loads)
        yield (
            f"bytes per worker: {min(loads) / 1e6:.3f} to {max(loads) / 1e6:.3f} MB, "
            f"the busiest has {max(loads) / mean:.3f} times the mean"
        )
    tagged = sum(t.tagged for t in tensors)
    waits = sum(len(i.waits) for i in program.instructions)
    yield (
        f"dependencies: {waits} waits on {len(program.barriers)} barriers, {tagged} tagged tensors"
    )
    target = TARGETS[machine]
    if target.working_bytes:
        most = max((i.working_bytes(tensors) for i in program.instructions), default=0)
        sizes = f"{most} of {target.working_bytes} bytes"
        yield f"the largest instruction takes {sizes} of working memory"
    if target.scratch_bytes:
        alike = find_alike(program.words, tensors)
        chosen = (inst for same in alike for inst in same.representatives)
        memory = kernel_memory(specialisation(chosen, tensors).common)
        yield (
            f"a worker has {memory.pages} pages of {PAGE_BYTES // 1024} KiB and "
            f"{memory.scratch_bytes} bytes of scratch"
        )
