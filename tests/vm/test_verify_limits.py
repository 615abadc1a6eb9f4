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


def tensors_of(size: int) -> list[TensorSpec]:
    return [TensorSpec(name, (size, size), F32, TensorKind.STATE) for name in "ab"]


def copy(rows: tuple[int, int], columns: tuple[int, int], x: int = 0) -> Copy:
    """Copies a rectangle of one tensor to the same place of the other: of ``a`` to ``b`` if x is 0."""
    (top, bottom), (left, right) = rows, columns
    return Copy(
        x=x,
        out=1 - x,
        x_row=top,
        x_column=left,
        row_begin=top,
        row_end=bottom,
        column_begin=left,
        column_end=right,
    )


def test_tiles_on_a_diagonal_cost_no_more_than_they_are() -> None:
    size = 3000
    copies = [copy((i, i + 1), (i, i + 1)) for i in range(size)]
    diagonal = Program.build(tensors_of(size), copies, [range(size)])
    begin = time.process_time()
    verify(diagonal)
    assert time.process_time() - begin < 2


def test_a_program_that_cuts_a_tensor_too_finely_is_refused_in_bounded_memory() -> None:
    size = 3000
    lines = [(i, i + 1) for i in range(size)]
    # Nothing overwrites the reads of rows, so that those of columns cut all of them.
    copies = [copy(line, (0, size)) for line in lines] + [copy((0, size), line) for line in lines]
    program = Program.build(tensors_of(size), copies, [range(len(copies))])
    with pytest.raises(VerificationError, match="into more than 8388608 pieces") as raised:
        verify(program)
    assert raised.value.rule == "limit"


def test_a_program_that_touches_too_many_pieces_is_refused_in_bounded_time() -> None:
    size = 1024
    lines = [(i, i + 1) for i in range(0, size, 2)]
    # At the end of a step columns lie over rows, with gaps: a million pieces, and each of the first
    # instructions of the next step touches them all. Nothing writes the last column of ``b``.
    copies = [copy((0, size), (0, size - 1))] * 1100
    copies += [copy((0, size), (size - 1, size), x=1)]
    copies += [copy(line, (0, size - 1)) for line in lines]
    copies += [copy((0, size), line) for line in lines]
    program = Program.build(tensors_of(size), copies, [range(len(copies))])
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
