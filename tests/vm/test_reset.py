"""After a fault an executable is reset, and runs as if it had been loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sabotage import lose_signals

from megavm.instructions.copy import Copy
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.isa import Wait
from megavm.vm.machine import MachineFault, MachineLost
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import F32, TensorKind, TensorSpec

MakeMachine = Callable[..., Any]
STATE, ACTIVATION = TensorKind.STATE, TensorKind.ACTIVATION


@pytest.fixture(params=["cpu", "cuda"])
def impatient(request: pytest.FixtureRequest) -> MakeMachine:
    """Makes a machine that gives up soon."""
    if request.param == "cpu":
        return lambda **options: CpuMachine(timeout=0.2, **options)
    make: MakeMachine = request.getfixturevalue("make_cuda_machine")
    return lambda **options: make(timeout=0.2, **options)


def copy(x: int, out: int, **sync: Any) -> Copy:
    return Copy(
        x=x,
        out=out,
        x_row=0,
        x_column=0,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=4,
        **sync,
    )


def relay(tagged: bool, dynamic: bool = False) -> Program:
    """One worker copies begin to middle, another one middle to end; the first waits for the other."""
    tensors = [
        TensorSpec("begin", (1, 4), F32, STATE),
        TensorSpec("middle", (1, 4), F32, ACTIVATION, tagged=tagged),
        TensorSpec("end", (1, 4), F32, STATE),
    ]
    instructions = [
        copy(0, 1, waits=[Wait(1, 0)], signal=0),
        copy(1, 2, waits=[] if tagged else [Wait(0, 1)], signal=1),
    ]
    queues = [[0, 1]] if dynamic else [[0], [1]]
    return Program.build(
        tensors, instructions, queues, barriers=["there", "back"], dynamic=dynamic, workers=2
    )


def load(machine: Any, program: Program) -> tuple[Any, Memory]:
    memory = Memory(machine.memory_device)
    memory.allocate(program.tensors)
    return machine.load(program, memory), memory


def check_that_it_runs(executable: Any, memory: Memory, value: float) -> None:
    memory.write("begin", torch.full((1, 4), value))
    executable.run(3)
    assert memory["end"].tolist() == [[value] * 4]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
def test_a_reset_executable_runs_again_and_again(
    impatient: MakeMachine, tagged: bool, dynamic: bool
) -> None:
    program = relay(tagged, dynamic)
    executable, memory = load(impatient(), program)
    check_that_it_runs(executable, memory, 1.0)
    for value in (2.0, 3.0):
        epoch = memory.epoch
        lose_signals(executable)
        memory.write("begin", torch.full((1, 4), -value))
        with pytest.raises(MachineFault, match=r"waits for (barrier|tensor)"):
            executable.run(5)
        # Words may carry the tags of all five steps, so that later ones have others.
        assert memory.epoch == epoch + 5
        with pytest.raises(MachineFault, match="reset it"):
            executable.run()
        assert memory.epoch == epoch + 5
        executable.reset()
        assert executable.barriers == [0, 0]
        check_that_it_runs(executable, memory, value)
        assert executable.barriers == [3, 3]


def test_a_reset_without_a_fault_changes_nothing_but_the_counters(impatient: MakeMachine) -> None:
    executable, memory = load(impatient(), relay(True))
    executable.reset()
    check_that_it_runs(executable, memory, 1.0)
    executable.reset()
    assert (executable.barriers, memory.epoch) == ([0, 0], 3)
    check_that_it_runs(executable, memory, 2.0)


def test_other_executables_of_the_memory_need_no_reset(impatient: MakeMachine) -> None:
    machine, program = impatient(), relay(True)
    executable, memory = load(machine, program)
    other = machine.load(program, memory)
    check_that_it_runs(other, memory, 1.0)
    lose_signals(executable)
    with pytest.raises(MachineFault):
        executable.run()
    check_that_it_runs(other, memory, 2.0)
    executable.reset()
    check_that_it_runs(executable, memory, 3.0)
    check_that_it_runs(other, memory, 4.0)


def test_what_a_broken_run_noted_is_not_handed_out(impatient: MakeMachine) -> None:
    executable, memory = load(impatient(trace=True), relay(True))
    check_that_it_runs(executable, memory, 1.0)
    lose_signals(executable)
    with pytest.raises(MachineFault):
        executable.run(2)
    executable.reset()
    check_that_it_runs(executable, memory, 2.0)
    notes = executable.trace()
    assert [n.steps for n in notes] == [3, 3]
    assert all(len(n.times) == 3 * 2 for n in notes)


def test_launches_behind_a_broken_one_end_and_leave_nothing(make_cuda_machine: MakeMachine) -> None:
    machine = make_cuda_machine(timeout=0.2)
    executable, memory = load(machine, relay(True))
    assert isinstance(executable, CudaExecutable)
    lose_signals(executable)
    for _ in range(4):
        executable.launch(2)
    assert memory.epoch == 8
    # It tells what the first of these launches waited for, not the later ones.
    with pytest.raises(MachineFault, match=r"waits for (barrier|tensor)") as told:
        executable.finish()
    assert not any("last step but one" in state.waiting_for for state in told.value.workers)
    executable.reset()
    check_that_it_runs(executable, memory, 1.0)
    # No instruction waits for these before the reset.
    lose_signals(executable)
    for _ in range(4):
        executable.launch(2)
    executable.reset()
    check_that_it_runs(executable, memory, 2.0)


def test_a_lost_context_is_told_by_everything(make_cuda_machine: MakeMachine) -> None:
    machine = make_cuda_machine()
    executable, _ = load(machine, relay(True))
    machine.lost = "CUDA_ERROR_TEST"
    for call in (executable.run, executable.reset, lambda: load(machine, relay(True))):
        with pytest.raises(MachineLost, match="context is lost since CUDA_ERROR_TEST"):
            call()


def test_a_reference_run_that_fails_leaves_no_tags_of_later_steps() -> None:
    program = relay(True)
    executable, memory = load(ReferenceMachine(), program)
    executable._order = [(0, 1), (0, 0)]
    with pytest.raises(MachineFault, match="are read before they are written"):
        executable.run(4)
    assert memory.epoch == 4
    executable.reset()
    executable._order = None
    check_that_it_runs(executable, memory, 1.0)
