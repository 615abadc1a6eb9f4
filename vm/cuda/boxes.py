"""Maps with which the copy engine finds boxes of matrices in memory (cuda/loader.cuh)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megavm.vm.config import (
    BOX_ROW_BYTES,
    BOX_TILES,
    MAP_WORD_BYTES,
    MAPS_OF_TENSOR,
    MAX_BOX_TOKENS,
    TILE_ROW_BYTES,
    UNIT_ROWS,
)
from megavm.vm.cuda.driver import Driver
from megavm.vm.cuda.launch import MAP_BYTES
from megavm.vm.layout import ROWS, SWIZZLED, Order, has_boxes
from megavm.vm.memory import Memory
from megavm.vm.tensors import BF16, TensorSpec


def operand_maps(
    driver: Driver, memory: Memory, specs: Sequence[TensorSpec], rows: int
) -> npt.NDArray[np.uint64]:
    """The maps of tensors in the memory of a GPU: [tensors, MAPS_OF_TENSOR, words], zeros for others.

    ``rows``: how many rows matrix products take at a time; 0: there are none. The first map of an input
    has boxes of 64 columns of that many rows, with the 128-byte swizzle. Map i of a
    weight has boxes of BOX_TILES tiles of each of i + 1 units, as they are. The first map of a KV cache has
    boxes of 64 columns of the tokens of a block, as they are, up to MAX_BOX_TOKENS.
    """

    def known(*matrix: Any) -> npt.NDArray[np.uint64]:
        # Programs share most matrices.
        if matrix not in driver.maps:
            driver.maps[matrix] = _map(driver, *matrix)
        found: npt.NDArray[np.uint64] = driver.maps[matrix]
        return found

    maps = np.zeros((len(specs), MAPS_OF_TENSOR, MAP_BYTES // 8), np.uint64)
    for place, spec in zip(maps, specs, strict=True):
        layout, storage = memory.layout(spec.name), memory.storage(spec.name)
        address = storage.data_ptr()
        if layout == SWIZZLED:
            box = BOX_ROW_BYTES // spec.dtype.size, min(spec.shape[2], MAX_BOX_TOKENS)
            slots = math.prod(spec.shape[:3])
            place[0] = known(address, spec.dtype.size, spec.shape[3], slots, box, False)
        elif rows and has_boxes(spec) and layout == ROWS:
            box = BOX_ROW_BYTES // spec.dtype.size, rows
            place[0] = known(address, spec.dtype.size, spec.columns, spec.rows, box, True)
        elif rows and spec.dtype is BF16 and layout.order is Order.UNITS:
            tile = UNIT_ROWS * TILE_ROW_BYTES // MAP_WORD_BYTES
            units, tiles = storage.shape[:2]
            for i in range(MAPS_OF_TENSOR):
                box = BOX_TILES * tile, i + 1
                place[i] = known(address, MAP_WORD_BYTES, tiles * tile, units, box, False)
    return maps


def _map(
    driver: Driver,
    address: int,
    size: int,
    columns: int,
    rows: int,
    box: tuple[int, int],
    swizzled: bool,
) -> npt.NDArray[np.uint64]:
    """The map of a matrix of elements of ``size`` bytes for boxes of (columns, rows)."""
    api = driver.api
    kinds, swizzles = api.CUtensorMapDataType, api.CUtensorMapSwizzle

    def numbers(kind: type, *values: int) -> list[object]:
        return [kind(value) for value in values]

    encoded = driver.call(
        "cuTensorMapEncodeTiled",
        kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
        if size == BF16.size
        else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT64,
        2,
        address,
        numbers(api.cuuint64_t, columns, rows),
        numbers(api.cuuint64_t, columns * size),
        numbers(api.cuuint32_t, *box),
        numbers(api.cuuint32_t, 1, 1),
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B if swizzled else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64)
