"""What a program's GPU kernel is specialised for."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from megavm.instructions import instruction_set
from megavm.instructions.copy import Copy
from megavm.vm.constants import Constant, largest, same, union
from megavm.vm.program import Program
from megavm.vm.specialisation import program_header
from megavm.vm.tensors import F32, TensorKind, TensorSpec


def test_a_program_header_names_what_the_program_uses() -> None:
    header = program_header(program_of(copy_rows(0, 1)))
    assert "constexpr bool kUsesCopy = true;" in header
    assert "constexpr bool kUsesMatmul = false;" in header
    assert "constexpr bool kTrace = false;" in header
    assert "constexpr unsigned int kMaxRows = 1u;" in header
    assert [line for line in header.splitlines() if line.startswith("#include")] == [
        '#include "cuda/interpreter.cuh"',
        '#include "instructions/copy/cuda.cuh"',
    ]
    assert "using Used = KernelList<Alone<Copy>>;" in header
    assert "kTrace = true" in program_header(program_of(copy_rows(0, 1)), trace=True)


def test_steps_of_several_rows_share_a_header() -> None:
    one, two, many = (program_header(program_of(copy_rows(0, n))) for n in (1, 2, 500))
    assert one != two
    assert two == many


def test_attention_brings_its_merge_whether_it_is_split_or_not() -> None:
    (attention,) = (cls for cls in instruction_set().values() if cls.name() == "attention")
    module = importlib.import_module(f"{attention.__module__}.examples")
    example = next(iter(module.examples(np.random.default_rng(0))))
    header = program_header(example.program())
    assert "using Used = KernelList<Alone<Attention>, Alone<AttentionMerge>>;" in header
    assert "kUsesAttentionMerge = true" in header


def test_specialisations_are_joined_and_contradictions_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def constants(self: Copy, tensors: object) -> dict[str, Constant]:
        return {
            "max_end": largest(self.row_end),
            "any_even": union(1 << self.row_begin % 2),
            "width": same(self.x_row),
        }

    monkeypatch.setattr(Copy, "constants", constants)
    header = program_header(program_of(copy_rows(0, 5), copy_rows(1, 3)))
    inner = header[header.index("namespace megavm::copy {") :]
    for line in ("kMaxEnd = 5u;", "kAnyEven = 3u;", "kWidth = 0u;"):
        assert f"constexpr unsigned int {line}" in inner
    common = header[: header.index("namespace megavm::copy {")]
    assert "kMaxEnd = 5u;" in common
    assert "kWidth" not in common
    with pytest.raises(ValueError, match="of copy is for one width, the program has 0 and 7"):
        program_header(program_of(copy_rows(0, 5), copy_rows(0, 5, x_row=7)))


def test_weights_of_two_types_in_one_program_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def constants(self: Copy, tensors: object) -> dict[str, Constant]:
        f32 = self.row_begin % 2
        return {"any_f32_weights": union(f32), "any_bf16_weights": union(1 - f32)}

    monkeypatch.setattr(Copy, "constants", constants)
    program_header(program_of(copy_rows(0, 5), copy_rows(2, 5)))
    with pytest.raises(ValueError, match="weights of float32 and of bfloat16"):
        program_header(program_of(copy_rows(0, 5), copy_rows(1, 5)))


def copy_rows(begin: int, end: int, x_row: int = 0) -> Copy:
    return Copy(
        x=0,
        out=1,
        x_row=x_row,
        x_column=0,
        row_begin=begin,
        row_end=end,
        column_begin=0,
        column_end=4,
    )


def program_of(*instructions: Copy) -> Program:
    tensors = [TensorSpec(n, (600, 4), F32, TensorKind.STATE) for n in "xy"]
    return Program.build(tensors, instructions, [list(range(len(instructions)))])
