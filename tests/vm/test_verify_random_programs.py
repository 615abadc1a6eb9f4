"""Random programs: synchronisation that no compiler would emit, and targets between 0 and all."""

from __future__ import annotations

import random
from typing import Any

from guilt import assert_guilty
from modelled_operations import Model
from schedules import outcomes

from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32
from megavm.vm.verify import VerificationError, verify

RANDOM_PROGRAMS = 6000


def random_tile(m: Model, rng: random.Random) -> Instruction:
    """An instruction with one input, with two, with three outputs, with earlier rows, or with nothing."""
    begin, end = rng.choice(((0, 2), (2, 4), (0, 4)))
    numbers = [rng.randrange(4) for _ in range(3)]
    kind = rng.random()
    if 0.45 <= kind < 0.75 and numbers[0] == numbers[2]:  # products are not computed in place
        numbers[0] = (numbers[0] + 1) % 4
    x, y, out = (m.handles[f"t{number}"] for number in numbers)
    columns: dict[str, Any] = {
        "row_begin": 0,
        "row_end": 1,
        "column_begin": begin,
        "column_end": end,
    }
    if kind < 0.45:
        return Copy(x=x, out=out, x_row=0, x_column=begin, **columns)
    if kind < 0.6:
        weight = m.weight("w", 4, 4)
        return Matmul(
            x=x,
            residual=y,
            weight=weight,
            out=out,
            x_rows=1,
            tile=0,
            part=0,
            part_k=4,
            eps=0.0,
            **columns,
        )
    if kind < 0.75:
        first, last = rng.choice(((0, 4), (2, 6), (0, 6), (0, 2)))
        return QkvRope(
            x=x,
            q=out,
            k_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            v_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            weight=m.weight("qkv", 12, 4),
            rope=m.given("rope", 4, 2, dtype=F32),
            row_sequence=m.given("one", 1),
            row_position=m.given("one", 1),
            row_count=m.given("one", 1),
            block_table=m.given("blocks", 1, 2),
            row_begin=0,
            row_end=1,
            pair_begin=first,
            pair_end=last,
            eps=0.0,
        )
    if kind < 0.85:
        return Attention(
            q=x,
            out=out,
            k_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            v_cache=m.state(f"c{rng.randrange(2)}", 2, 2, 2, 2),
            k_new=y,
            v_new=y,
            row_sequence=m.given("one", 1),
            row_position=m.given("one", 1),
            row_count=m.given("one", 1),
            block_table=m.given("blocks", 1, 2),
            row_begin=0,
            row_end=1,
            head_begin=begin // 2,
            head_end=end // 2,
            split=0,
            num_splits=1,
            chunk=2,
            context=4,
            step_rows=1,
            scale=1.0,
        )
    return Noop()


def random_program(rng: random.Random) -> Program:
    """A few instructions on random regions with random waits; most are wrong."""
    m = Model(tagged=False)
    for i in range(4):
        if rng.random() < 0.5:
            m.tensor(f"t{i}", 1, 4, tagged=rng.random() < 0.5)
        else:
            m.state(f"t{i}", 1, 4)
    count, barriers = rng.randint(2, 7), rng.randint(1, 4)
    signals = [rng.randrange(barriers) if rng.random() < 0.8 else None for _ in range(count)]
    instructions: list[Instruction] = []
    for i in range(count):
        waits = []
        for barrier in rng.sample(range(barriers), min(barriers, rng.choice((0, 1, 1, 2, 2, 3)))):
            before = signals[:i].count(barrier)
            target = rng.choice((0, before, before, rng.randint(0, signals.count(barrier))))
            waits.append(Wait(barrier, target))
        instructions.append(random_tile(m, rng).with_sync(waits, signals[i]))
    dynamic = rng.random() < 0.4
    queues: list[list[int]] = [[] for _ in range(1 if dynamic else rng.randint(2, 3))]
    for i in range(count):
        rng.choice(queues).append(i)
    return Program.build(
        m.tensors,
        instructions,
        queues,
        barriers=[""] * barriers,
        dynamic=dynamic,
        workers=len(queues),
    )


def test_random_programs_are_accepted_exactly_when_no_schedule_matters() -> None:
    accepted = unordered = 0
    for seed in range(RANDOM_PROGRAMS):
        rng = random.Random(seed)
        program = random_program(rng)
        try:
            verify(program)
        except VerificationError as error:
            if error.rule != "form":
                assert_guilty(program, error)
            unordered += error.rule == "unordered"
            continue
        accepted += 1
        outcomes(program, rng, 8)
    assert accepted > 300
    assert unordered > 600
