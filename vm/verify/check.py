"""A part of the verification: the program that it checks, and how its sentences name things."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm.isa import Instruction
from megavm.vm.program import Program
from megavm.vm.verify.error import VerificationError

Ints = npt.NDArray[np.int64]


class Check:
    """The base of the checks of a program for a machine."""

    def __init__(self, program: Program, machine: str) -> None:
        self.program = program
        self.machine = machine
        self.tensors = program.tensors
        self.words = program.words

    def _name(self, instruction: int) -> str:
        """``instruction 118 (matmul, layers.3.o_proj)``"""
        cls = instruction_set()[int(self.words[instruction, 0])]
        label = self.program.labels[instruction]
        return f"instruction {instruction} ({cls.name()}{f', {label}' if label else ''})"

    def _place(self, instruction: int, rank: int = 0) -> str:
        """``_name``, with the worker of a static queue and the rank, if there are several."""
        worker = f"worker {self.program.worker_of()[instruction]}"
        if self.program.dynamic:
            worker = "any worker" if self.program.ranks > 1 else ""
        if self.program.ranks > 1:
            worker += f" of rank {rank}"
        return f"{self._name(instruction)}{worker and f' on {worker}'}"

    def _barrier(self, number: int) -> str:
        name = self.program.barriers[number]
        return f"barrier {number}{f' ({name})' if name else ''}"

    def _fail(self, instruction: int | np.integer[Any], sentence: str) -> NoReturn:
        raise VerificationError(f"{self._name(int(instruction))}: {sentence}")

    def _by_class(self) -> Iterator[tuple[type[Instruction], Ints]]:
        """The instruction classes that occur in the program, and the numbers of their instructions."""
        for opcode, cls in instruction_set().items():
            numbers = np.flatnonzero(self.words[:, 0] == opcode)
            if len(numbers):
                yield cls, numbers
