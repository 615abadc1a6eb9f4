"""The verifier refuses operands that kernels cannot read or write."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from against_reference import examples_of
from copy_programs import ACTIVATION, INPUT, STATE, WEIGHT, copy, edit, fault
from gathered_product import GATHERED, gathered
from llama_decode import llama

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.attention.examples import Case
from megavm.instructions.attention.examples import example as attention
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.copy import Copy
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.reduce import Reduce
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, DType, Part, TensorSpec
from megavm.vm.verify import verify


def test_a_tagged_weight_is_refused() -> None:
    verify(gathered())
    assert fault(gathered(w={"kind": ACTIVATION, "tagged": True})) == (
        "instruction 0 (matmul): weight is w, which is tagged: "
        "kernels read and write no tags of this operand"
    )


def test_a_weight_in_parts_is_refused_where_kernels_take_none() -> None:
    assert fault(gathered(w={"kind": WEIGHT, "parts": (Part("upper", 3), Part("lower", 5))})) == (
        "instruction 0 (matmul): weight is w, which has parts: "
        "kernels read this operand as one tensor"
    )


@pytest.mark.parametrize(
    ("rows", "matrix", "changes", "most"),
    [
        (17, 1, {}, None),
        (17, 2, {}, 1),
        (16, 1, {}, 0),
        (17, 1, {"dtype": F32}, 0),
        (17, 1, {"tagged": True, "kind": ACTIVATION}, 0),
        (17, 1, {"shape": (17, 12)}, 0),  # rows of 24 bytes
    ],
)
def test_what_a_gpu_cannot_multiply_as_a_matrix_is_refused_as_one(
    rows: int, matrix: int, changes: dict[str, Any], most: int | None
) -> None:
    x = replace(TensorSpec("x", (17, 16), BF16, INPUT), **changes)
    weight = TensorSpec("w", (8, x.columns), BF16, WEIGHT)
    tile: dict[str, Any] = {"row_begin": 0, "row_end": rows, "x_rows": rows, "tile": 0}
    tile |= {"column_begin": 0, "column_end": 8, "part": 0, "part_k": x.columns, "eps": 0.0}
    inst = Matmul(x=0, weight=1, out=2, matrix=matrix, **tile)
    sentences = list(inst.check([x, weight, TensorSpec("y", (17, 8), F32, STATE)]))
    expected = f"matrix is {matrix}, expected at most {most} for {rows} rows of x and weights w"
    assert sentences == ([] if most is None else [expected])


@pytest.mark.parametrize("operand", ["weight", "bias"])
@pytest.mark.parametrize(("cls", "group"), [(GateUp, 4), (QkvRope, 6)])
def test_parts_that_end_within_gate_up_or_a_head_are_refused(
    cls: type[GateUp | QkvRope], group: int, operand: str
) -> None:
    tensors = {
        "x": TensorSpec("x", (1, 5), F32, INPUT),
        "weight": TensorSpec("w", (8 if cls is GateUp else 18, 5), F32, WEIGHT),
        "bias": TensorSpec("b", (8 if cls is GateUp else 18,), F32, WEIGHT),
        "out": TensorSpec("y", (1, 4), F32, STATE),
        "q": TensorSpec("q", (1, 6), F32, STATE),
        "k_cache": TensorSpec("k", (1, 1, 2, 6), F32, STATE),
        "v_cache": TensorSpec("v", (1, 1, 2, 6), F32, STATE),
        "rope": TensorSpec("rope", (2, 6), F32, WEIGHT),
        "row_sequence": TensorSpec("s", (1,), I32, INPUT),
        "row_position": TensorSpec("p", (1,), I32, INPUT),
        "block_table": TensorSpec("blocks", (1, 1), I32, INPUT),
        "row_count": TensorSpec("n", (1,), I32, INPUT),
    }
    tile = {"column_begin": 0, "column_end": 4, "pair_begin": 0, "pair_end": 9}
    tile |= {name: handle for handle, name in enumerate(tensors)}
    operands: Any = {field.name: tile[field.name] for field in cls.fields if field.name in tile}
    inst = cls(row_begin=0, row_end=1, eps=0.0, **operands)

    def program(*rows: int) -> Program:
        parts = tuple(Part(f"part{i}", count) for i, count in enumerate(rows))
        changed = tensors | {operand: replace(tensors[operand], parts=parts)}
        return Program.build(list(changed.values()), [inst], [[0]])

    rows = tensors[operand].rows
    verify(program(group, rows - group))
    verify(program(rows))
    text = fault(program(group + 1, rows - group - 1))
    assert text == (
        f"instruction 0 ({cls.name()}): {operand} is {tensors[operand].name}, whose part part0 has "
        f"{group + 1} rows: not a multiple of {group}"
    )


def test_an_index_that_is_a_matrix_is_refused() -> None:
    assert fault(gathered(ids={"shape": (4, 2)})) == (
        "instruction 0 (matmul): row_index is ids of shape (4, 2), expected [rows]"
    )


def test_a_weight_that_an_instruction_of_the_program_writes_is_refused() -> None:
    # The order of a queue does not help: the GPU's loader runs ahead of it.
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
    # All rows read before any is written give [0, 0, 1, 2]; copying row by row leaves zeros.
    text = fault(shifted(1))
    assert text == (
        "instruction 0 (copy): reads rows [0, 3) columns [0, 1) of x by one operand and writes some of "
        "them by another, in no particular order"
    )


def test_rows_are_not_normalised_in_place() -> None:
    tensors = [TensorSpec("x", (1, 8), F32, STATE), TensorSpec("gain", (8,), F32, WEIGHT)]
    norm = RmsNorm(x=0, gain=1, out=0, row_begin=0, row_end=1, eps=0.0)
    assert "x and out are the same tensor" in fault(Program.build(tensors, [norm], [[0]]))


def square_product(**operands: int) -> Program:
    """y := x . w^T with four rows and eight columns each, and with these operands besides or instead."""
    tensors = [
        TensorSpec("x", (4, 8), F32, STATE),
        TensorSpec("w", (8, 8), F32, WEIGHT),
        TensorSpec("r", (4, 8), F32, STATE),
        TensorSpec("y", (4, 8), F32, STATE),
        TensorSpec("s", (4, 1), F32, STATE),
        TensorSpec("gain", (8,), F32, WEIGHT),
        TensorSpec("r2", (4, 8), F32, STATE),
    ]
    words: dict[str, Any] = {"x": 0, "weight": 1, "out": 3, **operands}
    words |= {"row_begin": 0, "row_end": 4, "column_begin": 0, "column_end": 8}
    inst = Matmul(**words, part=0, part_k=8, x_rows=4, tile=0, eps=0.0)
    return Program.build(tensors, [inst], [[0]])


def test_operands_that_are_absent_do_not_hide_those_that_overlap() -> None:
    verify(square_product(residual=2, out=2))
    assert fault(square_product(residual=2, peaks=2)) == (
        "instruction 0 (matmul): reads rows [0, 4) columns [0, 8) of r by one operand and writes some of "
        "them by another, in no particular order"
    )


def test_constants_that_are_named_twice_do_not_hide_operands_that_overlap() -> None:
    twice = {"bias": 5, "out_gain": 5, "out_scaled": 3, "out_squares": 4, "out": 2}
    verify(square_product(**{**twice, "residual": 2}))
    text = fault(square_product(**{**twice, "residual": 6, "peaks": 6}))
    assert "of r2 by one operand and writes some of them by another" in text


def test_the_number_of_regions_is_limited() -> None:
    """An instruction of a damaged program may declare any number of them."""
    parts = TensorSpec("parts", (1, 8 * 2**40), F32, STATE)
    tensors = [parts, TensorSpec("y", (1, 8), F32, STATE)]
    inst = Reduce(parts=0, out=1, row_begin=0, row_end=1, column_begin=0, column_end=8)
    text = fault(Program.build(tensors, [inst], [[0]]))
    assert text == "instruction 0 (reduce): reads more than 4096 regions"


@pytest.mark.parametrize(
    ("name", "tensor", "operands"),
    [
        ("x", "x", {"out": 0}),
        ("x", "x", {"out_scaled": 0, "out_gain": 5, "out_squares": 4}),
        ("x_squares", "s", {"x_squares": 4, "out_scaled": 2, "out_gain": 5, "out_squares": 4}),
    ],
)
def test_the_input_of_a_product_is_not_its_result(
    name: str, tensor: str, operands: dict[str, int]
) -> None:
    # A GPU stores the results of some columns before it reads the input for others.
    assert fault(square_product(**operands)) == (
        f"instruction 0 (matmul): {name} and a result are {tensor}, but inputs are read again for other columns"
    )


def test_nothing_is_read_from_a_workspace() -> None:
    example = examples_of(AdjustLogits)[0]
    word = 8 + [field.name for field in AdjustLogits.fields].index("adjusted")
    assert isinstance(example.instruction, AdjustLogits)
    assert fault(edit(example.program(), 0, word, example.instruction.logits)) == (
        "instruction 0 (adjust_logits): adjusted is logits, which another operand names too, but kernels store "
        "anything there"
    )


@pytest.mark.parametrize(
    ("dtype", "columns", "refused"), [(BF16, 5, True), (BF16, 6, False), (F32, 5, False)]
)
def test_a_part_of_a_product_begins_with_a_word(dtype: DType, columns: int, refused: bool) -> None:
    tensors = [
        TensorSpec("x", (1, 192), F32, INPUT),
        TensorSpec("w", (columns, 192), F32, WEIGHT),
        TensorSpec("y", (1, 2 * columns), dtype, ACTIVATION, tagged=True),
    ]
    tile: dict[str, Any] = {"column_begin": columns % 2, "column_end": columns}
    tile |= {"row_begin": 0, "row_end": 1, "x_rows": 1, "tile": 0, "eps": 0.0}
    inst = Matmul(x=0, weight=1, out=2, part=1, part_k=64, **tile)
    expected = "out is y, which is tagged, but part 1 begins at column 5 of BF16, within a word"
    assert list(inst.check(tensors)) == ([expected] if refused else [])


@pytest.mark.parametrize(("dtype", "refused"), [(BF16, True), (F32, False)])
def test_a_head_of_attention_is_whole_words(dtype: DType, refused: bool) -> None:
    case = Case("odd heads", 4, 2, 5, [(0, 3), (1, 7)], 2, tagged=True, out=dtype)
    odd = attention(np.random.default_rng(1), case)
    expected = "out out is tagged, but a head of 5 BF16 is no whole words"
    assert list(odd.instruction.check(odd.tensors)) == ([expected] if refused else [])


def test_attention_reads_what_its_own_rows_have_stored() -> None:
    example = attention(
        np.random.default_rng(1), Case("rows", 4, 2, 8, [(0, 3), (1, 7)], 2, out=F32)
    )
    inst, rows = example.instruction, vars(example.instruction)["row_end"]
    assert isinstance(inst, Attention)
    assert not list(inst.check(example.tensors))
    inst.step_rows = rows - 1
    (sentence,) = inst.check(example.tensors)
    assert sentence == f"step_rows is {rows - 1}, below row_end {rows}"


@pytest.mark.parametrize("chunk", [0, 3, 2**32 - 16])
def test_a_chunk_of_attention_is_whole_blocks_and_below_2_31(chunk: int) -> None:
    example = attention(
        np.random.default_rng(1), Case("rows", 4, 2, 8, [(0, 3), (1, 7)], 2, out=F32)
    )
    inst = example.instruction
    assert isinstance(inst, Attention)
    inst.chunk = chunk
    (sentence,) = inst.check(example.tensors)
    assert re.fullmatch(
        f"chunk {chunk} is not a multiple of block_size [0-9]+ up to 2147483647", sentence
    )


@pytest.mark.parametrize("cls", [Attention, AttentionMerge])
def test_rows_of_splits_begin_with_a_pair(cls: type[Attention | AttentionMerge]) -> None:
    # A GPU accesses two elements of heads of even size at once.
    split = next(e for e in examples_of(cls) if vars(e.instruction)["num_splits"] > 1)
    partial = split.tensors[vars(split.instruction)["partial"]]
    rows, columns = partial.rows, partial.columns
    wider = split.changed("partial", shape=(rows, 1, 1, columns + 2))
    assert not list(split.instruction.check(wider.tensors))
    wider = split.changed("partial", shape=(rows, 1, 1, columns + 1))
    (sentence,) = split.instruction.check(wider.tensors)
    assert (
        f"partial partial has rows of {columns + 1} elements, expected an even number" in sentence
    )
