"""Memory of several ranks that divide a Llama."""

from __future__ import annotations

from dataclasses import replace

import torch
from random_llamas import Case

from megavm.scheduler.llama.graph import logits_spec
from megavm.scheduler.llama.parallel import Parallel, shard
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import TensorKind


def memory_of_ranks(
    case: Case, parallel: Parallel, whole: Memory, program: Program | None = None
) -> Memory:
    """What ranks hold of a model that ``whole`` holds, in the same state.

    For the program of the case, or for another one of it.
    """
    memory = Memory(ranks=parallel.ranks)
    memory.allocate([logits_spec(case.config, case.limits, parallel)])
    memory.allocate(whole.spec(name) for name in whole if name.startswith("step."))
    memory.allocate((program or case.program).tensors)
    for number, rank in enumerate(memory.ranks):
        for name in rank:
            spec = rank.spec(name)
            if spec.kind is TensorKind.ACTIVATION:
                continue
            values = [
                shard(
                    whole[case.config.stored_name(part)],
                    (rows, *spec.shape[1:]),
                    number,
                )
                for part, rows in _parts(case, whole, rank, name)
            ]
            rank.write(name, torch.cat(values))
    return memory


def logits_of_ranks(case: Case, memory: Memory) -> list[torch.Tensor]:
    """The logits of the last step, as each rank has them; if each has its own, all of them once."""
    live = case.logit_rows
    if "logits.own" in memory:
        return [torch.cat([rank["logits.own"][:live] for rank in memory.ranks], dim=1)]
    return [rank["logits"][:live].clone() for rank in memory.ranks]


def _parts(case: Case, whole: Memory, rank: Memory, name: str) -> list[tuple[str, int]]:
    """Names and rows of the parts of a tensor; ``whole`` gets those it lacks."""
    spec = rank.spec(name)
    if not spec.parts:
        return [(name, spec.rows)]
    joined, begin = whole[name], 0
    for part in whole.spec(name).parts:
        rows = joined[begin : begin + part.rows]
        if part.name not in whole:
            own = replace(whole.spec(name), name=part.name, shape=tuple(rows.shape), parts=())
            whole.bind(own, rows)
        begin += part.rows
    return [(part.name, part.rows) for part in spec.parts]
