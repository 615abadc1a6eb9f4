"""What the verifier says about programs with one fault, and how long it takes on a large one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megavm.instructions.attention import Attention
from megavm.instructions.attention.examples import Case, example
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.copy import Copy
from megavm.instructions.embed import Embed
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.rms_norm import RmsNorm
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Sample
from megavm.vm import _native
from megavm.vm.config import NONE
from megavm.vm.isa import BF16, F32, I32, DType, Instruction, TensorKind, TensorSpec, Wait
from megavm.vm.program import Program
from megavm.vm.verify import VerificationError, verify

WEIGHT, INPUT, STATE, ACTIVATION = (
    TensorKind.WEIGHT,
    TensorKind.INPUT,
    TensorKind.STATE,
    TensorKind.ACTIVATION,
)


# Small programs of copies. Tensors: a (state), b, c (activations), w (weight), n (input), t (tagged).

TENSORS = (
    TensorSpec("a", (2, 8), F32, STATE),
    TensorSpec("b", (2, 8), F32, ACTIVATION),
    TensorSpec("c", (2, 8), F32, ACTIVATION),
    TensorSpec("w", (2, 8), F32, WEIGHT),
    TensorSpec("n", (2, 8), F32, INPUT),
    TensorSpec("t", (2, 8), BF16, ACTIVATION, tagged=True),
    TensorSpec("ids", (4,), I32, INPUT),
)
A, B, C, W, N, T, IDS = range(len(TENSORS))


def copy(
    x: int,
    out: int,
    columns: tuple[int, int] = (0, 8),
    waits: Sequence[tuple[int, int]] = (),
    signal: int | None = None,
    rows: tuple[int, int] = (0, 1),
) -> Copy:
    return Copy(
        x=x,
        out=out,
        x_row=rows[0],
        x_column=columns[0],
        row_begin=rows[0],
        row_end=rows[1],
        column_begin=columns[0],
        column_end=columns[1],
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def program(
    instructions: Sequence[Instruction], queues: Sequence[Sequence[int]], dynamic: bool = False
) -> Program:
    used = {w.barrier for i in instructions for w in i.waits} | {i.signal for i in instructions}
    count = max((b for b in used if b is not None), default=-1) + 1
    return Program.build(
        TENSORS,
        instructions,
        queues,
        barriers=[f"{'xyz'[i]}" for i in range(count)],
        dynamic=dynamic,
        workers=3 if dynamic else None,
        labels=[f"op{i}" for i in range(len(instructions))],
    )


def edit(base: Program, instruction: int, word: int, value: int) -> Program:
    words = base.words.copy()
    words[instruction, word] = value
    return replace(base, words=words)


def fault(broken: Program) -> str:
    with pytest.raises(VerificationError) as error:
        verify(broken)
    return str(error.value)


PAIR = [copy(A, B, waits=[(1, 0)], signal=0), copy(B, C, waits=[(0, 1)], signal=1)]
CHAIN = program(PAIR, [[0], [1]])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_producer_and_a_consumer_with_both_waits_are_accepted(dynamic: bool) -> None:
    # The dynamic queue also needs the consumer's own writes of two steps ordered: the chain gives that.
    verify(program(PAIR, [[0, 1]] if dynamic else [[0], [1]], dynamic))


def test_a_program_without_instructions_is_accepted() -> None:
    verify(program([], [[], []]))


# Form.


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [
        (0, 999, "instruction 1: opcode 999 is unknown"),
        (1, 2, "instruction 1 (copy, op1): signals barrier 2, the program has 2"),
        (2, 7, "instruction 1 (copy, op1): wait 0 is for barrier 7, the program has 2"),
        (
            3,
            2,
            "instruction 1 (copy, op1): waits for barrier 0 (x) to reach 2, but one step signals it 1 times",
        ),
        (5, 1, "instruction 1 (copy, op1): wait 1 has target 1 but no barrier"),
        (6, 0, "instruction 1 (copy, op1): wait 2 is used but wait 1 is not"),
        (4, 0, "instruction 1 (copy, op1): waits twice for barrier 0 (x)"),
        (8, 70, "instruction 1 (copy, op1): x is tensor 70, the program has 7"),
        (8, NONE, "instruction 1 (copy, op1): x is NONE, but it is not optional"),
        (8, IDS, "instruction 1 (copy, op1): x is ids of I32, expected F32 or BF16"),
        (9, W, "instruction 1 (copy, op1): writes w, which is a weight"),
        (9, N, "instruction 1 (copy, op1): writes n, which is an input"),
        (
            10,
            2,
            "instruction 1 (copy, op1): reads rows [2, 3) outside tensor b of 2 rows",
        ),
        (
            11,
            1,
            "instruction 1 (copy, op1): reads columns [1, 9) outside tensor b of 8 columns",
        ),
        (13, 3, "instruction 1 (copy, op1): rows [0, 3) is empty or outside [0, 2)"),
        (13, 0, "instruction 1 (copy, op1): rows [0, 0) is empty or outside [0, 2)"),
        (16, 5, "instruction 1 (copy, op1): word 16 is 5, expected 0: no field uses it"),
        (31, 1, "instruction 1 (copy, op1): word 31 is 1, expected 0: no field uses it"),
    ],
)
def test_a_wrong_word_is_named(word: int, value: int, sentence: str) -> None:
    assert fault(edit(CHAIN, 1, word, value)) == sentence


def test_a_real_operand_must_be_finite() -> None:
    words = llama(1, 2).words
    matmul = int(np.flatnonzero(words[:, 0] == Matmul.opcode)[0])
    eps = 8 + [f.name for f in Matmul.fields].index("eps")
    assert "eps is nan, expected a finite number" in fault(
        edit(llama(1, 2), matmul, eps, 0x7FC00000)
    )
    assert fault(edit(llama(1, 2), matmul, eps, 0xBF800000)).endswith(
        "(matmul, layers.0.o_proj): eps is -1.0, expected at least 0"
    )


# A product of gathered rows: tensors x, w, y, ids, and a source for copies.

GATHERED = {
    "x": TensorSpec("x", (4, 8), F32, INPUT),
    "w": TensorSpec("w", (8, 8), F32, STATE),
    "y": TensorSpec("y", (4, 8), F32, STATE),
    "ids": TensorSpec("ids", (4,), I32, INPUT),
    "source": TensorSpec("source", (8, 8), F32, INPUT),
}
GATHER = Matmul(
    x=0,
    weight=1,
    out=2,
    row_index=3,
    row_begin=0,
    row_end=4,
    column_begin=0,
    column_end=8,
    x_rows=4,
    tile=0,
    part=0,
    part_k=8,
    eps=0.0,
)


def gathered(*copies: Copy, **changes: dict[str, Any]) -> Program:
    """The product, with copies behind it on the same worker, and tensors that are different."""
    tensors = [replace(t, **changes.get(name, {})) for name, t in GATHERED.items()]
    return Program.build(tensors, [GATHER, *copies], [range(1 + len(copies))])


def test_a_tagged_weight_is_refused() -> None:
    verify(gathered())
    assert fault(gathered(w={"kind": ACTIVATION, "tagged": True})) == (
        "instruction 0 (matmul): weight is w, which is tagged: "
        "kernels read and write no tags of this operand"
    )


def test_an_index_that_is_a_matrix_is_refused() -> None:
    assert fault(gathered(ids={"shape": (4, 2)})) == (
        "instruction 0 (matmul): row_index is ids of shape (4, 2), expected [rows]"
    )


def test_a_weight_that_an_instruction_of_the_program_writes_is_refused() -> None:
    # Even where a queue orders the two: the GPU's loader is ahead of it.
    text = fault(gathered(copy(4, 1)))
    assert text == (
        "instruction 0 (matmul): weight is w, which instruction 1 (copy) writes, "
        "but kernels read this operand before all waits"
    )
    verify(gathered(copy(1, 2, rows=(1, 2))))


def test_an_instruction_must_not_write_its_own_weight() -> None:
    tensors = [replace(t, shape=(8, 8)) if len(t.shape) == 2 else t for t in GATHERED.values()]
    words = gathered().words.copy()
    words[0, 8 + [f.name for f in Matmul.fields].index("out")] = 1
    assert fault(replace(gathered(), tensors=tuple(tensors), words=words)) == (
        "instruction 0 (matmul): weight is w, which it writes itself, "
        "but kernels read this operand before all waits"
    )


@pytest.mark.parametrize(
    ("queues", "sentence"),
    [
        ([[0], []], "instruction 1 (copy, op1) stands 0 times in the queues, expected once"),
        (
            [[0, 1], [1]],
            "instruction 1 (copy, op1) stands 2 times in the queues (workers 0, 1), expected once",
        ),
        ([[0], [1, 2]], "the queue of worker 1 holds instruction 2 of 2"),
        ([[0], [-1, 1]], "the queue of worker 1 holds instruction -1 of 2"),
    ],
)
def test_every_instruction_stands_once_in_the_queues(
    queues: list[list[int]], sentence: str
) -> None:
    assert fault(replace(CHAIN, queues=tuple(np.array(q, np.int32) for q in queues))) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workers": 0}, "the program is for 0 workers, expected 1 to 4096"),
        ({"workers": 10**6}, "the program is for 1000000 workers, expected 1 to 4096"),
        (
            {"workers": 3},
            "the program has 2 queues, expected 3: a static program has one for each of its 3 workers",
        ),
        (
            {"dynamic": True},
            "the program has 2 queues, expected 1: a dynamic program has one for all workers",
        ),
        ({"labels": ("one",)}, "1 labels for 2 instructions"),
        (
            {"words": np.zeros((2, 31), np.uint32)},
            "instruction words are uint32 of shape (2, 31), expected uint32 of (n, 32)",
        ),
        ({"tensors": (*TENSORS, TENSORS[1])}, "tensors 1 and 7 are both called b"),
    ],
)
def test_the_parts_of_a_program_fit_together(change: dict[str, object], sentence: str) -> None:
    assert fault(replace(CHAIN, **change)) == sentence  # type: ignore[arg-type]


# Machines. Two rows of x times all of w leave more sums than a CPU's worker can keep.

WIDE = (
    TensorSpec("x", (64, 65536), F32, INPUT),
    TensorSpec("w", (8192, 65536), F32, WEIGHT),
    TensorSpec("y", (64, 8192), F32, STATE),
    TensorSpec("u", (8, 65536), BF16, WEIGHT),
    TensorSpec("z", (64, 8), F32, STATE),
)


def product(weight: int = 1, out: int = 2) -> Matmul:
    """All of a product of x."""
    return Matmul(
        x=0,
        weight=weight,
        out=out,
        row_begin=0,
        row_end=64,
        column_begin=0,
        column_end=WIDE[weight].rows,
        x_rows=64,
        tile=0,
        part=0,
        part_k=65536,
        eps=0.0,
    )


def refusal(machine: str, broken: Program) -> str:
    with pytest.raises(VerificationError) as error:
        verify(broken, machine)
    return str(error.value)


def test_an_instruction_beyond_the_working_memory_of_a_cpu_is_refused_there() -> None:
    large = Program.build(WIDE, [product()], [[0]])
    assert refusal("cpu", large) == (
        "instruction 0 (matmul): needs 2279424 bytes of working memory, "
        "a worker of the CPU has 359424"
    )
    verify(large, "cuda")
    verify(large)


def attention_of(group: int) -> Program:
    """So many query heads of 128 elements for one KV head."""
    case = Case("", group, 1, 128, [(0, 3)], 1, block_size=16, splits=(0, 1, 16))
    made = example(np.random.default_rng(0), case)
    return made.changed("q", kind=INPUT).program()


def test_an_instruction_beyond_the_scratch_of_a_gpu_is_refused_there() -> None:
    verify(attention_of(32), "cuda")
    large = attention_of(64)
    assert refusal("cuda", large) == (
        "instruction 0 (attention): needs 266240 bytes of scratch, "
        "a worker of the GPU has 160768 beside 4 pages"
    )
    verify(large, "cpu")


def test_what_one_kernel_of_a_gpu_cannot_serve_is_refused_there() -> None:
    mixed = Program.build(WIDE, [product(), product(3, 4)], [[0, 1]])
    assert refusal("cuda", mixed) == (
        "the program multiplies with weights of float32 and of bfloat16: a kernel is for one"
    )
    verify(mixed)


def test_a_tensor_that_kernels_of_a_gpu_need_in_two_layouts_is_refused_there() -> None:
    units = gathered(copy(1, 2, rows=(1, 2)))
    assert refusal("cuda", units) == (
        "tensor w is wanted as units by instruction 0 (matmul, weight) "
        "and rows by instruction 1 (copy, x)"
    )
    verify(units, "cpu")


def test_machines_that_are_unknown_are_named() -> None:
    with pytest.raises(ValueError, match="machine 'tpu' is unknown: expected cpu, cuda, reference"):
        verify(CHAIN, "tpu")


def test_half_a_tagged_word_cannot_be_written() -> None:
    text = fault(program([copy(A, T, (0, 3))], [[0]]))
    assert text == (
        "instruction 0 (copy, op0): writes columns [0, 3) of t, which is tagged: "
        "words of 2 BF16 are written as a whole"
    )


def test_an_instruction_must_not_write_a_place_twice() -> None:
    whole = llama(1, 2)
    qkv = int(np.flatnonzero(whole.words[:, 0] == QkvRope.opcode)[-1])
    names = [f.name for f in QkvRope.fields]
    keys = int(whole.words[qkv, 8 + names.index("k_cache")])
    text = fault(edit(whole, qkv, 8 + names.index("v_cache"), keys))
    assert text == (
        f"instruction {qkv} (qkv_rope, layers.0.qkv): writes parts of layers.0.k_cache twice, "
        "in no particular order"
    )


# Progress.


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_cycle_of_waits_is_named(dynamic: bool) -> None:
    instructions = [copy(A, B, waits=[(1, 1)], signal=0), copy(A, C, waits=[(0, 1)], signal=1)]
    text = fault(program(instructions, [[0, 1]] if dynamic else [[0], [1]], dynamic))
    if dynamic:
        assert text == (
            "deadlock: instruction 0 (copy, op0) waits for barrier 1 (y) to reach 1 (it stands at 0), "
            "signalled by instruction 1 (copy, op1), which stands behind instruction 0"
        )
    else:
        assert text == (
            "deadlock: instruction 0 (copy, op0) on worker 0 waits for barrier 1 (y) to reach 1 "
            "(it stands at 0), signalled by instruction 1 (copy, op1); "
            "instruction 1 (copy, op1) on worker 1 waits for barrier 0 (x) to reach 1 "
            "(it stands at 0), signalled by instruction 0 (copy, op0)"
        )


def test_a_consumer_before_its_producer_in_the_same_queue_is_a_deadlock() -> None:
    text = fault(program([*PAIR, copy(A, B, (0, 1), rows=(1, 2))], [[1, 0], [2]]))
    assert text == (
        "deadlock: instruction 1 (copy, op1) on worker 0 waits for barrier 0 (x) to reach 1 "
        "(it stands at 0), signalled by instruction 0 (copy, op0), which stands behind instruction 1"
    )


def test_an_instruction_that_waits_for_itself_is_a_deadlock() -> None:
    text = fault(program([copy(A, B, waits=[(0, 1)], signal=0)], [[0]]))
    assert text.endswith("to reach 1 (it stands at 0), signalled by itself")


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tagged_word_before_its_writer_in_a_queue_is_a_deadlock(dynamic: bool) -> None:
    text = fault(program([copy(T, B), copy(A, T)], [[0, 1]], dynamic))
    assert "waits for tagged words, written by instruction 1 (copy, op1)" in text


def test_a_tagged_word_that_nobody_writes_is_unreachable() -> None:
    text = fault(program([copy(A, T, (0, 6)), copy(T, B)], [[0], [1]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 1 reads rows [0, 1) columns [0, 8) of t, which is tagged, "
        "and some of whose words no instruction writes"
    )


def test_a_tagged_word_with_two_writers_is_ambiguous() -> None:
    text = fault(program([copy(A, T, (0, 6)), copy(A, T, (4, 8)), copy(T, B)], [[0, 1, 2]]))
    assert text == (
        "instruction 1 (copy, op1) on worker 0 writes rows [0, 1) columns [4, 8) of t, which is tagged, "
        "and which instruction 0 (copy, op0) on worker 0 writes too"
    )


# Order.


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
    # Both producers signal x; the second waits for the first through y: no queue tells, the chain does.
    chain = [
        copy(A, B, (0, 4), [(2, 0)], 0),
        Noop(waits=[Wait(0, 1)], signal=0),
        copy(B, C, (0, 4), [(0, 1)], 2),
    ]
    for dynamic in (False, True):
        verify(program(chain, [[0, 1, 2]] if dynamic else [[0], [1], [2]], dynamic))


def test_a_tagged_word_orders_its_own_words_but_not_other_writes_of_the_writer() -> None:
    # Instruction 0 has to be over before 2 reads b; that it is before 1, and 1 before 2, is enough.
    tagged = [
        copy(A, B, waits=[(0, 0)]),
        copy(A, T),
        copy(T, C, signal=0),
    ]
    tagged[1] = tagged[1].with_sync([Wait(0, 0)], None)
    verify(program(tagged, [[0, 1], [2]]))
    # A plain read may be issued while the tagged words are still awaited.
    tensors = (
        *TENSORS,
        TensorSpec("r", (2, 8), F32, ACTIVATION),
        TensorSpec("g", (8, 8), BF16, WEIGHT),
    )
    product = Matmul(
        x=T,
        weight=8,
        residual=B,
        out=7,
        row_begin=0,
        row_end=1,
        column_begin=0,
        column_end=8,
        x_rows=1,
        tile=0,
        part=0,
        part_k=8,
        eps=0.0,
        signal=0,
    )
    racing = Program.build(tensors, [tagged[0], tagged[1], product], [[0, 1], [2]], barriers=["x"])
    assert "of b, which instruction 0 (copy) on worker 0 writes, without" in fault(racing)
    waiting = [tagged[0].with_sync([Wait(0, 0)], 1), tagged[1], product.with_sync([Wait(1, 1)], 0)]
    verify(Program.build(tensors, waiting, [[0, 1], [2]], barriers=["x", "y"]))


def test_tagged_words_must_be_read_before_the_next_step_rewrites_them() -> None:
    text = fault(program([copy(A, T), copy(T, B)], [[0], [1]]))
    assert text == (
        "instruction 0 (copy, op0) on worker 0 writes rows [0, 1) columns [0, 8) of t, which "
        "instruction 1 (copy, op1) on worker 1 reads in the step before, without an order between them"
    )
    verify(program([copy(A, T, waits=[(0, 0)]), copy(T, B, signal=0)], [[0], [1]]))
    verify(program([copy(A, T, waits=[(0, 0)]), copy(T, B, signal=0)], [[0, 1]], dynamic=True))


# Rows of earlier steps: one attention over a cache of one block, and a copy that rewrites all of it.


def attention_over(kind: TensorKind, waits: Sequence[tuple[int, int]] = ()) -> Program:
    row: dict[str, Any] = {"row_begin": 0, "row_end": 1}
    tensors = [
        TensorSpec("q", (1, 4), F32, INPUT),
        TensorSpec("cache", (1, 1, 2, 4), F32, kind),
        TensorSpec("new", (1, 4), F32, INPUT),
        TensorSpec("out", (1, 4), F32, ACTIVATION),
        TensorSpec("one", (1,), I32, INPUT),
        TensorSpec("blocks", (1, 1), I32, INPUT),
        TensorSpec("source", (1, 8), F32, INPUT),
    ]
    attention = Attention(
        q=0,
        k_cache=1,
        v_cache=1,
        k_new=2,
        v_new=2,
        out=3,
        row_sequence=4,
        row_position=4,
        row_count=4,
        block_table=5,
        head_begin=0,
        head_end=1,
        split=0,
        num_splits=1,
        chunk=2,
        context=2,
        step_rows=1,
        scale=1.0,
        waits=[Wait(*w) for w in waits],
        signal=1,
        **row,
    )
    refill = Copy(
        x=6,
        out=1,
        x_row=0,
        x_column=0,
        column_begin=0,
        column_end=8,
        waits=[Wait(1, 0)],
        signal=0,
        **row,
    )
    return Program.build(tensors, [refill, attention], [[0], [1]], barriers=["x", "y"])


def test_earlier_rows_are_indexed_rows_of_a_state() -> None:
    assert fault(attention_over(ACTIVATION)) == (
        "instruction 1 (attention): reads earlier rows of cache: "
        "only indexed rows of a state can be read so"
    )


def test_a_write_that_is_not_indexed_may_hit_what_an_earlier_read_means() -> None:
    verify(attention_over(STATE, [(0, 1)]))
    text = fault(attention_over(STATE, [(0, 0)]))
    assert text.startswith(
        "instruction 1 (attention) on worker 1 reads earlier indexed rows [0, 1)"
    )
    assert text.endswith("writes, without an order between them")


# A Llama-like program of any size.


class Builder:
    """Collects operations; every instruction of one waits for all of the operation before it."""

    def __init__(self, workers: int, tagged: bool) -> None:
        self.workers = workers
        self.tagged = tagged
        self.tensors: list[TensorSpec] = []
        self.instructions: list[Instruction] = []
        self.labels: list[str] = []
        self.barriers: list[str] = []
        self.queues: list[list[int]] = [[] for _ in range(workers)]
        self.sizes: list[int] = []

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        kind: TensorKind,
        tagged: bool = False,
    ) -> int:
        self.tensors.append(TensorSpec(name, shape, dtype, kind, tagged))
        return len(self.tensors) - 1

    def activation(self, name: str, *shape: int) -> int:
        return self.tensor(name, shape, F32, ACTIVATION, self.tagged)

    def add(self, label: str, tiles: Iterator[Instruction], wait: bool, signal: bool) -> None:
        """Append an operation. ``wait`` for the last one that signals."""
        waits = [Wait(len(self.barriers) - 1, self.sizes[-1])] if wait else []
        if signal:
            self.barriers.append(label)
        count = 0
        for i, tile in enumerate(tiles):
            self.queues[i % self.workers].append(len(self.instructions))
            self.instructions.append(
                tile.with_sync(waits, len(self.barriers) - 1 if signal else None)
            )
            self.labels.append(label)
            count += 1
        if signal:
            self.sizes.append(count)

    def cut(self, size: int, unit: int) -> Iterator[tuple[int, int]]:
        units = size // unit
        pieces = min(units, self.workers)
        for i in range(pieces):
            yield units * i // pieces * unit, units * (i + 1) // pieces * unit


def llama(layers: int, workers: int, tagged: bool = False, dynamic: bool = False) -> Program:
    """One decode step of a model of Llama-3's shapes, split attention included."""
    hidden, heads, kv_heads, d, inter, vocabulary, splits = 4096, 32, 8, 128, 14336, 128256, 16
    b = Builder(workers, tagged)
    every_wait = not tagged
    row: dict[str, Any] = {"row_begin": 0, "row_end": 1}
    step: dict[str, Any] = {
        name: b.tensor(name, shape, I32, INPUT)
        for name, shape in (
            ("row_sequence", (1,)),
            ("row_position", (1,)),
            ("row_count", (1,)),
            ("block_table", (1, 256)),
        )
    }
    count: dict[str, Any] = {"row_count": step["row_count"]}
    tokens = b.tensor("tokens", (1, 4096), I32, STATE)
    table = b.tensor("table", (vocabulary, hidden), BF16, WEIGHT)
    rope = b.tensor("rope", (4096, d), F32, WEIGHT)
    x = b.activation("embedded", 1, hidden)

    def weight(name: str, *shape: int) -> int:
        return b.tensor(name, shape, BF16, WEIGHT)

    def columns(begin: int, end: int) -> dict[str, Any]:
        return {**row, "column_begin": begin, "column_end": end}

    b.add(
        "embed",
        (
            Embed(
                table=table,
                tokens=tokens,
                row_sequence=step["row_sequence"],
                row_position=step["row_position"],
                out=x,
                **count,
                **columns(*c),
            )
            for c in b.cut(hidden, 64)
        ),
        wait=False,
        signal=every_wait,
    )
    for layer in range(layers):
        at = f"layers.{layer}"
        q, attended = b.activation(f"{at}.q", 1, hidden), b.activation(f"{at}.attended", 1, hidden)
        partial = b.activation(f"{at}.partial", 1, splits, heads, d + 2)
        cache: dict[str, Any] = {
            f"{name}_cache": b.tensor(f"{at}.{name}_cache", (256, kv_heads, 16, d), BF16, STATE)
            for name in "kv"
        }
        qkv: dict[str, Any] = {
            "q_weight": weight(f"{at}.q_weight", hidden, hidden),
            "k_weight": weight(f"{at}.k_weight", kv_heads * d, hidden),
            "v_weight": weight(f"{at}.v_weight", kv_heads * d, hidden),
        }
        b.add(
            f"{at}.qkv",
            (
                QkvRope(
                    x=x,
                    q=q,
                    rope=rope,
                    eps=1e-5,
                    pair_begin=first,
                    pair_end=last,
                    **qkv,
                    **cache,
                    **step,
                    **row,
                )
                for first, last in b.cut(hidden // 2 + kv_heads * d, 8)
            ),
            wait=every_wait,
            signal=True,
        )
        b.add(
            f"{at}.attention",
            (
                Attention(
                    q=q,
                    partial=partial,
                    head_begin=head,
                    head_end=head + 1,
                    split=split,
                    num_splits=splits,
                    chunk=256,
                    context=4096,
                    step_rows=1,
                    scale=d**-0.5,
                    **cache,
                    **step,
                    **row,
                )
                for head in range(kv_heads)
                for split in range(splits)
            ),
            wait=True,
            signal=every_wait,
        )
        b.add(
            f"{at}.merge",
            (
                AttentionMerge(
                    partial=partial,
                    out=attended,
                    head_begin=head,
                    head_end=head + 1,
                    head_dim=d,
                    num_splits=splits,
                    **count,
                    **row,
                )
                for head in range(heads)
            ),
            wait=every_wait,
            signal=every_wait,
        )
        between = b.activation(f"{at}.between", 1, hidden)
        after = b.activation(f"{at}.after", 1, hidden)
        act = b.activation(f"{at}.act", 1, inter)

        def product(
            label: str, source: int, residual: int, out: int, k: int, every_wait: bool = every_wait
        ) -> None:
            matrix = weight(f"{label}_weight", hidden, k)
            b.add(
                label,
                (
                    Matmul(
                        x=source,
                        weight=matrix,
                        residual=residual,
                        out=out,
                        x_rows=1,
                        tile=0,
                        part=0,
                        part_k=k,
                        eps=0.0,
                        **count,
                        **columns(*c),
                    )
                    for c in b.cut(hidden, 16)
                ),
                wait=every_wait,
                signal=every_wait,
            )

        product(f"{at}.o_proj", attended, x, between, hidden)
        mlp: dict[str, Any] = {n: weight(f"{at}.{n}", inter, hidden) for n in ("gate", "up")}
        b.add(
            f"{at}.gate_up",
            (
                GateUp(x=between, out=act, eps=1e-5, **mlp, **count, **columns(*c))
                for c in b.cut(inter, 16)
            ),
            wait=every_wait,
            signal=every_wait,
        )
        product(f"{at}.down_proj", act, between, after, inter)
        x = after
    logits = b.tensor("logits", (1, vocabulary), F32, ACTIVATION)
    b.add(
        "lm_head",
        (
            Matmul(
                x=x,
                weight=table,
                out=logits,
                x_rows=1,
                tile=0,
                part=0,
                part_k=hidden,
                eps=0.0,
                **count,
                **columns(*c),
            )
            for c in b.cut(vocabulary, 16)
        ),
        wait=every_wait,
        signal=True,
    )
    sample = Sample(
        logits=logits,
        adjusted=b.tensor("adjusted", (1, vocabulary), F32, ACTIVATION),
        tokens=tokens,
        sampling_real=b.tensor("sampling_real", (1, REAL_COLUMNS), F32, INPUT),
        sampling_integer=b.tensor("sampling_integer", (1, INTEGER_COLUMNS), I32, INPUT),
        logit_row=b.tensor("logit_row", (1,), I32, INPUT),
        logit_count=b.tensor("logit_count", (1,), I32, INPUT),
        row_sequence=step["row_sequence"],
        row_position=step["row_position"],
        **row,
    )
    b.add("sample", iter([sample]), wait=True, signal=True)
    last = Wait(len(b.barriers) - 1, 0)
    for i, instruction in enumerate(b.instructions):
        if isinstance(instruction, Embed):
            b.instructions[i] = instruction.with_sync([last], instruction.signal)
    return Program.build(
        b.tensors,
        b.instructions,
        [range(len(b.instructions))] if dynamic else b.queues,
        barriers=b.barriers,
        dynamic=dynamic,
        workers=workers,
        labels=b.labels,
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
def test_a_program_of_32_layers_for_132_workers_verifies_in_two_seconds(
    tagged: bool, dynamic: bool
) -> None:
    large = llama(32, 132, tagged, dynamic)
    assert len(large) > 22_000
    begin = time.process_time()
    verify(large)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tagged", [False, True], ids=["barriers", "tagged"])
def test_a_wait_missing_deep_in_a_large_program_is_found(tagged: bool, dynamic: bool) -> None:
    large = llama(8, 132, tagged, dynamic)
    attention = np.flatnonzero(large.words[:, 0] == Attention.opcode)
    culprit = int(attention[len(attention) // 2])
    text = fault(edit(edit(large, culprit, 2, NONE), culprit, 3, 0))
    assert text.startswith(f"instruction {culprit} (attention, layers.4.attention)")
    assert "without an order between them" in text


# In place.


def test_a_tile_may_be_computed_in_place_and_nothing_else_of_its_tensor() -> None:
    state = TensorSpec("x", (4, 1), F32, STATE)

    def shifted(rows: int) -> Program:
        inst = Copy(
            x=0,
            out=0,
            x_row=0,
            x_column=0,
            row_begin=rows,
            row_end=4,
            column_begin=0,
            column_end=1,
        )
        return Program.build([state], [inst], [[0]])

    verify(shifted(0))
    # The sequential meaning is [0, 0, 1, 2], but a machine that copies row by row leaves zeros.
    text = fault(shifted(1))
    assert text == (
        "instruction 0 (copy): reads rows [0, 3) columns [0, 1) of x by one operand and writes some of "
        "them by another, in no particular order"
    )


def test_rows_are_not_normalised_in_place() -> None:
    tensors = [TensorSpec("x", (1, 8), F32, STATE), TensorSpec("gain", (8,), F32, WEIGHT)]
    norm = RmsNorm(x=0, gain=1, out=0, row_begin=0, row_end=1, eps=0.0)
    assert "x and out are the same tensor" in fault(Program.build(tensors, [norm], [[0]]))


# Limits.


def test_a_program_that_cuts_a_tensor_too_finely_is_refused_in_bounded_memory() -> None:
    size = 3000
    tensors = [
        TensorSpec("a", (size, size), F32, TensorKind.STATE),
        TensorSpec("b", (size, size), F32, TensorKind.STATE),
    ]
    copies = [
        Copy(
            x=0,
            out=1,
            x_row=i,
            x_column=i,
            row_begin=i,
            row_end=i + 1,
            column_begin=i,
            column_end=i + 1,
        )
        for i in range(size)
    ]
    diagonal = Program.build(tensors, copies, [range(size)])
    with pytest.raises(VerificationError, match=r"cut its tensors into 1\d{7} cells") as raised:
        verify(diagonal)
    assert raised.value.rule == "limit"


GOOD: dict[str, Any] = {
    "barriers": 2,
    "dynamic": False,
    "queues": np.array([0, 1], np.int32),
    "lengths": np.array([1, 1], np.int64),
    "waits": np.array([[[1, 0], [-1, 0], [-1, 0]], [[0, 1], [-1, 0], [-1, 0]]], np.int64),
    "signals": np.array([0, 1], np.int64),
    "orders": np.zeros((2, 2), bool),
    "accesses": np.array([[0, 0, 0, 1, 0, 8, 1, 0, 0], [1, 0, 0, 1, 0, 8, 0, 0, 0]], np.int64),
    "traits": np.array([[False, True, True]]),
}


def changed(name: str, place: tuple[int, ...], value: int) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = GOOD[name].copy()
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("queues", (0,), 2),
        ("queues", (0,), -1),
        ("queues", (0,), 1),
        ("lengths", (0,), 2),
        ("lengths", (0,), -1),
        ("waits", (1, 0, 0), 2),
        ("waits", (1, 0, 1), 2),
        ("waits", (1, 0, 1), -1),
        ("signals", (0,), 2),
        ("signals", (0,), -2),
        ("accesses", (0, 0), 2),
        ("accesses", (1, 0), -1),
        ("accesses", (0, 1), 1),
        ("accesses", (0, 1), -1),
        ("accesses", (0, 2), 1),
        ("accesses", (0, 4), -1),
    ],
)
def test_the_analysis_checks_its_arrays(name: str, place: tuple[int, ...], value: int) -> None:
    assert _native.analyse(**GOOD) == (None, False)
    with pytest.raises(ValueError, match=r"queue|signal|wait|access"):
        _native.analyse(**GOOD | {name: changed(name, place, value)})
