"""Facts about each machine that code beside the kernels needs: one Target per machine.

config.py has the sizes that kernels are compiled with; C++ shares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavm.vm.config import (
    BLOCK_UNITS,
    INPUT_BYTES,
    MATRIX_BLOCKS,
    MAX_ATTENTION_ELEMENTS,
    MAX_GROUP_ROWS,
    MAX_MATRIX_ROWS,
    MIN_GROUP_ROWS,
    MIN_MATRIX_ROWS,
    MIN_ROWS_CHUNK_PAGES,
    PAGE_BYTES,
    SPLIT_COLUMNS,
    UNIT_ROWS,
    WORKING_BYTES,
)
from megavm.vm.cuda.memory import SCRATCH_BYTES
from megavm.vm.tensors import BF16, DType

Exchange = Literal["barrier", "preferred", "tagged"]  # see CompileOptions


@dataclass(frozen=True)
class MatrixTimes:
    """A rough model of the time of a tile of a matrix product, while all workers multiply.

    A worker reads ``bytes_per_second`` from the second-level cache and computes ``flops_per_second``; the
    slower of the two counts. A tile takes ``tile`` seconds more, and ``sum`` seconds for each of its sums.
    Times whose ratio is at most ``equal`` count as equal. Two halves of a product may take ``halves`` times as
    long as the whole if they hide exchanges between ranks (rewrites/halves.py).
    """

    bytes_per_second: float
    flops_per_second: float
    tile: float
    sum: float
    equal: float = 1.01
    halves: float = 1.06

    def seconds(self, read: float, flops: float, sums: int) -> float:
        """The time of a tile that reads so many bytes."""
        work = max(read / self.bytes_per_second, flops / self.flops_per_second)
        return work + (self.tile + self.sum * sums)


@dataclass(frozen=True)
class Target:
    """A machine, as the compiler, the verifier, the engine and the front end see it.

    ``workers``: threads or SMs to compile for when the machine is not available here.
    ``compute_capability`` is that of the GPUs it runs on, ``architecture`` NVRTC's name of it; None and
    "" without a GPU. ``working_bytes`` and ``scratch_bytes``: what an instruction may declare of each (0: the
    machine has none, and counts none).

    Engine: ``block_size``: tokens of a KV block. ``steps_per_launch``: tokens that a sequence may get before
    the host checks its stop conditions. ``launch_seconds``: how long a launch of several steps should take, as
    a request that comes waits for it (None: there is no limit). ``max_num_seqs`` and ``max_num_batched_tokens``:
    the defaults of sequences that run at the same time, and of tokens of a step. ``overlap``: the next step is
    planned while one runs. ``kv_fraction``, ``max_kv_bytes``: the default size of the KV cache, as a share of
    the memory that is available, and its limit (None: there is none).

    ``column_unit``: column tiles of products begin at multiples of it, those of embeddings at multiples of
    ``embedding_unit``. ``exchange``: how activations pass between workers (CompileOptions.exchange).
    ``tagged_bytes``: the largest activation that is tagged, in steps of up to so many rows, and of more rows than
    all of these as in the first of them.

    Products: up to ``tile_rows`` input rows of up to ``input_bytes`` together stay in a worker while weights
    stream. Of longer ones, ``split_columns`` columns and ``sums_bytes`` of sums do. Steps of 2 to ``group_rows``
    rows multiply rows in groups: all together, but for float32 weights (0: the machine has no such products).

    Split K: in these steps, products of long rows are split into at most ``most_parts`` parts of ``part_of_k``
    columns (0: never) or more, a multiple of ``part_unit`` (0: of ``part_of_k``). They are split only while no worker
    of the part that adds up the others has more than ``block_rows`` columns of the result (in groups of 16 rows half
    as many), because it waits for the other parts each time it has finished that many. Fewer than ``few_parts`` parts
    do not pay in groups of 8 rows.

    Matrix products: in steps of more than ``group_rows`` rows, products of bfloat16 take ``min_matrix_rows`` to
    ``matrix_rows`` rows at a time (0: the machine has no such products), and ``matrix_blocks`` blocks of
    ``block_rows`` rows of the weight. In steps of up to ``matrix_part_rows`` rows they are split along K too,
    into parts of at least ``matrix_part`` columns. ``matrix_times`` predicts how long their tiles take. The rows of
    ``matrix_row_tiles`` tiles of rows stay in the second-level cache. From ``wide_squares_rows`` rows on, sums of
    squares are of WIDE_SQUARES columns, if a row has a multiple of four of them: each worker adds up those of all its
    rows.

    Attention takes up to ``attention_elements`` elements of the queries for one KV head at a time, of
    several rows of a prompt (0: the rows of an instruction need not be few).

    Ranks: one sends ``link_bytes_per_second`` to the others (0: they have one memory), and loses
    ``exchange_seconds`` each time it meets them (rewrites/scatter.py).

    Assignment: ``flops_per_byte`` FLOPs take about as long as moving one byte. With more than
    ``balanced_rows`` rows (0: any number is balanced) workers get the tiles of a matrix product in turn: those
    that multiply neighbouring tiles at the same time share weights and rows of x.

    Split context: fewer than ``few_splits`` splits do not pay for a merge. From ``many_splits`` splits on,
    attention leaves workers free for the merges: one split fewer costs less than a late merge. A split has at
    least ``min_chunk`` tokens. Contexts of several times ``long_split`` tokens (0: no context) are split into at most
    ``many_splits`` in steps that decode, even if all workers have rows, and in steps of few rows of prompts.
    """

    name: str
    workers: int = 1
    compute_capability: tuple[int, int] | None = None
    architecture: str = ""
    working_bytes: int = 0
    scratch_bytes: int = 0
    block_size: int = 16
    steps_per_launch: int = 1
    launch_seconds: float | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    overlap: bool = False
    kv_fraction: float = 0.25
    max_kv_bytes: int | None = 4 << 30
    column_unit: int = 16
    embedding_unit: int = 64
    exchange: Exchange = "barrier"
    tagged_bytes: tuple[tuple[int, int], ...] = ((1, 128 * 1024),)
    input_bytes: int = INPUT_BYTES
    tile_rows: int = 512
    split_columns: int = SPLIT_COLUMNS
    sums_bytes: int = 128 * 1024
    group_rows: int = 0
    part_of_k: int = 0
    part_unit: int = 0
    few_parts: int = 2
    most_parts: int = 8  # the worker that adds the parts keeps one pair of each in registers
    block_rows: int = BLOCK_UNITS * UNIT_ROWS
    min_matrix_rows: int = 0
    matrix_rows: int = 0
    matrix_blocks: int = 0
    matrix_part: int = 0
    matrix_part_rows: int = 0
    matrix_times: MatrixTimes | None = None
    matrix_row_tiles: int = 8
    wide_squares_rows: int = 64
    attention_elements: int = 0
    link_bytes_per_second: float = 0.0
    exchange_seconds: float = 0.0
    flops_per_byte: int = 64
    balanced_rows: int = 0
    few_splits: int = 3
    many_splits: int = 8
    min_chunk: int = 256
    long_split: int = 0

    def is_matrix_step(self, rows: int, weights: DType) -> bool:
        """Whether products of such a step are matrix products."""
        return self.matrix_rows > 0 and rows > self.group_rows and weights is BF16

    def most_tagged_bytes(self, rows: int) -> int:
        """The bytes of the largest activation that is tagged in steps of up to ``rows`` rows."""
        sizes = (size for most, size in self.tagged_bytes if rows <= most)
        return next(sizes, self.tagged_bytes[0][1])


TARGETS = {
    target.name: target
    for target in (
        Target("cpu", working_bytes=WORKING_BYTES),
        Target(
            "cuda",
            workers=132,  # SMs of an H100 or H200
            compute_capability=(9, 0),
            architecture="sm_90a",
            scratch_bytes=SCRATCH_BYTES,
            block_size=64,
            steps_per_launch=8,
            launch_seconds=0.005,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            overlap=True,
            kv_fraction=0.85,
            max_kv_bytes=None,
            column_unit=UNIT_ROWS,
            exchange="preferred",
            tagged_bytes=(
                (1, 128 * 1024),
                (MIN_GROUP_ROWS, 64 * 1024),
                (MAX_GROUP_ROWS, 512 * 1024),
            ),
            group_rows=MAX_GROUP_ROWS,
            # The fewest columns of bfloat16 weights that a kernel takes at once.
            part_of_k=MIN_ROWS_CHUNK_PAGES * PAGE_BYTES // UNIT_ROWS // BF16.size,
            part_unit=PAGE_BYTES // UNIT_ROWS // BF16.size,
            few_parts=3,
            min_matrix_rows=MIN_MATRIX_ROWS,
            matrix_rows=MAX_MATRIX_ROWS,
            matrix_blocks=MATRIX_BLOCKS,
            matrix_part=256,
            matrix_part_rows=8 * MAX_MATRIX_ROWS,
            matrix_times=MatrixTimes(40e9, 5.3e12, tile=1.5e-6, sum=1e-10),  # H200
            attention_elements=MAX_ATTENTION_ELEMENTS,
            long_split=4096,
            link_bytes_per_second=345e9,  # H200, NVLink, in stores of 16 bytes
            exchange_seconds=4e-6,
            balanced_rows=2 * MAX_MATRIX_ROWS,
        ),
        Target("reference"),
    )
}
