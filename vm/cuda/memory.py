"""How the kernel of a program divides the shared memory of a worker.

codegen.py writes these sizes into the header of the kernel, and cuda/config.cuh derives the layout from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megavm.vm.config import (
    BLOCK_UNITS,
    FIXED_BYTES,
    MATRIX_ROW_BYTES,
    MAX_ROWS_CHUNK_PAGES,
    MIN_GROUP_ROWS,
    MIN_PAGES,
    MIN_ROWS_CHUNK_PAGES,
    NUM_CONSUMER_WARPS,
    NUM_PAGES,
    PAGE_BYTES,
    ROW_CHUNK_PAGES,
    SHARED_BYTES,
    TILE_ROW_BYTES,
    TILES_PER_PAGE,
    UNIT_ROWS,
)

SCRATCH_UNIT = 128  # the bytes of scratch are a multiple of this
SCRATCH_BYTES = (SHARED_BYTES - FIXED_BYTES - MIN_PAGES * PAGE_BYTES) // SCRATCH_UNIT * SCRATCH_UNIT


@dataclass(frozen=True)
class KernelMemory:
    """Sizes of one kernel.

    Products take *groups* of ``group_rows`` rows. A unit of weights has ``unit_pages`` pages, and products
    take at most ``chunk_pages`` of them at a time. All products divide the scratch alike: the *panel* of an
    input row (in steps of one row), then two halves, each with partial sums and one scale per row. Matrix
    products and other instructions use all of the scratch.
    """

    group_rows: int
    unit_pages: int
    chunk_pages: int
    panel_bytes: int
    partial_floats: int  # per half
    scales: int  # per half
    scratch_bytes: int
    pages: int


def rows_chunk_pages(pages: int) -> int:
    """The pages that a kernel of several rows multiplies at a time, if the shortest units have so many.

    A worker fetches x anew for each chunk, and waits for it. Three pages in place of two mean fewer
    chunks, but take registers from all other code of the kernel. They pay for units of three and of five
    pages (hidden sizes 3072 and 5120), not for those of two, four and eight.
    """
    return MAX_ROWS_CHUNK_PAGES if pages in (3, 5) else MIN_ROWS_CHUNK_PAGES


def kernel_memory(constants: Mapping[str, int]) -> KernelMemory:
    """The sizes of a kernel that these constants specialise (specialisation.py).

    Raises ValueError when its scratch leaves too few pages.
    """
    one_row = constants["max_rows"] <= 1
    element_bytes = 4 if constants.get("any_f32_weights") else 2
    page_columns = TILES_PER_PAGE * TILE_ROW_BYTES // element_bytes  # columns of a row in one page
    unit_pages = max(1, -(-constants.get("max_k", 0) // page_columns))
    group_rows = 1 if one_row else constants.get("group_rows", MIN_GROUP_ROWS)
    counts = constants.get("unit_page_counts", 0)
    shortest = (counts & -counts).bit_length() - 1  # the lowest bit
    chunk_pages = min(ROW_CHUNK_PAGES if one_row else rows_chunk_pages(shortest), unit_pages)
    panel_bytes = chunk_pages * PAGE_BYTES // UNIT_ROWS if one_row else 0
    # Of larger groups, a half has the sums of half of a block.
    partial_floats = BLOCK_UNITS * NUM_CONSUMER_WARPS * min(group_rows, MIN_GROUP_ROWS) * UNIT_ROWS
    scales = 0 if one_row else group_rows
    scratch = constants.get("max_scratch", 0)
    if constants.get("any_product"):
        scratch = max(scratch, panel_bytes + 2 * 4 * (partial_floats + scales))
    scratch = max(scratch, MATRIX_ROW_BYTES * constants.get("matrix_rows", 0))
    scratch = -(-scratch // SCRATCH_UNIT) * SCRATCH_UNIT
    if scratch > SCRATCH_BYTES:
        raise ValueError(
            f"the kernel needs {scratch} bytes of scratch, a worker of the GPU has {SCRATCH_BYTES} "
            f"beside {MIN_PAGES} pages"
        )
    return KernelMemory(
        group_rows=group_rows,
        unit_pages=unit_pages,
        chunk_pages=chunk_pages,
        panel_bytes=panel_bytes,
        partial_floats=partial_floats,
        scales=scales,
        scratch_bytes=scratch,
        pages=min(NUM_PAGES, (SHARED_BYTES - FIXED_BYTES - scratch) // PAGE_BYTES),
    )
