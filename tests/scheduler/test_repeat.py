"""Alike layers are compiled once; the program is the one that compiling all of them gives."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from megavm.scheduler.compiler import compile as compiler
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.lower import lower
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.compiler.repeat import KEPT, Irregular, extend
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import ONE_RANK, Exchange, Parallel
from megavm.vm.config import HEADER_WORDS
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, DType, TensorKind

SMALL = LlamaConfig(160, 64, 96, 9, 4, 2, 16)
WIDE = LlamaConfig(512, 512, 1024, 16, 8, 4, 64, tie_word_embeddings=True)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of operations of each lowering."""
    counts: list[int] = []

    def count(operations, *arguments):  # type: ignore[no-untyped-def]
        counts.append(len(operations))
        return lower(operations, *arguments)

    monkeypatch.setattr(compiler, "lower", count)
    return counts


def whole(graph: Graph, options: CompileOptions) -> Program:
    """The program with every layer compiled for itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "find_repetition", lambda *_: None)
        return compile_graph(graph, options)


def assert_equal(a: Program, b: Program) -> None:
    assert (a.words == b.words).all()
    assert (a.fingerprint(), a.labels) == (b.fingerprint(), b.labels)


def llama(
    config: LlamaConfig,
    rows: int,
    sequences: int,
    dtype: DType = BF16,
    parallel: Parallel = ONE_RANK,
) -> Graph:
    limits = Limits(sequences, 256, rows, max(sequences, min(rows, 16)), 4 * sequences, 64)
    bucket = Bucket(rows, limits.max_logit_rows, 256, decode=1 < rows == sequences)
    return llama_graph(config, limits, bucket, dtype, parallel)


@pytest.mark.parametrize("rows", [1, 8, 16, 40, 300])
@pytest.mark.parametrize("machine", ["cpu", "cuda"])
def test_a_llama_is_the_same_program(machine: str, rows: int, lowered: list[int]) -> None:
    graph = llama(WIDE, rows, min(rows, 40))
    options = default_options(machine, 16 if machine == "cpu" else 132, rows)
    program = compile_graph(graph, options)
    assert len(lowered) == 1
    alone = whole(graph, options)
    assert_equal(program, alone)
    assert lowered[0] < lowered[1]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_ranks_are_the_same_program(rows: int, ranks: int, lowered: list[int]) -> None:
    graph = llama(WIDE, rows, min(rows, 8), parallel=Parallel(ranks))
    options = default_options("cuda", 12, rows)
    program = compile_graph(graph, options)
    assert len(set(lowered)) == 1
    assert_equal(program, whole(graph, options))
    assert lowered[0] < lowered[-1]


@pytest.mark.parametrize("seed", range(20))
def test_any_options_give_the_same_program(seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.choice([1, 2, 5, 17, 64])
    graph = llama(SMALL, rows, rng.randint(1, rows), rng.choice([F32, BF16]))
    options = CompileOptions(
        rng.choice([1, 3, 8, 132]),
        machine="reference",
        assignment=rng.choice(["balanced", "round_robin", "dynamic"]),
        exchange=rng.choice(["barrier", "preferred", "tagged"]),
        waves=rng.choice([1, 2]),
        min_chunk=rng.choice([32, 64, 128]),
        part_of_k=rng.choice([0, 64]),
    )
    assert_equal(compile_graph(graph, options), whole(graph, options))


@pytest.mark.parametrize("exchange", ["all_gather", "all_reduce"])
@pytest.mark.parametrize("rows", [48, 300])
@pytest.mark.parametrize("config", [WIDE, replace(SMALL, num_layers=18)], ids=["wide", "small"])
def test_halves_of_rows_are_the_same_program(
    config: LlamaConfig, rows: int, exchange: Exchange, lowered: list[int]
) -> None:
    """Sections may then end between two halves of an operation, which share a result."""
    graph = llama(config, rows, 8, parallel=Parallel(2, exchange))
    options = replace(default_options("cuda", 12, rows), halves="all")
    program = compile_graph(graph, options)
    assert len(set(lowered)) == 1  # the shortened program was extended, and none was compiled whole
    assert_equal(program, whole(graph, options))
    assert lowered[0] < lowered[-1]


def test_the_work_does_not_grow_with_the_layers(lowered: list[int]) -> None:
    options = default_options("cuda", 132, 16)
    for layers in (24, 48):
        program = compile_graph(llama(replace(WIDE, num_layers=layers), 16, 16), options)
        assert program.labels[-1] == "sample"
        assert f"layers.{layers - 1}.down_proj" in program.labels
    assert lowered[0] == lowered[1]


def tower(eps: list[float], skip: int = 0) -> Graph:
    """Layers like those of an MLP. Each adds the result of ``skip`` layers ago, or of the input."""
    graph = Graph(4)
    x = graph.tensor("x", (4, 64), F32, TensorKind.INPUT)
    results = [x]
    for i, value in enumerate(eps):
        gain = graph.weight(f"{i}.gain", (64,), F32)
        normed = graph.rms_norm(f"{i}.norm", results[-1], gain, value)
        weights = [graph.weight(f"{i}.{n}", (96, 64), F32) for n in ("g", "u")]
        gate, up = (
            graph.linear(f"{i}.{n}.product", normed, weight)
            for n, weight in zip(("g", "u"), weights, strict=True)
        )
        wide = graph.silu_mul(f"{i}.silu", gate, up)
        down = graph.linear(f"{i}.down", wide, graph.weight(f"{i}.d", (64, 96), F32))
        other = results[max(0, len(results) - 1 - skip)]
        results.append(graph.add(f"{i}.sum", down, other))
    graph.output(results[-1], "y")
    return graph


@pytest.mark.parametrize("exchange", ["barrier", "tagged"])
@pytest.mark.parametrize("skip", [0, 1, 2, 3, 99])
def test_sums_of_results_long_ago_are_the_same_program(exchange: str, skip: int) -> None:
    options = CompileOptions(3, exchange=exchange)  # type: ignore[arg-type]
    graph = tower([1e-5] * 24, skip)
    assert_equal(compile_graph(graph, options), whole(graph, options))


def test_a_layer_that_differs_is_not_repeated(lowered: list[int]) -> None:
    eps = [1e-5] * 30
    eps[20] = 1e-3
    graph = tower(eps)
    options = CompileOptions(3)
    program = compile_graph(graph, options)
    assert len(lowered) == 1
    assert_equal(program, whole(graph, options))
    # Of the 20 layers before it some are left out, but none of those after it.
    assert lowered[1] - 20 * lowered[1] // 30 < lowered[0] < lowered[1]


def test_few_layers_are_not_repeated(lowered: list[int]) -> None:
    graph = tower([1e-5] * KEPT)
    compile_graph(graph, CompileOptions(3))
    assert_equal(compile_graph(graph, CompileOptions(3)), whole(graph, CompileOptions(3)))
    assert len(set(lowered)) == 1


@pytest.mark.parametrize("wrong", ["irregular", "waits"])
def test_a_repetition_that_goes_wrong_is_not_used(wrong: str, lowered: list[int]) -> None:
    graph, options = tower([1e-5] * 20), CompileOptions(3)

    def extend_wrongly(*arguments):  # type: ignore[no-untyped-def]
        if wrong == "irregular":
            raise Irregular("the third layer does not repeat")
        extended = extend(*arguments)
        extended.words[len(extended.words) // 2, 3:HEADER_WORDS:2] = 0  # waits for nothing
        return extended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "extend", extend_wrongly)
        program = compile_graph(graph, options)
    assert lowered[0] < lowered[1]
    assert_equal(program, whole(graph, options))
