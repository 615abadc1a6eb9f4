"""Rewrites: turn the operations of a graph into those that instructions execute; one module each.

Every rewrite takes operations and compile options and returns operations in topological order. Its
decisions are recorded in the operations: new values, inputs, outputs and attributes.
"""

from __future__ import annotations

from collections.abc import Callable

from megavm.scheduler.compiler.graph import Graph, Operation
from megavm.scheduler.compiler.kinds import FUSED
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.compiler.rewrites.all_gather import gather_in_producer
from megavm.scheduler.compiler.rewrites.gate_up import join_gate_and_up
from megavm.scheduler.compiler.rewrites.gather import (
    gather_before_matrix,
    gather_by_copy,
    gather_in_product,
)
from megavm.scheduler.compiler.rewrites.halves import cut_in_halves
from megavm.scheduler.compiler.rewrites.newest import pass_newest
from megavm.scheduler.compiler.rewrites.norm import norm_in_neighbours
from megavm.scheduler.compiler.rewrites.peaks import keep_peaks
from megavm.scheduler.compiler.rewrites.residual import add_in_product
from megavm.scheduler.compiler.rewrites.scatter import add_by_shares
from megavm.scheduler.compiler.rewrites.split_context import split_context
from megavm.scheduler.compiler.rewrites.split_k import split_k

Rewrite = Callable[[list[Operation], CompileOptions], list[Operation]]

REWRITES: tuple[Rewrite, ...] = (
    join_gate_and_up,
    add_in_product,
    gather_in_product,
    norm_in_neighbours,
    add_by_shares,
    gather_in_producer,
    split_k,
    keep_peaks,
    pass_newest,
    split_context,
    cut_in_halves,
    gather_before_matrix,
    gather_by_copy,
)


def rewrite(graph: Graph, options: CompileOptions) -> list[Operation]:
    """The operations of ``graph`` after all rewrites, in topological order.

    Raises ValueError when an operation that no instruction executes by itself (add, silu_mul) could
    not be fused.
    """
    operations = list(graph.operations)
    for step in REWRITES:
        operations = step(operations, options)
    for operation in operations:
        if operation.kind in FUSED:
            raise ValueError(
                f"{operation.label}: no instruction does {operation.kind} by itself, and the"
                " operations around it cannot be fused with it"
            )
        if operation.kind == "rms_norm":
            x, gain = operation.inputs["x"], operation.inputs["gain"]
            if gain.rows != x.columns:
                raise ValueError(
                    f"{operation.label}: gain {gain.name} has {gain.rows} of {x.columns} columns,"
                    " and the operation that computes them cannot be fused with it"
                )
    return operations
