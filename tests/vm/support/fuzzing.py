"""Compares the verifier's verdicts on many programs with those of the simulator."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from meaning import Finding
from mutations import mutate
from program_makers import random_program
from toy_graphs import toy_programs, toy_programs_of_ranks
from withholding import judge, live_counts

from megavm.instructions import instruction_set
from megavm.vm.alike import tag_orders
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.program import Program
from megavm.vm.tensors import TensorSpec
from megavm.vm.verify import VerificationError, verify

ORDER_RULES = ("deadlock", "unordered", "unwritten", "tag_unreachable", "tag_ambiguous")
WALK = 16  # mutants of a base program, one after the other


@dataclass(frozen=True)
class Verdict:
    """What the verifier says of a program (``rule`` None: accepted) and what the simulator finds.

    Programs of invalid form have no meaning and are not simulated.
    """

    program: Program
    rule: str | None
    sentence: str
    finding: Finding | None
    # The verifier says that it needs the order of its queues, the simulator finds no need.
    needless_order: bool = False

    @property
    def false_accept(self) -> bool:
        return self.rule is None and self.finding is not None

    @property
    def over_rejection(self) -> bool:
        return self.rule not in (None, "form") and self.finding is None

    def __str__(self) -> str:
        """The tensors and instructions, what the verifier says, and what the simulator finds."""
        program = self.program
        lines = [f"{program}, {program.shared_barriers} barriers shared"]
        for spec in program.tensors:
            kind = "tagged" if spec.tagged else spec.kind.value
            shares = f", {spec.shares} shares" if spec.shares > 1 else ""
            lines.append(f"{spec.name} {list(spec.shape)} {spec.dtype.name} {kind}{shares}")
        lines += program.disassemble()
        return "\n".join([*lines, *(str(text) for text in (self.sentence, self.finding) if text)])


def check(program: Program, rng: random.Random) -> Verdict:
    """Ask verifier and simulator.

    An accepted program is also simulated with some of its rows live, and seldom for more steps.
    A program that does not need the order of its static queues runs without it.
    """
    try:
        verify(program)
    except VerificationError as error:
        finding = None if error.rule == "form" else judge(program, seed=rng.getrandbits(32))
        return Verdict(program, error.rule, str(error), finding)
    seed = rng.getrandbits(32)
    finding = judge(program, seed=seed, steps=7 if rng.random() < 0.05 else 4)
    counts = live_counts(program)
    if finding is None and counts:
        finding = judge(program, live=rng.choice(counts), seed=seed)
    if finding is not None or program.dynamic:
        return Verdict(program, None, "", finding)
    overlapping = judge(program, queue_order=False, seed=seed)
    if program.needs_queue_order:
        return Verdict(program, None, "", None, needless_order=overlapping is None)
    sentence = "accepted, whatever the order of its queues"
    return Verdict(program, None, sentence, overlapping)


Ask = Callable[[Program, random.Random], Verdict]


@contextmanager
def varied_tag_orders(rng: random.Random) -> Iterator[None]:
    """Replace the tag order of each instruction class by a random one that it may have."""
    late = {cls: rng.random() < 0.6 for cls in instruction_set().values()}
    early = {cls: rng.random() < 0.6 for cls in instruction_set().values()}

    def tag_order(inst: Instruction, tensors: Sequence[TensorSpec], most_rows: int) -> TagOrder:
        if any(tensors[region.tensor].tagged for region in inst.writes(tensors)):
            return TagOrder.READS_LATE if late[type(inst)] else TagOrder.KEPT
        return TagOrder.WRITES_EARLY if early[type(inst)] else TagOrder.KEPT

    with ExitStack() as stack:
        for cls in late:
            stack.enter_context(patch.object(cls, "tag_order", tag_order))
        yield


def check_tag_orders(program: Program, rng: random.Random) -> Verdict:
    """Ask verifier and simulator about machine "cuda", with varied tag orders."""
    with varied_tag_orders(rng):
        orders = tag_orders(program.words, program.tensors)
        try:
            verify(program, "cuda")
        except VerificationError as error:
            if error.rule not in ORDER_RULES:
                return Verdict(program, "form", str(error), None)
            finding = judge(program, tag_orders=orders, seed=rng.getrandbits(32))
            return Verdict(program, error.rule, str(error), finding)
    keeps = program.dynamic or bool(program.__dict__["needs_queue_order"])
    seed = rng.getrandbits(32)
    finding = judge(program, tag_orders=orders, queue_order=keeps, seed=seed)
    counts = live_counts(program)
    if finding is None and counts:
        live = rng.choice(counts)
        finding = judge(program, live=live, tag_orders=orders, queue_order=keeps, seed=seed)
    return Verdict(program, None, "", finding)


def mutants(walk: int, seed: int, ask: Ask = check, ranks: int = 1) -> Iterator[Verdict]:
    """Verdicts on changes of one toy program. Accepted programs are changed further."""
    rng = random.Random(f"{seed} mutants {walk}")
    toys = toy_programs() if ranks == 1 else toy_programs_of_ranks(ranks)
    program = rng.choice(toys) if rng.random() < 0.7 else random_program(rng, ranks=ranks)
    for _ in range(WALK):
        changed = mutate(program, rng)
        if changed is None:
            continue
        verdict = ask(changed, rng)
        yield verdict
        if verdict.rule is None:
            program = changed


def random_verdict(number: int, seed: int, ask: Ask = check, ranks: int = 1) -> Verdict:
    """The verdict on a random program, which seldom has a change."""
    rng = random.Random(f"{seed} program {number}")
    program = random_program(rng, ranks=ranks)
    if rng.random() < 0.3:
        program = mutate(program, rng) or program
    return ask(program, rng)


def tiny_programs(count: int, ranks: int = 1) -> Iterator[Program]:
    """Random programs of up to three tiles with a change, without those of invalid form."""
    for number in range(count):
        rng = random.Random(number)
        program = random_program(rng, most=3, ranks=ranks)
        program = mutate(program, rng) or program
        try:
            verify(program)
        except VerificationError as error:
            if error.rule == "form":
                continue
        yield program


@dataclass
class Tally:
    """Counts of verdicts."""

    rules: Counter[str] = field(default_factory=Counter)
    over_rejections: Counter[str] = field(default_factory=Counter)
    false_accepts: int = 0
    without_order: int = 0
    needless_orders: int = 0

    def add(self, verdict: Verdict) -> None:
        rule = verdict.rule or "accepted"
        self.rules[rule] += 1
        self.over_rejections[rule] += verdict.over_rejection
        self.false_accepts += verdict.false_accept
        self.without_order += bool(verdict.rule is None and verdict.sentence)
        self.needless_orders += verdict.needless_order

    @property
    def checked(self) -> int:
        return self.rules.total()

    @property
    def accepted(self) -> int:
        return self.rules["accepted"]

    def __str__(self) -> str:
        judged = self.checked - self.accepted - self.rules["form"]
        over = self.over_rejections.total()
        by_rule = ", ".join(
            f"{rule} {n} of {self.rules[rule]}" for rule, n in self.over_rejections.items() if n
        )
        return (
            f"checked {self.checked}, accepted {self.accepted} "
            f"({self.without_order} without the order of their queues; "
            f"{self.needless_orders} do not need it), "
            f"rejected {self.checked - self.accepted} (form {self.rules['form']}), "
            f"false accepts {self.false_accepts}, over-rejections {over} of {judged} "
            f"({100 * over / max(judged, 1):.2f} %{': ' if by_rule else ''}{by_rule})"
        )
