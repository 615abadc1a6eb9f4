"""Tagged words as a GPU stores them: no step ever takes those of another one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megavm.instructions.copy import Copy
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.emulated import EmulatedMachine, HostArena, reason_unavailable
from megavm.vm.cuda.exchange import make_exchanges
from megavm.vm.cuda.launch import COPIES
from megavm.vm.differential import first_divergence
from megavm.vm.isa import Wait
from megavm.vm.machine import MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32, DType, TensorKind, TensorSpec
from megavm.vm.words import EMPTY, Turns, from_copies, to_copies

emulated = pytest.mark.skipif(reason_unavailable() is not None, reason="no C++ compiler")
SHAPE = (3, 40)


def passing_on(
    through: Sequence[str],
    dtype: DType = F32,
    lost: Sequence[str] = (),
    *,
    ordered: bool = False,
    dynamic: bool = False,
) -> Program:
    """Worker 0 copies x to tagged tensors, worker 1 copies each of them to a result of its own.

    Worker 0 has other work before that, so that worker 1 looks for words that are not stored yet. Nothing writes
    the tensors of ``lost``, so that a run does not end. ``ordered``: as the verifier wants it.
    """
    specs = [
        TensorSpec("x", SHAPE, dtype, TensorKind.STATE),
        TensorSpec("work", (32, 512), F32, TensorKind.STATE),
        TensorSpec("work done", (32, 512), F32, TensorKind.STATE),
    ]
    tile: dict[str, Any] = {"x_row": 0, "x_column": 0, "row_begin": 0, "row_end": 32}
    instructions = [Copy(x=1, out=2, column_begin=0, column_end=512, **tile)]
    queues: tuple[list[int], list[int]] = ([0], [])
    rows = {"x_row": 0, "x_column": 0, "row_begin": 0, "row_end": SHAPE[0]}

    def copy(worker: int, x: int, out: int) -> None:
        queues[worker].append(len(instructions))
        columns = {"column_begin": 0, "column_end": SHAPE[1]}
        # Worker 0 waits for the signals of earlier steps, which worker 1 gives when it has read everything.
        waits = [Wait(0, 0)] if ordered and worker == 0 else []
        signal = 0 if ordered and worker == 1 else None
        instructions.append(Copy(waits=waits, signal=signal, x=x, out=out, **rows, **columns))

    for name in (*through, *lost):
        specs += [
            TensorSpec(name, SHAPE, dtype, TensorKind.ACTIVATION, tagged=True),
            TensorSpec(f"from {name}", SHAPE, dtype, TensorKind.STATE),
        ]
        if name not in lost:
            copy(0, 0, len(specs) - 2)
        copy(1, len(specs) - 2, len(specs) - 1)
    shared = [[number for queue in queues for number in queue]]
    barriers = ["read"] if ordered else []
    return Program.build(
        specs,
        instructions,
        shared if dynamic else [*queues, [], []],
        barriers=barriers,
        dynamic=dynamic,
        workers=4,
    )


class Runs:
    """Programs that share a memory on an emulated GPU."""

    def __init__(self, timeout: float = 60.0) -> None:
        self.machine = EmulatedMachine(4, timeout)
        self.memory = self.machine.memory()
        self.value = 0.0

    def run(self, program: Program, steps: int = 1) -> bool:
        """Run a program on a new value of x; whether all its results are that."""
        self.memory.allocate(program.tensors)
        executable = self.machine.load(program, self.memory, verify=False)
        self.value += 1.0
        self.memory.write("x", torch.full(SHAPE, self.value))
        executable.run(steps)
        results = [s.name for s in program.tensors if s.name.startswith("from ")]
        return all(bool((self.memory[name] == self.value).all()) for name in results)


def alternate(dtype: DType) -> bool:
    """Whether programs whose tagged tensors are partly the same compute what they should, in any order."""
    runs, choice = Runs(), random.Random(3)
    programs = [passing_on(names, dtype) for names in ("t", "u", "tu", "t")]
    return all(runs.run(choice.choice(programs), choice.choice((1, 1, 2, 5))) for _ in range(30))


@emulated
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_programs_that_share_some_words_run_in_any_order(dtype: DType) -> None:
    assert alternate(dtype)


@emulated
def test_that_needs_words_to_be_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(turns: Turns, names: frozenset[str]) -> int:
        return turns._next.setdefault(names, 0)

    monkeypatch.setattr(Turns, "begin", begin)
    # Where other work runs beside it, no worker may look for words before they are stored.
    assert not all(alternate(F32) for _ in range(20))


@emulated
def test_what_a_broken_run_has_stored_is_not_taken_later() -> None:
    runs = Runs(timeout=1.0)
    with pytest.raises(MachineFault, match=r"tensor u, row ., word .*: not stored in this step"):
        runs.run(passing_on("t", lost="u"))
    assert runs.run(passing_on("t"), 3)
    assert runs.run(passing_on("tu"), 2)


@emulated
def test_a_value_with_the_bits_of_an_empty_word_arrives_as_another_nan() -> None:
    runs, program = Runs(), passing_on("t")
    runs.memory.allocate(program.tensors)
    executable = runs.machine.load(program, runs.memory, verify=False)
    runs.memory.write("x", torch.full(SHAPE, -1, dtype=torch.int32).view(torch.float32))
    executable.run(3)
    assert bool(runs.memory["from t"].isnan().all())


@emulated
def test_a_reset_that_nothing_waited_before_leaves_no_words() -> None:
    runs = Runs(timeout=1.0)
    program = passing_on("t", lost="u")
    runs.memory.allocate(program.tensors)
    executable = runs.machine.load(program, runs.memory, verify=False)
    executable.launch(4)
    executable.reset()
    assert runs.memory.turns.begin(frozenset("tu")) is None  # first all words are emptied
    assert runs.run(passing_on("tu"))


@emulated
def test_words_pass_through_a_common_queue_for_many_steps() -> None:
    runs, program = Runs(), passing_on("t", dynamic=True)
    assert all(runs.run(program, steps) for steps in (7, 1, 6))


@emulated
def test_a_gpu_and_a_cpu_agree_step_by_step() -> None:
    program, memory = passing_on("tu", BF16, ordered=True), Memory()
    memory.allocate(program.tensors)
    memory.write("x", torch.rand(SHAPE))
    gpu = EmulatedMachine(4)
    for left, right in ((CpuMachine(4), gpu), (gpu, ReferenceMachine())):
        assert first_divergence(program, memory, left, right, steps=5) is None


def test_ranks_of_a_copy_take_turns_together() -> None:
    twin = Memory(ranks=2).copy()
    assert twin.ranks[1].turns is twin.turns


def test_a_tagged_tensor_that_an_instruction_names_twice_is_refused() -> None:
    specs = [TensorSpec("t", (4, 8), F32, TensorKind.ACTIVATION, tagged=True)]
    tile: dict[str, Any] = {"x_row": 0, "x_column": 0, "row_begin": 2, "row_end": 4}
    copy = Copy(x=0, out=0, column_begin=0, column_end=8, **tile)
    program = Program.build(specs, [copy], [[0]])
    with pytest.raises(
        ValueError, match=r"instruction 0 \(copy\) names the tagged tensor t as x and out"
    ):
        make_exchanges(program)


words = st.lists(st.tuples(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-2, 1)), min_size=4, max_size=4)  # fmt: skip


@given(words, st.integers(0, COPIES - 1), st.integers(0, (1 << 32) - 1))
def test_copies_hold_the_words_of_four_steps(
    given_words: list[tuple[int, int]], turn: int, epoch: int
) -> None:
    tags = [(epoch + 1 + step) & 0xFFFFFFFF for _, step in given_words]
    signed = [tag - (1 << 32) if tag >> 31 else tag for tag in tags]
    natural = torch.tensor([[v, t] for (v, _), t in zip(given_words, signed, strict=True)])
    natural = natural.to(torch.int32).reshape(2, 2, 2)
    copies = torch.zeros(COPIES, 2, 2, dtype=torch.int32)
    to_copies(natural, copies, turn, epoch)
    expected = natural.clone()
    expected[..., 0][expected[..., 0] == EMPTY] = (1 << 31) - 1
    assert torch.equal(from_copies(copies, turn, epoch), expected)


def test_a_tagged_tensor_moves_between_a_cpu_and_a_gpu() -> None:
    spec = TensorSpec("t", (2, 4), F32, TensorKind.ACTIVATION, tagged=True)
    cpu, gpu = Memory(), Memory()
    for memory in (cpu, gpu):
        memory.allocate([spec])
        memory.epoch = 9
    gpu.words = HostArena(1, COPIES)
    gpu.give_copies(["t"])
    assert bool((gpu.tagged_words("t") == 0).all())
    cpu.write("t", torch.arange(8.0).reshape(2, 4))
    gpu.take("t", cpu)
    assert torch.equal(gpu["t"], cpu["t"])
    assert torch.equal(gpu.tagged_words("t"), cpu.storage("t"))
    other, twin = Memory(), gpu.copy()
    other.allocate([spec])
    other.epoch = 9
    other.take("t", gpu)
    assert torch.equal(other.storage("t"), cpu.storage("t"))
    assert torch.equal(twin.storage("t"), cpu.storage("t"))
