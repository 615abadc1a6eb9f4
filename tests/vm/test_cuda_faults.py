"""Faults of the GPU: what the records of a launch become, and launches that are made to fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_reference import check_example, check_missing_mask, masked_example
from faults_of_lanes import CASES, Case, check_fault_of_lanes

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.embed import Embed
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.sample import Sample
from megavm.vm.cuda.faults import (
    FaultKind,
    Record,
    SemaphoreKind,
    fault_names,
    sentence,
    waiting_for,
)
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, TensorKind, TensorSpec

STATE, ACTIVATION, INPUT, WEIGHT = (
    TensorKind.STATE,
    TensorKind.ACTIVATION,
    TensorKind.INPUT,
    TensorKind.WEIGHT,
)
EMBED_TENSORS = [
    TensorSpec("table", (10, 4), F32, WEIGHT),
    TensorSpec("tokens", (1, 2), I32, STATE),
    TensorSpec("row_sequence", (1,), I32, INPUT),
    TensorSpec("row_position", (1,), I32, INPUT),
    TensorSpec("row_count", (1,), I32, INPUT),
    TensorSpec("out", (1, 4), F32, ACTIVATION),
]


def embed() -> Embed:
    names = [t.name for t in EMBED_TENSORS]
    operands: dict[str, Any] = {name: i for i, name in enumerate(names)}
    return Embed(**operands, row_begin=0, row_end=1, column_begin=0, column_end=4)


# The records, without a GPU.


def record(kind: int, *rest: int, warp: int = 0) -> Record:
    return Record.read(3, warp, (kind, *rest))


@pytest.mark.parametrize(
    ("cls", "fault", "arguments", "want"),
    [
        (
            Embed,
            "ROW_SEQUENCE",
            (0, 0, 2**32 - 1, 4),
            "row_sequence of row 0 is -1, tokens has 4 seq",
        ),
        (Embed, "POSITION", (5, 0, 9, 8), "row 5 is at position 9, tokens holds [0, 8)"),
        (
            Embed,
            "TOKEN",
            (1, 6, 99, 50),
            "token 99 at position 6 of sequence 1 is outside the vocabul",
        ),
        (Attention, "ROW_SEQUENCE", (0, 0, 5, 4), "row_sequence of row 0 is 5, block_table has 4"),
        (
            Attention,
            "KV_BLOCK",
            (1, 2, 70, 64),
            "block table entry [1, 2] is 70, the KV cache has 64",
        ),
        (QkvRope, "POSITION", (5, 0, 9, 8), "row 5 is at position 9, rope holds [0, 8)"),
        (QkvRope, "POSITION", (5, 0, 9, 7), "row 5 is at position 9, block_table holds [0, 7)"),
        (
            Sample,
            "POSITION",
            (5, 0, 9, 8),
            "row 5 is at position 9, tokens, but for its last column",
        ),
        (AdjustLogits, "NUM_STOP", (2, 0, 33, 32), "NUM_STOP of sequence 2 is 33"),
        (
            AdjustLogits,
            "MASKS",
            (2, 0, 6, 7),
            "the host has not written mask 7 of row 2, the last one is 6",
        ),
        (Matmul, "ROW_INDEX", (2, 0, 33, 32), "row_index of row 2 is 33, expected below 32"),
        (Copy, "TOKEN", (1, 2, 3, 4), "fault TOKEN (row 1, word 2, value 3, target 4)"),
        (Embed, 77, (1, 2, 3, 4), "fault 77 (row 1, word 2, value 3, target 4)"),
    ],
)
def test_what_an_instruction_found_is_a_sentence(
    cls: type[Instruction], fault: str | int, arguments: tuple[int, ...], want: str
) -> None:
    code = fault if isinstance(fault, int) else fault_names().index(fault)
    found = record(FaultKind.INSTRUCTION, 0, 0, code, *arguments)
    operands: dict[str, Any] = {f.name: 0 for f in cls.fields}
    inst = cls(**operands)
    assert sentence(found, inst, [TensorSpec("rope", (8, 4), F32, WEIGHT)]).startswith(want)


def test_waits_are_told_in_words() -> None:
    inst = Copy(
        x=0, out=1, x_row=0, x_column=0, row_begin=0, row_end=1, column_begin=0, column_end=4
    )
    tensors = [TensorSpec("t", (1, 4), F32, ACTIVATION, True), TensorSpec("y", (1, 4), F32, STATE)]
    operand = [f.name for f in Copy.fields].index("x")
    barrier = record(FaultKind.BARRIER, 0, 0, 1, 0, 0, 5, 7)
    assert waiting_for(barrier, inst, tensors, ["a", "b"]) == "barrier 1 (b): value 5, target 7"
    word = record(FaultKind.ABORTED << 8 | FaultKind.WORD, 0, 0, operand, 0, 3, 0, 0)
    expected = "tensor t, row 0, word 3: not stored in this step"
    assert waiting_for(word, inst, tensors, []) == expected
    step = record(FaultKind.BARRIER, 0, 0, 2, 0, 0, 5, 7)
    expected = "the end of the last step but one: value 5, target 7"
    assert waiting_for(step, inst, tensors, ["a", "b"]) == expected
    page = record(FaultKind.SEMAPHORE, 0, 0, SemaphoreKind.PAGE_ARRIVED, 7, 0, 0, 1)
    assert waiting_for(page, inst, tensors, []) == "page 7 to arrive (phase 1)"


def test_the_record_that_says_most_comes_first() -> None:
    aborted = record(FaultKind.ABORTED << 8 | FaultKind.BARRIER, *[0] * 7)
    page = record(FaultKind.SEMAPHORE, *[0] * 7)
    tag = record(FaultKind.WORD, *[0] * 7, warp=8)
    wrong = record(FaultKind.INSTRUCTION, *[0] * 7, warp=10)
    ordered = sorted([aborted, page, tag, wrong], key=lambda r: r.order)
    assert ordered == [wrong, tag, page, aborted]
    assert [r.role for r in ordered] == ["storer", "loader", "consumer", "consumer"]


# Launches that fail.


@pytest.fixture(scope="module")
def impatient(make_cuda_machine: Callable[..., CudaMachine]) -> CudaMachine:
    return make_cuda_machine(timeout=0.2)


def test_a_choice_whose_mask_does_not_come_says_so(impatient: CudaMachine) -> None:
    check_missing_mask(impatient)
    # Its mask is there, and the next launch runs.
    check_example(impatient, masked_example(), alone=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_some_lanes_find_is_told_of_their_instruction(
    impatient: CudaMachine, case: Case
) -> None:
    check_fault_of_lanes(impatient, case)
    check_that_it_works(impatient)


def load(
    machine: CudaMachine, program: Program, values: dict[str, Any] | None = None
) -> tuple[Any, Memory]:
    memory = Memory(machine.memory_device)
    memory.allocate(program.tensors)
    for name, value in (values or {}).items():
        memory.write(name, torch.as_tensor(value).reshape(memory.spec(name).shape))
    return machine.load(program, memory, verify=False), memory


def check_that_it_works(machine: CudaMachine) -> None:
    tensors = [TensorSpec("x", (1, 4), F32, STATE), TensorSpec("y", (1, 4), F32, STATE)]
    inst = Copy(
        x=0, out=1, x_row=0, x_column=0, row_begin=0, row_end=1, column_begin=0, column_end=4
    )
    executable, memory = load(machine, Program.build(tensors, [inst], [[0]]), {"x": [1.0, 2, 3, 4]})
    executable.run(3)
    assert memory["y"].tolist() == [[1, 2, 3, 4]]
    assert memory.epoch == 3


def test_a_wait_for_nothing_names_worker_instruction_barrier_value_and_target(
    impatient: CudaMachine,
) -> None:
    program = Program.build(
        [TensorSpec("x", (1, 4), F32, STATE)],
        [Noop(signal=0), Noop(waits=[Wait(0, 2)], signal=1), Noop()],
        [[0, 1], [2]],
        barriers=["half", "done"],
    )
    executable, memory = load(impatient, program)
    with pytest.raises(MachineFault) as caught:
        executable.run()
    fault = caught.value
    assert "instruction 1 waits for barrier 0 (half): value 1, target 2" in fault.cause
    assert fault.cause.startswith("worker 0 (")
    waiting = [s for s in fault.workers if s.waiting_for.startswith("barrier 0 (half)")]
    assert waiting
    assert {(s.worker, s.instruction, s.disassembly) for s in waiting} == {
        (0, 1, "noop wait(b0 >= 2) signal(b1)")
    }
    assert memory.epoch == 1
    with pytest.raises(MachineFault, match="reset it"):
        executable.run()
    check_that_it_works(impatient)


def test_a_missing_word_names_tensor_row_and_word(impatient: CudaMachine) -> None:
    tensors = [
        TensorSpec("halves", (2, 8), BF16, ACTIVATION, tagged=True),
        TensorSpec("y", (1, 8), F32, STATE),
    ]
    sink = Copy(
        x=0, out=1, x_row=1, x_column=0, row_begin=0, row_end=1, column_begin=0, column_end=8
    )
    executable, memory = load(impatient, Program.build(tensors, [sink], [[0]]))
    memory.epoch = 41
    with pytest.raises(
        MachineFault, match=r"tensor halves, row 1, word \d: not stored in this step"
    ):
        executable.run()
    with pytest.raises(MachineFault, match=r"instruction 0 waits for tensor halves, row 1, word"):
        impatient.load(executable.program, memory, verify=False).execute_one(0)
    check_that_it_works(impatient)


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
def test_embed_refuses_bad_step_data(
    impatient: CudaMachine, change: dict[str, list[int]], message: str
) -> None:
    program = Program.build(EMBED_TENSORS, [embed()], [[0]])
    executable, _ = load(impatient, program, {"row_count": [1]} | change)
    with pytest.raises(MachineFault, match=r"instruction 0 \(embed\): " + message) as caught:
        executable.run()
    (state, *_) = caught.value.workers
    assert (state.worker, state.instruction) == (0, 0)
    check_that_it_works(impatient)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_worker_that_waits_is_named_among_many(impatient: CudaMachine, dynamic: bool) -> None:
    count = 20
    instructions: list[Instruction] = [Noop() for _ in range(count)]
    instructions[13] = Noop(waits=[Wait(0, 1)])
    queues = [list(range(count))] if dynamic else [[i] for i in range(count)]
    program = Program.build(
        [], instructions, queues, barriers=["never"], dynamic=dynamic, workers=count
    )
    executable, _ = load(impatient, program)
    with pytest.raises(
        MachineFault, match=r"instruction 13 waits for barrier 0 \(never\): value 0"
    ):
        executable.run()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("missing", ["x", "x_squares", "residual", "addends"])
def test_a_product_names_the_tagged_word_that_it_waits_for(
    impatient: CudaMachine, missing: str, rows: int
) -> None:
    def activation(name: str, columns: int) -> TensorSpec:
        return TensorSpec(name, (rows, columns), F32, ACTIVATION, tagged=name == missing)

    tensors = [
        activation("x", 64),
        TensorSpec("weight", (16, 64), BF16, WEIGHT),
        activation("x_squares", 8),
        activation("residual", 16),
        activation("addends", 16),
        TensorSpec("out", (rows, 16), F32, STATE),
    ]
    operands: dict[str, Any] = {spec.name: i for i, spec in enumerate(tensors)}
    inst = Matmul(
        **operands,
        row_begin=0,
        row_end=rows,
        column_begin=0,
        column_end=16,
        part=0,
        part_k=64,
        x_rows=rows,
        tile=0,
        eps=1e-5,
    )
    executable, memory = load(impatient, Program.build(tensors, [inst], [[0]]))
    memory.epoch = 6
    with pytest.raises(MachineFault, match=rf"tensor {missing}, row \d, word \d+: not stored"):
        executable.run()
    check_that_it_works(impatient)
