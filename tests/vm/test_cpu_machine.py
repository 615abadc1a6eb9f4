"""The C++ interpreter: queues, barriers, tagged data, and what it says when a program cannot go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.embed import Embed
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.products import sums_of_squares
from megavm.instructions.tiles import squares_of
from megavm.vm.cpu.machine import CpuExecutable, CpuMachine, levels
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import MachineFault
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind, TensorSpec

STATE, ACTIVATION, INPUT, WEIGHT = (
    TensorKind.STATE,
    TensorKind.ACTIVATION,
    TensorKind.INPUT,
    TensorKind.WEIGHT,
)


def copy(x: int, out: int, columns: int = 4, **sync: object) -> Copy:
    """Row 0 of x to row 0 of out."""
    return Copy(
        x=x,
        out=out,
        x_row=0,
        x_column=0,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=columns,
        **sync,  # type: ignore[arg-type]
    )


def add_one(x: int, out: int, one: int, columns: int, **sync: object) -> Matmul:
    """out := x . 1 + one: with an identity as the weight."""
    return Matmul(
        x=x,
        weight=one + 1,
        bias=one,
        out=out,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=columns,
        x_rows=1,
        tile=0,
        part=0,
        part_k=columns,
        eps=0.0,
        **sync,  # type: ignore[arg-type]
    )


def load(
    program: Program,
    machine: CpuMachine | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
) -> tuple[CpuExecutable, Memory]:
    """Load on a fresh memory. These programs are small enough to see that they are right, or wrong on purpose."""
    memory = Memory()
    memory.allocate(program.tensors)
    for name, value in (values or {}).items():
        memory.storage(name).copy_(value)
    machine = machine or CpuMachine(timeout=0.2)
    return machine.load(program, memory, verify=False), memory


def ring(workers: int, rounds: int, tagged: bool, dynamic: bool = False) -> Program:
    """A value goes round all workers, each adding one: the order of execution is the whole point."""
    columns = 16
    hops = workers * rounds
    tensors = [
        TensorSpec("start", (1, columns), F32, STATE),
        TensorSpec("one", (columns,), F32, WEIGHT),
        TensorSpec("identity", (columns, columns), F32, WEIGHT),
        *(TensorSpec(f"hop{i}", (1, columns), F32, ACTIVATION, tagged) for i in range(hops)),
    ]
    instructions: list[Instruction] = []
    for i in range(hops):
        waits = [] if tagged or i == 0 else [Wait(i - 1, 1)]
        instructions.append(
            add_one(
                0 if i == 0 else 2 + i, 3 + i, 1, columns, waits=waits, signal=None if tagged else i
            )
        )
    # The last hop goes back to the start, when this step's first reader is long done.
    last = [] if tagged else [Wait(hops - 1, 1)]
    instructions.append(copy(2 + hops, 0, columns, waits=last, signal=hops))
    # The next step's first hop waits for that.
    instructions[0] = instructions[0].with_sync([Wait(hops, 0)], instructions[0].signal)
    queues = (
        [list(range(hops + 1))]
        if dynamic
        else [[i for i in range(hops + 1) if i % workers == w] for w in range(workers)]
    )
    return Program.build(
        tensors,
        instructions,
        queues,
        barriers=[f"b{i}" for i in range(hops + 1)],
        dynamic=dynamic,
        workers=workers,
    )


RING_VALUES = {"one": torch.ones(16), "identity": torch.eye(16)}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_chain_over_all_workers_and_many_steps_adds_up(
    workers: int, tagged: bool, dynamic: bool
) -> None:
    rounds, steps = 3, 40
    executable, memory = load(ring(workers, rounds, tagged, dynamic), CpuMachine(), RING_VALUES)
    for _ in range(3):
        executable.run(steps)
    assert memory["start"].tolist() == [[3.0 * steps * rounds * workers] * 16]
    assert memory.epoch == 3 * steps


def test_barriers_count_on_over_runs() -> None:
    program = ring(2, 1, False)
    executable, _ = load(program, None, RING_VALUES)
    executable.run(5)
    executable.run(2)
    assert executable.barriers == [7 * int(s) for s in program.signals]


def test_barrier_counters_wrap_around() -> None:
    executable, memory = load(ring(2, 2, False), None, RING_VALUES)
    executable._loaded.set_steps_run((1 << 32) - 3)
    executable.run(10)
    assert memory["start"].tolist() == [[40.0] * 16]
    assert executable.barriers == [7] * 5


def test_tags_wrap_around() -> None:
    executable, memory = load(ring(2, 2, True), None, RING_VALUES)
    memory.epoch = (1 << 32) - 5
    executable.run(10)
    assert memory["start"].tolist() == [[40.0] * 16]


def test_programs_of_one_memory_take_turns() -> None:
    program = ring(2, 1, True)
    first, memory = load(program, None, RING_VALUES)
    second = CpuMachine().load(program, memory, verify=False)
    for _ in range(3):
        first.run(2)
        second.run(3)
    assert memory["start"].tolist() == [[30.0] * 16]


def test_workers_do_not_join_between_steps() -> None:
    # Worker 0 feeds worker 1 over a barrier and never waits: it may be steps ahead.
    tensors = [TensorSpec("x", (1, 4), F32, STATE), TensorSpec("y", (1, 4), F32, STATE)]
    program = Program.build(
        tensors,
        [Noop(signal=0), copy(0, 1, waits=[Wait(0, 1)])],
        [[0], [1]],
        barriers=["fed"],
    )
    executable, memory = load(program, None, {"x": torch.full((1, 4), 3.0)})
    executable.run(1000)
    assert executable.barriers == [1000]
    assert memory["y"].tolist() == [[3.0] * 4]


def test_empty_queues_and_programs_run() -> None:
    program = Program.build([], [], [[], []])
    load(program)[0].run(3)
    load(Program.build([], [], [[]], dynamic=True, workers=2))[0].run(3)


def test_run_needs_a_step() -> None:
    executable, _ = load(Program.build([], [Noop()], [[0]]))
    with pytest.raises(ValueError, match="at least one step"):
        executable.run(0)


def test_many_runs_of_many_workers_from_many_threads() -> None:
    machine = CpuMachine()
    pairs = [load(ring(1 + i % 5, 2, i % 2 == 0), machine, RING_VALUES) for i in range(6)]

    def work(executable: CpuExecutable) -> None:
        for _ in range(30):
            executable.run(2)

    threads = [threading.Thread(target=work, args=(e,)) for e, _ in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, (_, memory) in enumerate(pairs):
        assert memory["start"][0, 0] == 30 * 2 * 2 * (1 + i % 5)


# Faults.


def test_a_wait_for_nothing_names_worker_instruction_barrier_value_and_target() -> None:
    program = Program.build(
        [TensorSpec("x", (1, 4), F32, STATE)],
        [Noop(signal=0), Noop(waits=[Wait(0, 2)], signal=1), Noop()],
        [[0, 1], [2]],
        barriers=["half", "done"],
    )
    executable, _ = load(program)
    begin = time.monotonic()
    with pytest.raises(MachineFault) as caught:
        executable.run()
    assert 0.15 < time.monotonic() - begin < 5
    fault = caught.value
    assert "instruction 1 waits for barrier 0 (half): value 1, target 2" in fault.cause
    assert fault.workers[0].instruction == 1
    assert fault.workers[0].disassembly == "noop wait(b0 >= 2) signal(b1)"
    assert fault.workers[0].waiting_for == "barrier 0 (half): value 1, target 2"
    assert fault.workers[1].instruction is None
    assert "worker 1 (worker): idle" in str(fault)


def test_the_target_of_a_later_step_is_absolute() -> None:
    program = Program.build(
        [], [Noop(signal=0), Noop(waits=[Wait(0, 2)])], [[0], [1]], barriers=["b"]
    )
    executable, _ = load(program)
    executable._loaded.set_steps_run(10)
    with pytest.raises(MachineFault, match="value 11, target 12"):
        executable.run()


def test_a_missing_tag_names_tensor_row_word_and_epochs() -> None:
    tensors = [
        TensorSpec("halves", (2, 8), BF16, ACTIVATION, tagged=True),
        TensorSpec("y", (1, 8), F32, STATE),
    ]
    source = Copy(
        x=1, out=0, x_row=0, x_column=0, row_begin=1, row_end=2, column_begin=0, column_end=4
    )
    sink = Copy(
        x=0, out=1, x_row=1, x_column=0, row_begin=0, row_end=1, column_begin=0, column_end=8
    )
    executable, memory = load(Program.build(tensors, [source, sink], [[0], [1]]))
    memory.epoch = 41
    with pytest.raises(MachineFault) as caught:
        executable.run()
    assert (
        caught.value.workers[1].waiting_for == "tensor halves, row 1, word 2: epoch 0, expected 42"
    )


def test_workers_that_wait_for_each_other_are_both_named() -> None:
    program = Program.build(
        [],
        [Noop(waits=[Wait(1, 1)], signal=0), Noop(waits=[Wait(0, 1)], signal=1)],
        [[0], [1]],
        barriers=["ping", "pong"],
    )
    executable, _ = load(program)
    with pytest.raises(MachineFault) as caught:
        executable.run()
    assert [w.instruction for w in caught.value.workers] == [0, 1]
    assert all("value 0, target 1" in w.waiting_for for w in caught.value.workers)


@pytest.mark.parametrize("workers", [2, 6])
def test_a_fault_stops_the_others_and_leaves_the_machine_usable(workers: int) -> None:
    machine = CpuMachine(timeout=30)
    tensors = [
        TensorSpec("table", (10, 4), F32, WEIGHT),
        TensorSpec("tokens", (1, 2), I32, STATE),
        TensorSpec("row_sequence", (1,), I32, INPUT),
        TensorSpec("row_position", (1,), I32, INPUT),
        TensorSpec("row_count", (1,), I32, INPUT),
        TensorSpec("out", (1, 4), F32, ACTIVATION),
    ]
    embed = Embed(
        table=0,
        tokens=1,
        row_sequence=2,
        row_position=3,
        row_count=4,
        out=5,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=4,
        signal=0,
    )
    waiting: list[Instruction] = [Noop(waits=[Wait(0, 1)]) for _ in range(workers - 1)]
    program = Program.build(
        tensors, [embed, *waiting], [[i] for i in range(workers)], barriers=["embedded"]
    )
    executable, memory = load(program, machine, {"row_count": torch.tensor([1])})
    memory.storage("tokens")[0, 0] = 12
    begin = time.monotonic()
    with pytest.raises(MachineFault) as caught:
        executable.run()
    assert time.monotonic() - begin < 10, "the others waited for the timeout"
    assert caught.value.cause == (
        "instruction 0 (embed): token 12 at position 0 of sequence 0 is outside the vocabulary of 10"
    )
    assert "table=table" in caught.value.workers[0].disassembly
    assert memory.epoch == 1, "tags of the broken step are not to be used again"
    with pytest.raises(MachineFault, match="reset it"):
        executable.run()
    memory.storage("tokens")[0, 0] = 9
    executable.reset()
    executable.run(1)
    other, ring_memory = load(ring(3, 2, True), machine, RING_VALUES)
    other.run(3)
    assert ring_memory["start"][0, 0] == 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row_sequence": [3]}, "row_sequence of row 0 is 3, tokens has 1 sequences"),
        ({"row_sequence": [-1]}, "row_sequence of row 0 is -1"),
        ({"row_position": [2]}, r"row 0 is at position 2, tokens holds \[0, 2\)"),
        ({"row_position": [-1]}, "row 0 is at position -1"),
        ({"tokens": [[-5, 0]]}, "token -5 at position 0"),
    ],
)
def test_embed_refuses_bad_step_data(change: dict[str, list[int]], message: str) -> None:
    tensors = [
        TensorSpec("table", (10, 4), F32, WEIGHT),
        TensorSpec("tokens", (1, 2), I32, STATE),
        TensorSpec("row_sequence", (1,), I32, INPUT),
        TensorSpec("row_position", (1,), I32, INPUT),
        TensorSpec("row_count", (1,), I32, INPUT),
        TensorSpec("out", (1, 4), F32, ACTIVATION),
    ]
    operands: dict[str, Any] = {
        name: i
        for i, name in enumerate(
            ["table", "tokens", "row_sequence", "row_position", "row_count", "out"]
        )
    }
    embed = Embed(**operands, row_begin=0, row_end=1, column_begin=0, column_end=4)
    values = {"row_count": torch.tensor([1])} | {k: torch.tensor(v) for k, v in change.items()}
    executable, _ = load(Program.build(tensors, [embed], [[0]]), None, values)
    with pytest.raises(MachineFault, match=message):
        executable.run()


def test_an_interrupt_ends_a_run() -> None:
    program = Program.build([], [Noop(waits=[Wait(0, 1)])], [[0]], barriers=["never"])
    executable, _ = load(program, CpuMachine(timeout=60))
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        executable.run()
    assert time.monotonic() - begin < 10
    load(ring(2, 1, False), None, RING_VALUES)[0].run()


def test_a_long_run_can_be_interrupted_while_it_makes_progress() -> None:
    executable, _ = load(Program.build([], [Noop()], [[0], [0]]))
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        executable.run(4_000_000_000)


@pytest.mark.parametrize("asleep", [False, True])
def test_a_forked_child_can_run(asleep: bool) -> None:
    """Whether the parent's threads, which it has not, still wait for work or sleep."""
    machine = CpuMachine()
    executable, memory = load(ring(2, 1, False), machine, RING_VALUES)
    executable.run()
    if asleep:
        time.sleep(0.05)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # one that waits for ever ends too
        status = 1
        try:
            executable.run()
            status = 0 if memory["start"][0, 0] == 4 else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_unknown_opcodes_and_barriers_are_refused() -> None:
    program = Program.build([], [Noop(waits=[Wait(2, 1)])], [[0]], barriers=["b"])
    with pytest.raises(ValueError, match="a wait names no barrier"):
        load(program)
    words = Program.build([], [Noop()], [[0]])
    words.words[0, 0] = 77
    with pytest.raises(ValueError, match="opcode 77 is unknown to the compiled extension: install"):
        load(words)


def test_a_tensor_that_memory_lacks_is_named() -> None:
    program = Program.build([TensorSpec("x", (1, 4), F32, STATE)], [Noop()], [[0]])
    with pytest.raises(ValueError, match="tensor x of the program is not in memory"):
        CpuMachine().load(program, Memory(), verify=False)


def test_unknown_levels_are_refused() -> None:
    with pytest.raises(ValueError, match="no level sse7"):
        CpuMachine(level="sse7")


def test_working_memory_is_what_the_instruction_declares() -> None:
    program = product_program(F32, F32, 3, 64, 32, (0, 3), (0, 32))
    memory = Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine(check_resources=True).load(program, memory, verify=False)
    executable.execute_one(0)
    declared = program.instructions[0].working_bytes(program.tensors)
    assert 0 < executable.arena_used <= declared


# Arithmetic.


def product_program(
    weight: DType,
    x: DType,
    rows: int,
    k: int,
    columns: int,
    row_range: tuple[int, int],
    column_range: tuple[int, int],
) -> Program:
    tensors = [
        TensorSpec("x", (rows, k), x, INPUT),
        TensorSpec("weight", (columns, k), weight, WEIGHT),
        TensorSpec("squares", (rows, squares_of(k)), F32, INPUT),
        TensorSpec("out", (rows, columns), F32, STATE),
    ]
    inst = Matmul(
        x=0,
        weight=1,
        x_squares=2,
        out=3,
        row_begin=row_range[0],
        row_end=row_range[1],
        column_begin=column_range[0],
        column_end=column_range[1],
        x_rows=row_range[1],
        tile=0,
        part=0,
        part_k=k,
        eps=1e-5,
    )
    return Program.build(tensors, [inst], [[0]])


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("rows", "k", "columns"), [(11, 100, 40), (70, 1300, 35), (23, 4200, 19)])
def test_products_do_not_depend_on_the_tile(
    level: str, dtype: DType, rows: int, k: int, columns: int
) -> None:
    """Bit for bit: with rows alone, in any company, in any columns, whole rows held or slices."""
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k), torch.randn(columns, k)
    if dtype is BF16:
        x, weight = x.bfloat16(), weight.bfloat16()
    values = {"x": x, "weight": weight, "squares": sums_of_squares(x)}
    machine = CpuMachine(level=level)

    def run(row_range: tuple[int, int], column_range: tuple[int, int]) -> torch.Tensor:
        program = product_program(dtype, dtype, rows, k, columns, row_range, column_range)
        executable, memory = load(program, machine, values)
        executable.run()
        return memory["out"][row_range[0] : row_range[1], column_range[0] : column_range[1]]

    whole = run((0, rows), (0, columns))
    rng = np.random.default_rng(0)
    for _ in range(12):
        top, bottom = sorted(int(i) for i in rng.choice(rows + 1, 2, replace=False))
        left, right = sorted(int(i) for i in rng.choice(columns + 1, 2, replace=False))
        assert torch.equal(run((top, bottom), (left, right)), whole[top:bottom, left:right])
    assert torch.equal(run((3, 4), (0, columns)), whole[3:4])


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 33, 64, 100])
def test_bfloat16_products_of_any_number_of_rows_agree_with_torch(level: str, rows: int) -> None:
    torch.manual_seed(rows)
    k, columns = 544, 70
    x, weight = torch.randn(rows, k).bfloat16(), torch.randn(columns, k).bfloat16()
    program = product_program(BF16, BF16, rows, k, columns, (0, rows), (0, columns))
    executable, memory = load(
        program, CpuMachine(level=level), {"x": x, "weight": weight, "squares": sums_of_squares(x)}
    )
    executable.run()
    scale = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5)
    wanted = scale * (x.double() @ weight.double().T)
    assert (memory["out"] - wanted).abs().max() < 1e-4


def test_not_a_number_beside_a_row_does_not_reach_it() -> None:
    """Padding multiplies nothing that lies behind a row or beside a tile."""
    rows, k, columns = 20, 40, 20
    x, weight = torch.ones(rows, k).bfloat16(), torch.ones(columns, k).bfloat16()
    x[17:] = torch.nan
    weight[18:] = torch.nan
    program = product_program(BF16, BF16, rows, k, columns, (0, 17), (0, 18))
    executable, memory = load(
        program, None, {"x": x, "weight": weight, "squares": sums_of_squares(x)}
    )
    executable.run()
    assert torch.isfinite(memory["out"]).all()
    assert (memory["out"][17:] == 0).all()


def sequence_of_values(dtype: DType) -> Sequence[float]:
    return [
        0.0,
        -0.0,
        1.0,
        -1.5,
        3.0e38,
        1.0e-38,
        float("inf"),
        float("-inf"),
        1.00390625,
        1.01171875,
    ]


@pytest.mark.parametrize("level", levels())
def test_rounding_to_bfloat16_is_that_of_torch(level: str) -> None:
    torch.manual_seed(0)
    values = torch.cat([torch.tensor(sequence_of_values(F32)), torch.randn(1014)]).reshape(1, -1)
    tensors = [TensorSpec("x", (1, 1024), F32, STATE), TensorSpec("y", (1, 1024), BF16, STATE)]
    executable, memory = load(
        Program.build(tensors, [copy(0, 1, 1024)], [[0]]), CpuMachine(level=level), {"x": values}
    )
    executable.run()
    assert torch.equal(memory["y"], values.to(TORCH_DTYPE[BF16]))


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    ("block_size", "group", "head_dim"), [(16, 4, 64), (24, 3, 20), (80, 1, 7), (16, 40, 64)]
)
def test_attention_of_a_row_does_not_depend_on_the_rows_beside_it(
    level: str, dtype: DType, block_size: int, group: int, head_dim: int
) -> None:
    """Bit for bit, and as torch computes it."""
    # Two sequences of a step: the first has 21 rows up to position 149, the other two rows.
    sequences = [0] * 21 + [1] * 2
    positions = [*range(129, 150), 0, 1]
    rows, kv_heads, blocks = len(sequences), 2, -(-150 // block_size)
    generator = torch.Generator().manual_seed(block_size)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(TORCH_DTYPE[dtype])

    values = {
        "q": random(rows, kv_heads * group * head_dim),
        "k": random(2 * blocks, kv_heads, block_size, head_dim),
        "v": random(2 * blocks, kv_heads, block_size, head_dim),
        "sequence": torch.tensor(sequences, dtype=torch.int32),
        "position": torch.tensor(positions, dtype=torch.int32),
        "table": torch.arange(2 * blocks, dtype=torch.int32).flip(0).view(2, blocks),
    }
    tensors = [
        TensorSpec(name, tuple(value.shape), I32 if value.dtype == torch.int32 else dtype, STATE)
        for name, value in values.items()
    ]
    tensors.append(TensorSpec("out", tuple(values["q"].shape), dtype, STATE))

    def run(top: int, bottom: int) -> torch.Tensor:
        inst = Attention(
            q=0,
            k_cache=1,
            v_cache=2,
            row_sequence=3,
            row_position=4,
            block_table=5,
            out=6,
            row_begin=top,
            row_end=bottom,
            head_begin=0,
            head_end=kv_heads,
            split=0,
            num_splits=1,
            chunk=block_size,
            context=150,
            step_rows=rows,
            scale=0.25,
        )
        executable, memory = load(
            Program.build(tensors, [inst], [[0]]), CpuMachine(level=level), values
        )
        executable.run()
        return memory["out"][top:bottom].clone()

    together = run(0, rows)
    for row in range(rows):
        assert torch.equal(run(row, row + 1), together[row : row + 1]), row
    for row, (sequence, position) in enumerate(zip(sequences, positions, strict=True)):
        keys, weighted = (
            values[name]
            .float()[values["table"][sequence].long()]  # [blocks, kv_heads, block_size, d]
            .transpose(0, 1)
            .reshape(kv_heads, -1, head_dim)[:, : position + 1]
            .repeat_interleave(group, 0)
            for name in "kv"
        )
        q = values["q"][row].float().view(kv_heads * group, 1, head_dim)
        want = torch.nn.functional.scaled_dot_product_attention(q, keys, weighted, scale=0.25)
        near = 1e-5 if dtype is F32 else 1e-2
        torch.testing.assert_close(together[row].float(), want.flatten(), rtol=near, atol=near)


# The machine gives up after 0.5 s, while the interpreter of Python is ending and has taken the GIL.
ENDING = """
import threading, time
from megavm.instructions.noop import Noop
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.isa import Wait
from megavm.vm.memory import Memory
from megavm.vm.program import Program

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

slow = Slow()
program = Program.build([], [Noop(waits=[Wait(0, 1)])], [[0]], barriers=["never"], workers=1)
executable = CpuMachine(timeout=0.5).load(program, Memory(), verify=False)
threading.Thread(target=executable.run, args=(1,), daemon=True).start()
time.sleep(0.1)
"""


def test_a_run_in_a_daemon_thread_does_not_abort_the_process_that_ends() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
