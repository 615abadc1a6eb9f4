"""Where the order of a queue is all that orders two instructions, the machine keeps it.

On the GPU a worker begins an instruction while results of the one before it are still being stored,
unless the program's proof rests on the order of its queues.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from changed_sources import changed_sources

from megavm.instructions.matmul import Matmul
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec
from megavm.vm.verify import verify

SIZE = 64
LENGTH = 12  # products, each of the one before it


def chain(rows: int, *, barriers: bool = False) -> Program:
    """x0 -> x1 -> ... by products of one worker, in a queue or with a barrier after each."""
    tensors = [TensorSpec(f"x{i}", (rows, SIZE), F32, TensorKind.ACTIVATION) for i in range(LENGTH)]
    tensors.insert(0, TensorSpec("input", (rows, SIZE), F32, TensorKind.INPUT))
    tensors += [TensorSpec("w", (SIZE, SIZE), F32, TensorKind.WEIGHT)]
    weight = len(tensors) - 1
    instructions: list[Instruction] = []
    for i in range(LENGTH):
        # The next step overwrites what this one reads: x[i] is read by i alone, which is before it.
        waits = [Wait(i - 1, 1)] if i else [Wait(LENGTH - 1, 0)]
        instructions.append(
            Matmul(
                x=i,
                weight=weight,
                out=i + 1,
                row_begin=0,
                row_end=rows,
                column_begin=0,
                column_end=SIZE,
                part=0,
                part_k=SIZE,
                x_rows=rows,
                tile=0,
                eps=0.0,
                waits=waits if barriers else (),
                signal=i if barriers else None,
            )
        )
    names = [f"b{i}" for i in range(LENGTH)] if barriers else []
    return Program.build(tensors, instructions, [range(LENGTH)], barriers=names)


def memory_of(program: Program, device: str) -> Memory:
    memory = Memory(device)
    memory.allocate(program.tensors)
    generator = torch.Generator().manual_seed(1)
    rows = program.tensors[0].rows
    memory.write("input", torch.randn(rows, SIZE, generator=generator))
    memory.write("w", torch.linalg.qr(torch.randn(SIZE, SIZE, generator=generator))[0])
    return memory


def wrong_launches(executable: CudaExecutable, launches: int) -> int:
    """After how many launches of a chain, each of another input, its end is wrong."""
    memory, wrong = executable.memory, 0
    weight = memory["w"].double()
    generator = torch.Generator().manual_seed(2)
    for _ in range(launches):
        x = torch.randn(memory["input"].shape, generator=generator)
        memory.write("input", x)
        executable.run()
        want = x.double().to(memory.device)
        for _ in range(LENGTH):
            want = want @ weight.T
        wrong += not torch.allclose(memory[f"x{LENGTH - 1}"].double(), want, atol=1e-3)
    return wrong


@pytest.mark.parametrize("rows", [1, 3])
def test_a_proof_says_whether_it_needs_the_order_of_queues(rows: int) -> None:
    for barriers in (False, True):
        program = chain(rows, barriers=barriers)
        verify(program, "cuda")
        assert program.needs_queue_order == (not barriers)


def test_a_program_that_does_not_verify_is_taken_to_need_the_order_of_queues() -> None:
    out = TensorSpec("out", (1, 4), F32, TensorKind.ACTIVATION)
    gain = TensorSpec("gain", (4,), F32, TensorKind.WEIGHT)
    norm = RmsNorm(x=0, gain=1, out=0, row_begin=0, row_end=1, eps=0.0)
    assert Program.build([out, gain], [norm], [[0]]).needs_queue_order


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("barriers", [False, True])
def test_a_chain_in_a_queue_is_computed_in_its_order(
    rows: int, barriers: bool, machine: Machine
) -> None:
    program = chain(rows, barriers=barriers)
    memory = memory_of(program, machine.memory_device)
    executable = machine.load(program, memory)
    executable.run(steps=7)
    want = memory["input"].double()
    for _ in range(LENGTH):
        want = want @ memory["w"].double().T
    torch.testing.assert_close(memory[f"x{LENGTH - 1}"].double(), want, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def holding_machine(
    make_cuda_machine: Callable[..., CudaMachine],
    tmp_path_factory: pytest.TempPathFactory,
    pytestconfig: pytest.Config,
) -> CudaMachine:
    """A GPU whose kernels hold their stores back, for longer than an instruction takes."""
    nanoseconds = 2_000_000 if pytestconfig.getoption("--emulate-gpu") else 20_000
    folder, held = tmp_path_factory.mktemp("sources"), f"kHoldStores = {nanoseconds};"
    root = changed_sources(folder, "cuda/config.cuh", "kHoldStores = 0;", held)
    return make_cuda_machine(root=root)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_store_that_is_held_back_is_waited_for(rows: int, holding_machine: CudaMachine) -> None:
    program = chain(rows)
    executable = holding_machine.load(program, memory_of(program, holding_machine.memory_device))
    assert wrong_launches(executable, 20) == 0
    # Without it the same kernel reads what is not there yet: the test can fail.
    program = chain(rows)
    program.__dict__["needs_queue_order"] = False
    memory = memory_of(program, holding_machine.memory_device)
    assert wrong_launches(holding_machine.load(program, memory, verify=False), 20) > 0
    with_barriers = chain(rows, barriers=True)
    memory = memory_of(with_barriers, holding_machine.memory_device)
    assert wrong_launches(holding_machine.load(with_barriers, memory), 20) == 0
    assert not with_barriers.needs_queue_order
