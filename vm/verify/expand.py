"""All ranks of a program as one program, for the analysis in C++.

Instruction i of rank r becomes number r * n + i of the n instructions of a rank; tensors, and barriers
that are not shared, are numbered likewise. A shared barrier is one barrier of the whole: every rank has a
counter of its own, but each signal reaches all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megavm.vm.config import HEADER_WORDS, MAX_WAITS, NONE
from megavm.vm.program import Program

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Expanded:
    """The input of the analysis, of all ranks; -1 means no barrier."""

    barriers: int
    queues: npt.NDArray[np.int32]  # all queues, one after the other
    lengths: Ints  # number of instructions of each queue
    waits: Ints  # [instructions, MAX_WAITS, 2]: barrier, target
    signals: Ints  # [instructions]: barrier
    accesses: Ints  # [a, 9]: instruction, tensor, rows, columns, write, indexed, earlier


def expand(program: Program, accesses: Ints) -> Expanded:
    """The whole of a program whose instructions make ``accesses`` (DeclarationCheck) on one rank."""
    ranks = np.arange(program.ranks)[:, None]
    count, shared = len(program), program.shared_barriers
    own = len(program.barriers) - shared
    header = program.words[:, 1:HEADER_WORDS].astype(np.int64)
    header[header == NONE] = -1

    def barriers(numbers: Ints) -> Ints:
        """Numbers [k] of barriers in the whole: [ranks, k]."""
        return numbers + np.where(numbers >= shared, ranks * own, 0)

    waits = np.empty((program.ranks, count, MAX_WAITS, 2), np.int64)
    waits[..., 0] = barriers(header[:, 1::2].ravel()).reshape(program.ranks, count, MAX_WAITS)
    waits[..., 1] = header[:, 2::2]
    queues = [np.empty(0, np.int32), *program.queues]
    entries = np.concatenate(queues) + ranks * count
    lengths = np.tile([len(queue) for queue in program.queues], program.ranks)
    return Expanded(
        barriers=shared + program.ranks * own,
        queues=entries.ravel().astype(np.int32),
        lengths=lengths.astype(np.int64),
        waits=waits.reshape(-1, MAX_WAITS, 2),
        signals=barriers(header[:, 0]).ravel(),
        accesses=_accesses(program, accesses),
    )


def _accesses(program: Program, accesses: Ints) -> Ints:
    """The accesses of all ranks. Each write of a tensor with shares becomes one on every rank it reaches."""
    accesses, only = accesses[:, :-1], accesses[:, -1]
    if program.ranks == 1:
        return accesses
    shares = np.array([t.shares for t in program.tensors], np.int64)
    width = np.array([t.own_columns for t in program.tensors], np.int64)
    tensor = accesses[:, 1]
    sent = (accesses[:, 6] != 0) & (shares[tensor] > 1)
    times = np.where(sent & (only < 0), program.ranks, 1)
    which = np.repeat(np.arange(len(accesses)), times)
    copy = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
    reached = np.where(only[which] < 0, copy, only[which])
    everywhere = np.empty((program.ranks, len(which), accesses.shape[1]), np.int64)
    everywhere[:] = accesses[which]
    ranks = np.arange(program.ranks)[:, None]
    everywhere[..., 0] += ranks * len(program)
    everywhere[..., 1] += np.where(sent[which], reached, ranks) * len(program.tensors)
    share = np.flatnonzero(sent[which])  # accesses that each rank makes at its own columns
    everywhere[:, share, 4:6] += (ranks * width[tensor[which[share]]])[..., None]
    return everywhere.reshape(-1, accesses.shape[1])
