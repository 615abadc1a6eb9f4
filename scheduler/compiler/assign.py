"""Assignment: choose the queue of every instruction and its position in that queue."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from megavm.scheduler.compiler.barriers import Synchronised
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.alike import figures
from megavm.vm.isa import Instruction
from megavm.vm.tensors import TensorSpec


def assign(
    program: Synchronised, tensors: Sequence[TensorSpec], options: CompileOptions
) -> list[list[int]]:
    """The queues: lists of instruction numbers.

    Every queue is in topological order, so no instruction can block for ever.

    ``round_robin``: the instructions of an operation are dealt out to the workers there and back,
    so that a worker has cheap and costly ones where the cost grows with the number.

    ``balanced``: the instructions of an operation are cut into runs of neighbours (which share
    weights) of about equal cost. The costliest run goes to the least loaded worker. Operations that
    do not occupy all workers are assigned first, so that the others even out the load; they prefer
    workers that are idle during the operation before them.

    ``dynamic``: one list that all workers share.
    """
    total = len(program.words)
    if options.assignment == "dynamic":
        return [list(range(total))]
    queues: list[list[int]] = [[] for _ in range(options.workers)]
    by_operation = itertools.groupby(range(total), key=program.operations.__getitem__)
    operations = [list(group) for _, group in by_operation]
    if options.assignment == "round_robin":
        for members in operations:
            for i, index in enumerate(members):
                turn, place = divmod(i, options.workers)
                queues[place if turn % 2 == 0 else -1 - place].append(index)
        return queues
    load = [0] * options.workers
    rate = options.target.flops_per_byte
    cost_of = figures(program.words, tensors, 1, lambda i: (_cost(i, tensors, rate),))[:, 0]
    busy: dict[int, set[int]] = {}  # last instruction of an operation -> its workers
    for members in sorted(operations, key=lambda m: len(m) >= options.workers):
        costs: list[int] = cost_of[members].tolist()
        runs = _runs(members, costs, options.workers)
        before = busy.get(members[0] - 1, set())
        idle = [(w in before, load[w], w) for w in range(options.workers)]
        heapq.heapify(idle)
        chosen = busy[members[-1]] = set()
        for cost, run in sorted(runs, key=lambda r: -r[0]):
            worker = heapq.heappop(idle)[-1]
            queues[worker] += run
            load[worker] += cost
            chosen.add(worker)
    return [sorted(queue) for queue in queues]


def _cost(inst: Instruction, tensors: Sequence[TensorSpec], flops_per_byte: int) -> int:
    return inst.bytes(tensors) + inst.flops(tensors) // flops_per_byte + 1


def _runs(members: Sequence[int], costs: Sequence[int], count: int) -> list[tuple[int, list[int]]]:
    """Cut ``members`` into at most ``count`` runs of about equal cost: [(cost, run), ...]."""
    total = sum(costs)
    runs: list[tuple[int, list[int]]] = []
    run: list[int] = []
    run_cost = done = 0
    for position, (index, cost) in enumerate(zip(members, costs, strict=True)):
        run.append(index)
        run_cost += cost
        done += cost
        left = len(members) - position - 1
        full = done * count >= total * (len(runs) + 1) or left <= count - len(runs) - 1
        if full and len(runs) < count - 1:
            runs.append((run_cost, run))
            run, run_cost = [], 0
    if run:
        runs.append((run_cost, run))
    return runs
