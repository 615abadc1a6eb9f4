"""The compiler, top to bottom: a graph becomes a verified program.

::

    graph ── rewrite ── allocate ── lower ── add_barriers ── assign ──> Program ── verify

rewrites/ turns operations into those that instructions execute, storage.py gives values their
tensors, lower.py cuts operations into tiles, barriers.py adds waits and signals, and assign.py
fills the queues.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from megavm.scheduler.compiler.assign import assign
from megavm.scheduler.compiler.barriers import add_barriers
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.lower import Tiles, lower
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.rewrites import rewrite
from megavm.scheduler.compiler.storage import Storage, allocate
from megavm.vm.program import Program
from megavm.vm.verify import VerificationError, verify


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
    tiles, storage = _tiles(graph, options)
    if graph.ranks == 1:
        program = _program(tiles, storage, graph, options, metadata, closing=False)
    else:
        # In most programs ranks cannot run a step ahead of each other, because they meet in it.
        program = _program(tiles, storage, graph, options, metadata, closing=not verified)
        try:
            if verified:
                verify(program, options.machine)
            return program
        except VerificationError as error:
            if error.rule not in ("unordered", "tag_ambiguous"):
                raise
        program = _program(tiles, storage, graph, options, metadata, closing=True)
    if verified:
        verify(program, options.machine)
    return program


def _program(
    tiles: list[Tiles],
    storage: Storage,
    graph: Graph,
    options: CompileOptions,
    metadata: Mapping[str, Any] | None,
    *,
    closing: bool,
) -> Program:
    """The program of ``tiles``.

    ``closing``: on every rank, a step begins when all ranks have ended the one before.
    """
    synchronised = add_barriers(tiles, storage.tensors, graph.ranks, closing=closing)
    queues = assign(synchronised, storage.tensors, options)
    return Program(
        tensors=tuple(storage.tensors),
        words=synchronised.words,
        queues=tuple(np.array(queue, np.int32) for queue in queues),
        dynamic=options.assignment == "dynamic",
        workers=options.workers,
        barriers=tuple(synchronised.barriers),
        labels=tuple(synchronised.labels),
        metadata=dict(metadata or {}),
        ranks=graph.ranks,
        shared_barriers=synchronised.shared_barriers,
    )


def unordered(graph: Graph, options: CompileOptions) -> Program:
    """The instructions of ``graph`` without barriers and queues, to specialise kernels for.

    Raises ValueError as ``compile_graph`` does.
    """
    tiles, storage = _tiles(graph, options)
    instructions = [inst for operation in tiles for inst in operation.instructions]
    return Program.build(storage.tensors, instructions, [], ranks=graph.ranks)


def _tiles(graph: Graph, options: CompileOptions) -> tuple[list[Tiles], Storage]:
    operations = rewrite(graph, options)
    storage = allocate(operations, options)
    return lower(operations, storage, graph.row_count, options), storage
