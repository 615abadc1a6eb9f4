"""Random small Llamas with fewer live rows than their programs have are computed right.

scripts/fuzz-llamas runs thousands of them.
"""

from __future__ import annotations

import pytest
from random_llamas import Case, check, random_case, with_rows

from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.machine import Machine
from megavm.vm.tensors import F32

ON = pytest.mark.parametrize("machine", ["cpu", "cuda"], indirect=True)


@ON
@pytest.mark.parametrize("seed", range(24))
def test_a_random_llama_computes_what_the_reference_does(seed: int, machine: Machine) -> None:
    assert not check(random_case(seed), machine, runs=2)


@ON
@pytest.mark.parametrize("rows", [1, 5, 9, 16])
def test_dead_rows_of_a_decode_step_do_not_run_ahead(rows: int, machine: Machine) -> None:
    """Bucket of 16, 132 workers: with 9 live rows 9 of 30 launches gave other logits once."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
    )
    limits, bucket = Limits(16, 512, 16, 16, 512, 16), Bucket(16, 16, 512, decode=True)
    graph = llama_graph(config, limits, bucket, F32)
    options = CompileOptions(132, exchange="preferred", column_unit=8)
    program, plain = compile_graph(graph, options), compile_graph(graph, CompileOptions(1))
    case = Case(1, config, limits, bucket, options, program, plain, 16, 16, steps=6)
    assert not check(with_rows(case, rows), machine, runs=10)
