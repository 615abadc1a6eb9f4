"""What one instruction declares, spread over all that are alike, is what each of them declares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.run.buckets import compile_bucket
from megavm.scheduler.run.kernels import default_limits
from megavm.vm.alike import accesses, figures
from megavm.vm.isa import Instruction
from megavm.vm.program import Program
from megavm.vm.tensors import BF16


@pytest.fixture(scope="module", params=[1, 8])
def program(request: pytest.FixtureRequest) -> Program:
    rows = request.param
    config = Checkpoint.open(resolve("stories")).config
    bucket = Bucket(rows, rows, 300, decode=rows > 1)
    return compile_bucket(
        config, default_limits(config), BF16, bucket, lambda rows: default_options("cuda", 9, rows)
    )


def test_all_instructions_access_what_they_declare(program: Program) -> None:
    tensors = program.tensors
    asked = []

    def declare(number: int, inst: Instruction) -> Iterator[tuple[int, ...]]:
        assert inst == program.instructions[number]
        asked.append(number)
        for r in inst.reads(tensors):
            yield r.tensor, *r.rows, *r.columns

    found = accesses(program.words, tensors, 5, declare)
    assert len(program) > 2 * len(asked)
    expected = [
        [i, r.tensor, *r.rows, *r.columns]
        for i, inst in enumerate(program.instructions)
        for r in inst.reads(tensors)
    ]
    assert found.tolist() == expected


def test_alike_instructions_cost_the_same(program: Program) -> None:
    tensors = program.tensors
    found = figures(
        program.words, tensors, 2, lambda inst: (inst.bytes(tensors), inst.flops(tensors))
    )
    expected = [[inst.bytes(tensors), inst.flops(tensors)] for inst in program.instructions]
    assert found.tolist() == expected


def test_a_tensor_that_is_no_operand_is_refused(program: Program) -> None:
    foreign = len(program.tensors)
    with pytest.raises(ValueError, match=r"accesses tensor \d+, which is none of its operands"):
        accesses(program.words, program.tensors, 2, lambda number, inst: [(foreign, 0)])
    assert accesses(program.words, program.tensors, 2, lambda number, inst: []).shape == (0, 3)
