"""How the elements of a tensor lie in memory: in their natural order, or as the GPU's kernels want them.

Machines choose layouts when they load a program (``program_layouts``); ``Memory`` converts and hands out
values in natural order whatever the layout. The codes of ``Order`` are those of cuda/launch.cuh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from megavm.vm.alike import accesses
from megavm.vm.isa import BF16, Instruction, TensorSpec

if TYPE_CHECKING:
    import torch

    from megavm.vm.program import Program

UNIT_ROWS = 8  # rows of a weight that lie together
TILE_BYTES = 64  # of one row, in a tile of a unit
CHUNK = 8  # elements of bfloat16 that are swizzled together: 16 bytes
SWIZZLE_COLUMNS = 64  # a row must be whole multiples of this to be swizzled


class Order(IntEnum):
    """The kinds of layout."""

    ROWS = 0
    UNITS = 1
    SWIZZLED = 2


@dataclass(frozen=True)
class Layout:
    """One order of elements.

    ``ROWS``: natural. ``units(half)``, for weights [N, K]: units of 8 rows, each a sequence of tiles of
    8 rows x 64 bytes, so that a tile is 512 contiguous bytes; N and K are padded with zeros. With
    ``half`` > 0 the rows j and j + half of each head of 2 * half rows are neighbours. ``SWIZZLED``, for
    bfloat16 KV caches [blocks, kv heads, block_size, d]: chunk c of 16 bytes of slot t lies at chunk
    c ^ (t & 7).
    """

    order: Order
    half: int = 0

    def __str__(self) -> str:
        return self.order.name.lower() + (f"({self.half})" if self.half else "")

    def check(self, spec: TensorSpec) -> None:
        """Raise ValueError when the tensor cannot lie so."""
        if self.order is Order.ROWS:
            return
        wrong = None
        if spec.tagged:
            wrong = "it is tagged"
        elif self.order is Order.UNITS:
            if len(spec.shape) != 2:
                wrong = "it is not a matrix"
            elif self.half and spec.rows % (2 * self.half):
                wrong = f"its rows are not heads of {2 * self.half}"
        elif len(spec.shape) != 4 or spec.dtype is not BF16 or spec.shape[3] % SWIZZLE_COLUMNS:
            wrong = "it is not a KV cache of bfloat16 whose rows are multiples of 64"
        if wrong:
            raise ValueError(
                f"tensor {spec.name} {spec.shape} cannot have the layout {self}: {wrong}"
            )

    def pack(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        """The storage of a tensor whose natural-order contents are ``value``."""
        self.check(spec)
        if self.order is Order.UNITS:
            return self._pack_units(spec, value)
        return _swizzle(value) if self.order is Order.SWIZZLED else value

    def unpack(self, spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
        """The natural-order contents of ``storage``; of ``ROWS`` the storage itself."""
        if self.order is Order.UNITS:
            return self._unpack_units(spec, storage)
        return _swizzle(storage) if self.order is Order.SWIZZLED else storage

    def _pack_units(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        if self.half:
            value = value.reshape(-1, 2, self.half, spec.columns).transpose(1, 2)
            value = value.reshape(spec.rows, spec.columns)
        tile = TILE_BYTES // spec.dtype.size
        units, tiles = -(-spec.rows // UNIT_ROWS), -(-spec.columns // tile)
        if (units * UNIT_ROWS, tiles * tile) != (spec.rows, spec.columns):
            padded = value.new_zeros(units * UNIT_ROWS, tiles * tile)
            padded[: spec.rows, : spec.columns] = value
            value = padded
        return value.reshape(units, UNIT_ROWS, tiles, tile).transpose(1, 2).contiguous()

    def _unpack_units(self, spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
        units, tiles, _, tile = storage.shape
        value = storage.transpose(1, 2).reshape(units * UNIT_ROWS, tiles * tile)
        value = value[: spec.rows, : spec.columns]
        if self.half:
            value = value.reshape(-1, self.half, 2, spec.columns).transpose(1, 2)
        return value.reshape(spec.shape).contiguous()


ROWS = Layout(Order.ROWS)
SWIZZLED = Layout(Order.SWIZZLED)


def units(half: int = 0) -> Layout:
    """The layout of a weight that is read in units of 8 rows; see ``Layout``."""
    return Layout(Order.UNITS, half)


def _swizzle(value: torch.Tensor) -> torch.Tensor:
    """Exchange the chunks of every row; its own inverse."""
    import torch

    blocks, heads, slots, columns = value.shape
    chunks = columns // CHUNK
    slot = torch.arange(slots, device=value.device)[:, None]
    chunk = torch.arange(chunks, device=value.device)[None] ^ (slot & 7)
    split = value.reshape(blocks, heads, slots, chunks, CHUNK)
    return split[:, :, slot, chunk].reshape(value.shape)


# What instructions want until they say it themselves.


def _matmul(inst: Any, tensors: Sequence[TensorSpec]) -> Mapping[int, Layout]:
    return {inst.weight: units()}


def _gate_up(inst: Any, tensors: Sequence[TensorSpec]) -> Mapping[int, Layout]:
    return {inst.gate: units(), inst.up: units()}


def _attention(inst: Any, tensors: Sequence[TensorSpec]) -> Mapping[int, Layout]:
    def wanted(spec: TensorSpec) -> Layout:
        fits = spec.dtype is BF16 and spec.shape[-1] % SWIZZLE_COLUMNS == 0
        return SWIZZLED if fits else ROWS

    return {cache: wanted(tensors[cache]) for cache in (inst.k_cache, inst.v_cache)}


def _qkv_rope(inst: Any, tensors: Sequence[TensorSpec]) -> Mapping[int, Layout]:
    paired = units(tensors[inst.rope].columns // 2)
    weights = dict.fromkeys((inst.q_weight, inst.k_weight, inst.v_weight), paired)
    return {**weights, **_attention(inst, tensors)}


_WISHES = {
    "matmul": _matmul,
    "gate_up": _gate_up,
    "qkv_rope": _qkv_rope,
    "attention": _attention,
}


def layouts_of(inst: Instruction, tensors: Sequence[TensorSpec]) -> Mapping[int, Layout]:
    """The layouts that an instruction's GPU kernel wants, by handle; what is not there may be anything.

    An instruction class says so in a method ``layouts(tensors)``.
    """
    declared = getattr(type(inst), "layouts", None)
    if declared is not None:
        said: Mapping[int, Layout] = declared(inst, tensors)
        return said
    wish = _WISHES.get(inst.name())
    return {} if wish is None else wish(inst, tensors)


def program_layouts(program: Program) -> dict[str, Layout]:
    """The layout of every tensor of a program about which its instructions care, by name.

    Raises ValueError when two instructions want different ones, or a tensor cannot lie so.
    """
    tensors = program.tensors
    known: dict[Layout, int] = {}
    wishes = accesses(
        program.words,
        tensors,
        2,
        lambda _, inst: (
            (handle, known.setdefault(layout, len(known)))
            for handle, layout in layouts_of(inst, tensors).items()
        ),
    )
    different = np.unique(wishes[:, 1:], axis=0, return_index=True)[1]
    layouts = list(known)
    wanted: dict[int, tuple[Layout, int]] = {}
    for index, handle, number in wishes[np.sort(different)].tolist():
        layout, first = wanted.setdefault(handle, (layouts[number], index))
        if layout != layouts[number]:
            raise ValueError(
                f"tensor {tensors[handle].name} is wanted as {layout} by instruction {first} "
                f"({program.instructions[first].name()}) and as {layouts[number]} by instruction {index} "
                f"({program.instructions[index].name()})"
            )
    for handle, (layout, _) in wanted.items():
        layout.check(tensors[handle])
    return {tensors[handle].name: layout for handle, (layout, _) in wanted.items()}
