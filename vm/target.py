"""What is worth knowing of a machine to compile for it: one Target each.

Sizes that kernels are compiled with stand in config.py, for C++ as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from megavm.vm.config import (
    BLOCK_UNITS,
    MAX_GROUP_ROWS,
    PAGE_BYTES,
    ROWS_CHUNK_PAGES,
    UNIT_ROWS,
)

BF16_BYTES = 2


@dataclass(frozen=True)
class Target:
    """A machine, as the compiler and the engine see it.

    ``workers``: threads or SMs to compile for where the machine is not here. ``compute_capability``:
    of the GPUs that it runs on, ``architecture`` NVRTC's name of it; None and "" without a GPU.

    ``block_size``: tokens of a KV block. ``steps_per_launch``: tokens that a sequence may get before
    the host looks at its stop conditions. ``column_unit``: column tiles of products begin at
    multiples of it. ``row_exchange`` and ``rows_exchange``: how activations pass between workers in
    steps of one row and of several (CompileOptions.exchange).

    Products of long rows are split into parts of ``part_of_k`` columns (0: not) in steps of 2 to
    ``parted_rows`` rows, into ``most_parts`` at most, and only while no worker has more than
    ``summed_columns`` columns of the result: it waits for the other parts each time it finishes as
    many. From ``many_splits`` splits of a context on, attention leaves workers free for the merges:
    one split fewer costs less than a late merge. A split has ``min_chunk`` tokens or more.
    """

    name: str
    workers: int = 1
    compute_capability: tuple[int, int] | None = None
    architecture: str = ""
    block_size: int = 16
    steps_per_launch: int = 1
    column_unit: int = 16
    row_exchange: str = "barrier"
    rows_exchange: str = "barrier"
    part_of_k: int = 0
    parted_rows: int = 0
    most_parts: int = 8  # the worker that adds parts up holds a pair of each in registers
    summed_columns: int = BLOCK_UNITS * UNIT_ROWS
    many_splits: int = 8
    min_chunk: int = 256


TARGETS = {
    target.name: target
    for target in (
        Target("cpu"),
        Target(
            "cuda",
            workers=132,  # SMs of an H100 or H200
            compute_capability=(9, 0),
            architecture="sm_90a",
            block_size=64,
            steps_per_launch=8,
            column_unit=UNIT_ROWS,
            row_exchange="tagged",
            rows_exchange="heads",
            # What the kernel takes of a unit of bfloat16 weights, and of rows, at once.
            part_of_k=ROWS_CHUNK_PAGES * PAGE_BYTES // UNIT_ROWS // BF16_BYTES,
            parted_rows=MAX_GROUP_ROWS,
        ),
        Target("reference"),
    )
}
