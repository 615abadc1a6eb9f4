"""The instruction set: one folder per instruction. Every folder is found and registered.

Each folder ``<name>/`` holds the declaration (``__init__.py``), the meaning in torch (``reference.py``), the
kernels of the CPU machine (``cpu.hpp``) and the GPU (``cuda.cuh``), and examples for tests (``examples.py``).
``lower.py`` cuts an operation of a graph into instructions, if graphs have that operation.

``product/`` is no instruction: it holds what the instructions that multiply by a weight have in common.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import MappingProxyType

from megavm.vm.isa import Instruction


@functools.cache
def instruction_set() -> MappingProxyType[int, type[Instruction]]:
    """Every declared instruction by opcode, in the order of the opcodes.

    Raises TypeError when a folder declares no or several instructions, is not named after its
    instruction, or uses an opcode twice.
    """
    by_opcode: dict[int, type[Instruction]] = {}
    for info in pkgutil.iter_modules(__path__):
        if not info.ispkg:
            continue
        module = importlib.import_module(f"{__name__}.{info.name}")
        declared = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, Instruction)
            and value.__module__ == module.__name__
        ]
        if declared and all("opcode" not in vars(cls) for cls in declared):
            continue  # the base of several instructions
        if len(declared) != 1 or declared[0].name() != info.name:
            names = ", ".join(d.__name__ for d in declared) or "nothing"
            raise TypeError(
                f"instructions/{info.name} declares {names}: expected one class of its name"
            )
        cls = declared[0]
        if cls.opcode in by_opcode:
            raise TypeError(
                f"{cls.__name__} and {by_opcode[cls.opcode].__name__} both have opcode {cls.opcode}"
            )
        by_opcode[cls.opcode] = cls
    return MappingProxyType(dict(sorted(by_opcode.items())))


def instruction_of(kind: str) -> type[Instruction] | None:
    """The instruction that executes operations of a kind: the one of that name, or None."""
    return next((cls for cls in instruction_set().values() if cls.name() == kind), None)


def decode(data: bytes | memoryview) -> Instruction:
    """The instruction that 128 bytes encode.

    Raises ValueError when the opcode is unknown or the length is wrong.
    """
    opcode = int.from_bytes(bytes(data[:4]), "little")
    cls = instruction_set().get(opcode)
    if cls is None:
        known = ", ".join(f"{c.name()} {o}" for o, c in instruction_set().items())
        raise ValueError(f"opcode {opcode} is unknown (known: {known})")
    return cls.decode(data)
