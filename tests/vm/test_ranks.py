"""Programs of several ranks: gathers, shared barriers, what the verifier refuses, and faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from copy_programs import ACTIVATION, INPUT, copy
from scattering import check_scattering

from megavm.instructions.matmul import Matmul
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

MACHINES = pytest.mark.parametrize(
    "machine", [CpuMachine(), ReferenceMachine()], ids=lambda m: m.name
)


@MACHINES
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_ranks_scatter_arrives_on_one_rank_alone(machine: Machine, dtype: DType) -> None:
    check_scattering(machine, dtype, (1, 2, 16, 17, 40))


@MACHINES
def test_dead_rows_keep_what_ranks_were_sent_before(machine: Machine) -> None:
    """A copy to rank 1 alone, then a product whose second row is dead, then a copy of both rows."""
    rows, share = (0, 2), (0, 4)
    product = Matmul(
        **{"x": 0, "weight": 1, "out": 2, "row_count": 4, "row_begin": 0, "row_end": 2},
        **{"column_begin": 0, "column_end": 4, "part": 0, "part_k": 4, "x_rows": 2, "tile": 0},
        eps=0.0,
        waits=[Wait(0, 2)],
        signal=1,
    )
    program = Program.build(
        [
            TensorSpec("x", (2, 4), F32, INPUT),
            TensorSpec("w", (4, 4), F32, TensorKind.WEIGHT),
            TensorSpec("all", (2, 8), F32, ACTIVATION, shares=2),
            TensorSpec("y", (2, 8), F32, TensorKind.STATE),
            TensorSpec("live", (1,), I32, INPUT),
        ],
        [
            copy(0, 2, share, [(2, 0)], 0, rows, only=1),
            product,
            copy(2, 3, (0, 8), [(1, 2)], 2, rows),
        ],
        [[0, 1, 2]],
        barriers=["sent", "made", "read"],
        ranks=2,
        shared_barriers=3,
    )
    verify(program, machine.name)
    memory = machine.memory(2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((2, 4), number + 1.0))
        rank.write("w", torch.ones(4, 4))
        rank.write("live", torch.ones(1, dtype=torch.int32))
    machine.load(program, memory).run()
    live = [4.0] * 4 + [8.0] * 4
    assert [rank["y"].tolist() for rank in memory.ranks] == [
        [live, [0.0] * 8],
        [live, [1.0] * 4 + [2.0] * 4],
    ]


# What the verifier says. On each of two ranks, ``x`` is copied to the rank's share of ``all``.


def gather_program(
    instructions: Sequence[Instruction],
    queues: Sequence[Sequence[int]],
    *,
    tagged: bool = False,
    shared: int = 0,
    barriers: int = 0,
    ranks: int = 2,
) -> Program:
    tensors = [
        TensorSpec("x", (1, 4), F32, INPUT),
        TensorSpec("all", (1, 8), F32, ACTIVATION, tagged=tagged, shares=2),
        TensorSpec("y", (1, 8), F32, TensorKind.STATE),
        TensorSpec("z", (1, 8), F32, TensorKind.STATE),
    ]
    return Program.build(
        tensors,
        instructions,
        queues,
        barriers=[f"b{i}" for i in range(barriers)],
        ranks=ranks,
        shared_barriers=shared,
    )


X, ALL, Y, Z = range(4)


def sentence(program: Program) -> str:
    with pytest.raises(VerificationError) as caught:
        verify(program, "cpu")
    return str(caught.value)


def in_order(shared: int) -> Program:
    """Gather, wait for it, read it; the next step begins when all ranks have read."""
    return gather_program(
        [
            copy(X, ALL, (0, 4), waits=[(1, 0)], signal=0),
            copy(ALL, Y, (0, 8), waits=[(0, 2 if shared else 1)], signal=1),
        ],
        [[0], [1]],
        barriers=2,
        shared=shared,
    )


def test_a_gather_behind_shared_barriers_is_accepted() -> None:
    verify(in_order(shared=2), "cpu")
    memory = Memory(ranks=2)
    memory.allocate(in_order(2).tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((1, 4), number + 1.0))
    CpuMachine().load(in_order(2), memory).run(100)
    for rank in memory.ranks:
        assert rank["y"].tolist() == [[1.0] * 4 + [2.0] * 4]


def test_a_barrier_of_the_own_rank_does_not_order_what_others_write() -> None:
    text = sentence(in_order(shared=0))
    assert "without an order between them" in text
    assert "of rank 1" in text


def test_the_step_must_not_overtake_readers_on_other_ranks() -> None:
    """The second barrier is not shared: a rank may gather again while another one still reads."""
    text = sentence(in_order(shared=1))
    assert "in the step before, without an order between them" in text
    assert "on worker 0 of rank 0 writes" in text or "on worker 0 of rank 1 writes" in text


def test_words_that_are_read_without_an_answer_can_be_overrun() -> None:
    """Two ranks exchange words, and their readers write nothing back: one rank can be a step ahead."""
    instructions = [copy(X, ALL, (0, 4), waits=[(0, 0)]), copy(ALL, Y, (0, 8), signal=0)]
    program = gather_program(instructions, [[0], [1]], tagged=True, barriers=1)
    assert "in the step before, without an order between them" in sentence(program)
    # With the readers' barrier on all ranks it is right.
    verify(gather_program(instructions, [[0], [1]], tagged=True, barriers=1, shared=1), "cpu")


def test_ranks_that_wait_for_each_other_are_named() -> None:
    program = gather_program(
        [
            copy(X, ALL, (0, 4), waits=[(0, 2)], signal=1),
            copy(ALL, Y, (0, 8), waits=[(1, 2)], signal=0),
        ],
        [[0, 1]],
        barriers=2,
        shared=2,
    )
    text = sentence(program)
    assert text.startswith(
        "deadlock: instruction 0 (copy) on worker 0 of rank 0 waits for barrier 0"
    )
    assert "of rank" in text.partition("signalled by")[2]


def test_a_wait_may_count_the_signals_of_all_ranks_and_no_more() -> None:
    program = in_order(shared=2)
    program.words[1, 3] = 3
    assert "reach 3, but one step signals it 2 times" in sentence(program)


@pytest.mark.parametrize("ranks", [1, 3])
def test_shares_are_as_many_as_ranks(ranks: int) -> None:
    program = gather_program([copy(X, ALL, (0, 4))], [[0]], ranks=ranks)
    assert sentence(program) == f"tensor all has 2 shares, the program {ranks} ranks"


def test_a_rank_writes_only_its_share() -> None:
    text = sentence(gather_program([copy(Y, ALL, (0, 8))], [[0]]))
    assert "columns [0, 8) is empty or outside [0, 4)" in text


@pytest.mark.parametrize(
    ("out", "only", "tagged", "text"),
    [
        (1, 2, False, "writes all on rank 2 alone of 2"),
        (2, 0, False, "writes y on rank 0 alone, but ranks do not gather it"),
        (1, 0, True, "writes all on rank 0 alone, but it is tagged: its words go to all ranks"),
    ],
)
def test_a_tile_for_one_rank_is_of_a_gathered_tensor(
    out: int, only: int, tagged: bool, text: str
) -> None:
    program = gather_program([copy(X, out, (0, 4), only=only)], [[0]], tagged=tagged)
    assert text in sentence(program)


def test_what_one_rank_gets_is_ordered_on_that_rank() -> None:
    """Each rank writes its share on rank 0 alone, twice: there both writers need an order."""
    instructions = [copy(X, ALL, (0, 4), only=0), copy(X, ALL, (0, 4), only=1)]
    verify(gather_program(instructions, [[0], [1]]), "cpu")
    instructions[1] = copy(X, ALL, (0, 4), only=0)
    assert "without an order between them" in sentence(gather_program(instructions, [[0], [1]]))


def test_an_operand_that_kernels_store_on_one_rank_cannot_be_gathered() -> None:
    tensors = [
        TensorSpec("x", (1, 4), F32, INPUT),
        TensorSpec("gain", (4,), F32, TensorKind.WEIGHT),
        TensorSpec("all", (1, 4), F32, ACTIVATION, shares=2),
    ]
    norm = RmsNorm(x=0, gain=1, out=2, row_begin=0, row_end=1, eps=0.0)
    text = sentence(Program.build(tensors, [norm], [[0]], ranks=2))
    assert "out" in text
    assert "all" in text


def test_a_share_that_is_read_by_the_instruction_that_writes_it_is_refused() -> None:
    text = sentence(gather_program([copy(ALL, ALL, (0, 4))], [[0]]))
    assert "writes all, which has shares, and names or reads it twice" in text


@pytest.mark.parametrize("whole", [False, True])
def test_columns_of_gathered_peaks_are_counted_through_all_ranks(whole: bool) -> None:
    """Whether the ranks gather the results or not: float32 must hold the last column's number."""
    size = 1 << 23
    tensors = [
        TensorSpec("x", (1, 8), F32, INPUT),
        TensorSpec("weight", (size, 8), F32, TensorKind.WEIGHT),
        TensorSpec("y", (1, 2 * size if whole else size), F32, ACTIVATION, shares=1 + whole),
        TensorSpec("peaks", (1, 4), F32, ACTIVATION, shares=2),
    ]
    product: dict[str, Any] = {"x": 0, "weight": 1, "out": 2, "part": 0, "part_k": 8, "x_rows": 1}
    product |= {"row_begin": 0, "row_end": 1, "column_begin": 0, "column_end": 8, "eps": 0.0}
    verify(Program.build(tensors, [Matmul(**product, tile=0)], [[0]], ranks=2))
    text = sentence(Program.build(tensors, [Matmul(**product, tile=0, peaks=3)], [[0]], ranks=2))
    assert "peaks are of y, 16777216 columns of F32: expected fewer than 2^24 of F32" in text


def test_numbers_of_ranks_and_shared_barriers_are_checked() -> None:
    assert "for 0 ranks of 1 workers" in sentence(gather_program([], [[]], ranks=0))
    assert "5 barriers are shared, the program has 1" in sentence(
        gather_program([], [[]], barriers=1, shared=5)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shares": 3}, "not 3 equal shares"),
        ({"shares": 0}, "not 0 equal shares"),
        ({"shares": 2, "kind": TensorKind.STATE}, "has shares but is state"),
    ],
)
def test_shares_of_a_tensor_are_equal_and_of_activations(
    options: dict[str, object], message: str
) -> None:
    arguments: dict[str, object] = {"kind": ACTIVATION} | options
    with pytest.raises(ValueError, match=message):
        TensorSpec("t", (1, 8), F32, **arguments)  # type: ignore[arg-type]


# Files, memory and faults.


def test_a_program_of_ranks_is_saved_and_loaded(tmp_path: Path) -> None:
    program = in_order(shared=2)
    program.save(tmp_path / "p.npz")
    loaded = Program.load(tmp_path / "p.npz")
    assert (loaded.ranks, loaded.shared_barriers, loaded.tensors) == (2, 2, program.tensors)
    assert loaded.fingerprint() == program.fingerprint() != in_order(shared=1).fingerprint()
    assert str(loaded).endswith("static queues for 2 workers on each of 2 ranks")


@MACHINES
def test_memory_has_as_many_ranks_as_the_program(machine: Machine) -> None:
    program = in_order(shared=2)
    memory = Memory(ranks=3)
    memory.allocate(program.tensors)
    with pytest.raises(ValueError, match="the program has 2 ranks, its memory 3"):
        machine.load(program, memory)


def test_the_ranks_of_a_memory_have_one_epoch_and_are_copied_together() -> None:
    memory = Memory(ranks=2)
    memory.allocate([TensorSpec("t", (2,), F32, TensorKind.STATE)])
    memory.epoch = 7
    memory.ranks[1].write("t", torch.ones(2))
    twin = memory.copy()
    twin.ranks[1].write("t", torch.zeros(2))
    twin.epoch = 9
    assert [rank.epoch for rank in memory.ranks] == [7, 7]
    assert [rank.epoch for rank in twin.ranks] == [9, 9]
    assert memory.ranks[1]["t"].tolist() == [1, 1]


def test_a_rank_that_stops_is_named() -> None:
    program = gather_program(
        [
            copy(X, ALL, (0, 4), waits=[(1, 0)], signal=0),
            copy(ALL, Y, (0, 8), waits=[(0, 2), (2, 0)], signal=1),
            copy(Y, Z, (0, 8), waits=[(1, 2)], signal=2),
        ],
        [[0, 1], [2]],
        barriers=3,
        shared=2,
    )
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    executable = CpuMachine(timeout=0.3).load(program, memory)
    executable.run(2)
    executable._loaded.lose_signal(2, rank=1)
    with pytest.raises(MachineFault) as caught:
        executable.run(1)
    assert "rank 1, worker 0 (worker): instruction 1" in str(caught.value)
    assert "waits for barrier 2 (b2): value 1, target 2" in str(caught.value)
    executable.reset()
    executable.run(3)
    assert executable.barriers == [6, 6, 3, 6, 6, 3]
