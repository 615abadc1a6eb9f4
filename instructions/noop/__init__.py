"""Does nothing but wait and signal: joins several barriers into one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megavm.vm.isa import Instruction
from megavm.vm.tensors import Region, TensorSpec


class Noop(Instruction):
    """(no effect)

    It only waits and signals, and so joins up to three barriers into one.
    """

    opcode = 1

    def reads(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        return iter(())

    def writes(self, tensors: Sequence[TensorSpec]) -> Iterator[Region]:
        return iter(())
