"""What a trace says of a program: channels and waits, bytes and FLOPs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from recording import ring

from megavm.instructions.copy import Copy
from megavm.instructions.noop import Noop
from megavm.profiler.dependencies import trace_program
from megavm.profiler.trace import BARRIER, TAGGED, TraceProgram
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.run.buckets import compile_bucket
from megavm.vm.isa import Wait
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec

ONE_B = LlamaConfig(128256, 2048, 8192, 16, 32, 8, 64, tie_word_embeddings=True)


def llama(rows: int, context: int = 4096) -> Program:
    """Llama-3.2-1B for the workers of an H200."""
    limits = Limits(rows, context, 512, 64, context // 64 * rows, 64)
    return compile_bucket(
        ONE_B, limits, BF16, Bucket(rows, rows, context), lambda n: default_options("cuda", 132, n)
    )


def waits_of(program: TraceProgram, instruction: int) -> list[tuple[int, int, int, list[int], int]]:
    """(kind, object, target, producers, steps back) of each wait of an instruction."""
    offsets = program.channel_offsets
    return [
        (
            int(program.channel_kind[c]),
            int(program.channel_object[c]),
            int(program.channel_target[c]),
            program.channel_producers[offsets[c] : offsets[c + 1]].tolist(),
            int(back),
        )
        for i, c, back in program.waits.tolist()
        if i == instruction
    ]


def test_a_wait_for_a_barrier_is_a_channel_of_all_that_signal_it() -> None:
    instructions = [
        Noop(waits=[Wait(1, 0)], signal=0),
        Noop(signal=0),
        Noop(signal=0),
        Noop(waits=[Wait(0, 2)], signal=1),
        Noop(waits=[Wait(0, 2)]),
    ]
    program = trace_program(
        Program.build([], instructions, [[0, 3], [1, 2, 4]], barriers=["a", "b"])
    )
    assert waits_of(program, 3) == [(BARRIER, 0, 2, [0, 1, 2], 0)]
    assert waits_of(program, 4) == waits_of(program, 3)
    assert len(program.channel_kind) == 2


def test_target_zero_waits_for_the_step_before() -> None:
    program = trace_program(ring(2, 2))
    assert waits_of(program, 0) == [(BARRIER, 3, 1, [3], 1)]
    assert waits_of(program, 1) == [(BARRIER, 0, 1, [0], 0)]


def test_a_barrier_that_nobody_signals_is_no_channel() -> None:
    program = trace_program(Program.build([], [Noop(waits=[Wait(0, 0)])], [[0]], barriers=["a"]))
    assert len(program.waits) == len(program.channel_kind) == 0


def test_tagged_words_wait_for_those_who_write_what_is_read() -> None:
    tensors = [
        TensorSpec("x", (1, 8), F32, TensorKind.STATE),
        TensorSpec("y", (1, 8), F32, TensorKind.ACTIVATION, tagged=True),
        TensorSpec("z", (1, 8), F32, TensorKind.STATE),
    ]

    def copy(x: int, out: int, begin: int, end: int) -> Copy:
        return Copy(
            x=x, out=out, x_row=0, x_column=begin, row_begin=0, row_end=1, column_begin=begin,
            column_end=end,
        )  # fmt: skip

    instructions = [copy(0, 1, 0, 4), copy(0, 1, 4, 8), copy(1, 2, 0, 6), copy(1, 2, 6, 8)]
    program = trace_program(Program.build(tensors, instructions, [[0, 2], [1, 3]]))
    assert waits_of(program, 2) == [(TAGGED, 1, 0, [0, 1], 0)]
    assert waits_of(program, 3) == [(TAGGED, 1, 0, [1], 0)]
    assert program.channel_name(0) == "y"


def test_labels_kinds_and_fields_can_be_read_without_megavm() -> None:
    program = trace_program(ring(2, 2))
    assert program.kinds == ("copy",)
    assert [program.facts["labels"][i] for i in program.label] == ["rounds.0.hop"] * 2 + [
        "rounds.1.hop"
    ] * 2
    fields = program.facts["opcodes"][str(program.words[0, 0])]["fields"]
    handles = [f["word"] for f in fields if f["name"] in ("x", "out")]
    assert program.words[2, handles].tolist() == [2, 3]


@pytest.mark.parametrize("rows", [1, 8])
def test_dependencies_of_a_llama_are_those_that_instructions_declare(rows: int) -> None:
    program = llama(rows)
    tensors = program.tensors
    begin = time.perf_counter()
    traced = trace_program(program)
    assert time.perf_counter() - begin < 3
    writers: dict[int, list[tuple[int, tuple[int, int]]]] = {}
    for i, inst in enumerate(program.instructions):
        for region in inst.writes(tensors):
            if tensors[region.tensor].tagged:
                writers.setdefault(region.tensor, []).append((i, region.columns))
    for i in [*range(0, len(program), 97), len(program) - 1]:
        inst = program.instructions[i]
        wanted = set()
        for wait in inst.waits:
            signallers = np.flatnonzero(program.words[:, 1] == wait.barrier)
            wanted.add((BARRIER, wait.barrier, tuple(signallers.tolist()), int(wait.target == 0)))
        for region in inst.reads(tensors):
            if tensors[region.tensor].tagged:
                begin_, end = region.columns
                found = {w for w, (a, b) in writers[region.tensor] if a < end and begin_ < b}
                wanted.add((TAGGED, region.tensor, tuple(sorted(found)), 0))
        have = {(k, o, tuple(p), back) for k, o, _, p, back in waits_of(traced, i)}
        assert have == wanted


def test_streamed_bytes_are_the_weights_and_the_context() -> None:
    context = 250.0
    traced = trace_program(llama(1), context)
    kv = context * ONE_B.kv_elements_per_token * 2
    weights = 2 * (ONE_B.num_parameters - 33 * 2048)  # gains are not streamed
    assert traced.load_bytes.sum() == pytest.approx(weights + kv, rel=1e-3)
    assert (traced.load_bytes <= traced.bytes).all()


def test_bytes_of_attention_grow_with_the_context_and_of_others_do_not() -> None:
    program = llama(1)
    short, long = trace_program(program, 100.0), trace_program(program, 1100.0)
    attention = (
        np.array([program.instructions[i].name() for i in range(len(program))]) == "attention"
    )
    assert (short.bytes == long.bytes)[~attention].all()
    grown = (long.bytes - short.bytes)[attention].sum()
    assert grown == pytest.approx(1000 * ONE_B.kv_elements_per_token * 2, rel=1e-3)
    assert trace_program(program).bytes.sum() == sum(
        inst.bytes(program.tensors) for inst in program.instructions
    )
