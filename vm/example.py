"""Examples: an instruction with the tensors it works on, for tests and the differential tool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from megavm.instructions.tiles import squares_of
from megavm.vm.config import NONE, UNIT_ROWS
from megavm.vm.isa import Instruction
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, DType, Part, TensorKind, TensorSpec


@dataclass(frozen=True)
class Example:
    """``values`` gives the contents of tensors by name; the others hold zeros.

    A tagged tensor with a value counts as written in the running step, one without a value does not.
    """

    name: str
    instruction: Instruction
    tensors: list[TensorSpec]
    values: Mapping[str, torch.Tensor]

    def memory(self, epoch: int = 0, device: torch.device | str = "cpu") -> Memory:
        """A fresh memory with the values, after ``epoch`` steps."""
        memory = Memory(device)
        memory.epoch = epoch
        for spec in self.tensors:
            if spec.parts:
                whole = torch.zeros(spec.shape, dtype=TORCH_DTYPE[spec.dtype], device=device)
                parts = torch.split(whole, [part.rows for part in spec.parts])
                memory.bind(spec, *(part.clone() for part in parts))
        memory.allocate(self.tensors)
        for spec in self.tensors:
            value = self.values.get(spec.name)
            if value is not None:
                memory.write(spec.name, value.reshape(spec.shape))
        return memory

    def program(self) -> Program:
        """A program of this one instruction."""
        return Program.build(self.tensors, [self.instruction], [[0]])

    def changed(self, *operands: str, **changes: Any) -> Example:
        """A copy with ``changes`` in the specs of these operands' tensors."""
        tensors = list(self.tensors)
        for name in operands:
            handle = getattr(self.instruction, name)
            tensors[handle] = replace(tensors[handle], **changes)
        return replace(self, tensors=tensors)

    def tagged_variants(self) -> Iterator[tuple[str, Example]]:
        """(operand, the example with its tensor tagged) for every operand that may be tagged and is not.

        If the instruction rejects the example with this operand alone tagged, all such operands are tagged.
        """
        plain = [
            f.name
            for f in self.instruction.fields
            if f.tagged and (handle := getattr(self.instruction, f.name)) != NONE
            if not self.tensors[handle].tagged and self._is_whole_words(handle)
        ]
        for name in plain:
            for operands in ((name,), plain):
                variant = self._tagged(operands)
                if not any(self.instruction.check(variant.tensors)):
                    yield name, variant
                    break

    def _is_whole_words(self, handle: int) -> bool:
        """Whether the rows of a tensor, and the columns that are written, consist of whole 4-byte words."""
        size = self.tensors[handle].dtype.size
        written = [r for r in self.instruction.writes(self.tensors) if r.tensor == handle]
        ends = [self.tensors[handle].columns, *(c for r in written for c in r.columns)]
        return all(end * size % 4 == 0 for end in ends)

    def _tagged(self, operands: Sequence[str]) -> Example:
        variant = self.changed(*operands, kind=TensorKind.ACTIVATION, tagged=True)
        values = dict(self.values)
        for region in self.instruction.reads(variant.tensors):
            spec = variant.tensors[region.tensor]
            if (
                spec.tagged and not self.tensors[region.tensor].tagged
            ):  # its value counts as written
                values.setdefault(spec.name, torch.zeros(spec.shape))
        names = ", ".join(operands)
        return replace(variant, name=f"{self.name}, with {names} tagged", values=values)


@dataclass
class Table:
    """Collects the tensors of an example and hands out their handles."""

    rng: np.random.Generator
    specs: list[TensorSpec] = field(default_factory=list)
    values: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        kind: TensorKind,
        value: torch.Tensor | None = None,
        *,
        tagged: bool = False,
    ) -> int:
        """Add a tensor with these contents and return its handle.

        Without ``value`` it holds zeros, and a tagged tensor does not count as written.
        """
        self.specs.append(TensorSpec(name, shape, dtype, kind, tagged))
        if value is not None:
            self.values[name] = value
        return len(self.specs) - 1

    @staticmethod
    def tensor(array: np.ndarray) -> torch.Tensor:
        """A torch tensor of the same contents."""
        return torch.from_numpy(np.ascontiguousarray(array))

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normally distributed float32."""
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32) * scale)

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        *,
        parts: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """A weight whose products with normal inputs are approximately normal.

        ``parts``: the rows of its parts, by their names within the tensor's.
        """
        value = self.normal(*shape, scale=shape[-1] ** -0.5)
        handle = self.add(name, shape, dtype, TensorKind.WEIGHT, value)
        named = tuple(Part(f"{name}.{part}", rows) for part, rows in parts.items())
        self.specs[handle] = replace(self.specs[handle], parts=named)
        return handle

    def gain(self, name: str, columns: int, dtype: DType) -> int:
        """A gain around 1."""
        value = 1 + self.normal(columns, scale=0.3)
        return self.add(name, (columns,), dtype, TensorKind.WEIGHT, value)

    def squares(
        self, name: str, rows: int, columns: int, *, tagged: bool = False, unit: int = UNIT_ROWS
    ) -> int:
        """Sums of squares of rows of ``columns`` normal elements, as in ``out_squares`` of Matmul."""
        shape = (rows, squares_of(columns, unit))
        value = unit * (1 + self.normal(*shape, scale=0.2).abs())
        return self.add(name, shape, F32, TensorKind.ACTIVATION, value, tagged=tagged)

    def scaled(
        self,
        shape: tuple[int, int],
        dtype: DType,
        *,
        tagged: bool = False,
        unit: int = UNIT_ROWS,
    ) -> dict[str, int]:
        """out_gain, out_scaled and out_squares of a result, each of ``unit`` columns."""
        squares = (shape[0], squares_of(shape[1], unit))
        return {
            "out_gain": self.gain("out_gain", shape[1], dtype),
            "out_scaled": self.output("out_scaled", shape, dtype, tagged=tagged),
            "out_squares": self.output("out_squares", squares, F32, tagged=tagged),
        }

    def activation(
        self, name: str, shape: tuple[int, ...], dtype: DType, *, tagged: bool = False
    ) -> int:
        """A written activation."""
        return self.add(
            name, shape, dtype, TensorKind.ACTIVATION, self.normal(*shape), tagged=tagged
        )

    def output(
        self, name: str, shape: tuple[int, ...], dtype: DType, *, tagged: bool = False
    ) -> int:
        """An activation that has not been written yet."""
        return self.add(name, shape, dtype, TensorKind.ACTIVATION, tagged=tagged)

    def integers(self, name: str, value: Sequence[int] | torch.Tensor) -> int:
        """An int32 tensor that the host writes before a step."""
        array = torch.as_tensor(value, dtype=torch.int32)
        return self.add(name, tuple(array.shape), I32, TensorKind.INPUT, array)

    def count(self, name: str, live: int | None) -> int:
        """The number of live rows, or NONE."""
        return NONE if live is None else self.integers(name, [live])


@dataclass(frozen=True)
class Steps:
    """Handles of the step tensors, by the names of the operands."""

    row_sequence: int
    row_position: int
    block_table: int
    row_count: int


def paged_step(
    table: Table,
    rows: Sequence[tuple[int, int]],
    live: int | None,
    blocks_per_sequence: int,
    num_blocks: int,
) -> Steps:
    """A step of rows (sequence, position), with the KV blocks of the sequences scattered at random."""
    sequences = max(sequence for sequence, _ in rows) + 1
    blocks = table.rng.permutation(num_blocks)[: sequences * blocks_per_sequence]
    return Steps(
        row_sequence=table.integers("row_sequence", [s for s, _ in rows]),
        row_position=table.integers("row_position", [p for _, p in rows]),
        block_table=table.integers(
            "block_table",
            torch.from_numpy(blocks.reshape(sequences, blocks_per_sequence).astype(np.int32)),
        ),
        row_count=table.count("row_count", live),
    )
