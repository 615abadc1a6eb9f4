"""Whether schedules show the fault that the verifier names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from modelled_operations import conflict
from schedules import Hang, Interpreter, Run, hangs, words_of

from megavm.vm.program import Program
from megavm.vm.tensors import Region
from megavm.vm.verify import Access, VerificationError


def assert_guilty(program: Program, error: VerificationError) -> None:
    """A schedule shows what the verifier says."""
    interpreter = Interpreter(program)
    if error.rule in ("deadlock", "tag_unreachable"):
        assert hangs(program), str(error)
    elif error.rule == "unwritten":
        access = error.accesses[-1]
        unwritten = interpreter.run(1, None, workers=1).read_unwritten
        assert unwritten & {interpreter.cells[c] for c in elements(access.region)}, str(error)
    elif error.rule == "tag_ambiguous":
        first, second = error.accesses
        assert first.write
        assert second.write
        assert conflict(program.tensors, first.region, second.region)
    else:
        assert error.rule == "unordered"
        first, second = error.accesses
        tensors = program.tensors
        assert first.write or second.write
        assert conflict(tensors, first.region, second.region)
        assert any(
            can_come_first(interpreter, one, other) and can_come_first(interpreter, other, one)
            for word in words_of(tensors, first.region)
            if conflict(tensors, word, second.region)
            for one in [replace(first, region=word)]
            for other in [replace(second, region=word) if tensors[word.tensor].tagged else second]
        ), str(error)


def elements(region: Region) -> Iterable[tuple[int, int, int]]:
    return ((region.tensor, r, c) for r in range(*region.rows) for c in range(*region.columns))


def can_come_first(interpreter: Interpreter, one: Access, other: Access) -> bool:
    """Whether ``one`` can be made while ``other`` is delayed, or delaying hangs the program."""

    def position(run: Run, access: Access) -> int:
        return next(
            n
            for n, (index, step, write, region) in enumerate(run.log)
            if (index, step, write) == (access.instruction, access.step, access.write)
            and conflict(interpreter.program.tensors, region, access.region)
        )

    for steps in (2, 4, 12):
        try:
            run = interpreter.run(steps, None, held=other, hurried=one)
        except Hang:
            return True
        if position(run, one) < position(run, other):
            return True
    return False
