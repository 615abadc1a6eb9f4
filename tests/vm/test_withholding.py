"""The simulator finds what is wrong with programs, and the verifier accepts none in which it finds anything."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from exhaustive import Explorer, TooLarge
from fuzzing import Tally, check_tag_orders, mutants, random_verdict, tiny_programs
from toy_graphs import toy_programs
from withholding import judge, judge_all

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

WALKS, PROGRAMS, TINY_PROGRAMS = 40, 1000, 700

TENSORS = (
    TensorSpec("a", (2, 4), F32, TensorKind.STATE),
    TensorSpec("b", (2, 4), F32, TensorKind.ACTIVATION),
    TensorSpec("c", (2, 4), F32, TensorKind.ACTIVATION),
    TensorSpec("t", (2, 4), F32, TensorKind.ACTIVATION, tagged=True),
    TensorSpec("u", (2, 4), F32, TensorKind.ACTIVATION, tagged=True),
    TensorSpec("gain", (4,), F32, TensorKind.WEIGHT),
    TensorSpec("row_count", (1,), I32, TensorKind.INPUT),
    TensorSpec("weight", (4, 4), F32, TensorKind.WEIGHT),
    TensorSpec("peaks", (2, 2), F32, TensorKind.ACTIVATION, tagged=True),
    TensorSpec("d", (2, 2), F32, TensorKind.STATE),
)
A, B, C, T, U, GAIN, ROW_COUNT, WEIGHT, PEAKS, D = range(len(TENSORS))
Sync = Sequence[tuple[int, int]]


def copy(
    x: int,
    out: int,
    waits: Sync = (),
    signal: int | None = None,
    rows: tuple[int, int] = (0, 2),
    x_row: int | None = None,
) -> Copy:
    return Copy(
        x=x,
        out=out,
        x_row=rows[0] if x_row is None else x_row,
        x_column=0,
        row_begin=rows[0],
        row_end=rows[1],
        column_begin=0,
        column_end=4,
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def norm(
    x: int,
    out: int,
    waits: Sync = (),
    signal: int | None = None,
    rows: tuple[int, int] = (0, 2),
    count: int = ROW_COUNT,
) -> RmsNorm:
    return RmsNorm(
        x=x,
        gain=GAIN,
        out=out,
        row_count=count,
        row_begin=rows[0],
        row_end=rows[1],
        eps=1.0,
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def product(x: int, out: int, waits: Sync = (), signal: int | None = None, **others: Any) -> Matmul:
    return Matmul(
        x=x,
        weight=WEIGHT,
        out=out,
        row_begin=0,
        row_end=2,
        column_begin=0,
        column_end=4,
        part=0,
        part_k=4,
        x_rows=2,
        tile=0,
        eps=0.0,
        waits=[Wait(*w) for w in waits],
        signal=signal,
        **others,
    )


def peaks(waits: Sync = (), signal: int | None = None) -> Copy:
    """A copy of the peaks to d."""
    return Copy(
        x=PEAKS,
        out=D,
        x_row=0,
        x_column=0,
        row_begin=0,
        row_end=2,
        column_begin=0,
        column_end=2,
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def noop(waits: Sync = (), signal: int | None = None) -> Noop:
    return Noop(waits=[Wait(*w) for w in waits], signal=signal)


def queues(*workers: Sequence[Instruction]) -> Program:
    return _program(workers, False)


def drawn(*instructions: Instruction) -> Program:
    return _program([instructions], True)


def _program(workers: Sequence[Sequence[Instruction]], dynamic: bool) -> Program:
    instructions = [inst for worker in workers for inst in worker]
    numbers = iter(range(len(instructions)))
    return Program.build(
        TENSORS,
        instructions,
        [[next(numbers) for _ in worker] for worker in workers],
        barriers=["x", "y", "z"],
        dynamic=dynamic,
    )


# Every program beside one in which a wait, a target or an entry of a queue is wrong.

GOOD: dict[str, Callable[[], Program]] = {
    "a chain": lambda: queues([copy(A, B, [(1, 0)], 0)], [copy(B, C, [(0, 1)], 1)]),
    "a chain of tickets": lambda: drawn(copy(A, B, [(1, 0)], 0), copy(B, C, [(0, 1)], 1)),
    "words": lambda: queues([copy(A, T, [(0, 0)])], [copy(T, B, signal=0)]),
    "words by ticket": lambda: drawn(copy(A, T, [(0, 0)]), copy(T, B, [(0, 0)], 0)),
    "two signals": lambda: queues(
        [copy(A, B, [(1, 0)], 0, (0, 1))],
        [copy(A, B, [(1, 0)], 0, (1, 2))],
        [copy(B, C, [(0, 2)], 1)],
    ),
    "the first of two signals": lambda: queues(
        [copy(A, B, [(1, 0)], 0, (0, 1)), copy(A, B, [], 0, (1, 2))],
        [copy(B, C, [(0, 1)], rows=(0, 1)), copy(B, C, [(0, 2)], 1, (1, 2))],
    ),
    "a plain read behind its barrier, words or not": lambda: queues(
        [copy(A, B, [(0, 0)], 1), copy(A, T)], [product(T, C, [(1, 1)], 0, residual=B)]
    ),
    "plain writes behind their barrier, words or not": lambda: queues(
        [product(A, B, [(0, 0)], 1, peaks=PEAKS)], [peaks(), copy(B, C, [(1, 1)], 0)]
    ),
    # The words of t come when b was read, so an instruction that waits for them may overwrite b.
    "a write after words": lambda: queues(
        [copy(B, T, [(0, 1)])], [copy(A, B, [(1, 0)], 0), copy(T, B, [], 1)]
    ),
    "dead rows": lambda: queues(
        [copy(A, T, [(0, 0), (1, 0)], None, (0, 1)), copy(A, T, [], None, (1, 2))],
        [norm(T, B, [], 0, (0, 1))],
        [norm(T, B, [], 0, (1, 2))],
        [copy(B, C, [(0, 2)], 1)],
    ),
    "dead words": lambda: queues([copy(A, T, [(0, 0)])], [norm(T, U)], [copy(U, C, [], 0)]),
    "in place": lambda: queues([copy(A, B), copy(B, B)]),
}
BAD: dict[str, tuple[str, Callable[[], Program]]] = {
    "missing wait for this step": (
        "race",
        lambda: queues([copy(A, B, [(1, 0)], 0)], [copy(B, C, [], 1)]),
    ),
    "missing wait for the step before": (
        "race",
        lambda: queues([copy(A, B, [], 0)], [copy(B, C, [(0, 1)], 1)]),
    ),
    "a step overtakes the one before by ticket": (
        "race",
        lambda: drawn(copy(A, B, [], 0), copy(B, C, [(0, 1)], 1)),
    ),
    "one write overtakes another": (
        "race",
        lambda: queues([copy(A, B, [(1, 0)], 0)], [copy(A, B, [], 1)]),
    ),
    "wrong target": (
        "race",
        lambda: queues(
            [copy(A, B, [(1, 0)], 0, (0, 1))],
            [copy(A, B, [(1, 0)], 0, (1, 2))],
            [copy(B, C, [(0, 1)], 1)],
        ),
    ),
    "the second of two signals is not the first": (
        "race",
        lambda: queues(
            [copy(A, B, [(1, 0)], 0, (0, 1)), copy(A, B, [], 0, (1, 2))],
            [copy(B, C, [(0, 1)], rows=(1, 2)), copy(B, C, [(0, 2)], 1, (0, 1))],
        ),
    ),
    "an early signaller stands for another": (
        "race",
        lambda: queues([copy(A, B, [(1, 0)], 0)], [noop([], 0)], [copy(B, C, [(0, 2)], 1)]),
    ),
    "words overwritten before they are read": (
        "hang",
        lambda: queues([copy(A, T)], [copy(T, B, signal=0)]),
    ),
    "words overwritten by the next ticket": (
        "race",
        lambda: drawn(copy(A, T), copy(T, B, [(0, 0)], 0)),
    ),
    "words with two writers": (
        "race",
        lambda: queues([copy(A, T, [(0, 0)])], [copy(A, T, [(0, 0)])], [copy(T, B, [], 0)]),
    ),
    "words that no instruction writes": (
        "hang",
        lambda: queues([copy(A, T, [(0, 0)], None, (0, 1))], [copy(T, B, [], 0)]),
    ),
    "a plain read is not held back by words": (
        "race",
        lambda: queues([copy(A, B, [(0, 0)]), copy(A, T)], [product(T, C, [], 0, residual=B)]),
    ),
    "plain writes may be late when words are visible": (
        "race",
        lambda: queues([product(A, B, [(0, 0)], peaks=PEAKS)], [peaks(), copy(B, C, [], 0)]),
    ),
    "waits in a circle": (
        "hang",
        lambda: queues([copy(A, B, [(1, 1)], 0)], [copy(A, C, [(0, 1)], 1)]),
    ),
    "a reader before its writer in the queue": (
        "hang",
        lambda: queues([copy(T, B), copy(A, T)]),
    ),
    "a reader drawn before its writer": (
        "hang",
        lambda: drawn(copy(B, C, [(0, 1)], 1), copy(A, B, [(1, 0)], 0)),
    ),
    "read before written": ("unwritten", lambda: queues([copy(B, C), copy(A, B)])),
    "dead rows signal early": (
        "race",
        lambda: queues(
            [copy(A, T, [(1, 0)], None, (0, 1)), norm(T, B, [], 0, (0, 1))],
            [norm(A, B, [], 0, (1, 2))],
            [copy(B, C, [(0, 2)], 1)],
        ),
    ),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_found_in_a_good_program(name: str) -> None:
    program = GOOD[name]()
    verify(program)
    assert judge_all(program) is None


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_is_found_out(name: str) -> None:
    kind, build = BAD[name]
    finding = judge(build(), random_schedules=0)
    assert finding is not None
    assert finding.kind == kind, str(finding)
    with pytest.raises(VerificationError):
        verify(build())


def test_a_finding_names_what_went_by() -> None:
    finding = judge(BAD["missing wait for this step"][1]())
    assert finding is not None
    assert finding.sentence == (
        "instruction 1 (copy) of step 0 reads rows [0, 2) columns [0, 4) of b after nothing, "
        "expected instruction 0 (copy) of step 0"
    )


def test_random_schedules_alone_find_a_race() -> None:
    program = BAD["an early signaller stands for another"][1]()
    assert all(judge(program, seed=seed) is not None for seed in range(3))


@pytest.mark.parametrize("number", range(len(toy_programs())))
def test_nothing_is_found_in_what_the_compiler_makes(number: int) -> None:
    assert judge_all(toy_programs()[number], steps=5) is None


def test_withholding_finds_exactly_what_trying_every_execution_finds() -> None:
    found = 0
    for program in tiny_programs(TINY_PROGRAMS):
        try:
            good = Explorer(program, 2).is_good(limit=10_000)
        except TooLarge:
            continue
        finding = judge(program, steps=2, random_schedules=0)
        assert good == (finding is None), "\n".join([*program.disassemble(), str(finding)])
        found += not good
    assert TINY_PROGRAMS // 4 < found < TINY_PROGRAMS * 3 // 4


def test_mutants_that_hang_or_race_are_rejected() -> None:
    tally = Tally()
    for walk in range(WALKS):
        for verdict in mutants(walk, 1):
            assert not verdict.false_accept, str(verdict)
            tally.add(verdict)
    assert tally.accepted > tally.checked // 5, str(tally)
    assert tally.rules["unordered"] > tally.checked // 10, str(tally)


def test_random_programs_that_hang_or_race_are_rejected() -> None:
    tally = Tally()
    for number in range(PROGRAMS):
        verdict = random_verdict(number, 1)
        assert not verdict.false_accept, str(verdict)
        # The verifier is exact for all that is not written twice.
        assert not verdict.over_rejection or verdict.rule in ("unwritten", "tag_ambiguous"), str(
            verdict
        )
        tally.add(verdict)
    assert tally.accepted > PROGRAMS // 4, str(tally)
    assert tally.rules["unordered"] > PROGRAMS // 10, str(tally)


def test_words_of_kernels_that_read_late_or_write_early_are_judged_as_such() -> None:
    tally = Tally()
    needed = 0  # programs of the compiler that are right only where all kernels keep the order
    for number, program in enumerate(toy_programs()):
        verdict = check_tag_orders(program, random.Random(number))
        assert not verdict.false_accept, str(verdict)
        needed += verdict.rule is not None and verdict.finding is not None
    assert needed > 0
    changed = (v for walk in range(WALKS // 2) for v in mutants(walk, 2, check_tag_orders))
    made = (random_verdict(number, 2, check_tag_orders) for number in range(PROGRAMS // 4))
    for verdict in itertools.chain(changed, made):
        assert not verdict.false_accept, str(verdict)
        tally.add(verdict)
    assert tally.accepted > tally.checked // 10, str(tally)
    assert tally.rules["unordered"] > tally.checked // 10, str(tally)


@pytest.mark.parametrize("order", [True, False])
def test_the_order_of_a_queue_counts_where_it_is_kept(order: bool) -> None:
    program = queues([copy(A, B), copy(B, C)])
    verify(program)
    assert program.needs_queue_order
    assert (judge(program, queue_order=order) is None) == order
    free = queues([copy(A, B, [(1, 0)], 0), copy(B, C, [(0, 1)], 1)])
    verify(free)
    assert not free.needs_queue_order
    assert judge(free, queue_order=order) is None


def test_verdicts_can_be_repeated() -> None:
    one, two = ([v.sentence for v in mutants(3, 5)] for _ in range(2))
    assert one == two
    assert str(judge(random_verdict(7, 5).program)) == str(judge(random_verdict(7, 5).program))
