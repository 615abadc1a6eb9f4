"""Programs of several ranks: the simulator finds what is wrong, and the verifier accepts none of that."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import pytest
from copy_programs import copy
from exhaustive import Explorer, TooLarge
from fuzzing import Tally, check, check_tag_orders, mutants, random_verdict, tiny_programs
from meaning import Action, Meaning, action_of
from mutations import Draft, mutate
from toy_graphs import toy_programs_of_ranks
from withholding import each_action, judge, judge_all

from megavm.vm.isa import Instruction
from megavm.vm.program import Program
from megavm.vm.tensors import F32, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

WALKS, PROGRAMS, TINY_PROGRAMS = 8, 150, 80
A, B, ALL, WORDS, MORE, Y, Z = range(7)


def tensors(ranks: int) -> list[TensorSpec]:
    """Each rank writes 4 columns of ``all``, ``words`` and ``more``."""
    wide, activation, state = (1, 4 * ranks), TensorKind.ACTIVATION, TensorKind.STATE
    return [
        TensorSpec("a", (1, 4), F32, state),
        TensorSpec("b", (1, 4), F32, activation),
        TensorSpec("all", wide, F32, activation, shares=ranks),
        TensorSpec("words", wide, F32, activation, tagged=True, shares=ranks),
        TensorSpec("more", wide, F32, activation, tagged=True, shares=ranks),
        TensorSpec("y", wide, F32, state),
        TensorSpec("z", wide, F32, state),
    ]


def program(
    *workers: Sequence[Instruction],
    barriers: int,
    shared: int,
    ranks: int = 2,
    dynamic: bool = False,
) -> Program:
    """Workers that every rank has, with their queues."""
    numbers = itertools.count()
    return Program.build(
        tensors(ranks),
        [inst for worker in workers for inst in worker],
        [[next(numbers) for _ in worker] for worker in workers],
        barriers=[f"b{i}" for i in range(barriers)],
        shared_barriers=shared,
        ranks=ranks,
        dynamic=dynamic,
    )


MINE, WHOLE = (0, 4), (0, 8)


def gather(
    shared: int = 2, arrived: int = 2, begin: tuple[int, int] = (1, 0), dynamic: bool = False
) -> Program:
    """All ranks write their share of ``all``, and read all of it after ``arrived`` signals."""
    write = copy(A, ALL, MINE, [begin], 0)
    read = copy(ALL, Y, WHOLE, [(0, arrived)], 1)
    workers = [[write, read]] if dynamic else [[write], [read]]
    return program(*workers, barriers=2, shared=shared, dynamic=dynamic)


def gather_of_three(arrived: int) -> Program:
    return program(
        [copy(A, ALL, MINE, [(1, 0)], 0)],
        [copy(ALL, Y, (0, 12), [(0, arrived)], 1)],
        barriers=2,
        shared=2,
        ranks=3,
    )


def gather_and_more(arrived: int) -> Program:
    """A gather whose writers signal the same barrier once more."""
    return program(
        [copy(A, ALL, MINE, [(1, 0)], 0), copy(A, B, MINE, (), 0)],
        [copy(ALL, Y, WHOLE, [(0, arrived)], 1)],
        barriers=2,
        shared=2,
    )


def words(shared: int) -> Program:
    """Ranks exchange words. The next ones wait until those were read: on all ranks, or on the own one."""
    return program(
        [copy(A, WORDS, MINE, [(0, 0)])],
        [copy(WORDS, Y, WHOLE, signal=0)],
        barriers=1,
        shared=shared,
    )


def behind_words(first: Sequence[Instruction], *second: Instruction) -> Program:
    """One worker reads ``all`` when the words of all ranks have come; the other writes ``first``."""
    reads = [copy(WORDS, Z, WHOLE), copy(ALL, Y, WHOLE, signal=0)]
    return program([*first, *second], reads, barriers=1, shared=1)


GOOD: dict[str, Callable[[], Program]] = {
    "a gather": gather,
    "a gather by ticket": lambda: gather(dynamic=True),
    "a gather of three ranks": lambda: gather_of_three(3),
    "three of four signals have one of each rank": lambda: gather_and_more(3),
    "what ranks do not gather needs no signal of others": lambda: program(
        [copy(A, B, MINE, [(1, 0)], 0)], [copy(B, Y, MINE, [(0, 1)], 1)], barriers=2, shared=0
    ),
    "words, when all ranks say that they have read": lambda: words(shared=1),
    # Each of the two exchanges shows that all ranks have read the words of the other.
    "words answered with words": lambda: program(
        [copy(A, WORDS, MINE), copy(WORDS, Y, WHOLE), copy(A, MORE, MINE), copy(MORE, Z, WHOLE)],
        barriers=0,
        shared=0,
    ),
    # The worker tags the words when what it wrote before is visible on all ranks.
    "words after the columns": lambda: behind_words(
        [copy(A, ALL, MINE, [(0, 0)])], copy(A, WORDS, MINE)
    ),
}
BAD: dict[str, tuple[str, Callable[[], Program]]] = {
    "signals of the own rank for a gather": ("unwritten", lambda: gather(shared=0, arrived=1)),
    "signals of some ranks for a gather": ("unwritten", lambda: gather(arrived=1)),
    "signals of two of three ranks": ("unwritten", lambda: gather_of_three(2)),
    "the own rank has read, others still read": ("race", lambda: gather(shared=1)),
    "the own rank has read, others still read, by ticket": (
        "race",
        lambda: gather(shared=1, dynamic=True),
    ),
    "no signal says that a gather was read": ("race", lambda: gather(begin=(0, 0))),
    "a gather in the order of the queue": (
        "unwritten",
        lambda: program([copy(A, ALL, MINE), copy(ALL, Y, WHOLE)], barriers=0, shared=0),
    ),
    "two signals of one rank for one of each": ("unwritten", lambda: gather_and_more(2)),
    "the other rank overruns words without an answer": ("hang", lambda: words(shared=0)),
    "words answered before they are read": (
        "hang",
        lambda: program(
            [
                copy(A, WORDS, MINE),
                copy(A, MORE, MINE),
                copy(WORDS, Y, WHOLE),
                copy(MORE, Z, WHOLE),
            ],
            barriers=0,
            shared=0,
        ),
    ),
    "words before the columns": (
        "race",
        lambda: behind_words([copy(A, WORDS, MINE, [(0, 0)])], copy(A, ALL, MINE)),
    ),
    "ranks wait for each other": ("hang", lambda: gather(begin=(1, 2))),
    "a rank waits for more signals than it gets": ("hang", lambda: gather(shared=0)),
}


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_found_in_a_good_program_of_ranks(name: str) -> None:
    made = GOOD[name]()
    verify(made)
    assert judge_all(made) is None


@pytest.mark.parametrize("name", BAD)
def test_a_bad_program_of_ranks_is_found_out(name: str) -> None:
    kind, build = BAD[name]
    finding = judge(build(), random_schedules=0)
    assert finding is not None
    assert finding.kind == kind, str(finding)
    with pytest.raises(VerificationError):
        verify(build())


def test_a_finding_names_ranks() -> None:
    finding = judge(gather(shared=1), random_schedules=0)
    assert finding is not None
    assert finding.sentence == (
        "instruction 1 (copy) of step 0 on rank 1 reads rows [0, 1) columns [0, 4) of all on rank 1 "
        "after instruction 0 (copy) of step 1 on rank 0, "
        "expected instruction 0 (copy) of step 0 on rank 0"
    )
    assert "instruction 0 (copy) of step 0 on rank 0 signals to rank 1" in finding.schedule


def test_what_a_rank_writes_becomes_visible_on_every_rank_at_another_time() -> None:
    meaning = Meaning(gather(), steps=1)
    write = meaning.order[0]
    places = [meaning.places.describe(int(p)) for n in write.writes for p in write.accesses[n]]
    assert places == [f"rows [0, 1) columns [0, 4) of all on rank {rank}" for rank in (0, 1)]
    actions = [n for number, n in each_action(meaning.order, 1) if number == write.number]
    assert [action_of(n) for n in actions] == [Action.WRITE, Action.WRITE]
    assert len(set(actions)) == len(set(write.signals)) == 2


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_found_in_what_the_compiler_makes_for_ranks(ranks: int) -> None:
    for made in toy_programs_of_ranks(ranks):
        assert judge_all(made, steps=5) is None, "\n".join(made.disassemble())


def test_withholding_finds_exactly_what_trying_every_execution_of_two_ranks_finds() -> None:
    explored = found = 0
    for made in tiny_programs(TINY_PROGRAMS, ranks=2):
        try:
            good = Explorer(made, 2).is_good(limit=2000)
        except TooLarge:
            continue
        finding = judge(made, steps=2, random_schedules=0)
        assert good == (finding is None), "\n".join([*made.disassemble(), str(finding)])
        explored += 1
        found += not good
    assert explored > TINY_PROGRAMS // 2
    assert explored // 4 < found < explored * 3 // 4


def all_barriers_shared(made: Program) -> Program:
    """The program whose waits for barriers of the own rank are for signals of all ranks instead."""
    draft = Draft(made, random.Random())
    for i, inst in enumerate(made.instructions):
        waits = [
            (w.barrier, w.target * (1 if w.barrier < made.shared_barriers else made.ranks))
            for w in inst.waits
        ]
        draft.header(i, waits, inst.signal)
    draft.shared_barriers = draft.barriers
    return draft.program()


def test_a_verifier_that_takes_all_barriers_for_shared_ones_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fuzzing.verify", lambda made: verify(all_barriers_shared(made)))
    changes = (mutate(gather(), random.Random(number)) for number in range(PROGRAMS))
    verdicts = (check(made, random.Random(0)) for made in changes if made is not None)
    assert any(verdict.false_accept for verdict in verdicts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_programs_of_ranks_that_hang_or_race_are_rejected(ranks: int) -> None:
    tally = Tally()
    changed = (v for walk in range(WALKS // ranks) for v in mutants(walk, 1, ranks=ranks))
    made = (random_verdict(number, 1, ranks=ranks) for number in range(PROGRAMS // ranks))
    late = (random_verdict(n, 2, check_tag_orders, ranks) for n in range(PROGRAMS // ranks // 3))
    for verdict in itertools.chain(changed, made, late):
        assert not verdict.false_accept, str(verdict)
        tally.add(verdict)
    assert tally.accepted > tally.checked // 5, str(tally)
    assert tally.rules["unordered"] > tally.checked // 10, str(tally)
    assert tally.over_rejections.total() < tally.checked // 20, str(tally)
