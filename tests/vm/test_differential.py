"""The differential tool names the first instruction after which two machines differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from copy_programs import copy

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.differential import first_divergence
from megavm.vm.machine import Executable, memory_on_cpu
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def chain() -> Program:
    """Three products, one after the other, in two tiles each."""
    graph = Graph(2)
    x = graph.tensor("x", (2, 32), F32, TensorKind.INPUT)
    for i in range(3):
        x = graph.linear(f"product{i}", x, graph.weight(f"w{i}", (32, 32), F32), dtype=F32)
    graph.output(x, "y")
    return compile_graph(graph, CompileOptions(2))


@dataclass
class Wrong:
    """A reference machine that adds ``error`` to what instruction ``index`` writes at [1, 20]."""

    index: int
    error: float
    name: str = "wrong"
    memory_device: str = "cpu"

    def memory(self, ranks: int = 1) -> Memory:
        return memory_on_cpu(ranks)

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> Executable:
        inner = ReferenceMachine().load(program, memory, verify=verify)
        right = inner.execute_one

        def execute_one(index: int, step: int = 0, rank: int = 0) -> None:
            right(index, step, rank)
            if index == self.index:
                (region,) = program.instructions[index].writes(program.tensors)
                memory[program.tensors[region.tensor].name][1, 20] += self.error

        inner.execute_one = execute_one  # type: ignore[method-assign]
        return inner


def memory_for(program: Program) -> Memory:
    torch.manual_seed(0)
    memory = Memory()
    memory.allocate(program.tensors)
    for spec in program.tensors:
        if spec.kind is not TensorKind.ACTIVATION:
            memory[spec.name].normal_()
    return memory


def test_equal_machines_do_not_diverge() -> None:
    program = chain()
    memory = memory_for(program)
    assert (
        first_divergence(program, memory, ReferenceMachine(), ReferenceMachine(), steps=2) is None
    )


def test_the_first_wrong_instruction_is_named_with_its_element() -> None:
    program = chain()
    wrong = next(
        i
        for i, inst in enumerate(program.instructions)
        if program.labels[i] == "product1" and inst.disassemble().find("column_begin=16") > 0
    )
    found = first_divergence(
        program, memory_for(program), ReferenceMachine(), Wrong(wrong, 0.5), steps=2
    )
    assert found is not None
    assert (found.step, found.instruction, found.row, found.column) == (0, wrong, 1, 20)
    assert found.elements == 1
    assert abs(found.values[1] - found.values[0] - 0.5) < 1e-5
    assert "(product1)" in str(found)


def test_a_difference_within_the_tolerance_is_none() -> None:
    program = chain()
    memory = memory_for(program)
    assert first_divergence(program, memory, ReferenceMachine(), Wrong(0, 1e-7)) is None


def test_the_memory_given_is_left_alone() -> None:
    program = chain()
    memory = memory_for(program)
    before = memory["y"].clone()
    first_divergence(program, memory, ReferenceMachine(), ReferenceMachine())
    torch.testing.assert_close(memory["y"], before)
    assert memory.epoch == 0


def test_the_reference_reads_words_when_they_are_written_not_all_of_their_tensor() -> None:
    """One queue: a row of a tagged tensor is copied on before the next row is written."""
    x, words, y = range(3)
    program = Program.build(
        [
            TensorSpec("x", (2, 4), F32, TensorKind.INPUT),
            TensorSpec("words", (2, 4), F32, TensorKind.ACTIVATION, tagged=True),
            TensorSpec("y", (2, 4), F32, TensorKind.STATE),
        ],
        [
            copy(*places, (0, 4), rows=(row, row + 1))
            for row in range(2)
            for places in ((x, words), (words, y))
        ],
        [[0, 1, 2, 3]],
    )
    memory = memory_on_cpu()
    memory.allocate(program.tensors)
    memory.write("x", torch.arange(8.0).reshape(2, 4))
    ReferenceMachine().load(program, memory).run()
    assert torch.equal(memory["y"], memory["x"])
