"""The events of an instruction that machines trace; machines, device code and profiler share their names."""

from __future__ import annotations

from typing import Final, Self

from megavm.vm.abi import Code

# The number of a worker in a trace may have that of its SM above it, plus 1: 0 is an unknown one.
SM_SHIFT: Final = 32


class Event(Code):
    """A point in time during an instruction, and the role that it belongs to.

    The members are in the order of a trace; the value is the event's column in a trace of the GPU.
    """

    role: str

    def __new__(cls, column: int, role: str, doc: str) -> Self:
        member = int.__new__(cls, column)
        member._value_ = column
        member.role, member.doc = role, doc
        return member

    FETCHED = 0, "controller", "the instruction is decoded"
    READY = 1, "controller", "the waits of its header are over"
    LOAD_BEGIN = 2, "loader", "before its first load is issued"
    LOAD_ISSUED = 3, "loader", "after its last load was issued"
    LOAD_ARRIVED = 8, "loader", "its last load is there"
    BEGIN = 4, "consumer", "the consumers turn to it"
    INPUTS = 5, "consumer", "its inputs are there, tagged words too"
    COMPUTED = 6, "consumer", "its sums are complete"
    END = 7, "consumer", "its results are stored"
    SIGNALLED = 9, "storer", "its barrier is signalled"

    @property
    def label(self) -> str:
        """Its name in traces."""
        return self.name.lower()
