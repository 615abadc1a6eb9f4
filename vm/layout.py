"""Layouts: tensors store their elements in natural order, or in an order that the GPU's kernels need.

Instructions declare the layouts that their kernels accept (``Instruction.layouts``), and a machine applies
them to tensors when it loads a program (cuda/layouts.py). ``Memory`` converts: it takes and returns values
in natural order for every layout. Device code calls ``Order`` ``Layout``, in ``launch.hpp``.

This module imports neither torch nor numpy: the C++ build runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megavm.vm.abi import Code
from megavm.vm.config import BOX_COLUMNS, TILE_ROW_BYTES, UNIT_ROWS
from megavm.vm.tensors import BF16, TensorSpec

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 16  # bytes that a swizzle moves together
CHUNK = CHUNK_BYTES // BF16.size


class Order(Code):
    """How the elements of a tensor lie in memory."""

    ROWS = 0
    UNITS = 1
    SWIZZLED = 2
    COPIES = 3


@dataclass(frozen=True)
class Layout:
    """One order of elements.

    ``ROWS``: natural. ``units(half)``, for weights [N, K]: units of 8 rows, each a sequence of tiles of
    8 rows x 64 bytes, so that a tile is 512 contiguous bytes; N and K are padded with zeros. Chunk c of 16
    bytes of row r of a tile lies at chunk c ^ (r >> 1): the 64-byte swizzle of wgmma. With ``half`` > 0
    the rows j and j + half of each group of 2 * half rows are neighbours. ``SWIZZLED``, for
    bfloat16 KV caches [blocks, kv heads, block_size, d]: chunk c of 16 bytes of slot t lies at chunk
    c ^ (t & 7). ``COPIES``, for tagged tensors on GPUs: see vm/words.py; ``Memory`` converts these itself.
    """

    order: Order
    half: int = 0

    def __str__(self) -> str:
        return self.order.name.lower() + (f"({self.half})" if self.half else "")

    def check(self, spec: TensorSpec) -> None:
        """Raise ValueError when the tensor cannot have this layout."""
        if self.order is Order.ROWS:
            return
        wrong = None
        if self.order is Order.COPIES:
            wrong = None if spec.tagged else "it is not tagged"
        elif spec.tagged:
            wrong = "it is tagged"
        elif self.order is Order.UNITS:
            if len(spec.shape) != 2:
                wrong = "it is not a matrix"
            elif self.half and spec.rows % (2 * self.half):
                wrong = f"its rows are not groups of {2 * self.half}"
        elif len(spec.shape) != 4 or spec.dtype is not BF16 or spec.shape[3] % BOX_COLUMNS:
            wrong = "it is not a KV cache of bfloat16 whose rows are multiples of 64"
        if wrong:
            raise ValueError(
                f"tensor {spec.name} {spec.shape} cannot have the layout {self}: {wrong}"
            )

    def pack(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        """The storage of a tensor whose natural-order contents are ``value``."""
        self.check(spec)
        if self.order is Order.COPIES:
            raise ValueError(f"tensor {spec.name} is tagged: its words are stored by Memory")
        if self.order is Order.UNITS:
            return self._pack_units(spec, value)
        return _swizzle(value) if self.order is Order.SWIZZLED else value

    def unpack(self, spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
        """The natural-order contents of ``storage``; for ``ROWS`` the storage itself."""
        if self.order is Order.UNITS:
            return self._unpack_units(spec, storage)
        return _swizzle(storage) if self.order is Order.SWIZZLED else storage

    def _pack_units(self, spec: TensorSpec, value: torch.Tensor) -> torch.Tensor:
        if self.half:
            value = value.reshape(-1, 2, self.half, spec.columns).transpose(1, 2)
            value = value.reshape(spec.rows, spec.columns)
        tile = TILE_ROW_BYTES // spec.dtype.size
        units, tiles = -(-spec.rows // UNIT_ROWS), -(-spec.columns // tile)
        if (units * UNIT_ROWS, tiles * tile) != (spec.rows, spec.columns):
            padded = value.new_zeros(units * UNIT_ROWS, tiles * tile)
            padded[: spec.rows, : spec.columns] = value
            value = padded
        return _exchange_chunks(value.reshape(units, UNIT_ROWS, tiles, tile).transpose(1, 2))

    def _unpack_units(self, spec: TensorSpec, storage: torch.Tensor) -> torch.Tensor:
        units, tiles, _, tile = storage.shape
        value = _exchange_chunks(storage).transpose(1, 2).reshape(units * UNIT_ROWS, tiles * tile)
        value = value[: spec.rows, : spec.columns]
        if self.half:
            value = value.reshape(-1, self.half, 2, spec.columns).transpose(1, 2)
        return value.reshape(spec.shape).contiguous()


ROWS = Layout(Order.ROWS)
SWIZZLED = Layout(Order.SWIZZLED)
COPIES = Layout(Order.COPIES)


def units(half: int = 0) -> Layout:
    """The layout of a weight that is read in units of 8 rows; see ``Layout``."""
    return Layout(Order.UNITS, half)


def _exchange_chunks(tiles: torch.Tensor) -> torch.Tensor:
    """Permute the chunks of every row of [units, tiles, 8 rows, 64 bytes]; its own inverse."""
    chunk = CHUNK_BYTES // tiles.element_size()
    split = tiles.reshape(*tiles.shape[:3], -1, chunk)
    exchanged = split.new_empty(split.shape)
    # Row by row: one index for all rows would need one more copy of the whole tensor.
    for row in range(UNIT_ROWS):
        for place in range(split.shape[3]):
            exchanged[:, :, row, place] = split[:, :, row, place ^ (row >> 1)]
    return exchanged.reshape(tiles.shape)


def _swizzle(value: torch.Tensor) -> torch.Tensor:
    """Permute the chunks of every row; the permutation is its own inverse."""
    import torch

    blocks, heads, slots, columns = value.shape
    chunks = columns // CHUNK
    slot = torch.arange(slots, device=value.device)[:, None]
    chunk = torch.arange(chunks, device=value.device)[None] ^ (slot & 7)
    split = value.reshape(blocks, heads, slots, chunks, CHUNK)
    return split[:, :, slot, chunk].reshape(value.shape)


def has_boxes(spec: TensorSpec) -> bool:
    """Whether the copy engine of a GPU can fetch boxes of a matrix that has natural order."""
    matrix = len(spec.shape) == 2 and spec.dtype is BF16 and not spec.tagged
    return matrix and spec.columns * BF16.size % CHUNK_BYTES == 0


def swizzled_if_possible(cache: TensorSpec) -> Layout:
    """The layout that the GPU's attention needs for a KV cache."""
    fits = cache.dtype is BF16 and cache.shape[-1] % BOX_COLUMNS == 0
    return SWIZZLED if fits else ROWS
