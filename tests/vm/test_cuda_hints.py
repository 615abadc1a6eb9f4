"""Hints: counters of those that write what an instruction reads as tagged words."""

from __future__ import annotations

import numpy as np
import pytest

from megavm.instructions.matmul import Matmul
from megavm.scheduler.compiler.compile import compile_graph
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, llama_graph
from megavm.vm.config import NONE
from megavm.vm.cuda.hints import make_hints
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, Region

OPTIONS = [
    CompileOptions(6, exchange="tagged", column_unit=8),
    CompileOptions(12, exchange="tagged", column_unit=8, part_of_k=64),
    CompileOptions(6, exchange="preferred", column_unit=8),
]


def llama(options: CompileOptions, rows: int) -> Program:
    config = LlamaConfig(67, 64, 128, 2, 4, 2, 16)
    limits = Limits(rows, 64, rows, rows, rows * 16, 4)
    return compile_graph(
        llama_graph(config, limits, Bucket(rows, rows, 64, decode=True), BF16), options
    )


def overlap(one: Region, two: Region) -> bool:
    pairs = ((one.rows, two.rows), (one.columns, two.columns))
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in pairs)


@pytest.mark.parametrize("options", OPTIONS, ids=["words", "parts", "preferred"])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_hint_counts_instructions_that_write_what_the_reader_reads(
    options: CompileOptions, rows: int
) -> None:
    program = llama(options, rows)
    hints, signals = make_hints(program)
    first = len(program.barriers)
    counters = hints[:, 0][hints[:, 0] != NONE] - first
    np.testing.assert_array_equal(np.bincount(counters, minlength=len(signals)), signals)
    for i in np.flatnonzero(hints[:, 1] != NONE):
        read = {
            r.tensor: r
            for r in program.instructions[i].reads(program.tensors)
            if program.tensors[r.tensor].tagged
        }
        counted = np.flatnonzero(hints[:, 0] == hints[i, 1])
        for j in counted:
            assert any(
                w.tensor in read and overlap(w, read[w.tensor])
                for w in program.instructions[j].writes(program.tensors)
            )


def test_every_product_of_words_has_a_hint_of_its_input() -> None:
    program = llama(OPTIONS[0], 1)
    hints, _ = make_hints(program)
    inputs = {
        inst.x: program.tensors[inst.x].columns
        for inst in program.instructions
        if isinstance(inst, Matmul) and program.tensors[inst.x].tagged
    }
    assert len(inputs) > 4
    for inst, hint in zip(program.instructions, hints, strict=True):
        if isinstance(inst, Matmul) and inst.x in inputs:
            assert hint[1] != NONE


def test_the_last_part_of_a_product_waits_for_no_hint_of_the_others() -> None:
    """It multiplies first. Where a part is shorter, its workers have other columns than those of the rest."""
    config = LlamaConfig(67, 192, 160, 2, 4, 2, 16)
    limits = Limits(4, 64, 4, 4, 64, 4)
    options = CompileOptions(12, exchange="preferred", column_unit=8, part_of_k=64)
    graph = llama_graph(config, limits, Bucket(4, 4, 64, decode=True), BF16)
    program = compile_graph(graph, options)
    hints, _ = make_hints(program)
    adding = {
        number: inst.addends
        for number, inst in enumerate(program.instructions)
        if isinstance(inst, Matmul) and inst.addends != NONE
    }
    assert adding
    for number, parts in adding.items():
        counted = np.flatnonzero(hints[:, 0] == hints[number, 1])
        written = {
            region.tensor
            for writer in counted
            for region in program.instructions[writer].writes(program.tensors)
        }
        assert hints[number, 1] == NONE or parts not in written
