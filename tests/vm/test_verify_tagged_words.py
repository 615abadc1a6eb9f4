"""A tagged word has one writer, and orders no more than it promises."""

from __future__ import annotations

import pytest
from copy_programs import (
    ACTIVATION,
    INPUT,
    STATE,
    TENSORS,
    WEIGHT,
    A,
    B,
    C,
    T,
    copy,
    fault,
    program,
)

from megavm.instructions.matmul import Matmul
from megavm.vm.isa import Wait
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorSpec
from megavm.vm.verify import verify


def test_half_a_tagged_word_cannot_be_written() -> None:
    text = fault(program([copy(A, T, (0, 3))], [[0]]))
    assert text == (
        "instruction 0 (copy, op0): writes columns [0, 3) of t, which is tagged: "
        "words of 2 BF16 are written as a whole"
    )


def test_a_tagged_word_that_nobody_writes_is_unreachable() -> None:
    text = fault(program([copy(A, T, (0, 6)), copy(T, B)], [[0], [1]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 1 reads rows [0, 1) columns [0, 8) of t, which is tagged, "
        "and some of whose words no instruction writes"
    )


def test_a_tagged_word_with_two_writers_is_ambiguous() -> None:
    text = fault(program([copy(A, T, (0, 6)), copy(A, T, (4, 8)), copy(T, B)], [[0, 1, 2]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 0 writes rows [0, 1) columns [4, 8) of t, which is tagged, "
        "and which instruction 0 (copy, op0) on worker 0 writes too"
    )


def test_a_tagged_word_orders_its_own_words_but_not_other_writes_of_the_writer() -> None:
    # The queue orders 0 before 1, and the tagged words order 1 before 2.
    tagged = [
        copy(A, B, waits=[(0, 0)]),
        copy(A, T),
        copy(T, C, signal=0),
    ]
    tagged[1] = tagged[1].with_sync([Wait(0, 0)], None)
    verify(program(tagged, [[0, 1], [2]]))
    # A machine may issue a plain read while it still waits for the tagged words.
    tensors = (
        *TENSORS,
        TensorSpec("r", (2, 8), F32, ACTIVATION),
        TensorSpec("g", (8, 8), BF16, WEIGHT),
    )
    product = Matmul(
        x=T,
        weight=8,
        residual=B,
        out=7,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=8,
        x_rows=1,
        tile=0,
        part=0,
        part_k=8,
        eps=0.0,
        signal=0,
    )
    racing = Program.build(tensors, [tagged[0], tagged[1], product], [[0, 1], [2]], barriers=["x"])
    assert "of b, which instruction 0 (copy) on worker 0 writes, without" in fault(racing)
    waiting = [tagged[0].with_sync([Wait(0, 0)], 1), tagged[1], product.with_sync([Wait(1, 1)], 0)]
    verify(Program.build(tensors, waiting, [[0, 1], [2]], barriers=["x", "y"]))


def test_tagged_words_must_be_read_before_the_next_step_rewrites_them() -> None:
    text = fault(program([copy(A, T), copy(T, B)], [[0], [1]]))
    assert text == (
        "instruction 0 (copy, op0) on worker 0 writes rows [0, 1) columns [0, 8) of t, which "
        "instruction 1 (copy, op1) on worker 1 reads in the step before, without an order between them"
    )
    verify(program([copy(A, T, waits=[(0, 0)]), copy(T, B, signal=0)], [[0], [1]]))
    verify(program([copy(A, T, waits=[(0, 0)]), copy(T, B, signal=0)], [[0, 1]], dynamic=True))


@pytest.mark.parametrize(("tagged", "order"), [(False, "KEPT"), (True, "READS_LATE")])
def test_words_of_a_product_do_not_say_that_its_addends_are_read(tagged: bool, order: str) -> None:
    """A GPU's thread reads the addends of a result when others have stored theirs."""
    tensors = [
        TensorSpec("x", (2, 64), BF16, INPUT),
        TensorSpec("w", (1024, 64), BF16, WEIGHT),
        TensorSpec("parts", (2, 1024), F32, STATE),
        TensorSpec("sum", (2, 1024), F32, ACTIVATION, tagged=tagged),
        TensorSpec("y", (2, 1024), F32, STATE),
        TensorSpec("z", (2, 1024), F32, INPUT),
    ]
    product = Matmul(
        **{"x": 0, "weight": 1, "addends": 2, "out": 3, "row_begin": 0, "row_end": 2, "x_rows": 2},
        **{"column_begin": 0, "column_end": 1024, "part": 0, "part_k": 64, "tile": 0, "eps": 0.0},
        waits=[Wait(0, 0), Wait(1, 0)],
        signal=2,
    )
    assert product.tag_order(tensors, 2).name == order
    waits = [] if tagged else [(2, 1)]
    read = copy(3, 4, (0, 8), waits, rows=(0, 2))
    overwrite = copy(5, 2, (0, 1024), signal=0, rows=(0, 2))
    rest = copy(3, 4, (8, 1024), waits, 1, (0, 2))
    racing = Program.build(
        tensors, [product, read, overwrite, rest], [[0], [1, 2], [3]], barriers=["p", "y", "s"]
    )
    if tagged:
        assert "writes rows [0, 2) columns [0, 1024) of parts, which instruction 0" in fault(
            racing, "cuda"
        )
    else:  # a barrier does say so
        verify(racing, "cuda")
