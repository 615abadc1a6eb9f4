"""Finds the layouts of a program's tensors that all its GPU kernels accept."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from megavm.vm.alike import Alike, find_alike
from megavm.vm.config import NONE
from megavm.vm.layout import COPIES, ROWS, Layout
from megavm.vm.operands import FieldKind
from megavm.vm.program import Program

Choice = tuple[Layout, ...]


def program_layouts(program: Program, alike: Iterable[Alike] | None = None) -> dict[str, Choice]:
    """The layouts that all instructions accept for each tensor that a program names, by name, best first.

    A kernel that declares no layout of an operand accepts it in natural order only. ``alike``: the result of
    ``find_alike``, if known.

    Raises ValueError when instructions have no layout of a tensor in common, or the tensor cannot have it.
    """
    tensors = program.tensors
    known: dict[Choice, int] = {(ROWS,): 0}
    named = []  # (handles, choices) of all tensor operands, one pair per class
    for same in find_alike(program.words, tensors) if alike is None else alike:
        fields = [f for f in same.representatives[0].fields if f.kind is FieldKind.TENSOR]
        slots = {field.name: slot for slot, field in enumerate(fields)}
        table = np.zeros((len(same.representatives), len(slots)), np.int64)
        for row, inst in zip(table, same.representatives, strict=True):
            for name, choice in inst.layouts(tensors).items():
                row[slots[name]] = known.setdefault(choice, len(known))
        named.append((same.handles, table[same.kind]))
    accepted = np.zeros((len(tensors) + 1, len(known)), bool)
    for handles, numbers in named:
        accepted[np.where(handles == NONE, len(tensors), handles), numbers] = True
    choices: dict[str, Choice] = {}
    common_of: dict[bytes, Choice] = {}  # tensors with the same set of choices share the result
    for handle in np.flatnonzero(accepted[:-1].any(axis=1)).tolist():
        pattern = accepted[handle].tobytes()
        if pattern not in common_of:
            several = [choice for choice, is_one in zip(known, pattern, strict=True) if is_one]
            common = tuple(layout for layout in several[0] if all(layout in c for c in several))
            if not common:
                raise ValueError(_conflict(program, handle, several))
            common_of[pattern] = common
        spec = tensors[handle]
        choices[spec.name] = (COPIES,) if spec.tagged else common_of[pattern]
        choices[spec.name][0].check(spec)
    return choices


def _conflict(program: Program, handle: int, several: list[Choice]) -> str:
    """A sentence that names the instructions whose layouts of a tensor have nothing in common."""
    pairs = [(a, b) for a, b in itertools.combinations(several, 2) if not set(a) & set(b)]
    chosen = pairs[0] if pairs else several
    places: dict[Choice, str] = {}
    for number, inst in enumerate(program.instructions):
        declared = inst.layouts(program.tensors)
        for field in inst.fields:
            if field.kind is FieldKind.TENSOR and getattr(inst, field.name) == handle:
                place = f"instruction {number} ({inst.name()}, {field.name})"
                places.setdefault(declared.get(field.name, (ROWS,)), place)
    needs = sorted((places[choice], names(choice)) for choice in chosen)
    text = " and ".join(f"{layout} by {place}" for place, layout in needs)
    return f"tensor {program.tensors[handle].name} is needed as {text}"


def names(choice: Choice) -> str:
    """Layouts in words."""
    return " or ".join(map(str, choice))
