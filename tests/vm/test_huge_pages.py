"""Large tensors in huge pages."""

from __future__ import annotations

import gc

import pytest
import torch

from megavm.vm.huge_pages import LEAST_BYTES, zeros_in_huge_pages


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
@pytest.mark.parametrize("bytes_", [0, 24, LEAST_BYTES - 8, LEAST_BYTES, 3 * LEAST_BYTES + 40])
def test_tensors_are_zeros_that_can_be_written_and_keep_their_memory(
    dtype: torch.dtype, bytes_: int
) -> None:
    shape = (2, bytes_ // dtype.itemsize // 2)
    tensor = zeros_in_huge_pages(shape, dtype)
    assert (tensor.shape, tensor.dtype) == (shape, dtype)
    assert tensor.is_contiguous()
    assert tensor.data_ptr() % 64 == 0
    assert not tensor.any()
    part = tensor[1:]
    part.fill_(3)
    del tensor
    gc.collect()
    zeros_in_huge_pages(shape, dtype)  # in the place of memory that nobody holds
    assert bool((part == 3).all())
