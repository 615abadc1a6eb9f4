"""Declaring, encoding, decoding and describing instructions."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megavm.instructions import decode, instruction_set
from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.noop import Noop
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.config import (
    HEADER_WORDS,
    INSTRUCTION_BYTES,
    INSTRUCTION_WORDS,
    MAX_WAITS,
    NONE,
    OPERAND_WORDS,
)
from megavm.vm.isa import Instruction, Wait
from megavm.vm.operands import Field, FieldKind, integer, real, tensor
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec

CLASSES = list(instruction_set().values())
words = st.integers(0, NONE - 1)
MAX_REAL = 3.4028234663852886e38  # of float32
operand: dict[FieldKind, Callable[[Field[int]], st.SearchStrategy[int | float]]] = {
    FieldKind.TENSOR: lambda field: st.integers(0, NONE if field.optional else NONE - 1),
    FieldKind.INTEGER: lambda _: words,
    FieldKind.REAL: lambda field: st.floats(
        min_value=max(field.least, -MAX_REAL), max_value=MAX_REAL, width=32
    ),
}


@st.composite
def instructions(draw: st.DrawFn) -> Instruction:
    cls = draw(st.sampled_from(CLASSES))
    waits = draw(st.lists(st.builds(Wait, words, st.integers(0, NONE)), max_size=MAX_WAITS))
    values = {field.name: draw(operand[field.kind](field)) for field in cls.fields}
    return cls(waits=waits, signal=draw(st.none() | words), **values)


@given(instructions())
def test_decode_is_the_inverse_of_encode(inst: Instruction) -> None:
    data = inst.encode()
    assert len(data) == INSTRUCTION_BYTES
    again = decode(data)
    assert again == inst
    assert hash(again) == hash(inst)
    assert again.encode() == data
    assert decode(memoryview(data)) == inst


@given(instructions())
def test_the_words_are_opcode_signal_waits_operands_and_zeros(inst: Instruction) -> None:
    encoded = struct.unpack(f"<{INSTRUCTION_WORDS}I", inst.encode())
    assert encoded[0] == inst.opcode
    assert encoded[1] == (NONE if inst.signal is None else inst.signal)
    pairs = [*((w.barrier, w.target) for w in inst.waits)]
    pairs += [(NONE, 0)] * (MAX_WAITS - len(pairs))
    assert encoded[2:HEADER_WORDS] == tuple(word for pair in pairs for word in pair)
    for word, field in zip(encoded[HEADER_WORDS:], inst.fields, strict=False):
        value = getattr(inst, field.name)
        if field.kind is FieldKind.REAL:
            assert struct.unpack("<f", struct.pack("<I", word))[0] == value
        else:
            assert word == value
    assert not any(encoded[HEADER_WORDS + len(inst.fields) :])


@given(instructions(), st.integers(0, INSTRUCTION_WORDS - 1), words)
def test_any_words_of_a_known_opcode_decode_and_encode_to_a_fixed_point(
    inst: Instruction, position: int, word: int
) -> None:
    encoded = list(struct.unpack(f"<{INSTRUCTION_WORDS}I", inst.encode()))
    encoded[position] = word
    data = struct.pack(f"<{INSTRUCTION_WORDS}I", *encoded)
    if encoded[0] not in instruction_set():
        with pytest.raises(ValueError, match=f"opcode {encoded[0]} is unknown"):
            decode(data)
        return
    once = decode(data).encode()
    assert decode(once).encode() == once


@given(instructions(), instructions())
def test_instructions_are_equal_when_their_encodings_are(a: Instruction, b: Instruction) -> None:
    # Zero has two encodings and one value.
    signed_zero = any(isinstance(v, float) and v == 0 for v in vars(a).values())
    assert (a == b) == (a.encode() == b.encode()) or signed_zero


@given(instructions())
def test_with_sync_changes_waits_and_signal_only(inst: Instruction) -> None:
    changed = inst.with_sync([Wait(1, 2)], 3)
    assert (changed.waits, changed.signal) == ((Wait(1, 2),), 3)
    assert changed.with_sync(inst.waits, inst.signal) == inst
    assert changed.encode()[4 * HEADER_WORDS :] == inst.encode()[4 * HEADER_WORDS :]


@given(instructions())
def test_disassembly_names_mnemonic_operands_waits_and_signal(inst: Instruction) -> None:
    line = inst.disassemble()
    assert "\n" not in line
    assert line.split(" ")[0] == inst.name()
    for wait in inst.waits:
        assert f" wait(b{wait.barrier} >= {wait.target})" in line
    assert (f" signal(b{inst.signal})" in line) == (inst.signal is not None)
    for field in inst.fields:
        absent = field.kind is FieldKind.TENSOR and getattr(inst, field.name) == NONE
        assert (f" {field.name}=" in line) != absent
    assert repr(inst) == f"<{line}>"


def test_disassembly_shows_tensors_by_name_when_it_can() -> None:
    table = [TensorSpec("hidden", (1, 4), F32, TensorKind.STATE)]
    norm = RmsNorm(x=0, gain=7, out=0, row_begin=0, row_end=1, eps=1e-5, signal=2)
    assert norm.disassemble(table) == (
        "rms_norm x=hidden gain=t7 out=hidden row_begin=0 row_end=1 eps=1e-05 signal(b2)"
    )
    assert norm.disassemble().startswith("rms_norm x=t0 gain=t7")


NORM: dict[str, Any] = {"x": 0, "gain": 1, "out": 2, "row_begin": 0, "row_end": 1, "eps": 0.0}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"row_end": -1}, "RmsNorm.row_end is -1: does not fit 32 bits"),
        ({"row_end": 1 << 32}, "RmsNorm.row_end is 4294967296: does not fit 32 bits"),
        ({"row_end": NONE}, "RmsNorm.row_end is NONE, but it is not optional"),
        ({"row_end": 1.0}, "RmsNorm.row_end is 1.0: expected an integer"),
        ({"row_end": True}, "RmsNorm.row_end is True: expected an integer"),
        ({"x": NONE}, "RmsNorm.x is NONE, but it is not optional"),
        ({"eps": "0"}, "RmsNorm.eps is '0': expected a real number"),
        ({"eps": math.nan}, "RmsNorm.eps is nan: not a finite float32"),
        ({"eps": 1e39}, "RmsNorm.eps is 1e+39: not a finite float32"),
        ({"eps": 10**400}, f"RmsNorm.eps is {10**400}: not a finite float32"),
        ({"colour": 1}, "RmsNorm has no field colour"),
        ({"waits": [Wait(0, 0)] * 4}, "RmsNorm has 4 waits; the header holds 3"),
        ({"waits": [Wait(NONE, 0)]}, "does not fit the header"),
        ({"waits": [Wait(0, -1)]}, "does not fit the header"),
        ({"waits": [Wait(0, 1 << 32)]}, "does not fit the header"),
        ({"signal": NONE}, "signals barrier 4294967295: does not fit the header"),
        ({"signal": -1}, "signals barrier -1: does not fit the header"),
        ({"signal": 0.5}, "signals barrier 0.5: expected an integer"),
        ({"signal": True}, "signals barrier True: expected an integer"),
        ({"waits": [Wait(0.5, 1)]}, "has Wait(barrier=0.5, target=1): expected integers"),  # type: ignore[arg-type]
    ],
)
def test_an_operand_that_does_not_fit_is_named(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 the sentence is compared below
        RmsNorm(**{**NORM, **change})
    assert sentence in str(error.value)


def test_a_pair_is_no_wait() -> None:
    sentence = r"RmsNorm has the wait \(0, 1\): expected Wait\(barrier, target\)"
    with pytest.raises(TypeError, match=sentence):
        RmsNorm(**NORM, waits=[(0, 1)])  # type: ignore[list-item]


def test_a_missing_operand_is_named_with_what_it_means() -> None:
    operands = {name: value for name, value in NORM.items() if name != "eps"}
    with pytest.raises(
        ValueError, match=r"RmsNorm needs a value for eps \(added to the mean square\)"
    ):
        RmsNorm(**operands)


def test_an_absent_optional_tensor_is_none() -> None:
    assert RmsNorm(**NORM).row_count == NONE


@pytest.mark.parametrize("least", [0.7, 1e-6, 0.1, 3.0])
def test_a_real_may_be_what_it_is_at_least(least: float) -> None:
    field = real("bound", least=least)
    field.name = "cap"
    assert field.check(least, "A") == field.least == pytest.approx(least)
    with pytest.raises(ValueError, match=re.escape(f"A.cap is {least / 2!r}: expected at least")):
        field.check(least / 2, "A")


def test_reals_are_rounded_to_float32_when_given() -> None:
    assert RmsNorm(**{**NORM, "eps": 0.1}).eps == struct.unpack("<f", struct.pack("<f", 0.1))[0]


@pytest.mark.parametrize("length", [4, 127, 129])
def test_an_encoding_of_another_length_is_refused(length: int) -> None:
    data = Noop().encode()
    with pytest.raises(ValueError, match=f"has 128 bytes, not {length}"):
        decode((data * 2)[:length])


def test_decoding_as_another_class_is_refused() -> None:
    with pytest.raises(ValueError, match=r"opcode 1 is not Copy \(2\)"):
        Copy.decode(Noop().encode())


def test_fields_describe_themselves_on_the_class_and_hold_values_on_the_instance() -> None:
    assert isinstance(Copy.x, Field)
    assert Copy.x.doc == "source"
    assert Copy.x.dtypes == (F32, BF16)
    with pytest.raises(AttributeError, match=r"Copy\.x was never given a value"):
        _ = object.__new__(Copy).x


def test_the_name_is_snake_case_and_the_formula_the_first_line() -> None:
    assert RmsNorm.name() == "rms_norm"
    assert Matmul.formula().startswith("out[r, c] := scale(i(r)) * (x[i(r), K] . weight[c, K])")


def test_more_operands_than_words_are_refused() -> None:
    too_many = {f"f{i}": integer("one of many") for i in range(OPERAND_WORDS + 1)}
    with pytest.raises(TypeError, match="declares 25 operands; an instruction has 24 words"):
        type("TooMany", (Instruction,), {"opcode": 999, **too_many})


def test_an_instruction_without_an_opcode_is_refused() -> None:
    with pytest.raises(TypeError, match="Numberless has no opcode"):
        type("Numberless", (Instruction,), {"x": tensor("source", F32)})


@pytest.mark.parametrize("opcode", [0, -1, 1024, 20_000_000, (1 << 32) + 5, 7.0, True, None])
def test_an_opcode_outside_the_tables_is_refused(opcode: object) -> None:
    sentence = f"Numbered has opcode {opcode!r}: expected an integer from 1 to 1023"
    with pytest.raises(TypeError, match=re.escape(sentence)):
        type("Numbered", (Instruction,), {"opcode": opcode})


def test_an_opcode_that_another_folder_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Noop, "opcode", Copy.opcode)
    with pytest.raises(TypeError, match="Noop and Copy both have opcode 2"):
        instruction_set.__wrapped__()


def test_what_an_instruction_accesses_must_be_declared() -> None:
    class Silent(Instruction):
        """(nothing)"""

        opcode = 999
        x = tensor("source", F32)
        factor = real("factor")

    silent = Silent(x=0, factor=1.0)
    with pytest.raises(NotImplementedError, match="Silent does not declare what it reads"):
        silent.reads([])
    with pytest.raises(NotImplementedError, match="Silent does not declare what it writes"):
        silent.writes([])
    assert silent.flops([]) == 0


@pytest.mark.parametrize(
    ("shape", "kind", "tagged", "sentence"),
    [
        ((), TensorKind.STATE, False, "every size must be a positive integer"),
        ((2, 0), TensorKind.STATE, False, "every size must be a positive integer"),
        ((2, 2), TensorKind.STATE, True, "is tagged but state, not activation"),
        ((2, 3), TensorKind.ACTIVATION, True, "a row must be whole 4-byte words"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(
    shape: tuple[int, ...], kind: TensorKind, tagged: bool, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        TensorSpec("t", shape, BF16, kind, tagged)


def test_instructions_see_every_tensor_as_a_matrix() -> None:
    spec = TensorSpec("cache", (5, 2, 3, 4), BF16, TensorKind.STATE)
    assert (spec.rows, spec.columns, spec.bytes) == (5, 24, 240)
    assert TensorSpec("one", (7,), F32, TensorKind.INPUT).columns == 1
    assert spec.writable
    assert not TensorSpec("one", (7,), F32, TensorKind.INPUT).writable
