"""Machines are not early: dead rows keep their place in the order, and nothing is written too soon.

The verifier accepts these programs, and no schedule within what machines may do gives other values.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from row_liveness_programs import (
    dead_rows,
    dead_words,
    prepare_rows,
    total_of_rows,
    words_before_inputs,
    writes_before_inputs,
)
from withholding import judge_all

from megavm.vm.machine import Executable, Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.verify import verify

STEPS = 6


def launches(machine: Machine) -> range:
    """A machine that is early is not early every time; the reference runs in one order only."""
    return range(1 if machine.name == "reference" else 80)


def load(machine: Machine, program: Program) -> tuple[Executable, Memory]:
    memory = Memory(machine.memory_device)
    memory.allocate(program.tensors)
    return machine.load(program, memory), memory


@pytest.mark.parametrize(
    "build", [dead_rows, dead_words, writes_before_inputs, words_before_inputs]
)
def test_the_program_is_accepted_and_no_schedule_matters(build: Callable[[], Program]) -> None:
    program = build()
    verify(program)
    assert judge_all(program) is None


@pytest.mark.parametrize("live", [0, 1, 2])
@pytest.mark.parametrize("build", [dead_rows, dead_words])
def test_dead_rows_neither_signal_early_nor_hold_up_others(
    machine: Machine, build: Callable[[], Program], live: int
) -> None:
    executable, memory = load(machine, build())
    for _ in launches(machine):
        prepare_rows(memory, live)
        executable.run(STEPS)
        expected = torch.full((live, 32), total_of_rows(STEPS))
        torch.testing.assert_close(memory["total"][:live].cpu(), expected, rtol=1e-4, atol=1e-4)
        assert torch.all(memory.tagged_words("T")[..., 1] == memory.epoch)


def test_tagged_words_of_dead_rows_carry_the_tag_of_their_step(machine: Machine) -> None:
    executable, memory = load(machine, dead_words())
    prepare_rows(memory, 1)
    executable.run(STEPS)
    assert torch.all(memory.tagged_words("out")[..., 1] == memory.epoch)


def test_nothing_is_written_before_all_tagged_inputs_are_there(machine: Machine) -> None:
    executable, memory = load(machine, writes_before_inputs())
    memory["A"].fill_(1.0)
    for _ in launches(machine):
        memory["P"].zero_()
        executable.run()
        assert memory["Q"].tolist() == [[0.0, 0.0], [0.0, 0.0]]
        assert memory["P"].tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_no_tagged_word_is_visible_before_all_inputs_are_read(machine: Machine) -> None:
    executable, memory = load(machine, words_before_inputs())
    for _ in launches(machine):
        memory["P"].zero_()
        memory["P"][0, :2] = 7.0
        executable.run()
        assert memory["T"][-1, -2:].tolist() == [0.0, 0.0]
        assert memory["P"][-1, -2:].tolist() == [7.0, 7.0]
