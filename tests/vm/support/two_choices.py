"""A graph with a greedy and a sampled choice, each from logits of its own, on any machine."""

from __future__ import annotations

from dataclasses import replace

import torch

from megavm.instructions.sample import Integer, Real
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Batch, Graph, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.graph import Limits, step_tensors
from megavm.vm.machine import Machine
from megavm.vm.tensors import F32, TensorKind

WIDTH, SHARE, LENGTH, STEPS = 16, 320, 8, 3


def two_choices(rows: int, ranks: int) -> Graph:
    """greedy.tokens := the largest of a product of ``SHARE`` columns of each rank; sampled.tokens likewise."""
    limits = Limits(rows, LENGTH, rows, rows, rows, LENGTH)
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, WIDTH), F32, TensorKind.INPUT)
    for name in ("greedy", "sampled"):
        specs = step_tensors(limits, ranks * SHARE)
        tensors = {k: replace(spec, name=f"{name}.{k}") for k, spec in specs.items()}
        weight = graph.weight(f"{name}.weight", (SHARE, WIDTH), F32)
        logits = graph.linear(f"{name}.head", x, weight, dtype=F32)
        batch = Batch(**{key: Value.of(spec) for key, spec in tensors.items()})
        logits = graph.all_gather(f"{name}.all", logits)
        graph.sample(name, logits, batch, sampled=name == "sampled")
    return graph


def tokens_of_two_choices(
    machine: Machine, rows: int, ranks: int, options: CompileOptions, live: int
) -> dict[str, torch.Tensor]:
    """The tokens of both choices in all steps: a temperature for one, top-k beside it for another.

    ``live``: rows that choose. Logits are small whole numbers, so that machines agree on every bit.
    """
    program = compile_graph(two_choices(rows, ranks), options)
    memory = machine.memory(ranks)
    memory.allocate(program.tensors)
    generator = torch.Generator().manual_seed(rows)
    numbers = {
        name: torch.randint(-1, 2, shape, generator=generator).float()
        for name, shape in (
            ("x", (rows, WIDTH)),
            ("greedy.weight", (ranks, SHARE, WIDTH)),
            ("sampled.weight", (ranks, SHARE, WIDTH)),
        )
    }
    reals, integers = (
        memory["sampled.sampling_real"].cpu(),
        memory["sampled.sampling_integer"].cpu(),
    )
    reals[:, [Real.TEMPERATURE, Real.TOP_P, Real.REPETITION_PENALTY]] = 1.0
    integers[:, Integer.ENABLED] = 1
    integers[:, Integer.SEED_LOW] = torch.arange(rows, dtype=torch.int32)
    integers[1::2, Integer.TOP_K] = 5
    own_rows = torch.arange(rows, dtype=torch.int32)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", numbers["x"])
        for name in ("greedy", "sampled"):
            rank.write(f"{name}.weight", numbers[f"{name}.weight"][number])
            rank.write(f"{name}.sampling_real", reals)
            rank.write(f"{name}.sampling_integer", integers)
            rank.write(f"{name}.row_sequence", own_rows)
            rank.write(f"{name}.logit_row", own_rows)
            rank.write(f"{name}.logit_count", torch.tensor([live], dtype=torch.int32))
    machine.load(program, memory).run(STEPS)
    logits = numbers["x"] @ numbers["greedy.weight"].flatten(0, 1).T
    want = logits.argmax(1)[:live, None].expand(live, STEPS).int()
    for rank in memory.ranks:
        assert torch.equal(rank["greedy.tokens"][:live, 1 : STEPS + 1].cpu(), want)
        assert torch.equal(rank["sampled.tokens"].cpu(), memory["sampled.tokens"].cpu())
    return {name: memory[f"{name}.tokens"].cpu() for name in ("greedy", "sampled")}


def check_two_choices(
    machine: Machine, other: Machine, rows: int, ranks: int, options: CompileOptions
) -> None:
    """Both choices are those of ``other``, a CPU machine; rows that do not choose keep their tokens."""
    for live in dict.fromkeys((rows, rows - 1)):
        found = tokens_of_two_choices(machine, rows, ranks, options, live)
        want = tokens_of_two_choices(other, rows, ranks, CompileOptions(3), live)
        for name in found:
            assert torch.equal(found[name], want[name]), (name, live)
        assert not found["sampled"][live:].any()
        if live == rows > 1:
            assert len(set(found["sampled"][:, 1 : STEPS + 1].flatten().tolist())) > 1
