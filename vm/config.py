"""Sizes of the machines. The C++ header of the same constants is generated from this file.

Sizes that depend on the program, of its kernel on the GPU, are worked out in cuda/memory.py.
"""

from __future__ import annotations

# Instruction encoding.
INSTRUCTION_WORDS = 32
MAX_WAITS = 3
HEADER_WORDS = 2 + 2 * MAX_WAITS  # opcode, signal, (barrier, target) per wait
OPERAND_WORDS = INSTRUCTION_WORDS - HEADER_WORDS
INSTRUCTION_BYTES = 4 * INSTRUCTION_WORDS
NONE = 0xFFFFFFFF  # "no barrier" in the header, "no tensor" in an optional tensor field
FAR_TAG = 0x80000000  # how a tag that nobody waits for differs from that of the step

# Working memory of a worker of the CPU machine.
WORKING_BYTES = 351 * 1024

# Warps of a worker on the GPU: the consumers, then one of each other role.
NUM_CONSUMER_WARPS = 8
LOADER_WARP = NUM_CONSUMER_WARPS
CONTROLLER_WARP = NUM_CONSUMER_WARPS + 1
STORER_WARP = NUM_CONSUMER_WARPS + 2
WAITER_WARP = NUM_CONSUMER_WARPS + 3
NUM_WARPS = NUM_CONSUMER_WARPS + 4
NUM_THREADS = 32 * NUM_WARPS

# Shared memory of a worker on the GPU, an SM of a Hopper GPU: pages, scratch, then the rest.
SHARED_BYTES = 227 * 1024
PAGE_BYTES = 16 * 1024
NUM_PAGES = 13  # at most: large scratch takes room of pages
MIN_PAGES = 4  # attention takes so many at a time
NUM_STAGES = 8  # instructions in flight
STAGE_BYTES = 640  # words, operands and place of one of them
CURRENT_BYTES = 32  # what a warp is at
CONTROL_BYTES = 64
SEMAPHORE_BYTES = -(-8 * (2 * NUM_PAGES + 5 * NUM_STAGES + 5) // 16) * 16
FIXED_BYTES = NUM_STAGES * STAGE_BYTES + SEMAPHORE_BYTES + NUM_WARPS * CURRENT_BYTES + CONTROL_BYTES

# Products on the GPU. Weights are units of rows, made of tiles: so many bytes of each row.
UNIT_ROWS = 8  # which are as many columns of the product, whose squares are one sum
TILE_ROW_BYTES = 64
TILES_PER_PAGE = 32
BLOCK_UNITS = 8  # whose sums are finished together
MAX_GROUP_ROWS = 8  # rows of the input that are multiplied together, in steps of several
ROW_CHUNK_PAGES = 4  # of a unit that are multiplied at a time, in steps of one row
ROWS_CHUNK_PAGES = 2  # and of several

# Sampling state of a sequence, see instructions/sample.
MAX_STOP_TOKENS = 32

assert UNIT_ROWS * TILE_ROW_BYTES * TILES_PER_PAGE == PAGE_BYTES, "a page is full of tiles"
assert NUM_PAGES <= 32, "one lane per page"
