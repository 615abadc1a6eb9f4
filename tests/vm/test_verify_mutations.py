"""The verifier against an interpreter that knows nothing of it: thousands of broken and of harmless programs.

The interpreter runs a program under any schedule, in events: waits satisfied, one region read, one region
written, signalled. An instruction is abstract: what it writes is a hash of its operands, the step and all
that it read, so that whatever arrives too late or too early shows in the result. The *outcome* of a run is
the hash of every instruction of every step, and the final contents of memory.

What holds for every mutant of a correct program:

* Accepted: it ends under every schedule tried, always with the same outcome. If only waits, signals or the
  order of queues changed, every activation also holds what it held in the original: such a mutant
  lost nothing it needed. (Other mutations may change the meaning: another weight, another tile.)
* Rejected for a deadlock: it hangs.
* Rejected for order: the two accesses named conflict, and there are two schedules, one that delays the
  first access and one that delays the second, that make them in either order (or hang).
* Rejected for reading what is not written: the interpreter reads it unwritten.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
from guilt import assert_guilty
from modelled_programs import CASES, NAMES, base_program
from mutants import OTHERS, TIMING_ONLY, Mutant
from schedules import outcomes

from megavm.vm.verify import VerificationError, verify

MUTANTS_PER_PROGRAM = 230


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_the_unchanged_program_is_accepted_and_independent_of_the_schedule(case: int) -> None:
    program = base_program(case)
    verify(program)
    outcomes(program, random.Random(case), 40)


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
def test_no_mutant_that_hangs_or_races_is_accepted_and_no_correct_one_rejected(case: int) -> None:
    base = base_program(case)
    rng = random.Random(1000 + case)
    original = outcomes(base, rng, 2)
    verdicts: dict[str, int] = defaultdict(int)
    for number in range(MUTANTS_PER_PROGRAM):
        kinds = TIMING_ONLY if number % 5 < 3 else OTHERS
        mutate = rng.choice(kinds)
        mutant = Mutant(base, rng)
        mutate(mutant)
        if rng.random() < 0.15:
            rng.choice(TIMING_ONLY)(mutant) if kinds is TIMING_ONLY else rng.choice(OTHERS)(mutant)
        try:
            program = mutant.program()
        except ValueError:
            continue
        try:
            verify(program)
        except VerificationError as error:
            verdicts[error.rule] += 1
            if error.rule != "form":
                assert_guilty(program, error)
            continue
        verdicts["accepted"] += 1
        outcome = outcomes(program, rng, 6)
        if kinds is TIMING_ONLY:
            assert outcome == original, f"{mutate.__name__} changed the meaning"
    assert verdicts["accepted"] > 0
    assert verdicts["unordered"] > 0 or base.workers == 1
