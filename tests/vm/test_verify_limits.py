"""The verifier is fast on large programs, bounded on any, and checks the arrays that C++ receives."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llama_decode import llama

from megavm.instructions.copy import Copy
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.scheduler.llama.parallel import Parallel
from megavm.vm import _native
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
def test_a_program_of_32_layers_for_132_workers_verifies_in_two_seconds(
    tagged: bool, dynamic: bool
) -> None:
    large = llama(32, 132, tagged, dynamic)
    assert len(large) > 22_000
    begin = time.process_time()
    verify(large)
    assert time.process_time() - begin < 2


def test_a_program_that_cuts_a_tensor_too_finely_is_refused_in_bounded_memory() -> None:
    size = 3000
    tensors = [
        TensorSpec("a", (size, size), F32, TensorKind.STATE),
        TensorSpec("b", (size, size), F32, TensorKind.STATE),
    ]
    copies = [
        Copy(
            x=0,
            out=1,
            x_row=i,
            x_column=i,
            row_begin=i,
            row_end=i + 1,
            column_begin=i,
            column_end=i + 1,
        )
        for i in range(size)
    ]
    diagonal = Program.build(tensors, copies, [range(size)])
    with pytest.raises(VerificationError, match=r"cut its tensors into 1\d{7} cells") as raised:
        verify(diagonal)
    assert raised.value.rule == "limit"


def test_a_program_that_touches_too_many_cells_is_refused_in_bounded_time() -> None:
    size = 512
    tensors = [TensorSpec(name, (size, size), F32, TensorKind.STATE) for name in "ab"]

    def copy(x: int, begin: int, end: int) -> Copy:
        return Copy(
            x=x,
            out=1 - x,
            x_row=begin,
            x_column=begin,
            row_begin=begin,
            row_end=end,
            column_begin=begin,
            column_end=end,
        )

    copies = [copy(0, i, i + 1) for i in range(size)]
    copies += [copy(i % 2, 0, size) for i in range(1700)]  # each touches all cells of both
    program = Program.build(tensors, copies, [range(len(copies))])
    with pytest.raises(VerificationError, match="more than 1000000000 times") as raised:
        verify(program)
    assert raised.value.rule == "limit"


@pytest.mark.parametrize(
    ("config", "rows", "ranks"),
    [
        (LlamaConfig(128256, 4096, 14336, 32, 32, 8, 128), 64, 4),
        (LlamaConfig(128256, 8192, 28672, 80, 64, 8, 128), 1, 8),
    ],
    ids=["8B, 64 rows, 4 ranks", "70B, 1 row, 8 ranks"],
)
def test_programs_of_large_models_on_several_ranks_are_within_the_limits(
    config: LlamaConfig, rows: int, ranks: int
) -> None:
    limits = Limits(rows, 256, rows, rows, 4 * rows, 64)
    bucket = Bucket(rows, rows, 256, decode=rows > 1)
    graph = llama_graph(config, limits, bucket, BF16, Parallel(ranks))
    compile_graph(graph, default_options("cuda", 132, rows))


GOOD: dict[str, Any] = {
    "barriers": 2,
    "dynamic": False,
    "queues": np.array([0, 1], np.int32),
    "lengths": np.array([1, 1], np.int64),
    "waits": np.array([[[1, 0], [-1, 0], [-1, 0]], [[0, 1], [-1, 0], [-1, 0]]], np.int64),
    "signals": np.array([0, 1], np.int64),
    "orders": np.zeros((2, 2), bool),
    "accesses": np.array([[0, 0, 0, 1, 0, 8, 1, 0, 0], [1, 0, 0, 1, 0, 8, 0, 0, 0]], np.int64),
    "traits": np.array([[False, True, True]]),
}


def changed(name: str, place: tuple[int, ...], value: int) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = GOOD[name].copy()
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("queues", (0,), 2),
        ("queues", (0,), -1),
        ("queues", (0,), 1),
        ("lengths", (0,), 2),
        ("lengths", (0,), -1),
        ("waits", (1, 0, 0), 2),
        ("waits", (1, 0, 1), 2),
        ("waits", (1, 0, 1), -1),
        ("signals", (0,), 2),
        ("signals", (0,), -2),
        ("accesses", (0, 0), 2),
        ("accesses", (1, 0), -1),
        ("accesses", (0, 1), 1),
        ("accesses", (0, 1), -1),
        ("accesses", (0, 2), 1),
        ("accesses", (0, 4), -1),
    ],
)
def test_the_analysis_checks_its_arrays(name: str, place: tuple[int, ...], value: int) -> None:
    assert _native.analyse(**GOOD) == (None, False)
    with pytest.raises(ValueError, match=r"queue|signal|wait|access"):
        _native.analyse(**GOOD | {name: changed(name, place, value)})
