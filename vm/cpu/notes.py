"""What the CPU machine notes of an instruction when it traces. codegen.py makes ``note.hpp`` from here."""

from __future__ import annotations

from megavm.vm.abi import I64, Member, Struct
from megavm.vm.events import Event

NOTE = Struct(
    "Note",
    "When a worker did what with one instruction, in nanoseconds of the steady clock; 0: it did not.",
    (
        Member("fetched", I64),
        Member("ready", I64, "the waits of the header are over"),
        Member("inputs", I64, "`ready` and all the time that the kernel waited for tagged words"),
        Member("end", I64, "the kernel has returned"),
        Member("signalled", I64, "after the signal"),
        Member("worker", I64),
    ),
)
# A worker turns to an instruction when it fetches it, and computes and stores in one go.
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
