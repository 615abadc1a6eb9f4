"""What one instruction declares, spread over all that are alike, is what each of them declares."""

from __future__ import annotations

import numpy as np
import pytest

from megavm.scheduler.checkpoint import Checkpoint
from megavm.scheduler.hub import resolve
from megavm.scheduler.kernels import default_limits
from megavm.scheduler.llama import Bucket
from megavm.scheduler.runner import compile_bucket, default_options
from megavm.vm.alike import find_alike
from megavm.vm.isa import BF16
from megavm.vm.program import Program


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
    found = []
    kinds = 0
    for same in find_alike(program.words, tensors):
        kinds += len(same.representatives)
        declared = [
            [(r.tensor, *r.rows, *r.columns) for r in inst.reads(tensors)]
            for inst in same.representatives
        ]
        found.append(same.accesses(declared, 5))
    rows = np.concatenate(found)
    assert len(program) > 2 * kinds
    expected = [
        (i, r.tensor, *r.rows, *r.columns)
        for i, inst in enumerate(program.instructions)
        for r in inst.reads(tensors)
    ]
    assert sorted(map(tuple, rows.tolist())) == sorted(expected)


def test_alike_instructions_cost_the_same(program: Program) -> None:
    for same in find_alike(program.words, program.tensors):
        costs = np.array([inst.bytes(program.tensors) for inst in same.representatives])
        mine = [program.instructions[i].bytes(program.tensors) for i in same.numbers]
        assert costs[same.kind].tolist() == mine


def test_a_tensor_that_is_no_operand_is_refused(program: Program) -> None:
    same = next(find_alike(program.words, program.tensors))
    declared = [[(len(program.tensors), 0)]] * len(same.representatives)
    with pytest.raises(ValueError, match=r"accesses tensor \d+, which is none of its operands"):
        same.accesses(declared, 2)
    assert same.accesses([[]] * len(same.representatives), 2).shape == (0, 3)
