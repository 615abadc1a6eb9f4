"""What a launch on the GPU leaves behind when it fails, and the sentences that this becomes.

Device code includes the enumerations and the record as ``faults.hpp``, which codegen makes from here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from megavm.vm.abi import U32, Code, Member, Struct
from megavm.vm.config import (
    CONTROLLER_WARP,
    HEADER_WORDS,
    LOADER_WARP,
    NUM_CONSUMER_WARPS,
    STORER_WARP,
    WAITER_WARP,
)
from megavm.vm.isa import FieldKind, Instruction, TensorSpec


class FaultKind(Code):
    """Why a warp stopped, and what the words of its record are then."""

    NONE = 0
    BARRIER = 1, "thing: barrier; value, target: of its counter"
    TAG = (
        2,
        "thing: operand word of the tensor; row, word; value: epoch found, target: wanted",
    )
    SEMAPHORE = 3, "thing: SemaphoreKind; row: its number; target: phase"
    INSTRUCTION = 4, "thing: Fault; row, word, value, target: its arguments"
    ABORTED = (
        5,
        "another warp stopped first; the other words are those of the wait that it was in",
    )


class SemaphoreKind(Code):
    """What a semaphore stands for, and what a warp that waits for it waits for."""

    PAGE_ARRIVED = 0, "page {number} to arrive"
    PAGE_FINISHED = 1, "page {number} to be free"
    STAGE_RESOLVED = (
        2,
        "the instruction of stage {number}",
    )  # which may be read then, with its operands
    STAGE_READY = 3, "the waits of stage {number} to end"
    STAGE_STORED = 4, "the results of stage {number} to be stored"
    STAGE_RELEASED = 5, "stage {number} to be free"
    STAGE_HINTED = (
        6,
        "the hint of stage {number}",
    )  # that the tagged words that it reads are likely there
    CONSUMERS = 7, "the other consumers"
    SUMS_ARRIVED = 8, "block {number} of sums to arrive"
    SUMS_FINISHED = (
        9,
        "block {number} of sums to be stored",
    )  # its half of the scratch may be overwritten then


class Fault(Code):
    """What an instruction can find wrong with its data, in the sentences of the CPU's kernels.

    {holder}: the tensor that the value indexes.
    """

    ROW_SEQUENCE = 0, "row_sequence of row {row} is {value}, {holder} has {target} sequences"
    POSITION = 1, "row {row} is at position {value}, {holder} holds [0, {target})"
    KV_BLOCK = (
        2,
        "block table entry [{row}, {word}] is {value}, the KV cache has {target} blocks",
    )
    TOKEN = (
        3,
        "token {value} at position {word} of sequence {row} is outside the vocabulary of {target}",
    )
    LOGIT_ROW = 4, "logit_row of row {row} is {value}, the step has {target} rows"
    NAN_LOGITS = 5, "logits of row {row} hold NaN"
    NUM_STOP = 6, "NUM_STOP of sequence {row} is {value}"
    ROW_INDEX = 7, "row_index of row {row} is {value}, expected below {target}"
    UNSUPPORTED = 8, "the kernel was not compiled for operands like these ({value}, {target})"


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
    """What one warp left behind: its FaultRecord, whose words but for the kind are declared here."""

    worker: int
    warp: int
    kind: FaultKind
    waited: FaultKind  # of an aborted warp: the kind of wait that it was in, or NONE
    position: int = recorded("static: place in the worker's queue; dynamic: instruction number")
    step: int = recorded("of the launch")
    thing: int = recorded()
    row: int = recorded()
    word: int = recorded()
    value: int = recorded()
    target: int = recorded()

    @classmethod
    def read(cls, worker: int, warp: int, words: Sequence[int]) -> Record:
        """A record from the words of a FaultRecord."""
        kind, waited = words[0], 0
        if kind >> 8:
            kind, waited = kind >> 8, kind & 0xFF
        return cls(worker, warp, FaultKind(kind), FaultKind(waited), *map(int, words[1:]))

    @property
    def role(self) -> str:
        return ROLES[self.warp]

    @property
    def condition(self) -> FaultKind:
        """What it waited for, whether it gave up itself or not."""
        return self.waited if self.kind is FaultKind.ABORTED else self.kind

    @property
    def rank(self) -> tuple[bool, int, int, int]:
        """Records that say more about the cause come first."""
        order = (FaultKind.INSTRUCTION, FaultKind.BARRIER, FaultKind.TAG, FaultKind.SEMAPHORE)
        telling = order.index(self.condition) if self.condition in order else len(order)
        return (self.kind is FaultKind.ABORTED, telling, self.worker, self.warp)


FAULT_RECORD = Struct(
    "FaultRecord",
    "What a warp that stops leaves behind.",
    (
        Member("kind", U32, "FaultKind; of an aborted warp kAborted << 8 | kind of wait"),
        *(Member(f.name, U32, f.metadata["doc"]) for f in fields(Record) if "doc" in f.metadata),
    ),
    aligned=32,
)


def sentence(record: Record, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """What an instruction found wrong."""
    try:
        template = Fault(record.thing).doc
    except ValueError:
        template = (
            f"fault {record.thing} (row {{row}}, word {{word}}, value {{value}}, target {{target}})"
        )
    return template.format(
        row=record.row,
        word=record.word,
        value=_signed(record.value),
        target=record.target,
        holder=_holder(record, inst, tensors),
    )


def _holder(record: Record, inst: Instruction | None, tensors: Sequence[TensorSpec]) -> str:
    """Which tensor a position or a sequence was too large for."""
    if inst is None:
        return "block_table"
    if record.thing == Fault.POSITION:
        return inst.position_holder(record.target, tensors)
    return inst.sequence_holder()


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def waiting_for(
    record: Record,
    inst: Instruction | None,
    tensors: Sequence[TensorSpec],
    barriers: Sequence[str],
) -> str:
    """What the warp waited for, in words; "" when it did not wait."""
    if record.condition is FaultKind.BARRIER:
        name = barriers[record.thing] if record.thing < len(barriers) else "unknown"
        return f"barrier {record.thing} ({name}): value {record.value}, target {record.target}"
    if record.condition is FaultKind.TAG:
        name = _operand(record.thing, inst, tensors)
        return (
            f"tensor {name}, row {record.row}, word {record.word}: "
            f"epoch {record.value}, wanted {record.target}"
        )
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
