"""The verifier names the instructions of a deadlock."""

from __future__ import annotations

import pytest
from copy_programs import PAIR, A, B, C, T, copy, fault, program


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cycle_of_waits_is_named(dynamic: bool) -> None:
    instructions = [copy(A, B, waits=[(1, 1)], signal=0), copy(A, C, waits=[(0, 1)], signal=1)]
    text = fault(program(instructions, [[0, 1]] if dynamic else [[0], [1]], dynamic))
    if dynamic:
        assert text == (
            "deadlock: instruction 0 (copy, op0) waits for barrier 1 (y) to reach 1 (it stands at 0), "
            "signalled by instruction 1 (copy, op1), which stands behind instruction 0"
        )
    else:
        assert text == (
            "deadlock: instruction 0 (copy, op0) on worker 0 waits for barrier 1 (y) to reach 1 "
            "(it stands at 0), signalled by instruction 1 (copy, op1); "
            "instruction 1 (copy, op1) on worker 1 waits for barrier 0 (x) to reach 1 "
            "(it stands at 0), signalled by instruction 0 (copy, op0)"
        )


def test_a_consumer_before_its_producer_in_the_same_queue_is_a_deadlock() -> None:
    text = fault(program([*PAIR, copy(A, B, (0, 1), rows=(1, 2))], [[1, 0], [2]]))
    assert text == (
        "deadlock: instruction 1 (copy, op1) on worker 0 waits for barrier 0 (x) to reach 1 "
        "(it stands at 0), signalled by instruction 0 (copy, op0), which stands behind instruction 1"
    )


def test_an_instruction_that_waits_for_itself_is_a_deadlock() -> None:
    text = fault(program([copy(A, B, waits=[(0, 1)], signal=0)], [[0]]))
    assert text.endswith("to reach 1 (it stands at 0), signalled by itself")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tagged_word_before_its_writer_in_a_queue_is_a_deadlock(dynamic: bool) -> None:
    text = fault(program([copy(T, B), copy(A, T)], [[0, 1]], dynamic))
    assert "waits for tagged words, written by instruction 1 (copy, op1)" in text
