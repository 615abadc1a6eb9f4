"""What holds for every instruction, by the fact that it is declared."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megavm.instructions
from megavm.instructions import decode, instruction_set
from megavm.instructions.copy import Copy
from megavm.vm import codegen, config
from megavm.vm.cpu.machine import CpuMachine, levels
from megavm.vm.cuda.memory import SCRATCH_BYTES
from megavm.vm.example import Example
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import MachineFault
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.operands import Field, FieldKind
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import I32, DType, Part, TensorKind, TensorSpec
from megavm.vm.verify import VerificationError, verify

INSTRUCTIONS = list(instruction_set().values())
every_instruction = pytest.mark.parametrize(
    "cls", INSTRUCTIONS, ids=[c.name() for c in INSTRUCTIONS]
)

RELATIVE = {DType.F32: 2e-5, DType.BF16: 2**-7, DType.I32: 0.0}
ABSOLUTE = {DType.F32: 2e-5, DType.BF16: 2e-3, DType.I32: 0.0}


def examples_of(cls: type[Instruction]) -> list[Example]:
    return _examples(cls.__module__, cls.opcode)


@functools.cache  # nobody changes them
def _examples(folder: str, seed: int) -> list[Example]:
    module = importlib.import_module(f"{folder}.examples")
    return list(module.examples(np.random.default_rng(seed)))


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
def test_the_reference_refuses_accesses_that_are_not_declared(
    cls: type[Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operand's declared reads, and its writes, are left out in turn; one example must show it."""
    found: dict[tuple[str, str], bool] = {}
    for example, access in itertools.product(examples_of(cls), ("reads", "writes")):
        declared = list(getattr(example.instruction, access)(example.tensors))
        for handle in {region.tensor for region in declared if not region.indexed}:
            kept = [region for region in declared if region.tensor != handle]
            with monkeypatch.context() as patch:
                patch.setattr(cls, access, lambda self, tensors, kept=kept: iter(kept))
                memory = example.memory()
                executable = ReferenceMachine().load(example.program(), memory, verify=False)
                refused = False
                try:
                    executable.execute_one(0)
                except MachineFault as fault:
                    refused = "declare" in str(fault)
            name = next(
                f.name for f in cls.fields if getattr(example.instruction, f.name) == handle
            )
            found[access, name] = found.get((access, name), False) or refused
    assert all(found.values()), found


@every_instruction
def test_faults_of_the_kernel_have_sentences(cls: type[Instruction]) -> None:
    pattern = re.compile(r"\bFault::k(\w+)")
    own = {
        name for path in folder_of(cls).glob("*.cuh") for name in pattern.findall(path.read_text())
    }
    declared = {codegen.camel(name) for name in cls.faults}
    assert own <= declared
    root = folder_of(cls).parents[1]
    sources = [*(root / "cuda").glob("*.cuh"), *(root / "instructions").rglob("*.cuh")]
    assert declared <= {name for path in sources for name in pattern.findall(path.read_text())}
    for sentence in cls.faults.values():
        assert sentence.format(row=1, word=2, value=3, target=4)


@every_instruction
def test_what_reads_earlier_rows_says_with_which_operand(cls: type[Instruction]) -> None:
    """A GPU then reads them before the waits of the header are over."""
    for example in examples_of(cls):
        inst = example.instruction
        earlier = any(region.earlier for region in inst.reads(example.tensors))
        operand = cls.earlier_operand
        assert earlier == bool(operand and getattr(inst, operand) != config.NONE), example.name


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


def test_opcodes_are_distinct() -> None:
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
    required = [f.name for f in cls.fields if f.default is None]
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
        # Examples have one rank; test_rank_graphs.py and test_ranks.py name another one.
        if field.optional and field.name != "only":
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
        inst, tensors = example.instruction, example.tensors
        assert inst.working_bytes(tensors) <= config.WORKING_BYTES, example.name
        assert inst.scratch_bytes(tensors) <= SCRATCH_BYTES, example.name


# What operands may be.


def operands_of(example: Example) -> Iterator[tuple[Field[int], TensorSpec]]:
    """The tensor operands that are there, and their tensors."""
    for field in example.instruction.fields:
        handle = getattr(example.instruction, field.name)
        if field.kind is FieldKind.TENSOR and handle != config.NONE:
            yield field, example.tensors[handle]


def refusal(program: Program) -> str:
    with pytest.raises(VerificationError) as error:
        verify(program)
    return str(error.value)


@every_instruction
def test_tensor_operands_declare_how_many_dimensions_they_have(cls: type[Instruction]) -> None:
    # A copy takes everything for the matrix that all instructions see.
    without = [f.name for f in cls.fields if f.kind is FieldKind.TENSOR and f.rank is None]
    assert without == (["x", "out"] if cls is Copy else [])
    for example in examples_of(cls):
        for field, spec in operands_of(example):
            assert field.rank in (None, len(spec.shape)), (example.name, field.name)
            assert field.tagged or not spec.tagged, (example.name, field.name)


@every_instruction
def test_what_an_instruction_writes_is_declared_as_produced(cls: type[Instruction]) -> None:
    for example in examples_of(cls):
        written = {example.tensors[r.tensor] for r in example.instruction.writes(example.tensors)}
        for field, spec in operands_of(example):
            assert field.produced or spec not in written, (example.name, field.name)


@every_instruction
def test_an_operand_that_must_not_be_tagged_is_refused_tagged(cls: type[Instruction]) -> None:
    wanted = {f.name for f in cls.fields if f.kind is FieldKind.TENSOR and not f.tagged}
    for example in examples_of(cls):
        for field, spec in operands_of(example):
            if field.tagged or spec.columns * spec.dtype.size % 4:
                continue
            tagged = example.changed(field.name, kind=TensorKind.ACTIVATION, tagged=True, parts=())
            text = refusal(tagged.program())
            assert f": {field.name} is {spec.name}, which is tagged" in text, example.name
            wanted.discard(field.name)
    assert not wanted, "no example has them"


@every_instruction
def test_only_a_weight_whose_operand_may_have_parts_is_accepted_in_parts(
    cls: type[Instruction],
) -> None:
    accepted = set()
    for example in examples_of(cls):
        for field, spec in operands_of(example):
            if field.parts:
                accepted |= {field.name} if spec.parts else set()
                continue
            part = Part("part", spec.rows)
            changed = example.changed(
                field.name, kind=TensorKind.WEIGHT, tagged=False, parts=(part,)
            )
            text = refusal(changed.program())
            assert f": {field.name} is {spec.name}, which has parts: kernels" in text, example.name
    assert accepted == {f.name for f in cls.fields if f.parts}, "no example has them"


@every_instruction
def test_an_operand_of_another_number_of_dimensions_is_refused(cls: type[Instruction]) -> None:
    for example in examples_of(cls):
        for field, spec in operands_of(example):
            if field.rank is None:
                continue
            shape = (*spec.shape, 1)  # the same as a matrix
            text = refusal(example.changed(field.name, shape=shape).program())
            what = f": {field.name} is {spec.name} of shape {shape}, expected {field.shape}"
            assert what in text, example.name


@every_instruction
def test_an_operand_that_must_not_be_produced_is_refused_when_a_copy_writes_it(
    cls: type[Instruction], monkeypatch: pytest.MonkeyPatch
) -> None:
    # No instruction writes vectors of integers.
    for operand in (Copy.x, Copy.out):
        monkeypatch.setattr(operand, "dtypes", (*operand.dtypes, I32))
    wanted = {f.name for f in cls.fields if f.kind is FieldKind.TENSOR and not f.produced}
    for example in examples_of(cls):
        for field, spec in operands_of(example):
            if field.produced:
                continue
            made = example.changed(field.name, kind=TensorKind.STATE, parts=())
            source = TensorSpec("source of the copy", spec.shape, spec.dtype, TensorKind.INPUT)
            copy = Copy(
                x=len(made.tensors),
                out=getattr(example.instruction, field.name),
                x_row=0,
                x_column=0,
                row_begin=0,
                row_end=spec.rows,
                column_begin=0,
                column_end=spec.columns,
            )
            tensors = [*made.tensors, source]
            text = refusal(Program.build(tensors, [example.instruction, copy], [[0, 1]]))
            if "words of 2 BF16 are written as a whole" in text:
                continue  # a part of a tagged result, which only tests write alone
            what = f": {field.name} is {spec.name}, which instruction 1 (copy) writes, but"
            assert what in text, example.name
            wanted.discard(field.name)
    assert not wanted, "no example has them"


@every_instruction
def test_reals_below_their_least_are_refused(cls: type[Instruction]) -> None:
    for field in cls.fields:
        if field.least > -np.inf:
            values: dict[str, Any] = {f.name: 1 for f in cls.fields}
            with pytest.raises(ValueError, match=f"{field.name} is .*: expected at least"):
                cls(**values | {field.name: np.nextafter(np.float32(field.least), -np.inf).item()})


@every_instruction
def test_operands_that_may_be_tagged_are_read_and_written_so(cls: type[Instruction]) -> None:
    wanted = {f.name for f in cls.fields if f.tagged}
    found: list[str] = []
    seen: set[tuple[str, tuple[tuple[str, DType], ...]]] = set()
    for example in examples_of(cls):
        wanted -= {field.name for field, spec in operands_of(example) if spec.tagged}
        for name, tagged in example.tagged_variants():
            types = tuple((field.name, spec.dtype) for field, spec in operands_of(example))
            if (name, types) in seen:
                continue
            seen.add((name, types))
            wanted.discard(name)
            found += differences(tagged, run_reference(tagged), run_cpu(tagged))
    assert not found, "\n".join(found)
    assert not wanted, "no example can have them tagged"


# Running.


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
        wrong &= ~(a.isnan() & b.isnan())
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


def poisoned(example: Example) -> Example:
    """NaN in all elements of what the instruction only reads, but for those that it declares to."""
    tensors, inst, values = example.tensors, example.instruction, dict(example.values)
    written = {region.tensor for region in inst.writes(tensors)}
    declared = list(inst.reads(tensors))
    for handle, spec in enumerate(tensors):
        regions = [region for region in declared if region.tensor == handle]
        unwritten = spec.tagged and spec.name not in values
        if spec.dtype is I32 or handle in written or unwritten or any(r.indexed for r in regions):
            continue
        given = values.get(spec.name, torch.zeros(spec.shape))
        mask = torch.ones(spec.rows, spec.columns, dtype=torch.bool)
        for region in regions:
            mask[slice(*region.rows), slice(*region.columns)] = False
        changed = given.reshape(spec.rows, -1).float().masked_fill(mask, math.nan)
        values[spec.name] = changed.reshape(spec.shape)
    return replace(example, values=values)


@every_instruction
@pytest.mark.parametrize("level", levels())
def test_the_cpu_uses_nothing_that_is_not_declared_as_read(
    cls: type[Instruction], level: str
) -> None:
    for example in examples_of(cls):
        left, right = run_cpu(example, level), run_cpu(poisoned(example), level)
        for handle in {region.tensor for region in example.instruction.writes(example.tensors)}:
            if handle in example.instruction.workspaces():
                continue
            name = example.tensors[handle].name
            bits = [memory.storage(name).contiguous().view(torch.uint8) for memory in (left, right)]
            assert torch.equal(*bits), f"{example.name}: {name}"


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
