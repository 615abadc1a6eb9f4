"""A choice of the largest of logits that ranks divide, on any machine."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from megavm.instructions.sample import Integer, Sample
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Batch, Graph, Value
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.graph import Limits, step_tensors
from megavm.vm.config import NONE
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.program import Program
from megavm.vm.tensors import F32, DType, TensorKind

# The logits that the host can read: none, on each rank those of its own share, on each rank all.
Kept = Literal["nothing", "own", "whole"]
WIDTH, LENGTH = 16, 8


def choice_of_ranks(
    rows: int, ranks: int, share: int, dtype: DType = F32, kept: Kept = "nothing"
) -> Graph:
    """tokens := the largest of a product of ``share`` columns of each rank, for every row."""
    limits = Limits(rows, LENGTH, rows, rows, rows, LENGTH)
    specs = step_tensors(limits, ranks * share)
    batch = Batch(**{name: Value.of(spec) for name, spec in specs.items()})
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, WIDTH), dtype, TensorKind.INPUT)
    logits = graph.linear("head", x, graph.weight("weight", (share, WIDTH), dtype), dtype=F32)
    if kept == "own":
        logits = graph.output(logits, "own")
    logits = graph.all_gather("all", logits)
    if kept == "whole":
        logits = graph.output(logits, "logits")
    graph.sample("choice", logits, batch, sampled=False)
    return graph


def gathers_peaks_alone(program: Program) -> bool:
    """Whether ranks gather the peaks, and neither gather nor read the logits."""
    (sample, *_) = samples = [i for i in program.instructions if isinstance(i, Sample)]
    gathered = {t.name for t in program.tensors if t.shares > 1}
    return (
        all(s.logits == NONE for s in samples)
        and sample.peaks != NONE
        and gathered == {program.tensors[sample.peaks].name}
    )


def check_choices_of_ranks(
    machine: Machine,
    ranks: int,
    rows: int,
    options: CompileOptions,
    dtype: DType = F32,
    kept: Kept = "nothing",
) -> None:
    """Choose among small whole numbers, of which many are equal, and hold the tokens against torch.

    A row that chooses nothing keeps its token, and not-a-number of one rank stops all of them.
    """
    share, steps = 40, 2
    program = compile_graph(choice_of_ranks(rows, ranks, share, dtype, kept), options)
    assert gathers_peaks_alone(program) == (kept != "whole")
    memory = machine.memory(ranks)
    memory.allocate(program.tensors)
    generator = torch.Generator().manual_seed(rows + ranks)

    def whole_numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).float()

    x, weights = whole_numbers(rows, WIDTH), whole_numbers(ranks, share, WIDTH)
    weights[-1, 7] = weights[0, 11]  # equal logits of the first and of the last rank
    x[0] = 2 * weights[0, 11]  # which are the largest of a row
    enabled = torch.zeros(rows, Integer.BIASED + 1, dtype=torch.int32)
    enabled[:, Integer.ENABLED] = 1
    integers = torch.arange(rows, dtype=torch.int32)
    for weight, rank in zip(weights, memory.ranks, strict=True):
        rank.write("x", x)
        rank.write("weight", weight)
        rank.write("step.sampling_integer", enabled)
        rank.write("step.row_sequence", integers)
        rank.write("step.logit_row", integers)
    executable = machine.load(program, memory)
    logits = x @ weights.flatten(0, 1).T
    want = logits.argmax(1)  # the first of equals
    assert want[0] == 11
    assert len(set(logits[0].topk(2).values.tolist())) == 1

    def run(live: int) -> list[torch.Tensor]:
        for rank in memory.ranks:
            rank.write("step.tokens", torch.full((rows, LENGTH + 1), -1, dtype=torch.int32))
            rank.write("step.logit_count", torch.tensor([live], dtype=torch.int32))
        executable.run(steps)
        return [rank["step.tokens"].cpu() for rank in memory.ranks]

    for live in dict.fromkeys([rows, rows - 1, 0]):
        for tokens in run(live):
            for step in range(1, steps + 1):
                assert torch.equal(tokens[:live, step].long(), want[:live])
            assert (tokens[live:] == -1).all()
    for number, rank in enumerate(memory.ranks):
        if kept == "whole":
            assert torch.equal(rank["logits"].cpu(), logits)
        elif kept == "own":
            own = logits[:, number * share : (number + 1) * share]
            assert torch.equal(rank["own"].cpu(), own)
    # A sequence that chooses nothing.
    enabled[0, Integer.ENABLED] = 0
    for rank in memory.ranks:
        rank.write("step.sampling_integer", enabled)
    for tokens in run(rows):
        assert torch.equal(tokens[1:, 1].long(), want[1:])
        assert (tokens[0] == -1).all()
    enabled[0, Integer.ENABLED] = 1
    weights[-1, 3] = torch.nan
    for weight, rank in zip(weights, memory.ranks, strict=True):
        rank.write("step.sampling_integer", enabled)
        rank.write("weight", weight)
    with pytest.raises(MachineFault, match="hold NaN"):
        run(rows)
    executable.reset()
