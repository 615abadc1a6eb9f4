"""Programs of modelled operations, and compiled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from modelled_operations import Model, build, cut

from megavm.instructions.copy import Copy
from megavm.instructions.rms_norm import RmsNorm
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import Assignment, CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.isa import Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def attend_newest(m: Model) -> None:
    m.newest = True
    attend(m)


def llama_newest(m: Model) -> None:
    m.newest = True
    llama(m)


def copies(m: Model) -> None:
    source = m.state("source", 1, 8)
    for name in ("first", "second", "third"):
        out = m.tensor(name, 1, 8)
        m.add(
            name,
            (
                Copy(
                    x=source,
                    out=out,
                    x_row=0,
                    x_column=begin,
                    row_begin=0,
                    row_end=1,
                    column_begin=begin,
                    column_end=end,
                )
                for begin, end in cut(8, 3 if name == "second" else 2)
            ),
        )
        source = out


def matvecs(m: Model) -> None:
    x = m.state("x", 1, 4)
    y, z = m.tensor("y", 1, 6), m.tensor("z", 1, 4)
    m.matmul(x, y, 3)
    m.matmul(y, z, 2)
    m.tagged = False
    m.matmul(z, x, 2)


def mlps(m: Model) -> None:
    x, y, z = m.state("x", 1, 4), m.tensor("y", 1, 4), m.tensor("z", 1, 4)
    norm = m.tensor("norm", 1, 4)
    m.mlp(x, y, "a")
    m.add(
        "norm",
        [RmsNorm(x=y, gain=m.weight("gain", 4), out=norm, row_begin=0, row_end=1, eps=0.0)],
    )
    m.mlp(norm, z, "b")


def attend(m: Model) -> None:
    x, attended, y = (
        m.state("x", m.rows, 4),
        m.tensor("attended", m.rows, 4),
        m.tensor("y", m.rows, 4),
    )
    m.attention(x, attended, "a", 2)
    m.matmul(attended, y, 2, residual=x)


def rewrite(m: Model) -> None:
    """The queries of one projection are the input of the next, which rewrites the same keys and values."""
    source = m.state("x", 1, 4)
    for name in ("one", "two", "three"):
        m.project(source, name, "cache")
        source = m.handles[f"{name}.q"]


def llama(m: Model) -> None:
    x = m.tensor("x", m.rows, 4)
    m.embed(x)
    for layer in range(2):
        attended = m.tensor(f"{layer}.attended", m.rows, 4)
        between, after = (
            m.tensor(f"{layer}.between", m.rows, 4),
            m.tensor(f"{layer}.after", m.rows, 4),
        )
        m.attention(x, attended, f"{layer}", 1 + layer)
        m.matmul(attended, between, 2, residual=x)
        m.mlp(between, after, f"{layer}")
        x = after
    logits = m.tensor("logits", m.rows, 6, tagged=False)
    m.matmul(x, logits, 2)
    m.sample(logits)


def chunks(_: Model) -> Program:
    """Worker 0 signals one barrier chunk by chunk, worker 1 waits for each chunk alone."""
    tensors = (
        TensorSpec("a", (1, 8), F32, TensorKind.STATE),
        TensorSpec("b", (1, 8), F32, TensorKind.ACTIVATION),
        TensorSpec("c", (1, 8), F32, TensorKind.ACTIVATION),
    )

    def tile(x: int, out: int, i: int, waits: list[Wait], signal: int) -> Copy:
        return Copy(
            x=x,
            out=out,
            x_row=0,
            x_column=2 * i,
            row_begin=0,
            row_end=1,
            column_begin=2 * i,
            column_end=2 * i + 2,
            waits=waits,
            signal=signal,
        )

    produce = [tile(0, 1, i, [Wait(1, 0)] if i == 0 else [], 0) for i in range(4)]
    consume = [tile(1, 2, i, [Wait(0, i + 1)], 1) for i in range(4)]
    return Program.build(
        tensors,
        [*produce, *consume],
        [range(4), range(4, 8)],
        barriers=["produced", "consumed"],
        labels=["produce"] * 4 + ["consume"] * 4,
    )


def compiled(_: Model, assignment: Assignment = "balanced") -> Program:
    """What the compiler makes of a step of one row: attention waits for nothing but earlier steps."""
    config = LlamaConfig(
        vocab_size=6,
        hidden_size=4,
        intermediate_size=6,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        head_dim=2,
    )
    graph = llama_graph(config, Limits(1, 8, 1, 1, 2, 4), Bucket(1, 1, 8), F32)
    options = CompileOptions(
        4, exchange="tagged", assignment=assignment, column_unit=2, min_chunk=4
    )
    return compile_graph(graph, options)


def compiled_dynamic(m: Model) -> Program:
    return compiled(m, "dynamic")


CASES: list[tuple[Callable[[Model], Any], int, bool, bool, int]] = [
    # network, workers, dynamic, tagged, rows
    (copies, 1, False, False, 1),
    (copies, 3, False, False, 1),
    (copies, 2, False, True, 1),
    (copies, 2, True, False, 1),
    (matvecs, 2, False, False, 1),
    (matvecs, 3, False, True, 1),
    (matvecs, 3, True, False, 1),
    (matvecs, 2, True, True, 1),
    (mlps, 2, False, False, 1),
    (mlps, 4, False, True, 1),
    (mlps, 3, True, False, 1),
    (attend, 3, False, False, 2),
    (attend, 3, False, True, 1),
    (attend, 2, True, False, 1),
    (attend, 4, True, True, 1),
    (rewrite, 2, False, True, 1),
    (rewrite, 2, True, True, 1),
    (llama, 2, False, False, 1),
    (llama, 5, False, False, 2),
    (llama, 3, False, True, 1),
    (llama, 4, True, False, 1),
    (llama, 4, True, True, 1),
    (chunks, 2, False, False, 1),
    (attend_newest, 3, False, False, 2),
    (attend_newest, 4, False, True, 1),
    (attend_newest, 3, True, True, 1),
    (llama_newest, 3, False, True, 1),
    (llama_newest, 4, True, True, 1),
    (compiled, 4, False, True, 1),
    (compiled_dynamic, 4, True, True, 1),
]
NAMES = [
    f"{network.__name__}-{'dynamic' if dynamic else 'static'}{workers}{'-tagged' * tagged}"
    for network, workers, dynamic, tagged, _ in CASES
]


def base_program(case: int) -> Program:
    network, workers, dynamic, tagged, rows = CASES[case]
    model = Model(tagged, rows)
    made = network(model)
    if made is not None:
        return made  # type: ignore[no-any-return]
    return build(model.tensors, model.operations, workers, dynamic)
