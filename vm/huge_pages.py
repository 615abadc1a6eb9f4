"""Large tensors on the CPU, in pages of megabytes where the system has them."""

from __future__ import annotations

import contextlib
import math
import mmap
import sys
from collections.abc import Sequence

import torch

LEAST_BYTES = 2 << 20  # a huge page


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of zeros that begins at a multiple of 64 bytes.

    Linux gives huge pages to large tensors that ask for them (``transparent_hugepage``: madvise or always). To
    read these, a processor translates fewer addresses, which virtual machines take long for.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST_BYTES or sys.platform != "linux":
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # this system has none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))
