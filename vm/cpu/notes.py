"""The record that the CPU machine traces for every instruction. codegen.py writes it to ``note.hpp``."""

from __future__ import annotations

from megavm.vm.abi import I64, Member, Struct
from megavm.vm.events import Event

NOTE = Struct(
    "Note",
    "Times of one instruction on its worker, in nanoseconds of the steady clock; 0: did not happen.",
    (
        Member("fetched", I64),
        Member("ready", I64, "the waits of the header are over"),
        Member("inputs", I64, "`ready` plus the time that the kernel waited for tagged words"),
        Member("end", I64, "the kernel has returned"),
        Member("signalled", I64, "after the signal"),
        Member("worker", I64),
    ),
)
# A worker begins an instruction when it fetches it, and does not separate computing from storing.
EVENTS = {
    event.label: NOTE.index(member)
    for event, member in (
        (Event.FETCHED, "fetched"),
        (Event.BEGIN, "fetched"),
        (Event.READY, "ready"),
        (Event.INPUTS, "inputs"),
        (Event.COMPUTED, "end"),
        (Event.END, "end"),
        (Event.SIGNALLED, "signalled"),
    )
}
WORKER_COLUMN = NOTE.index("worker")
