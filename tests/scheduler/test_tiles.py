"""How operations are cut into tiles and parts, and tiles dealt out to workers."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from compiled_graphs import ALL_OPTIONS, mlp_graph, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from megavm.instructions.attention.lower import attention_tiling
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.tiles import LOADED_SQUARES
from megavm.scheduler.compiler.compile import compile_graph, unordered
from megavm.scheduler.compiler.graph import Graph
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.compiler.tiling import matrix_tiles
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, default_logit_rows, llama_graph
from megavm.scheduler.run.buckets import choose_bucket, compile_bucket
from megavm.vm.config import NONE, WIDE_SQUARES
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16, F32, DType, TensorKind
from megavm.vm.verify import verify


def test_a_product_of_long_rows_is_split_among_workers() -> None:
    """Workers by their share of the columns; those that add up the parts come last."""
    options = CompileOptions(8, part_of_k=64)
    program = compile_graph(mlp_graph(F32, 2, hidden=64, wide=160), options)
    down = [
        i
        for i in program.instructions
        if isinstance(i, Matmul) and program.tensors[i.weight].name == "down.w"
    ]
    parts = [i.k(program.tensors) for i in down]
    assert parts == [(0, 64)] * 3 + [(64, 128)] * 3 + [(128, 160)] * 2
    for i in down:
        assert (i.addends == NONE, i.residual == NONE) == (i.part < 2, i.part < 2)
        assert i.out_begin(program.tensors) == (64 * i.part if i.part < 2 else 0)
    (addends,) = {i.addends for i in down if i.part == 2}
    assert {i.out for i in down if i.part < 2} == {addends}
    assert program.tensors[addends].shape == (2, 128)
    assert program.tensors[addends].tagged


@pytest.mark.parametrize(
    ("workers", "parts"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (12, 6), (200, 8)]
)
def test_a_product_has_no_more_parts_than_workers_add_up(workers: int, parts: int) -> None:
    graph = Graph(4)
    x = graph.tensor("x", (4, 1536), F32, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (128, 1536), F32), dtype=F32)
    graph.output(y, "y")
    program = compile_graph(graph, CompileOptions(workers, part_of_k=64))
    found = {i.k(program.tensors) for i in program.instructions if isinstance(i, Matmul)}
    step = 1536 // parts
    assert found == {(k, k + step) for k in range(0, 1536, step)}


@pytest.mark.parametrize("workers", [66, 114, 132])
@pytest.mark.parametrize(
    ("rows", "k", "columns", "parts"),
    [
        (8, 8192, 2048, 4),
        (8, 5632, 2048, 3),
        (8, 3072, 3072, 1),
        (8, 14336, 4096, 1),
        (8, 14336, 2048, 3),
        (9, 8192, 2048, 2),
        (9, 5632, 2048, 1),
        (9, 14336, 4096, 1),
        (16, 8192, 1024, 4),
    ],
)
def test_workers_that_add_up_parts_have_one_block_of_columns(
    rows: int, k: int, columns: int, parts: int, workers: int
) -> None:
    """With two they would wait for the other parts before they multiply the second one."""
    graph = Graph(rows)
    x = graph.tensor("x", (rows, k), BF16, TensorKind.INPUT)
    y = graph.linear("y", x, graph.weight("w", (columns, k), BF16), dtype=F32)
    graph.output(y, "y")
    program = unordered(graph, default_options("cuda", workers, rows))
    tiles = [i for i in program.instructions if isinstance(i, Matmul)]
    for tile in tiles:
        assert tile.addends == NONE or tile.column_end - tile.column_begin <= (
            64 if rows <= 8 else 32
        )
    if workers == 132:
        assert len({tile.part for tile in tiles}) == parts


@pytest.mark.parametrize("unit", [2, 8, 16, 24])
def test_column_tiles_begin_at_multiples_of_the_unit(unit: int) -> None:
    program = tiny_llama(132, rows=1, column_unit=unit)
    begins = {i.column_begin for i in program.instructions if isinstance(i, Matmul | GateUp)}
    assert math.gcd(*begins) % unit == 0
    pairs = {i.pair_begin for i in program.instructions if isinstance(i, QkvRope)}
    assert math.gcd(*pairs) == math.gcd(4, unit // 2)


@pytest.mark.parametrize("context", [256, 4096])
def test_a_step_of_a_large_model_occupies_132_workers_evenly(context: int) -> None:
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
    )
    limits = Limits(1, context, 1, 1, context // 16, 16)
    graph = llama_graph(config, limits, Bucket(1, 1, context), BF16)
    program = compile_graph(graph, CompileOptions(132, exchange="tagged", column_unit=8))
    assert not any(i.name() == "noop" for i in program.instructions)
    worker = program.worker_of()
    places = list(zip(program.labels, worker.tolist(), strict=True))
    assert len(set(places)) == len(places)
    cost = np.zeros(132)
    np.add.at(cost, worker, [i.bytes(program.tensors) for i in program.instructions])
    assert np.abs(cost / cost.mean() - 1).max() < 0.015


@pytest.mark.parametrize("assignment", ["balanced", "round_robin"])
def test_static_queues_share_the_bytes(assignment: Any) -> None:
    program = compile_graph(mlp_graph(BF16, 1, 256, 1024), CompileOptions(3, assignment=assignment))
    cost = [sum(program.instructions[i].bytes(program.tensors) for i in q) for q in program.queues]
    assert max(cost) <= 1.1 * min(cost)


def test_every_instruction_stands_in_one_queue() -> None:
    for options in ALL_OPTIONS:
        program = compile_graph(mlp_graph(F32, 5), options)
        listed = np.sort(np.concatenate(program.queues))
        np.testing.assert_array_equal(listed, np.arange(len(program)))


@pytest.mark.parametrize(
    ("machine", "dtype", "rows", "matrix"),
    [
        ("cuda", BF16, 1, 0),
        ("cuda", BF16, 8, 0),
        ("cuda", BF16, 16, 0),
        ("cuda", BF16, 17, 1),
        ("cuda", F32, 17, 0),
        ("cpu", BF16, 17, 0),
    ],
)
def test_lowering_chooses_for_each_product_how_its_rows_are_multiplied(
    machine: str, dtype: DType, rows: int, matrix: int
) -> None:
    graph = Graph(rows)
    x = graph.tensor("x", (rows, 64), dtype, TensorKind.INPUT)
    wide = graph.tensor("wide", (rows, 64), F32, TensorKind.INPUT)
    for name, value in (("x", x), ("wide", wide)):
        result = graph.linear(
            f"{name}.y", value, graph.weight(f"{name}.w", (64, 64), dtype), dtype=F32
        )
        graph.output(result, f"{name}.out")
    program = compile_graph(graph, default_options(machine, 4, rows))
    chosen = {
        program.labels[i]: inst.matrix
        for i, inst in enumerate(program.instructions)
        if isinstance(inst, Matmul)
    }
    assert chosen == {"x.y": matrix, "wide.y": 0}


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("narrow", [4, 16, 64, 144, 200])
@pytest.mark.parametrize("rows", [1000, 1024, 8192])
def test_narrow_products_of_many_rows_fit_into_the_working_memory(
    rows: int, narrow: int, dtype: DType
) -> None:
    program = compile_graph(
        mlp_graph(dtype, rows, hidden=narrow, wide=3 * narrow), default_options("cpu", 2, rows)
    )
    verify(program, "cpu")


@given(
    model=st.tuples(
        st.sampled_from([(1, 1), (2, 1), (3, 3), (9, 3), (8, 4), (7, 1)]),  # heads, KV heads
        st.sampled_from([4, 8, 16, 48, 64, 128]),  # head_dim
        st.sampled_from([16, 32, 64, 200, 288]),  # hidden size
        st.sampled_from([16, 64, 128, 344]),  # intermediate size
    ),
    rows=st.sampled_from([1, 7, 100, 512, 1024, 2048, 8192]),
    dtype=st.sampled_from([F32, BF16]),
    workers=st.sampled_from([1, 2, 8]),
    context=st.sampled_from([1, 20000]),
)
@settings(max_examples=25, deadline=None)
def test_small_models_compile_for_the_cpu_at_any_number_of_rows(
    model: tuple[tuple[int, int], int, int, int],
    rows: int,
    dtype: DType,
    workers: int,
    context: int,
) -> None:
    (heads, kv_heads), head_dim, hidden, wide = model
    config = LlamaConfig(257, hidden, wide, 1, heads, kv_heads, head_dim)
    limits = Limits(16, 20480, max(rows, 16), default_logit_rows(16, rows), 1280, 16)
    options = functools.partial(default_options, "cpu", workers)
    bucket = choose_bucket(config, limits, options, rows, min(rows, 16), context)
    verify(compile_bucket(config, limits, dtype, bucket, options), "cpu")


@pytest.mark.parametrize("rows", [64, 512, 4096, 8192])
def test_matrix_products_have_no_more_tiles_than_they_need(rows: int) -> None:
    tiles = list(matrix_tiles((0, rows), 14336, 4096, 64, 2, 132, TARGETS["cuda"]))
    assert len(tiles) <= 2 * 132, "two waves of large tiles are as fast as many of small ones"
    area = sum((right - left) * (bottom - top) for (left, right), (top, bottom) in tiles)
    assert area == rows * 14336


@given(st.integers(17, 4096), st.sampled_from([1, 2, 3, 4, 5, 8, 32]), st.integers(1, 132))
def test_attention_gives_two_tiles_to_a_worker_only_if_tiles_would_be_too_large(
    rows: int, heads: int, workers: int
) -> None:
    """A tile of a prompt takes as long whether it has a row more or less."""
    options = default_options("cuda", workers, rows)
    largest = TARGETS["cuda"].attention_elements // 512
    for queries, context in ((0, 4096), (512, 4096), (512, 8192), (512, 32768), (512, 131072)):
        tiling = attention_tiling(rows, heads, 64, context, options, queries)
        tiles = -(-rows // tiling.rows) * tiling.heads * tiling.splits
        assert tiles <= workers or (queries and tiling.rows == largest)


@pytest.mark.parametrize("hidden", [576, 896, 960, 2048])  # SmolLM and others; Llama 3.2 1B
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64, 512])
def test_sums_of_squares_of_a_row_are_loaded_together(hidden: int, rows: int) -> None:
    """Rows of 576 had nine of 64 columns: batches of 64 took three times as long as of 32."""
    config = LlamaConfig(257, hidden, 512, 1, hidden // 64, hidden // 64, 64)
    limits = Limits(rows, 320, rows, default_logit_rows(rows, rows), 5 * rows, 64)
    options = functools.partial(default_options, "cuda", TARGETS["cuda"].workers)
    bucket = choose_bucket(config, limits, options, rows, rows, 260, decode=True)
    program = compile_bucket(config, limits, BF16, bucket, options)
    squares = {
        program.tensors[inst.x_squares].columns
        for inst in program.instructions
        if isinstance(inst, (Matmul, QkvRope, GateUp)) and inst.x_squares != NONE
    }
    assert squares
    assert all(columns % LOADED_SQUARES == 0 for columns in squares)
    if rows >= 64 and hidden == 2048:
        assert squares == {hidden // WIDE_SQUARES}
