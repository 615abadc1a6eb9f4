"""Sizes of the machine, each said once; the C++ header of the same constants is generated from here.

The shared-memory figures are those of one Hopper SM (227 KiB per block). The CPU machine keeps the same
budget, so that a program that runs there also fits on the GPU.
"""

from __future__ import annotations

# Instruction encoding.
INSTRUCTION_WORDS = 32
MAX_WAITS = 3
HEADER_WORDS = 2 + 2 * MAX_WAITS  # opcode, signal, (barrier, target) per wait
OPERAND_WORDS = INSTRUCTION_WORDS - HEADER_WORDS
INSTRUCTION_BYTES = 4 * INSTRUCTION_WORDS
NONE = 0xFFFFFFFF  # "no barrier" in the header, "no tensor" in an optional tensor field

# Shared memory of one worker.
SHARED_BYTES = 227 * 1024
PAGE_BYTES = 16 * 1024
NUM_PAGES = 13
NUM_STAGES = 16  # slots of the instruction ring
MAX_SEMAPHORES = 8  # what one instruction may use beside the two of each page
SEMAPHORE_BYTES = 8 * (2 * NUM_PAGES + (2 + MAX_SEMAPHORES) * NUM_STAGES)
_FIXED_BYTES = NUM_PAGES * PAGE_BYTES + NUM_STAGES * INSTRUCTION_BYTES + SEMAPHORE_BYTES
SCRATCH_BYTES = (SHARED_BYTES - _FIXED_BYTES) // 1024 * 1024

# Warps of one worker on the GPU: the consumers, then loader, controller, storer and a spare one.
NUM_CONSUMER_WARPS = 8
NUM_WARPS = 12
THREADS = 32 * NUM_WARPS

# Registers of the consumer warps that may hold sums: 128 of 4 bytes in each of 32 lanes.
ACCUMULATOR_BYTES = NUM_CONSUMER_WARPS * 32 * 128 * 4

# Sampling state of a sequence, see instructions/sample.
MAX_STOP_TOKENS = 32

assert SCRATCH_BYTES >= 8 * 1024, "no room for scratch beside the pages"
assert NUM_PAGES <= 32, "one lane per page"
