"""Let each rank add up a share of a large sum over ranks, in place of all of it.

All-reduce by gathers: every rank sends its values to all others, which add up all of them.
All-reduce by shares: a rank sends every other one the columns of that rank's share, adds up its own
share (reduce-scatter) and stores it on all ranks (all-gather). Of n ranks each sends 2 / n as many
values, but they meet once more. See Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 4.5.
"""

from __future__ import annotations

from dataclasses import replace

from megavm.scheduler.compiler.graph import (
    Operation,
    Value,
    has_one_reader,
    producers_of,
    readers_of,
    scatter,
    with_values,
)
from megavm.scheduler.compiler.options import CompileOptions


def add_by_shares(operations: list[Operation], options: CompileOptions) -> list[Operation]:
    """Replace the all_gather before a reduce by a copy that scatters, where that is faster.

    A reduce that adds something else, too, or prepares a normalisation, has all columns and stays.
    """
    producers, readers = producers_of(operations), readers_of(operations)
    gathers: dict[Operation, Operation] = {}  # by what takes their place
    shared: dict[Value, Value] = {}
    for operation in operations:
        gather = producers.get(operation.inputs["parts"]) if operation.kind == "reduce" else None
        if gather is None or gather.kind != "all_gather" or len(operation.inputs) > 1:
            continue
        parts, out = operation.inputs["parts"], operation.outputs["out"]
        x = gather.inputs["x"]
        if out.columns != x.columns or len(operation.outputs) > 1:
            continue
        if not has_one_reader(parts, readers) or not _pays(parts, out, options):
            continue
        scattered = replace(parts, columns=x.columns)
        gathers[gather] = scatter(gather.label, x, scattered)
        spec = None if out.spec is None else replace(out.spec, shares=parts.shares)
        shared |= {parts: scattered, out: replace(out, shares=parts.shares, spec=spec)}
    return [with_values(gathers.get(operation, operation), shared) for operation in operations]


def _pays(parts: Value, out: Value, options: CompileOptions) -> bool:
    """Whether the sums are to be added by shares.

    Programs for steps of other sizes have the same outputs: these count with all their rows.
    """
    ranks, target = parts.shares, options.target
    if out.columns % ranks or options.all_reduce == "gather":
        return False
    if options.all_reduce == "scatter" or not target.link_bytes_per_second:
        return options.all_reduce == "scatter"
    rows = out.rows if out.spec is None else out.capacity
    values, others = rows * out.columns, ranks - 1
    sent = others * values * parts.dtype.size
    sent_by_shares = others * values * (parts.dtype.size + out.dtype.size) / ranks
    saved = (sent - sent_by_shares) / target.link_bytes_per_second
    if target.matrix_times is not None:
        # Each rank adds up one part of n as many values.
        saved += sent / (target.matrix_times.bytes_per_second * options.workers)
    return saved > target.exchange_seconds
