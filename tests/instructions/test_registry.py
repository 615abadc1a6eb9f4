"""What holds for every instruction, by the fact that it is declared."""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megavm.instructions
from megavm.instructions import decode, instruction_set
from megavm.vm import config
from megavm.vm.cpu_machine import CpuMachine, levels
from megavm.vm.example import Example
from megavm.vm.isa import DType, Field, FieldKind, Instruction, TensorSpec, Wait
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.reference import ReferenceMachine

INSTRUCTIONS = list(instruction_set().values())
every_instruction = pytest.mark.parametrize(
    "cls", INSTRUCTIONS, ids=[c.name() for c in INSTRUCTIONS]
)

RELATIVE = {DType.F32: 2e-5, DType.BF16: 2**-7, DType.I32: 0.0}
ABSOLUTE = {DType.F32: 2e-5, DType.BF16: 2e-3, DType.I32: 0.0}


def examples_of(cls: type[Instruction]) -> list[Example]:
    module = importlib.import_module(f"{cls.__module__}.examples")
    return list(module.examples(np.random.default_rng(cls.opcode)))


def folder_of(cls: type[Instruction]) -> Path:
    return Path(str(importlib.import_module(cls.__module__).__file__)).parent


def sample_of(cls: type[Instruction], first: int = 0) -> Instruction:
    operands: dict[str, int | float] = {}
    for i, field in enumerate(cls.fields):
        operands[field.name] = 0.5 + i if field.kind is FieldKind.REAL else first + i
    return cls(waits=[Wait(3, 4), Wait(5, 0)], signal=2, **operands)


@every_instruction
def test_folder_holds_declaration_meaning_kernel_and_examples(cls: type[Instruction]) -> None:
    folder = folder_of(cls)
    assert folder.name == cls.name()
    for name in ("__init__.py", "reference.py", "cpu.hpp", "cuda.cuh", "examples.py"):
        assert (folder / name).is_file(), f"{folder.name} has no {name}"


@every_instruction
def test_docstring_starts_with_a_formula(cls: type[Instruction]) -> None:
    assert ":=" in cls.formula() or cls.formula() == "(no effect)"
    assert len(cls.formula()) <= 120
    assert importlib.import_module(cls.__module__).__doc__, "the module says what it is for"


@every_instruction
def test_formula_names_outputs_that_are_fields(cls: type[Instruction]) -> None:
    left = cls.formula().split(":=")[0]
    names = {
        n
        for n in re.findall(r"[a-z_]{2,}", left)
        if n not in ("slot", "no", "effect", "row_begin", "column_begin")
    }
    assert names <= {f.name for f in cls.fields}


@every_instruction
def test_every_field_is_described(cls: type[Instruction]) -> None:
    field: Field[Any]
    for field in cls.fields:
        assert field.doc
        assert (field.kind is FieldKind.TENSOR) == bool(field.dtypes)


def test_opcodes_are_distinct_and_leave_zero_alone() -> None:
    assert 0 not in instruction_set()
    assert len({c.opcode for c in INSTRUCTIONS}) == len(INSTRUCTIONS)


@every_instruction
def test_decode_is_the_inverse_of_encode(cls: type[Instruction]) -> None:
    inst = sample_of(cls)
    data = inst.encode()
    assert len(data) == config.INSTRUCTION_BYTES
    assert decode(data) == inst
    assert decode(data).encode() == data


@every_instruction
def test_disassembly_names_every_field_wait_and_signal(cls: type[Instruction]) -> None:
    text = sample_of(cls).disassemble()
    assert text.startswith(cls.name())
    for field in cls.fields:
        assert f" {field.name}=" in text
    assert "wait(b3 >= 4)" in text
    assert "wait(b5 >= 0)" in text
    assert "signal(b2)" in text


@every_instruction
def test_missing_and_unknown_operands_are_refused(cls: type[Instruction]) -> None:
    operands: dict[str, Any] = {f.name: 1 for f in cls.fields}
    with pytest.raises(ValueError, match="has no field bogus"):
        cls(**operands, bogus=1)
    required = [f.name for f in cls.fields if not f.optional]
    if required:
        del operands[required[0]]
        with pytest.raises(ValueError, match=f"needs a value for {required[0]}"):
            cls(**operands)


@every_instruction
def test_examples_exist_and_use_every_optional_operand(cls: type[Instruction]) -> None:
    made = examples_of(cls)
    assert made
    assert len({e.name for e in made}) == len(made)
    for field in cls.fields:
        if field.optional:
            used = {getattr(e.instruction, field.name) == config.NONE for e in made}
            assert used == {True, False}, f"{field.name} is always there or always absent"


@every_instruction
def test_examples_pass_the_declared_checks(cls: type[Instruction]) -> None:
    for example in examples_of(cls):
        assert list(example.instruction.check(example.tensors)) == [], example.name
        for field in cls.fields:
            handle = getattr(example.instruction, field.name)
            if field.kind is FieldKind.TENSOR and handle != config.NONE:
                assert example.tensors[handle].dtype in field.dtypes, (example.name, field.name)


@every_instruction
def test_declared_regions_lie_inside_their_tensors(cls: type[Instruction]) -> None:
    for example in examples_of(cls):
        inst, tensors = example.instruction, example.tensors
        for region in itertools.chain(inst.reads(tensors), inst.writes(tensors)):
            spec = tensors[region.tensor]
            assert 0 <= region.columns[0] < region.columns[1], example.name
            assert 0 <= region.rows[0] < region.rows[1], example.name
            if not region.indexed:
                assert region.rows[1] <= spec.rows, (example.name, spec.name)
                assert region.columns[1] <= spec.columns, (example.name, spec.name)
        assert all(tensors[r.tensor].writable for r in inst.writes(tensors))
        assert inst.bytes(tensors) >= 0
        assert inst.flops(tensors) >= 0


@every_instruction
def test_resources_are_within_the_budget(cls: type[Instruction]) -> None:
    for example in examples_of(cls):
        needs = example.instruction.resources(example.tensors)
        assert needs.pages <= config.NUM_PAGES, example.name
        assert needs.scratch_bytes <= config.SCRATCH_BYTES, example.name
        assert needs.accumulator_bytes <= config.ACCUMULATOR_BYTES, example.name
        assert needs.semaphores <= config.MAX_SEMAPHORES, example.name


def run_reference(example: Example) -> Memory:
    memory = example.memory()
    ReferenceMachine().load(example.program(), memory, verify=False).execute_one(0)
    return memory


def run_cpu(example: Example, level: str | None = None) -> Memory:
    memory = example.memory()
    machine = CpuMachine(timeout=1.0, level=level, check_resources=True)
    machine.load(example.program(), memory, verify=False).execute_one(0)
    return memory


def differences(example: Example, left: Memory, right: Memory) -> Iterator[str]:
    for handle, spec in enumerate(example.tensors):
        if handle in example.instruction.workspaces():
            continue
        a, b = left[spec.name], right[spec.name]
        bound = (
            ABSOLUTE[spec.dtype] + RELATIVE[spec.dtype] * torch.maximum(a.abs(), b.abs()).double()
        )
        wrong = ~((a.double() - b.double()).abs() <= bound) & ~(a == b)
        if bool(wrong.any()):
            at = [int(i) for i in torch.nonzero(wrong)[0]]
            yield (
                f"{example.name}: {int(wrong.sum())} of {wrong.numel()} elements of {spec.name} differ; "
                f"{at}: {a[tuple(at)]} and {b[tuple(at)]}"
            )
        if spec.tagged and bool(
            (left.storage(spec.name)[..., 1] != right.storage(spec.name)[..., 1]).any()
        ):
            yield f"{example.name}: tags of {spec.name} differ"


@every_instruction
@pytest.mark.parametrize("level", levels())
def test_cpu_agrees_with_the_reference_within_its_resources(
    cls: type[Instruction], level: str
) -> None:
    found = [
        text
        for example in examples_of(cls)
        for text in differences(example, run_reference(example), run_cpu(example, level))
    ]
    assert not found, "\n".join(found)


def written_mask(example: Example, spec: TensorSpec, handle: int) -> torch.Tensor:
    """Which elements of a tensor the instruction declares to write, as a matrix."""
    mask = torch.zeros(spec.rows, spec.columns, dtype=torch.bool)
    for region in example.instruction.writes(example.tensors):
        if region.tensor == handle:
            if region.indexed:
                # Rows of an index: any place of the tensor may be meant.
                mask[:] = True
            mask[region.rows[0] : region.rows[1], region.columns[0] : region.columns[1]] = True
    return mask


@every_instruction
@pytest.mark.parametrize("run", [run_reference, run_cpu], ids=["reference", "cpu"])
def test_nothing_is_written_outside_the_declared_regions(cls: type[Instruction], run: Any) -> None:
    for example in examples_of(cls):
        before, after = example.memory(), run(example)
        for handle, spec in enumerate(example.tensors):
            mask = written_mask(example, spec, handle)
            old, new = (
                m[spec.name].reshape(spec.rows, -1).view(torch.uint8) for m in (before, after)
            )
            size = TORCH_DTYPE[spec.dtype].itemsize
            changed = (old != new).reshape(spec.rows, spec.columns, size).any(-1)
            assert not bool((changed & ~mask).any()), (example.name, spec.name)


@every_instruction
def test_the_instruction_set_is_found_by_its_folders(cls: type[Instruction]) -> None:
    assert (Path(megavm.instructions.__file__).parent / cls.name()).is_dir()
