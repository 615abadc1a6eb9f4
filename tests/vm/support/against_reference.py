"""Compares what an instruction does on a machine of the GPU with what the reference says."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megavm.instructions import instruction_set
from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.vm.config import NONE
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.example import Example
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, DType, TensorKind, TensorSpec

RELATIVE = {DType.F32: 2e-5, DType.BF16: 2**-7, DType.I32: 0.0}
ABSOLUTE = {DType.F32: 2e-5, DType.BF16: 2e-3, DType.I32: 0.0}


def examples_of(cls: type[Instruction]) -> list[Example]:
    return _examples(cls.__module__, cls.opcode)


@functools.cache  # nobody changes them
def _examples(folder: str, seed: int) -> list[Example]:
    module = importlib.import_module(f"{folder}.examples")
    return list(module.examples(np.random.default_rng(seed)))


# Examples whose kernels differ most; --emulate-gpu takes all.
WANTED = {
    *(
        "matrix",
        "matrix, tails",
        "matrix, odd ends",
        "matrix, deep",
        "matrix, scaled",
        "matrix, parts added",
    ),
    *("matrix, few columns in turn", "matrix, newest", "scaled, units", "fours"),
    *("gathered", "gathered eights", "gathered, no live row"),
    *("sixteen rows", "sixteen rows, long", "sixteen rows, scaled", "sixteen rows, peaks"),
    *("sixteen rows, parts added", "sixteen rows, gathered"),
    *("quads", "quads, bf16 result", "quads, shared block", "quads, shared rows"),
    *("quads, few shared rows", "quads, peaks", "quads, equal peaks", "quads, float32 result"),
    *("quads, four tiles of rows", "quads, long rows"),
    *("fast, prompts", "fast, prompts, long heads", "fast, prompts, last of two splits"),
    *("fast, long prompts", "fast, rows apart, newest", "fast, rows apart, long heads"),
    *("fast, long prompts, first of two", "fast, long prompts, last of two"),
    *("fast, long prompts, ends of turns", "fast, long prompts, turned round"),
    *("fast, uneven rows, newest", "fast, few uneven rows, tagged"),
    *("fast, uneven rows, small blocks", "fast, a prompt, then a row"),
    *("fast, rows apart, tagged", "fast, newest, tagged", "fast, few rows apart, newest"),
    *(
        "peaks, long rows in turn, bf16",
        "sixteen rows, long and tagged",
        "sixteen rows, long and scaled",
        "eight rows, long",
        "eight rows, long and scaled",
        "eight rows, long and tagged",
    ),
    *("sums of 64", "sums of 64, units", "sums of 64, long rows", "sums of 64, in turn"),
    *("no logits", "no logits, one tagged row", "no logits, tagged dead row"),
    *("sums of 64, bf16", "sums of 64, wide", "scaled, wide"),
}


def emulated_examples() -> Iterator[Example]:
    """The first example of every instruction, and those of ``WANTED``."""
    for cls in instruction_set().values():
        for i, example in enumerate(examples_of(cls)):
            if i == 0 or example.name in WANTED:
                yield example


def name_of(example: Example) -> str:
    return f"{type(example.instruction).name()}-{example.name}"


def rounding(example: Example) -> float:
    """How far results of attention may be off besides: the kernel rounds the weights to bf16."""
    inst = example.instruction
    if not isinstance(inst, Attention) or example.tensors[inst.k_cache].dtype is not BF16:
        return 0.0
    if inst.partial == NONE:
        return 4e-3
    # Partial sums are not divided by the weights' total: errors add up as those of chance do.
    return float(2e-2 * max(1.0, inst.context / inst.num_splits / 64) ** 0.5)


def differences(example: Example, left: Memory, right: Memory) -> Iterator[str]:
    for handle, spec in enumerate(example.tensors):
        if handle in example.instruction.workspaces():
            continue
        a, b = left[spec.name].double(), right[spec.name].cpu().double()
        bound = (
            rounding(example)
            + ABSOLUTE[spec.dtype]
            + RELATIVE[spec.dtype] * torch.maximum(a.abs(), b.abs())
        )
        wrong = ~((a - b).abs() <= bound) & ~(a == b) & ~(a.isnan() & b.isnan())
        if bool(wrong.any()):
            at = tuple(int(i) for i in torch.nonzero(wrong)[0])
            yield (
                f"{example.name}: {int(wrong.sum())} of {wrong.numel()} elements of {spec.name} "
                f"differ; {at}: {a[at]} and {b[at]}"
            )
        tags = (m.tagged_words(spec.name)[..., 1].cpu() for m in (left, right) if spec.tagged)
        if spec.tagged and not torch.equal(*tags):
            yield f"{example.name}: tags of {spec.name} differ"


def masked_example() -> Example:
    """Sequences that have masks and biases."""
    return next(e for e in examples_of(AdjustLogits) if e.name == "mask and bias, drawn")


def check_missing_mask(machine: Machine) -> None:
    """A choice whose mask the host does not write ends with a sentence."""
    example = masked_example()
    memory = example.memory(5, machine.memory_device)
    memory.write("masks_written", torch.tensor([6]))
    memory.write("masks_awaited", torch.tensor([7]))
    executable = machine.load(example.program(), memory, verify=False)
    with pytest.raises(MachineFault, match=r"has not written mask 7\b.*last one is 6"):
        executable.run()


def behind_copies(example: Example) -> tuple[Program, Example]:
    """A program in which another worker copies the example's inputs to where they are read.

    Those that other instructions may produce. The instruction waits for a barrier, which copies to
    tagged tensors do not signal: their words must be waited for. Others hold NaN before. The second
    result has the tensors and values of the program's memory.
    """
    inst, tensors, values = example.instruction, list(example.tensors), dict(example.values)
    written = {region.tensor for region in inst.writes(tensors)}
    copies: list[Instruction] = []
    for handle in dict.fromkeys(region.tensor for region in inst.reads(tensors)):
        spec = tensors[handle]
        if spec.kind is not TensorKind.ACTIVATION or handle in written or spec.name not in values:
            continue
        source = TensorSpec(f"{spec.name}.copied", spec.shape, spec.dtype, TensorKind.INPUT)
        everything: dict[str, Any] = {"row_begin": 0, "row_end": spec.rows}
        everything |= {"column_begin": 0, "column_end": spec.columns, "x_row": 0, "x_column": 0}
        signal = None if spec.tagged else 0
        copy = Copy(x=len(tensors), out=handle, signal=signal, **everything)
        if len(spec.shape) != 2 or any(copy.check([*tensors, source])):
            continue
        tensors.append(source)
        copies.append(copy)
        values[source.name] = values[spec.name]
        if spec.tagged:
            del values[spec.name]
        else:
            values[spec.name] = torch.full(spec.shape, torch.nan)
    signals = sum(copy.signal is not None for copy in copies)
    waits = [Wait(0, signals)] if signals else []
    operands = {field.name: getattr(inst, field.name) for field in inst.fields}
    waiting = type(inst)(waits=waits, **operands)
    queues = [[0], list(range(1, 1 + len(copies)))]
    barriers = ("copied",) if signals else ()
    program = Program.build(tensors, [waiting, *copies], queues, barriers=barriers)
    return program, replace(example, tensors=tensors, values=values)


def check_behind_copies(machine: CudaMachine, example: Example) -> None:
    """Run an example whose inputs another worker stores meanwhile; see ``check_example``."""
    program, given = behind_copies(example)
    _check(machine, example, program, given.memory(5, machine.memory_device))


def check_example(machine: CudaMachine, example: Example, alone: bool) -> None:
    """Run an example, by itself or in a launch, and compare all that memory then holds."""
    memory = example.memory(5, machine.memory_device)
    _check(machine, example, example.program(), memory, alone)


def _check(
    machine: CudaMachine, example: Example, program: Program, memory: Memory, alone: bool = False
) -> None:
    expected = example.memory(5)
    ReferenceMachine().load(example.program(), expected, verify=False).execute_one(0)
    executable = machine.load(program, memory, verify=False)
    if alone:
        executable.execute_one(0)
    else:
        executable.run()
    found = list(differences(example, expected, memory))
    assert not found, "\n".join(found)
