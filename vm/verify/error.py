"""Why a program must not be launched."""

from __future__ import annotations

from dataclasses import dataclass

from megavm.vm.tensors import Region


class VerificationError(ValueError):
    """A program must not be launched; the message is one sentence that says why.

    ``rule`` is "form", "deadlock", "unordered", "unwritten", "tag_unreachable", "tag_ambiguous", or "limit":
    the program is too large to be analysed.
    ``accesses`` are the accesses at fault, in the order of the execution that was analysed.
    """

    def __init__(
        self, sentence: str, rule: str = "form", accesses: tuple[Access, ...] = ()
    ) -> None:
        super().__init__(sentence)
        self.rule = rule
        self.accesses = accesses


@dataclass(frozen=True)
class Access:
    """A region that an instruction reads or writes in a step."""

    instruction: int
    region: Region
    write: bool
    step: int = 0
    rank: int = 0  # the rank that runs the instruction
    tensor_rank: int = 0
