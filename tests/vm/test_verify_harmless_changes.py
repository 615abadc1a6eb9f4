"""Harmless changes of correct programs are accepted."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from guilt import assert_guilty
from modelled_operations import Accesses, Model, Operation, build
from modelled_programs import CASES, NAMES, base_program, chunks, compiled, compiled_dynamic
from schedules import Interpreter, hangs

from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.vm.config import HEADER_WORDS, MAX_WAITS, NONE
from megavm.vm.isa import Wait
from megavm.vm.program import Program
from megavm.vm.verify import VerificationError, verify


def fine_grained(case: int) -> Program:
    """The program with a barrier for every tile, so that nothing leans on the order of a queue.

    Keys and values have one: their readers in the next step wait for all of it in their own header.
    """
    network, workers, _, tagged, rows = CASES[case]
    model = Model(tagged, rows)
    if network(model) is not None:
        raise ValueError("a program of its own, not a network")
    tiles = [
        Operation(o.label, own)
        for o in model.operations
        for own in ([o.tiles] if isinstance(o.tiles[0], QkvRope) else [[t] for t in o.tiles])
    ]
    return build(model.tensors, tiles, max(workers, 2), False)


NETWORKS = [c for c in range(len(CASES)) if CASES[c][0] not in (chunks, compiled, compiled_dynamic)]
STATIC = [c for c in NETWORKS if not CASES[c][2]]


@pytest.mark.parametrize("case", STATIC, ids=[NAMES[c] for c in STATIC])
def test_swapping_independent_neighbours_of_a_queue_is_accepted(case: int) -> None:
    program = fine_grained(case)
    verify(program)
    accesses = Accesses(program.tensors)
    swaps = 0
    for worker, queue in enumerate(program.queues):
        for i in range(len(queue) - 1):
            one, two = (program.instructions[k] for k in queue[i : i + 2])
            if accesses.ordered(one, two, False):
                continue
            queues = [q.copy() for q in program.queues]
            queues[worker][[i, i + 1]] = queues[worker][[i + 1, i]]
            swapped = replace(program, queues=tuple(queues))
            if not hangs(swapped):  # the second may wait for the first through others
                verify(swapped)
                swaps += 1
    assert swaps or len(program) < 20


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_dropping_a_wait_that_another_implies_is_accepted(case: int) -> None:
    """A wait added for what a needed barrier already waits for can be taken away again, and kept."""
    program = base_program(case)
    for index, inst in enumerate(program.instructions):
        if not inst.waits or len(inst.waits) == MAX_WAITS:
            continue
        behind = inst.waits[0]
        signallers = [i for i in program.instructions if i.signal == behind.barrier]
        if behind.target != len(signallers):
            continue
        held = {w.barrier for w in inst.waits} | {inst.signal}
        for extra in (w for w in signallers[0].waits if w.barrier not in held):
            words = program.words.copy()
            words[index] = np.frombuffer(
                inst.with_sync([*inst.waits, extra], inst.signal).encode(), "<u4"
            )
            verify(replace(program, words=words))


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_renumbering_barriers_and_instructions_is_accepted(case: int) -> None:
    program = base_program(case)
    rng = np.random.default_rng(case)
    barriers = rng.permutation(len(program.barriers)).astype(np.uint32)
    numbers = rng.permutation(len(program))
    words = program.words.copy()
    for word in (1, *range(2, HEADER_WORDS, 2)):
        used = words[:, word] != NONE
        words[used, word] = barriers[words[used, word]]
    moved = np.empty_like(words)
    moved[numbers] = words
    queues = tuple(numbers[q].astype(np.int32) for q in program.queues)
    verify(replace(program, words=moved, queues=queues))


@pytest.mark.parametrize("case", STATIC, ids=[NAMES[c] for c in STATIC])
def test_merging_queues_in_topological_order_is_accepted(case: int) -> None:
    program = base_program(case)
    order = np.arange(len(program), dtype=np.int32)  # the order in which tiles were made
    verify(replace(program, queues=(order,), workers=1))
    if program.workers > 2:
        merged = np.sort(np.concatenate(program.queues[:2]))
        verify(replace(program, queues=(merged, *program.queues[2:]), workers=program.workers - 1))


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_splitting_a_wait_through_a_noop_is_accepted(case: int) -> None:
    program = base_program(case)
    for index, inst in enumerate(program.instructions):
        # Reads of earlier rows wait for the barriers of their own header.
        if not inst.waits or any(region.earlier for region in inst.reads(program.tensors)):
            continue
        join = Noop(waits=inst.waits, signal=len(program.barriers))
        behind = inst.with_sync([Wait(len(program.barriers), 1)], inst.signal)
        words = np.concatenate([program.words, np.frombuffer(join.encode(), "<u4")[None]])
        words[index] = np.frombuffer(behind.encode(), "<u4")
        queues = [[int(e) for e in q] for q in program.queues]
        for queue in queues:
            if index in queue:
                queue.insert(queue.index(index), len(program))
        split = replace(
            program,
            words=words,
            queues=tuple(np.array(q, np.int32) for q in queues),
            barriers=(*program.barriers, "split"),
            labels=(*program.labels, "split"),
        )
        try:
            verify(split)
        except VerificationError as error:
            # In a dynamic queue two steps of the join may pass each other: then the wait is not the same.
            assert program.dynamic
            assert_guilty(split, error)


def test_the_analysis_does_not_depend_on_the_numbers_of_steps_tried() -> None:
    """What is accepted keeps its outcome when it runs for more steps than were analysed."""
    for case in range(len(CASES)):
        interpreter = Interpreter(base_program(case))
        expected = interpreter.run(7, None, workers=1).outcome
        assert interpreter.run(7, random.Random(case), workers=5).outcome == expected
