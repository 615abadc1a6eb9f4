"""The facts about a program that a trace holds: dependencies, bytes and FLOPs of instructions.

All are derived from the declarations of the instructions.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from megavm.instructions import instruction_set
from megavm.profiler.trace import BARRIER, TAGGED, Ints, Longs, TraceProgram
from megavm.vm.alike import figures, tagged_regions
from megavm.vm.config import HEADER_WORDS, MAX_WAITS, NONE
from megavm.vm.isa import Instruction
from megavm.vm.layout import ROWS
from megavm.vm.operands import FieldKind
from megavm.vm.program import Program
from megavm.vm.tensors import TensorKind, TensorSpec

CONTEXT: Final = "context"  # the operand with the most tokens that a row attends to; a cost hint


def trace_program(program: Program, context: float | None = None) -> TraceProgram:
    """The program in the form that a trace holds.

    A program of several ranks becomes one of all their instructions and workers: the instructions
    of rank r come after those of rank r - 1, and so do its workers and its barriers.

    Instructions declare their cost for the longest context of the program. With ``context`` (the
    mean number of tokens that rows attended to) bytes and FLOPs are scaled to that context. Takes
    half a second for 10,000 instructions.
    """
    tensors = program.tensors
    cost = figures(program.words, tensors, 3, lambda inst: _cost(inst, tensors, context))
    channels = _Channels()
    _add_barriers(channels, program)
    regions = tagged_regions(program.words, tensors)
    write = regions[:, 6] != 0
    reads, writes = regions[~write, :6], regions[write, :6]
    for rank in range(program.ranks):
        first = rank * len(program)
        _add_tagged(channels, _shifted(reads, first), _seen_by(rank, writes, program))
    labels = list(dict.fromkeys(program.labels))
    number = {label: i for i, label in enumerate(labels)}
    label = np.array([number[label] for label in program.labels], np.int32)
    return TraceProgram(
        facts=_facts(program, labels),
        words=np.tile(program.words, (program.ranks, 1)),
        label=np.tile(label, program.ranks),
        bytes=np.tile(cost[:, 0], program.ranks),
        load_bytes=np.tile(cost[:, 1], program.ranks),
        flops=np.tile(cost[:, 2], program.ranks),
        **channels.columns(),
    )


def _shifted(regions: Longs, instructions: int, columns: Longs | int = 0) -> Longs:
    """Regions of other instructions, further right in their tensors."""
    moved = regions.copy()
    moved[:, 0] += instructions
    moved[:, 4] += columns
    moved[:, 5] += columns
    return moved


def _seen_by(rank: int, writes: Longs, program: Program) -> Longs:
    """The writes that reach a rank: its own, and those of all ranks to tensors with shares."""
    shares = np.array([t.shares for t in program.tensors] or [1])[writes[:, 1]]
    width = np.array([t.own_columns for t in program.tensors] or [0])[writes[:, 1]]
    sent = shares > 1
    found = [_shifted(writes[~sent], rank * len(program))]
    for sender in range(program.ranks):
        columns = sender * width[sent]
        found.append(_shifted(writes[sent], sender * len(program), columns))
    return np.concatenate(found)


def _facts(program: Program, labels: list[str]) -> dict[str, Any]:
    """The members of the program in the header of the file."""
    used = {int(opcode) for opcode in np.unique(program.words[:, 0])}
    return {
        "fingerprint": program.fingerprint(),
        "dynamic": program.dynamic,
        "workers": program.ranks * program.workers,
        "ranks": program.ranks,
        "barriers": [
            name if program.ranks == 1 else f"{name} of rank {rank}"
            for rank in range(program.ranks)
            for name in program.barriers
        ],
        "tensors": [
            [t.name, list(t.shape), t.dtype.name, t.kind.value, t.tagged] for t in program.tensors
        ],
        "labels": labels,
        "metadata": dict(program.metadata),
        "opcodes": {
            str(opcode): {
                "name": cls.name(),
                "help": cls.formula(),
                "fields": [
                    {"name": field.name, "word": HEADER_WORDS + k, "kind": _FIELD_KINDS[field.kind]}
                    for k, field in enumerate(cls.fields)
                ],
            }
            for opcode, cls in instruction_set().items()
            if opcode in used
        },
    }


_FIELD_KINDS: Final = {
    FieldKind.TENSOR: "tensor",
    FieldKind.INTEGER: "integer",
    FieldKind.REAL: "float",
}


def _cost(
    inst: Instruction, tensors: Sequence[TensorSpec], context: float | None
) -> tuple[int, int, int]:
    """(bytes moved, bytes streamed (weights and KV), FLOPs) of an instruction."""
    cached = 0.0
    moved, flops = float(inst.bytes(tensors)), float(inst.flops(tensors))
    if any(field.name == CONTEXT for field in inst.fields):
        longest = getattr(inst, CONTEXT)
        none = _at_context(inst, 0)
        fixed, fixed_flops = none.bytes(tensors), none.flops(tensors)
        share = 1.0 if context is None or not longest else context / longest
        cached = (moved - fixed) * share
        moved = fixed + cached
        flops = fixed_flops + (flops - fixed_flops) * share
    # The loader streams the operands that a kernel accepts only in its own layout.
    streamed = {
        getattr(inst, n) for n, choice in inst.layouts(tensors).items() if ROWS not in choice
    }
    weights = sum(
        region.elements * tensors[region.tensor].dtype.size
        for region in inst.reads(tensors)
        if region.tensor in streamed and tensors[region.tensor].kind is TensorKind.WEIGHT
    )
    return round(moved), min(round(moved), weights + round(cached)), round(flops)


def _at_context(inst: Instruction, context: int) -> Instruction:
    changed = copy.copy(inst)
    setattr(changed, CONTEXT, context)
    return changed


class _Channels:
    """Collects distinct channels, and the instructions that wait for them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, bytes], int] = {}
        self._producers: list[Ints] = []
        self._waits: list[Longs] = [np.empty((0, 3), np.int64)]

    def channel(self, kind: int, thing: int, target: int, producers: Ints) -> int:
        """The number of a channel; equal channels have the same number."""
        key = kind, thing, target, producers.tobytes()
        number = self._known.setdefault(key, len(self._known))
        if number == len(self._producers):
            self._producers.append(producers)
        return number

    def wait(self, instructions: Longs, channel: int | Longs, back: int) -> None:
        """Add waits of instructions for one channel or one channel each, ``back`` steps ago."""
        columns = np.broadcast_arrays(instructions, channel, back)
        self._waits.append(np.column_stack(columns))

    def columns(self) -> dict[str, Ints]:
        """The columns of a TraceProgram."""
        keys = np.array([key[:3] for key in self._known], np.int32).reshape(-1, 3)
        waits = np.unique(np.concatenate(self._waits), axis=0)
        offsets = np.cumsum([0, *map(len, self._producers)])
        return {
            "channel_kind": keys[:, 0].copy(),
            "channel_object": keys[:, 1].copy(),
            "channel_target": keys[:, 2].copy(),
            "channel_offsets": offsets.astype(np.int32),
            "channel_producers": np.concatenate([*self._producers, np.empty(0, np.int32)]),
            "waits": waits.astype(np.int32),
        }


def _add_barriers(channels: _Channels, program: Program) -> None:
    """Add the waits in the headers. Target 0 waits for all signals of the step before."""
    header = program.words[:, 2:HEADER_WORDS].reshape(-1, MAX_WAITS, 2).astype(np.int64)
    instruction, place = np.nonzero(header[:, :, 0] != NONE)
    barrier, target = header[instruction, place].T
    signals = program.words[:, 1]
    order = np.argsort(signals, kind="stable").astype(np.int32)
    first = np.searchsorted(signals[order], np.arange(len(program.barriers) + 1))
    pairs, which = np.unique(np.column_stack([barrier, target]), axis=0, return_inverse=True)
    for i, (number, count) in enumerate(pairs.tolist()):
        own = order[first[number] : first[number + 1]]
        if not len(own):
            continue
        waiting = instruction[which.reshape(-1) == i]
        of_ranks = [own + np.int32(rank * len(program)) for rank in range(program.ranks)]
        for rank in range(program.ranks):
            shared = number < program.shared_barriers
            producers = np.concatenate(of_ranks) if shared else of_ranks[rank]
            thing = rank * len(program.barriers) + number
            channel = channels.channel(BARRIER, thing, count or len(producers), producers)
            channels.wait(waiting + rank * len(program), channel, int(count == 0))


def _add_tagged(channels: _Channels, reads: Longs, writes: Longs) -> None:
    """Add the reads of tagged words as waits.

    ``reads`` and ``writes`` have rows (instruction, tensor, row range, column range).
    """
    for tensor in np.unique(reads[:, 1]):
        writers = writes[writes[:, 1] == tensor]
        readers = reads[reads[:, 1] == tensor]
        regions, which = np.unique(readers[:, 2:], axis=0, return_inverse=True)
        for i, (top, bottom, left, right) in enumerate(regions.tolist()):
            inside = (writers[:, 2] < bottom) & (top < writers[:, 3])
            inside &= (writers[:, 4] < right) & (left < writers[:, 5])
            producers = np.unique(writers[inside, 0]).astype(np.int32)
            if len(producers):
                channel = channels.channel(TAGGED, int(tensor), 0, producers)
                channels.wait(readers[which.reshape(-1) == i, 0], channel, 0)
