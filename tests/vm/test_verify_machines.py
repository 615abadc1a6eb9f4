"""The verifier refuses a program that a machine has no room or no kernel for."""

from __future__ import annotations

import numpy as np
import pytest
from copy_programs import CHAIN, INPUT, STATE, WEIGHT, copy, fault
from gathered_product import gathered

from megavm.instructions.attention.examples import Case, example
from megavm.instructions.matmul import Matmul
from megavm.vm.cuda.memory import SCRATCH_BYTES
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorSpec
from megavm.vm.verify import verify

# The product of x and w has more sums than a worker of the CPU can keep.
WIDE = (
    TensorSpec("x", (64, 65536), F32, INPUT),
    TensorSpec("w", (8192, 65536), F32, WEIGHT),
    TensorSpec("y", (64, 8192), F32, STATE),
    TensorSpec("u", (8, 65536), BF16, WEIGHT),
    TensorSpec("z", (64, 8), F32, STATE),
)


def product(weight: int = 1, out: int = 2) -> Matmul:
    """The whole product of x and a weight, as one instruction."""
    return Matmul(
        x=0,
        weight=weight,
        out=out,
        row_begin=0,
        row_end=64,
        column_begin=0,
        column_end=WIDE[weight].rows,
        x_rows=64,
        tile=0,
        part=0,
        part_k=65536,
        eps=0.0,
    )


def test_an_instruction_beyond_the_working_memory_of_a_cpu_is_refused_there() -> None:
    large = Program.build(WIDE, [product()], [[0]])
    assert fault(large, "cpu") == (
        "instruction 0 (matmul): needs 2295808 bytes of working memory, "
        "a worker of the CPU has 359424"
    )
    verify(large, "cuda")
    verify(large)


def attention_of(group: int) -> Program:
    """An attention of ``group`` query heads of 128 elements for one KV head."""
    case = Case("", group, 1, 128, [(0, 3)], 1, block_size=16, splits=(0, 1, 16))
    made = example(np.random.default_rng(0), case)
    return made.changed("q", kind=INPUT).program()


def test_an_instruction_beyond_the_scratch_of_a_gpu_is_refused_there() -> None:
    verify(attention_of(32), "cuda")
    large = attention_of(64)
    assert fault(large, "cuda") == (
        "instruction 0 (attention): needs 266240 bytes of scratch, "
        f"a worker of the GPU has {SCRATCH_BYTES} beside 4 pages"
    )
    verify(large, "cpu")


def test_what_one_kernel_of_a_gpu_cannot_serve_is_refused_there() -> None:
    mixed = Program.build(WIDE, [product(), product(3, 4)], [[0, 1]])
    assert fault(mixed, "cuda") == (
        "the program multiplies with weights of float32 and of bfloat16: a kernel is for one"
    )
    verify(mixed)


def test_a_tensor_that_kernels_of_a_gpu_need_in_two_layouts_is_refused_there() -> None:
    units = gathered(copy(1, 2, rows=(1, 2)))
    assert fault(units, "cuda") == (
        "tensor w is needed as units by instruction 0 (matmul, weight) "
        "and rows by instruction 1 (copy, x)"
    )
    verify(units, "cpu")


def test_machines_that_are_unknown_are_named() -> None:
    with pytest.raises(ValueError, match="machine 'tpu' is unknown: expected cpu, cuda, reference"):
        verify(CHAIN, "tpu")
