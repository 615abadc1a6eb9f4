"""Maps with which the copy engine finds boxes of the inputs of matrix products (cuda/loader.cuh)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from megavm.vm.cuda.driver import Driver
from megavm.vm.cuda.launch import MAP_BYTES
from megavm.vm.layout import ROWS, has_boxes
from megavm.vm.memory import Memory
from megavm.vm.tensors import TensorSpec

BOX_ROW_BYTES = 128


def input_maps(
    driver: Driver, memory: Memory, specs: Sequence[TensorSpec], rows: int
) -> npt.NDArray[np.uint64]:
    """The maps of tensors in the memory of a GPU: [tensors, 2, words], zeros for those that are no inputs.

    ``rows``: how many rows matrix products take at a time. The first map of a tensor has boxes of that many
    rows, the second of one row.
    """
    maps = np.zeros((len(specs), 2, MAP_BYTES // 8), np.uint64)
    for place, spec in zip(maps, specs, strict=True):
        if has_boxes(spec) and memory.layout(spec.name) == ROWS:
            storage = memory.storage(spec.name)
            place[0] = _map(driver, spec, storage, rows)
            place[1] = _map(driver, spec, storage, 1)
    return maps


def _map(
    driver: Driver, spec: TensorSpec, storage: torch.Tensor, box_rows: int
) -> npt.NDArray[np.uint64]:
    api = driver.api
    size = spec.dtype.size

    def numbers(kind: type, *values: int) -> list[object]:
        return [kind(value) for value in values]

    found = driver.call(
        "cuTensorMapEncodeTiled",
        api.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        2,
        storage.data_ptr(),
        numbers(api.cuuint64_t, spec.columns, spec.rows),
        numbers(api.cuuint64_t, spec.columns * size),
        numbers(api.cuuint32_t, BOX_ROW_BYTES // size, box_rows),
        numbers(api.cuuint32_t, 1, 1),
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.array([int(word) for word in found.opaque], np.uint64)
