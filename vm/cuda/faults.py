"""The records that a failed launch on the GPU leaves behind, and the sentences made from them.

codegen.py writes the enumerations and the record to ``faults.hpp``, for device code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megavm.instructions import instruction_set
from megavm.vm.abi import U32, Code, Member, Struct
from megavm.vm.config import (
    CONTROLLER_WARP,
    HEADER_WORDS,
    LOADER_WARP,
    NUM_CONSUMER_WARPS,
    STORER_WARP,
    WAITER_WARP,
)
from megavm.vm.isa import Instruction
from megavm.vm.operands import FieldKind
from megavm.vm.tensors import TensorSpec


class FaultKind(Code):
    """Why a warp stopped, and what the words of its record mean then."""

    NONE = 0
    BARRIER = 1, "thing: barrier; value, target: of its counter"
    WORD = (
        2,
        "thing: operand word of the tensor; row, word",
    )
    SEMAPHORE = 3, "thing: SemaphoreKind; row: its number; target: phase"
    INSTRUCTION = 4, "thing: Fault; row, word, value, target: as its sentence says"
    ABORTED = (
        5,
        "another warp stopped first; the other words are those of the wait that it was in",
    )


class SemaphoreKind(Code):
    """The event that a semaphore stands for, in the words of a fault: a warp waits for ..."""

    PAGE_ARRIVED = 0, "page {number} to arrive"
    PAGE_FINISHED = 1, "page {number} to be free"
    STAGE_RESOLVED = (
        2,
        "the instruction of stage {number}",
    )  # the instruction and its operands may be read
    STAGE_READY = 3, "the waits of stage {number} to end"
    STAGE_STORED = 4, "the results of stage {number} to be stored"
    STAGE_RELEASED = 5, "stage {number} to be free"
    STAGE_HINTED = (
        6,
        "the hint of stage {number}",
    )  # its tagged inputs are likely available
    STAGE_EARLIER = (
        7,
        "the steps before that of stage {number}",
    )  # the part of its waits that rows of earlier steps need
    CONSUMERS = 8, "the other consumers"
    SUMS_ARRIVED = 9, "block {number} of sums to arrive"
    SUMS_FINISHED = (
        10,
        "block {number} of sums to be stored",
    )  # its half of the scratch may be overwritten
    SCALES_ARRIVED = 11, "the scales of the rows, in place {number}"
    SCALES_FINISHED = (
        12,
        "the scales in place {number} to be used",
    )  # they may be overwritten


def fault_names() -> list[str]:
    """The faults that instructions find in their data (Instruction.faults). The code of a fault is its index."""
    return list(dict.fromkeys(name for cls in instruction_set().values() for name in cls.faults))


ROLES = {
    **dict.fromkeys(range(NUM_CONSUMER_WARPS), "consumer"),
    LOADER_WARP: "loader",
    CONTROLLER_WARP: "controller",
    STORER_WARP: "storer",
    WAITER_WARP: "waiter",
}


def recorded(doc: str = "") -> Any:
    """A field of Record that the device writes, as a word of its FaultRecord."""
    return field(metadata={"doc": doc})


@dataclass(frozen=True)
class Record:
    """The FaultRecord of one warp; the words after its kind are declared here."""

    rank: int
    worker: int
    warp: int
    kind: FaultKind
    waited: FaultKind  # the kind of wait that an aborted warp was in, or NONE
    position: int = recorded("static: place in the worker's queue; dynamic: instruction number")
    step: int = recorded("step within the launch")
    thing: int = recorded()
    row: int = recorded()
    word: int = recorded()
    value: int = recorded()
    target: int = recorded()

    @classmethod
    def read(cls, worker: int, warp: int, words: Sequence[int], rank: int = 0) -> Record:
        """A record from the words of a FaultRecord."""
        kind, waited = words[0], 0
        if kind >> 8:
            kind, waited = kind >> 8, kind & 0xFF
        return cls(rank, worker, warp, FaultKind(kind), FaultKind(waited), *map(int, words[1:]))

    @property
    def role(self) -> str:
        return ROLES[self.warp]

    @property
    def condition(self) -> FaultKind:
        """The condition that it waited for, whether it timed out itself or was aborted."""
        return self.waited if self.kind is FaultKind.ABORTED else self.kind

    @property
    def order(self) -> tuple[bool, int, int, int, int]:
        """Sort key: records that say more about the cause come first."""
        kinds = (FaultKind.INSTRUCTION, FaultKind.BARRIER, FaultKind.WORD, FaultKind.SEMAPHORE)
        telling = kinds.index(self.condition) if self.condition in kinds else len(kinds)
        return (self.kind is FaultKind.ABORTED, telling, self.rank, self.worker, self.warp)


FAULT_RECORD = Struct(
    "FaultRecord",
    "What a stopped warp leaves behind.",
    (
        Member("kind", U32, "FaultKind; for an aborted warp kAborted << 8 | kind of wait"),
        *(Member(f.name, U32, f.metadata["doc"]) for f in fields(Record) if "doc" in f.metadata),
    ),
    aligned=32,
)


def sentence(record: Record, inst: Instruction, tensors: Sequence[TensorSpec]) -> str:
    """The sentence for an error that an instruction found in its data."""
    names = fault_names()
    name = names[record.thing] if record.thing < len(names) else str(record.thing)
    if name in inst.faults:
        template = inst.fault(name, record.target, tensors)
    else:
        template = f"fault {name} (row {{row}}, word {{word}}, value {{value}}, target {{target}})"
    return template.format(
        row=record.row, word=record.word, value=_signed(record.value), target=record.target
    )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def waiting_for(
    record: Record,
    inst: Instruction | None,
    tensors: Sequence[TensorSpec],
    barriers: Sequence[str],
) -> str:
    """A description of the wait in which the warp was; "" when it did not wait."""
    if record.condition is FaultKind.BARRIER:
        if record.thing >= len(barriers):
            return f"the end of the last step but one: value {record.value}, target {record.target}"
        name = barriers[record.thing]
        return f"barrier {record.thing} ({name}): value {record.value}, target {record.target}"
    if record.condition is FaultKind.WORD:
        name = _operand(record.thing, inst, tensors)
        return f"tensor {name}, row {record.row}, word {record.word}: not stored in this step"
    if record.condition is FaultKind.SEMAPHORE:
        try:
            text = SemaphoreKind(record.thing).doc
        except ValueError:
            text = f"semaphore {record.thing}, {{number}}"
        return f"{text.format(number=record.row)} (phase {record.target})"
    return ""


def _operand(word: int, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """The tensor that an operand word names."""
    if inst is None or word >= len(inst.fields) or inst.fields[word].kind is not FieldKind.TENSOR:
        return f"of operand word {HEADER_WORDS + word}"
    handle = vars(inst)[inst.fields[word].name]
    return tensors[handle].name if handle < len(tensors) else f"t{handle}"
