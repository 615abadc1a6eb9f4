"""Proves before a launch that a program is well-formed, ends, and computes the same at any timing.

``verify`` checks, in this order:

1. *Form.* Header and operand words, tensor handles and types, queues, and each instruction's own checks
   of its operands; every tile lies inside its tensor; no instruction writes a weight or an input. On
   the CPU, every instruction fits into the working memory. On the GPU, it fits into scratch, and the
   program needs one kernel and one layout of each tensor.
2. *Progress.* Every tagged word that is read has one writer in a step. The program does not deadlock: with
   static queues in their order, with a dynamic queue for any number of workers.
3. *Order.* Every execution orders any two accesses to overlapping regions if one is a write, within a
   step and from step to step. Activations are written before they are read. (A read of rows that
   earlier steps wrote is ordered after those writes, and conflicts with no other.)

form.py and declarations.py check the first. C++ checks the second and third (order.py); happens_before.hpp states the model, and why two steps are enough. A program
of several ranks is checked as one program: expand.py makes one queue of each rank's.
"""

from __future__ import annotations

from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.verify.declarations import DeclarationCheck
from megavm.vm.verify.error import Access, VerificationError
from megavm.vm.verify.form import FormCheck
from megavm.vm.verify.order import OrderCheck

__all__ = ["Access", "VerificationError", "verify"]


def verify(program: Program, machine: str = "reference") -> None:
    """Return if the program may be launched on a machine, for any number of steps.

    ``machine``: "cpu", "cuda", or "reference", which runs every well-formed program.

    Raises VerificationError, with one sentence that names instruction, field and values; ValueError when
    the machine is unknown.
    """
    if machine not in TARGETS:
        raise ValueError(f"machine {machine!r} is unknown: expected {', '.join(TARGETS)}")
    FormCheck(program, machine).check()
    declarations = DeclarationCheck(program, machine)
    accesses = declarations.accesses()
    OrderCheck(program, machine).check(accesses, declarations.alike)
