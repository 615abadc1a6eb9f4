"""The compiler, top to bottom: a graph becomes a verified program.

::

    graph ── rewrite ── allocate ── lower ── add_barriers ── extend ── assign ──> Program ── verify

rewrites/ turns operations into those that instructions execute, storage.py gives values their
tensors, lower.py cuts operations into tiles, barriers.py adds waits and signals, and assign.py
fills the queues. Of many layers that are alike, only a few are lowered and get barriers; repeat.py
extends the result to all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from megavm.scheduler.compiler.assign import assign
from megavm.scheduler.compiler.barriers import add_barriers
from megavm.scheduler.compiler.graph import Graph, Operation
from megavm.scheduler.compiler.lower import lower
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.repeat import (
    Irregular,
    Repetition,
    extend,
    find_repetition,
    shorten,
)
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.compiler.storage import Storage, allocate
from megavm.vm.program import Program
from megavm.vm.verify import VerificationError, verify

logger: Final = logging.getLogger(__name__)


def compile_graph(
    graph: Graph,
    options: CompileOptions,
    metadata: Mapping[str, Any] | None = None,
    *,
    verified: bool = True,
) -> Program:
    """Compile ``graph`` for ``options.workers`` workers and verify the result.

    ``verified=False`` skips the verification, for callers that verify the program themselves.

    Raises ValueError when the graph cannot be fused into instructions or does not fit the machine.
    """
    operations = rewrite(graph, options)
    storage = allocate(operations, options)
    step = _Step(graph, options, operations, storage, dict(metadata or {}))
    repetition = find_repetition(operations, storage)
    if repetition is not None:
        try:
            return step.compile(verified, repetition)
        except (Irregular, VerificationError) as error:
            logger.debug("layers are compiled one by one: %s", error)
    return step.compile(verified)


@dataclass(frozen=True)
class _Step:
    """The input of the compiler for one step."""

    graph: Graph
    options: CompileOptions
    operations: Sequence[Operation]
    storage: Storage
    metadata: Mapping[str, Any]

    def compile(self, verified: bool, repetition: Repetition | None = None) -> Program:
        """The program; of a repetition, only some sections are compiled (repeat.py)."""
        # In most programs ranks cannot run a step ahead of each other, because they meet in it.
        closings = [False] if self.graph.ranks == 1 else [False, True] if verified else [True]
        for closing in closings:
            program = self._program(repetition, closing)
            try:
                if verified:
                    verify(program, self.options.machine)
                break
            except VerificationError as error:
                if closing is closings[-1] or error.rule not in ("unordered", "tag_ambiguous"):
                    raise
        return program

    def _program(self, repetition: Repetition | None, closing: bool) -> Program:
        """The program.

        ``closing``: on every rank, a step begins when all ranks have ended the one before.
        """
        graph, storage, options = self.graph, self.storage, self.options
        kept = self.operations if repetition is None else shorten(self.operations, repetition)
        tiles = lower(kept, storage, graph.row_count, options)
        synchronised = add_barriers(tiles, storage.tensors, graph.ranks, closing=closing)
        if repetition is not None:
            synchronised = extend(
                synchronised, kept, self.operations, storage, repetition, graph.ranks
            )
        queues = assign(synchronised, storage.tensors, options)
        return Program(
            tensors=tuple(storage.tensors),
            words=synchronised.words,
            queues=tuple(np.array(queue, np.int32) for queue in queues),
            dynamic=options.assignment == "dynamic",
            workers=options.workers,
            barriers=tuple(synchronised.barriers),
            labels=tuple(synchronised.labels),
            metadata=self.metadata,
            ranks=graph.ranks,
            shared_barriers=synchronised.shared_barriers,
            fixed_order=options.fixed_order,
        )


def unordered(graph: Graph, options: CompileOptions) -> Program:
    """The instructions of ``graph`` without barriers and queues, to specialise kernels for.

    Raises ValueError as ``compile_graph`` does.
    """
    operations = rewrite(graph, options)
    storage = allocate(operations, options)
    tiles = lower(operations, storage, graph.row_count, options)
    instructions = [inst for operation in tiles for inst in operation.instructions]
    return Program.build(
        storage.tensors, instructions, [], ranks=graph.ranks, fixed_order=options.fixed_order
    )
