"""Programs of several ranks: gathers, shared barriers, what the verifier refuses, and faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from copy_programs import ACTIVATION, INPUT, copy
from scattering import check_scattering

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.rms_norm import RmsNorm
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import AllReduce, CompileOptions, default_options
from megavm.vm.config import NONE
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Instruction
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

MACHINES = pytest.mark.parametrize(
    "machine", [CpuMachine(), ReferenceMachine()], ids=lambda m: m.name
)
OPTIONS = pytest.mark.parametrize(
    "options",
    [
        CompileOptions(2),
        CompileOptions(3, exchange="tagged"),
        CompileOptions(3, exchange="preferred", all_reduce="scatter"),
        CompileOptions(2, exchange="tagged", assignment="dynamic", waves=2),
    ],
    ids=["barrier", "tagged", "scatter", "dynamic"],
)


# Graphs.


@MACHINES
@OPTIONS
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_graph_gathers_and_sums_over_ranks(
    ranks: int, options: CompileOptions, machine: Machine
) -> None:
    graph = Graph(rows=3, ranks=ranks)
    x = graph.tensor("x", (3, 16), F32, INPUT)
    weight = graph.weight("weight", (8, 16), F32)
    y = graph.linear("y", x, weight, dtype=F32)
    graph.output(graph.all_reduce("sum", y, None, F32), "sum")
    whole = graph.all_gather("whole", graph.linear("z", x, weight, dtype=F32))
    graph.output(
        graph.linear("end", whole, graph.weight("last", (4, 8 * ranks), F32), dtype=F32), "end"
    )
    program = compile_graph(graph, options)
    memory = Memory(ranks=ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(0)
    parts = []
    for rank in memory.ranks:
        for name in ("x", "weight", "last"):
            rank.write(name, torch.randn(rank.spec(name).shape))
        parts.append(rank["x"] @ rank["weight"].T)
    machine.load(program, memory).run(3)
    for rank in memory.ranks:
        torch.testing.assert_close(rank["sum"], sum(parts, torch.zeros(3, 8)))
        torch.testing.assert_close(rank["end"], torch.cat(parts, dim=1) @ rank["last"].T)
        assert torch.equal(rank["sum"], memory["sum"])


@OPTIONS
def test_a_gather_with_another_reader_is_a_copy(options: CompileOptions) -> None:
    graph = Graph(rows=2, ranks=2)
    x = graph.tensor("x", (2, 8), F32, INPUT)
    y = graph.linear("y", x, graph.weight("weight", (8, 8), F32), dtype=F32)
    graph.output(graph.all_gather("all", y), "all")
    graph.output(graph.linear("z", y, graph.weight("w2", (8, 8), F32), dtype=F32), "z")
    program = compile_graph(graph, options)
    assert any(isinstance(i, Copy) for i in program.instructions)
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        rank.write("x", torch.full((2, 8), number + 1.0))
        rank.write("weight", torch.eye(8))
        rank.write("w2", torch.eye(8))
    CpuMachine().load(program, memory).run(2)
    for number, rank in enumerate(memory.ranks):
        assert rank["all"].tolist() == [[1.0] * 8 + [2.0] * 8] * 2
        assert rank["z"].tolist() == [[number + 1.0] * 8] * 2


@OPTIONS
@MACHINES
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_of_sums_gathered_are_the_whole_sums(
    ranks: int, options: CompileOptions, machine: Machine
) -> None:
    graph = Graph(rows=3, ranks=ranks)
    x = graph.tensor("x", (3, 8), F32, INPUT)
    weight = graph.weight("weight", (8, 8), F32)
    bias, own_bias = graph.weight("bias", (8,), F32), graph.weight("own_bias", (8 // ranks,), F32)
    y = graph.linear("y", x, weight, dtype=F32)
    share = graph.output(graph.reduce_scatter("share", y, own_bias, F32), "kept")
    graph.output(graph.all_gather("all", share), "all")
    graph.output(graph.all_reduce("sum", y, bias, F32), "sum")
    program = compile_graph(graph, options)
    memory = Memory(ranks=ranks)
    memory.allocate(program.tensors)
    torch.manual_seed(0)
    all_bias = torch.randn(8)
    for number, rank in enumerate(memory.ranks):
        for name in ("x", "weight"):
            rank.write(name, torch.randn(rank.spec(name).shape))
        rank.write("bias", all_bias)
        rank.write("own_bias", all_bias.reshape(ranks, -1)[number])
    machine.load(program, memory).run(3)
    sums = torch.stack([rank["x"] @ rank["weight"].T for rank in memory.ranks]).sum(0)
    for number, rank in enumerate(memory.ranks):
        torch.testing.assert_close(rank["sum"], sums + all_bias)
        assert torch.equal(rank["all"], rank["sum"])
        width = 8 // ranks
        assert torch.equal(rank["kept"], rank["sum"][:, number * width : (number + 1) * width])


@pytest.mark.parametrize(
    ("ranks", "rows", "columns", "expected"),
    [
        (4, 1, 2048, False),
        (4, 128, 2048, True),  # 1 MiB
        (4, 4096, 2046, False),  # cannot be shared by four
        (2, 2048, 2048, False),  # 16 MiB took as long in either form on two H200s
        (2, 8192, 2048, True),  # 64 MiB, 7 % less
    ],
)
def test_a_large_sum_on_gpus_is_added_up_by_shares(
    ranks: int, rows: int, columns: int, expected: bool
) -> None:
    graph = Graph(rows, ranks=ranks)
    x = graph.tensor("x", (rows, columns), F32, INPUT)
    graph.output(graph.all_reduce("sum", x, None, F32), "sum")
    program = compile_graph(graph, CompileOptions(132, machine="cuda"))
    copies = [i for i in program.instructions if isinstance(i, Copy)]
    assert any(copy.only != NONE for copy in copies) == expected


@pytest.mark.parametrize("all_reduce", ["gather", "scatter"])
def test_sums_may_be_gathered_again(all_reduce: AllReduce) -> None:
    """All ranks have the sums, and a gather puts those of each rank side by side."""
    graph = Graph(rows=3, ranks=2)
    x = graph.tensor("x", (3, 8), F32, INPUT)
    graph.output(graph.all_gather("all", graph.all_reduce("sum", x, None, F32)), "all")
    memory = run_sums(graph, all_reduce)
    total = memory.ranks[0]["x"] + memory.ranks[1]["x"]
    for rank in memory.ranks:
        assert torch.equal(rank["all"], torch.cat([total, total], dim=1))


@pytest.mark.parametrize("all_reduce", ["gather", "scatter"])
def test_a_sum_over_ranks_of_parts_of_rows_is_not_cut(all_reduce: AllReduce) -> None:
    """Four parts of four columns, two of each rank: a rank's share of x has parts of the whole sum."""
    graph = Graph(rows=1, ranks=2)
    x = graph.tensor("x", (1, 8), F32, INPUT)
    parts = graph.all_gather("parts", x)
    graph.output(graph.append("reduce", "sum", {"parts": parts}, 4, F32), "sum")
    memory = run_sums(graph, all_reduce)
    want = sum((rank["x"].reshape(2, 4).sum(0) for rank in memory.ranks), torch.zeros(4))
    for rank in memory.ranks:
        assert torch.equal(rank["sum"][0], want)


def run_sums(graph: Graph, all_reduce: AllReduce) -> Memory:
    """The memory of two ranks after a graph of whole numbers in ``x`` has run."""
    program = compile_graph(graph, CompileOptions(3, all_reduce=all_reduce))
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    for number, rank in enumerate(memory.ranks):
        shape = rank.spec("x").shape
        rank.write("x", torch.arange(float(math.prod(shape))).reshape(shape) + 100 * number)
    CpuMachine().load(program, memory).run(2)
    return memory


def test_programs_of_all_sizes_have_the_same_outputs() -> None:
    """Only large steps add up by shares, but what the host reads is one tensor."""
    memory = Memory(ranks=4)
    for rows in (1, 512):
        graph = Graph(rows, capacity=512, ranks=4)
        x = replace(graph.tensor("x", (512, 2048), F32, INPUT), rows=rows)
        graph.output(graph.all_reduce("sum", x, None, F32), "sum")
        memory.allocate(compile_graph(graph, CompileOptions(8, machine="cuda")).tensors)


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_ranks_add_up_is_not_split_along_k(rows: int) -> None:
    """Parts of a product would have to be added up first; both forms add up the same sums."""
    graph = Graph(rows, ranks=4)
    x = graph.tensor("x", (rows, 8192), BF16, INPUT)
    y = graph.linear("y", x, graph.weight("weight", (512, 8192), BF16), dtype=F32)
    graph.output(graph.all_reduce("sum", y, None, F32), "sum")
    for form in ("gather", "scatter"):
        options = replace(default_options("cuda", 132, rows), all_reduce=form)
        program = compile_graph(graph, options)
        assert {i.part for i in program.instructions if isinstance(i, Matmul)} == {0}


def test_what_cannot_be_added_up_by_shares_is_refused() -> None:
    graph = Graph(rows=1, ranks=3)
    narrow = graph.tensor("narrow", (1, 9), BF16, INPUT)
    with pytest.raises(ValueError, match="sum: x is BF16, but sums over ranks are added in F32"):
        graph.all_reduce("sum", narrow, None, F32)
    with pytest.raises(ValueError, match="share: x has 8 columns, which 3 ranks cannot share"):
        graph.reduce_scatter("share", graph.tensor("x", (1, 8), F32, INPUT), None, F32)


@MACHINES
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_ranks_scatter_arrives_on_one_rank_alone(machine: Machine, dtype: DType) -> None:
    check_scattering(machine, dtype, (1, 2, 16, 17, 40))


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
