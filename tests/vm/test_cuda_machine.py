"""The CudaMachine: every instruction means what the reference says; launches, layouts, what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from against_reference import check_behind_copies, check_example, examples_of, name_of

from megavm.instructions import instruction_set
from megavm.instructions.copy import Copy
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.vm.cuda.launch import TRACE_COLUMNS
from megavm.vm.cuda.layouts import program_layouts
from megavm.vm.cuda.machine import CudaMachine, reason_unavailable
from megavm.vm.example import Example
from megavm.vm.layout import units
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec

MakeMachine = Callable[..., CudaMachine]
INSTRUCTIONS = list(instruction_set().values())


def test_without_a_gpu_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert reason_unavailable() in ("torch sees no GPU", "this torch was built without CUDA")
    with pytest.raises(ValueError, match="machine 'cuda' is not available"):
        CudaMachine()


@pytest.mark.parametrize("way", ["alone", "launched", "behind copies"])
@pytest.mark.parametrize(
    "example",
    [example for cls in INSTRUCTIONS for example in examples_of(cls)],
    ids=name_of,
)
def test_instructions_mean_what_the_reference_says(
    cuda_machine: CudaMachine, example: Example, way: str
) -> None:
    if way == "behind copies":
        check_behind_copies(cuda_machine, example)
    else:
        check_example(cuda_machine, example, way == "alone")


def tagged_examples() -> Iterator[Any]:
    """For every operand that may be tagged one example in which it is."""
    for cls in INSTRUCTIONS:
        seen = set()
        for example in examples_of(cls):
            for operand, tagged in example.tagged_variants():
                if operand not in seen:
                    yield pytest.param(tagged, id=f"{cls.name()}-{operand}")
                seen.add(operand)


@pytest.mark.parametrize("example", list(tagged_examples()))
def test_operands_that_may_be_tagged_are_read_and_written_so(
    cuda_machine: CudaMachine, example: Example
) -> None:
    check_example(cuda_machine, example, True)


def product(columns: int = 64) -> Program:
    graph = Graph(1)
    x = graph.tensor("x", (1, columns), BF16, TensorKind.INPUT)
    y = graph.linear("product", x, graph.weight("w", (200, columns), BF16), dtype=F32)
    graph.output(y, "y")
    return compile_graph(graph, CompileOptions(4))


def filled(program: Program, device: str) -> Memory:
    torch.manual_seed(0)
    memory = Memory(device)
    memory.allocate(program.tensors)
    for name in ("x", "w"):
        memory.write(name, torch.randn(memory.spec(name).shape))
    return memory


def test_weights_are_given_their_layout_and_keep_their_values(cuda_machine: CudaMachine) -> None:
    program = product()
    memory = filled(program, cuda_machine.memory_device)
    before = memory["w"].clone()
    executable = cuda_machine.load(program, memory)
    assert program_layouts(program)["w"] == (units(),)
    assert memory.layout("w") == units()
    assert torch.equal(memory["w"], before)
    executable.run(2)
    values = memory.copy("cpu")
    want = values["x"].float() @ values["w"].float().T
    torch.testing.assert_close(values["y"], want, rtol=1e-4, atol=1e-4)
    # What is written later goes to where it belongs.
    memory.write("w", before * 2)
    executable.run()
    torch.testing.assert_close(memory["y"].cpu(), 2 * want, rtol=1e-4, atol=1e-4)


def test_launches_may_follow_each_other_before_one_waits(cuda_machine: CudaMachine) -> None:
    program = product()
    memory = filled(program, cuda_machine.memory_device)
    executable = cuda_machine.load(program, memory)
    for _ in range(5):
        executable.launch(3)
    executable.finish()
    assert memory.epoch == 15
    assert executable.barriers == [15 * int(n) for n in program.signals]


def test_programs_that_need_the_same_share_a_kernel(make_cuda_machine: MakeMachine) -> None:
    machine = make_cuda_machine()
    for columns in (64, 64):
        program = product(columns)
        machine.load(program, filled(program, machine.memory_device))
    assert len(machine._functions) == 1


def test_a_trace_has_a_row_for_every_instruction_and_step(make_cuda_machine: MakeMachine) -> None:
    machine = make_cuda_machine(trace=True)
    program = product()
    executable = machine.load(program, filled(program, machine.memory_device))
    assert executable.trace() == []
    executable.run(2)
    (notes,) = executable.trace()
    assert notes.steps == 2
    *_, instruction = notes.places(program)
    assert sorted(instruction.tolist()) == sorted([*range(len(program))] * 2)
    assert notes.times.shape == (2 * len(program), TRACE_COLUMNS)
    times = notes.times.cpu().numpy()
    begin, end = (times[:, notes.events[name]] for name in ("begin", "end"))
    assert bool((end >= begin).all())
    assert int(begin.min()) > 0


def test_a_launch_that_is_waited_for_alone_has_a_trace(make_cuda_machine: MakeMachine) -> None:
    machine = make_cuda_machine(trace=True)
    program = product()
    executable = machine.load(program, filled(program, machine.memory_device))
    executable.launch(2)
    wait = executable.mark()
    executable.launch(3)
    wait()
    assert [notes.steps for notes in executable.trace()] == [2]
    executable.finish()
    assert [notes.steps for notes in executable.trace()] == [3]


def test_what_does_not_fit_the_gpu_is_refused(cuda_machine: CudaMachine, real_gpu: None) -> None:
    program = product()
    with pytest.raises(ValueError, match="the memory is on cpu, the machine on cuda:0"):
        cuda_machine.load(program, filled(program, "cpu"))
    empty = Memory(cuda_machine.memory_device)
    with pytest.raises(ValueError, match=r"tensor \w of the program is not in memory"):
        cuda_machine.load(program, empty)
    tensors = [TensorSpec(n, (1, 4), F32, TensorKind.STATE) for n in "xy"]
    inst = Copy(
        x=0, out=1, x_row=0, x_column=0, row_begin=0, row_end=1, column_begin=0, column_end=4
    )
    wide = Program.build(tensors, [inst], [[0], *[[]] * 200])
    memory = Memory(cuda_machine.memory_device)
    memory.allocate(tensors)
    with pytest.raises(ValueError, match="for 201 workers, GPU 0 has"):
        cuda_machine.load(wide, memory)
    with pytest.raises(ValueError, match="a run has at least one step"):
        cuda_machine.load(program, filled(program, cuda_machine.memory_device)).run(0)
