"""Launches that end because some lanes of a warp, and not its first one, find bad data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from against_reference import examples_of

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.vm.example import Example
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec


@dataclass(frozen=True)
class Case:
    """An example in whose ``tensor`` the element at ``index`` becomes ``value``; what the fault says of it."""

    instruction: type[Instruction]
    example: str
    tensor: str
    index: tuple[int, ...]
    value: float
    text: str

    def __str__(self) -> str:
        return f"{self.instruction.name()}-{self.example}-{self.tensor}"


NAN = float("nan")


def block(sequence: int, column: int) -> str:
    return rf"block table entry \[{sequence}, {column}\] is 1000, the KV cache has"


ROW_3 = r"row_index of row 3 is 1000, expected below \d+"
CASES = [
    # 10 pairs, 16 fours, 8 eights to a row; of row 38 also the second eight of a thread.
    Case(Copy, "gathered", "row_index", (3,), 1000, ROW_3),
    Case(
        Copy, "gathered fours", "row_index", (2,), -1, r"row_index of row 2 is -1, expected below"
    ),
    Case(Copy, "gathered eights", "row_index", (2,), 1000, "row_index of row 2 is 1000"),
    Case(Copy, "gathered eights", "row_index", (38,), 1000, "row_index of row 38 is 1000"),
    Case(Matmul, "gathered", "row_index", (3,), 1000, ROW_3),
    Case(Matmul, "rows in turn", "row_index", (12,), -7, "row_index of row 12 is -7"),
    Case(Matmul, "sixteen rows, gathered", "row_index", (9,), 1000, "row_index of row 9 is 1000"),
    Case(QkvRope, "multi-head", "row_position", (3,), 1000, "row 3 is at position 1000"),
    Case(QkvRope, "bf16", "row_sequence", (2,), 9, "row_sequence of row 2 is 9"),
    Case(QkvRope, "sixteen rows", "row_position", (9,), -1, "row 9 is at position -1"),
    Case(QkvRope, "matrix", "row_position", (20,), 1000, "row 20 is at position 1000"),
    # Kernels of any shape, of single rows, of a run, of rows of different sequences.
    Case(Attention, "grouped", "block_table", (0, 2), 1000, block(0, 2)),
    Case(Attention, "bf16", "block_table", (2, 2), 1000, block(2, 2)),
    Case(Attention, "fast, prompts", "block_table", (2, 1), 1000, block(2, 1)),
    Case(Attention, "fast, rows apart", "block_table", (3, 2), 1000, block(3, 2)),
    Case(Attention, "fast, rows apart", "row_sequence", (3,), 100, "row_sequence of row 3 is 100"),
    Case(Attention, "fast, few rows apart", "row_position", (5,), 999, "row 5 is at position 999"),
    Case(AdjustLogits, "greedy", "logits", (0, 60), NAN, "logits of row 0 hold NaN"),
    Case(
        AdjustLogits, "everything", "tokens", (0, 3), 5000, "token 5000 at position 3 of sequence 0"
    ),
]


def check_fault_of_lanes(machine: Machine, case: Case) -> None:
    """The fault names the instruction, whether it is the last one of its worker or not."""
    example = next(e for e in examples_of(case.instruction) if e.name == case.example)
    changed = example.values[case.tensor].clone()
    changed[case.index] = case.value
    for more in (0, 3):
        program = late_program(example, more)
        values = {**example.values, case.tensor: changed}
        memory = replace(example, tensors=list(program.tensors), values=values).memory(
            5, machine.memory_device
        )
        text = rf"instruction 1 \({case.instruction.name()}\): {case.text}"
        with pytest.raises(MachineFault, match=text):
            machine.load(program, memory, verify=False).run()


def late_program(example: Example, more: int) -> Program:
    """The example's instruction, ``more`` others behind it; all are in the worker's ring when it begins.

    The worker waits for another one before it: so no warp waits for anything behind it, where it would see
    that the worker stops.
    """
    tensors = [
        *example.tensors,
        *(TensorSpec(name, (1, 4), F32, TensorKind.STATE) for name in ("source", "copied")),
    ]
    x, out = len(tensors) - 2, len(tensors) - 1
    rectangle = {"x_row": 0, "x_column": 0, "row_begin": 0, "row_end": 1, "column_begin": 0}
    first = Copy(x=x, out=out, **rectangle, column_end=4, waits=[Wait(0, 1)])
    others = [Noop() for _ in range(40)]
    instructions = [first, example.instruction, *(Noop() for _ in range(more)), *others]
    instructions.append(Noop(signal=0))
    queues = [list(range(2 + more)), list(range(2 + more, len(instructions)))]
    return Program.build(tensors, instructions, queues, barriers=["late"])
