"""What the compiler must know about each machine: one Target per machine.

config.py has the sizes that kernels are compiled with; C++ shares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavm.vm.config import (
    BLOCK_UNITS,
    MAX_ATTENTION_ELEMENTS,
    MAX_GROUP_ROWS,
    MAX_MATRIX_ROWS,
    PAGE_BYTES,
    ROWS_CHUNK_PAGES,
    UNIT_ROWS,
)
from megavm.vm.tensors import BF16

Exchange = Literal["barrier", "preferred", "tagged"]  # see CompileOptions


@dataclass(frozen=True)
class MatrixTimes:
    """A rough model of the time of a tile of a matrix product, while all workers multiply.

    A worker reads ``bytes_per_second`` from the second-level cache and computes ``flops_per_second``; the
    slower of the two counts. A tile takes ``tile`` seconds more, and ``sum`` seconds for each of its sums.
    """

    bytes_per_second: float
    flops_per_second: float
    tile: float
    sum: float

    def seconds(self, read: float, flops: float, sums: int) -> float:
        """The time of a tile that reads so many bytes."""
        work = max(read / self.bytes_per_second, flops / self.flops_per_second)
        return work + (self.tile + self.sum * sums)


@dataclass(frozen=True)
class Target:
    """A machine, as the compiler and the engine see it.

    ``workers``: threads or SMs to compile for when the machine is not available here.
    ``compute_capability`` is that of the GPUs it runs on, ``architecture`` NVRTC's name of it; None and
    "" without a GPU.

    ``block_size``: tokens of a KV block. ``steps_per_launch``: tokens that a sequence may get before
    the host checks its stop conditions. ``max_num_seqs``: the default of sequences that run at the same
    time. ``column_unit``: column tiles of products begin at
    multiples of it. ``exchange``: how activations pass between workers (CompileOptions.exchange).

    Split K: in steps of 2 to ``parted_rows`` rows, products of long rows are split into parts of
    ``part_of_k`` columns (0: never), at most ``most_parts``. They are split only while no worker has
    more than ``summed_columns`` columns of the result, because a worker waits for the other parts each
    time it has finished that many.

    Matrix products: in steps of more than MAX_GROUP_ROWS rows, products of bfloat16 take up to
    ``matrix_rows`` rows at a time (0: the machine has no such products). In steps of up to that many rows,
    they are split along K too, into parts of at least ``matrix_part`` columns. ``matrix_times`` predicts
    how long their tiles take. The rows of ``matrix_row_tiles`` tiles of rows stay in the second-level cache.

    Attention takes up to ``attention_elements`` elements of the queries for one KV head at a time, of
    several rows of a prompt (0: the rows of an instruction need not be few).

    Assignment: ``flops_per_byte`` FLOPs take about as long as moving one byte.

    Split context: from ``many_splits`` splits on, attention leaves workers free for the merges: one
    split fewer costs less than a late merge. A split has at least ``min_chunk`` tokens.
    """

    name: str
    workers: int = 1
    compute_capability: tuple[int, int] | None = None
    architecture: str = ""
    block_size: int = 16
    steps_per_launch: int = 1
    max_num_seqs: int = 16
    column_unit: int = 16
    exchange: Exchange = "barrier"
    part_of_k: int = 0
    parted_rows: int = 0
    most_parts: int = 8  # the worker that adds the parts keeps one pair of each in registers
    summed_columns: int = BLOCK_UNITS * UNIT_ROWS
    matrix_rows: int = 0
    matrix_part: int = 0
    matrix_times: MatrixTimes | None = None
    matrix_row_tiles: int = 8
    attention_elements: int = 0
    flops_per_byte: int = 64
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
            max_num_seqs=64,
            column_unit=UNIT_ROWS,
            exchange="preferred",
            # The columns of a unit of bfloat16 weights, and the rows, that the kernel takes at once.
            part_of_k=ROWS_CHUNK_PAGES * PAGE_BYTES // UNIT_ROWS // BF16.size,
            parted_rows=MAX_GROUP_ROWS,
            matrix_rows=MAX_MATRIX_ROWS,
            matrix_part=256,
            matrix_times=MatrixTimes(40e9, 5.3e12, tile=1.5e-6, sum=1e-10),  # H200
            attention_elements=MAX_ATTENTION_ELEMENTS,
        ),
        Target("reference"),
    )
}
