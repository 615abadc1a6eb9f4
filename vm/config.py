"""Sizes of the machines. The C++ header of the same constants is generated from this file.

cuda/memory.py computes the sizes of a GPU kernel that depend on the program.
"""

from __future__ import annotations

# Instruction encoding.
INSTRUCTION_WORDS = 32
MAX_WAITS = 3
HEADER_WORDS = 2 + 2 * MAX_WAITS  # opcode, signal, (barrier, target) per wait
OPERAND_WORDS = INSTRUCTION_WORDS - HEADER_WORDS
INSTRUCTION_BYTES = 4 * INSTRUCTION_WORDS
NONE = 0xFFFFFFFF  # "no barrier" in the header, "no tensor" in an optional tensor field
FAR_TAG = 0x80000000  # a step's tag exclusive-or this is a tag that no instruction waits for

# A worker of the CPU machine: its working memory, and the products in it.
WORKING_BYTES = 351 * 1024
INPUT_BYTES = 144 * 1024  # most bytes of the input that a product holds at a time
SPLIT_COLUMNS = 512  # input columns held at a time when whole rows do not fit: a multiple of this
PANEL_COLUMNS = 32  # input columns are padded to a multiple of this
CPU_LANES = 16  # elements of a vector

# Warps of a worker on the GPU: the consumers, then one warp of each other role.
NUM_CONSUMER_WARPS = 8
LOADER_WARP = NUM_CONSUMER_WARPS
CONTROLLER_WARP = NUM_CONSUMER_WARPS + 1
STORER_WARP = NUM_CONSUMER_WARPS + 2
WAITER_WARP = NUM_CONSUMER_WARPS + 3
NUM_WARPS = NUM_CONSUMER_WARPS + 4
NUM_THREADS = 32 * NUM_WARPS

# Shared memory of a worker on the GPU (an SM of Hopper): pages, scratch, then the fixed part.
SHARED_BYTES = 227 * 1024
PAGE_BYTES = 16 * 1024
NUM_PAGES = 13  # maximum; a large scratch leaves room for fewer
MIN_PAGES = 4  # attention takes this many at a time; of prompts more (tile.cuh)
NUM_STAGES = 8  # instructions in flight
STAGE_BYTES = 640  # words, operands and place of one instruction in flight
CURRENT_BYTES = 32  # what one warp is working on
CONTROL_BYTES = 64
SEMAPHORE_BYTES = -(-8 * (2 * NUM_PAGES + 6 * NUM_STAGES + 9) // 16) * 16
FIXED_BYTES = NUM_STAGES * STAGE_BYTES + SEMAPHORE_BYTES + NUM_WARPS * CURRENT_BYTES + CONTROL_BYTES

# Products on the GPU. A weight is cut into units of UNIT_ROWS rows, and a unit into tiles of
# TILE_ROW_BYTES bytes of each row.
UNIT_ROWS = 8  # also the columns of a result that share one sum of squares
WIDE_SQUARES = 64  # the same in steps of many rows
TILE_ROW_BYTES = 64
TILES_PER_PAGE = 32
BLOCK_UNITS = 8  # units whose sums are finished together, of groups of 16 rows in two passes
MIN_GROUP_ROWS = 8  # input rows multiplied together, of up to 8 and with float32 weights
MAX_GROUP_ROWS = 16  # the same in steps of 9 to 16 rows, and of bfloat16 that is no matrix product
MIN_MATRIX_ROWS = 32  # fewest and most input rows that matrix products take at a time
MAX_MATRIX_ROWS = 128
MATRIX_BLOCKS = 4  # blocks of units that a matrix product multiplies at a time
# Scratch of matrix products, for each row: two places for its scale, what epilogues look up of it, and what each
# consumer keeps.
SCALE_BYTES = 4
OF_ROW_BYTES = 8
KEPT_BYTES = 8
MATRIX_ROW_BYTES = 2 * SCALE_BYTES + OF_ROW_BYTES + NUM_CONSUMER_WARPS * KEPT_BYTES
MAPS_OF_TENSOR = (
    2 * BLOCK_UNITS
)  # maps of boxes of an operand of matrix products, of up to two blocks
BOX_COLUMNS = 64  # bfloat16 columns of a box
BOX_ROW_BYTES = 2 * BOX_COLUMNS
BOX_TILES = BOX_ROW_BYTES // TILE_ROW_BYTES  # tiles of each unit in a box of weights
MAP_WORD_BYTES = 8  # maps of weights count words of this size
ROW_CHUNK_PAGES = 4  # pages of a unit multiplied at a time, in steps of one row
MIN_ROWS_CHUNK_PAGES = 2  # fewest and most of them in steps of several rows
MAX_ROWS_CHUNK_PAGES = 3
MOST_COUNTED_PAGES = 31  # kernels know which numbers of pages their units have, up to this
MAX_SPAN_UNITS = 32  # most units that are multiplied with such a chunk of x one after the other

# Attention on the GPU.
MAX_ATTENTION_ELEMENTS = 128 * 128  # of queries for one KV head that are processed together
MAX_BOX_TOKENS = 64  # most tokens of a KV block in a box; attention of prompts takes two at a time

# Sampling state of a sequence, see instructions/sample.
MAX_STOP_TOKENS = 32

assert UNIT_ROWS * TILE_ROW_BYTES * TILES_PER_PAGE == PAGE_BYTES, "a page is full of tiles"
assert NUM_PAGES <= 32, "one lane per page"
