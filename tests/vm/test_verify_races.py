"""Two conflicting accesses need an order."""

from __future__ import annotations

import numpy as np
import pytest
from copy_programs import PAIR, A, B, C, copy, edit, fault, program
from llama_decode import llama

from megavm.instructions.attention import Attention
from megavm.instructions.noop import Noop
from megavm.vm.config import NONE
from megavm.vm.isa import Wait
from megavm.vm.verify import verify


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_producer_and_a_consumer_with_both_waits_are_accepted(dynamic: bool) -> None:
    # A dynamic queue must also order the consumer's writes of two steps; the chain of waits does.
    verify(program(PAIR, [[0, 1]] if dynamic else [[0], [1]], dynamic))


def test_a_read_without_a_wait_is_a_race() -> None:
    text = fault(program([PAIR[0], PAIR[1].with_sync((), 1)], [[0], [1]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 1 reads rows [0, 1) columns [0, 8) of b, which "
        "instruction 0 (copy, op0) on worker 0 writes, without an order between them"
    )


def test_overwriting_what_the_step_before_still_reads_is_a_race() -> None:
    text = fault(program([PAIR[0].with_sync((), 0), PAIR[1]], [[0], [1]]))
    assert text == (
        "instruction 0 (copy, op0) on worker 0 writes rows [0, 1) columns [0, 8) of b, which "
        "instruction 1 (copy, op1) on worker 1 reads in the step before, without an order between them"
    )


def test_two_writers_of_one_place_need_an_order() -> None:
    assert "writes, without an order" in fault(program([copy(A, B), copy(A, B)], [[0], [1]]))
    verify(program([copy(A, B), copy(A, B)], [[0, 1]]))
    verify(program([copy(A, B, (0, 4)), copy(A, B, (4, 8))], [[0], [1]]))


def test_reading_an_activation_before_it_is_written_is_rejected() -> None:
    text = fault(program([copy(A, B, (0, 4)), copy(B, C)], [[0, 1]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 0 reads rows [0, 1) columns [0, 8) of b, "
        "some of which no instruction has written before in the step, and none does later"
    )
    text = fault(program([copy(B, C), copy(A, B)], [[0, 1]]))
    assert text.endswith(
        "some of which no instruction has written before in the step: instruction 1 (copy, op1) on "
        "worker 0 writes rows [0, 1) columns [0, 8) of b, but not before"
    )
    assert "no instruction has written before" in fault(program([copy(B, C), copy(A, B)], [[0, 1]]))


def test_what_one_worker_signals_early_does_not_stand_for_another() -> None:
    # Worker 1 can run ahead and signal twice before worker 0 has signalled once.
    early = [copy(A, B, signal=0), Noop(signal=0), copy(B, C, waits=[(0, 2)], signal=1)]
    early[0] = early[0].with_sync([Wait(1, 0)], 0)
    assert "without an order" in fault(program(early, [[0], [1], [2]]))
    held = [early[0], Noop(signal=0, waits=[Wait(1, 0)]), early[2]]
    verify(program(held, [[0], [1], [2]]))


def test_a_partial_target_orders_the_signals_that_it_cannot_do_without() -> None:
    producers = [copy(A, B, (0, 4), [(1, 0)], 0), copy(A, B, (4, 8), [(1, 0)], 0)]
    first = copy(B, C, (0, 4), [(0, 1)], 1)
    second = copy(B, C, (4, 8), [(0, 1)], 1)
    verify(program([*producers, first], [[0, 1], [2]]))
    assert "columns [4, 8)" in fault(program([*producers, second], [[0, 1], [2]]))
    assert "columns [0, 4)" in fault(program([*producers, first], [[0], [1], [2]]))


def test_a_chain_of_signals_behind_one_partial_target_is_decided_exactly() -> None:
    # Both producers signal x. The first signal is from the first one, as the second waits for it.
    chain = [
        copy(A, B, (0, 4), [(2, 0)], 0),
        Noop(waits=[Wait(0, 1)], signal=0),
        copy(B, C, (0, 4), [(0, 1)], 2),
    ]
    for dynamic in (False, True):
        verify(program(chain, [[0, 1, 2]] if dynamic else [[0], [1], [2]], dynamic))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
def test_a_wait_missing_deep_in_a_large_program_is_found(tagged: bool, dynamic: bool) -> None:
    large = llama(8, 132, tagged, dynamic)
    attention = np.flatnonzero(large.words[:, 0] == Attention.opcode)
    culprit = int(attention[len(attention) // 2])
    text = fault(edit(edit(large, culprit, 2, NONE), culprit, 3, 0))
    assert text.startswith(f"instruction {culprit} (attention, layers.4.attention)")
    assert "without an order between them" in text
