"""The arguments of a launch on the GPU, and the results that it leaves for the host.

codegen.py writes these declarations to ``launch.hpp``, for device code.
"""

from __future__ import annotations

from megavm.vm import events
from megavm.vm.abi import U32, U64, Member, Struct

BARRIER_STRIDE = 32  # words from counter to counter: each has a 128-byte line of its own
MAP_BYTES = 128  # a CUtensorMap, with which the copy engine finds boxes of a matrix
NUM_COUNTS = 32  # tensors with numbers of live rows: one lane of the controller reads each

# Fields of Tensor::address above the 48 bits of the address.
DTYPE_SHIFT = 48  # four bits
TAGGED_SHIFT = 52  # one bit
GATHERED_SHIFT = 53  # one bit: what is written goes to all ranks
LAYOUT_SHIFT = 56  # four bits: vm.layout.Order

# Memory that all ranks write is in one range of addresses: that of rank r begins r << RANK_SHIFT bytes after
# that of rank 0. So a rank has up to 64 GiB of it.
RANK_SHIFT = 36
# A tagged tensor has copies, which steps use in turn: copy c begins c << COPY_SHIFT bytes after the first
# (cuda/words.cuh). A word that is empty is one that no instruction has stored for the step.
COPIES = 4
COPY_SHIFT = 32
EMPTY_WORD = 0xFFFFFFFF
# Bits of Exchange::by_machine beside those of operand words.
BY_MACHINE = 1 << 31  # the storer waits for all words, and publishes all
AWAITS_DEAD = 1 << 30  # the storer waits for the words of dead rows before the instruction begins

# The trace of a launch is uint64 [instructions of all queues x steps, TRACE_COLUMNS]: worker by worker,
# step by step. The number of an event is its column; times are nanoseconds of the global timer.
WORKER_COLUMN = len(events.Event)  # the worker that executes the instruction, and its SM above it
SM_SHIFT = events.SM_SHIFT
TRACE_COLUMNS = WORKER_COLUMN + 1

TENSOR = Struct(
    "Tensor",
    "A tensor as instructions see it: a matrix.",
    (
        Member(
            "address",
            U64,
            "48 bits; above them dtype, whether it is tagged, whether it is gathered, and layout",
        ),
        Member("rows", U32),
        Member("columns", U32),
    ),
    aligned=16,
)

HINT = Struct(
    "Hint",
    "Counters that tell, without any ordering, that tagged words are likely available: one warp polls one word "
    "instead of all warps polling their data. They follow the barriers and count alike; kNone: no hint.",
    (
        Member(
            "signal", U32, "counts the instructions that have stored their part of a tagged tensor"
        ),
        Member("wait", U32, "counter of the tagged tensor that the instruction reads as a whole"),
    ),
)

EXCHANGE = Struct(
    "Exchange",
    "How an instruction exchanges words with others, besides its header: hints, and the tagged regions that "
    "cuda/tagged_rows.cuh handles, either for the dead rows only or for all rows.",
    (
        Member("hint", HINT),
        Member("num_regions", U32, "0 for most instructions"),
        Member("regions_begin", U32, "index into Launch::regions"),
        Member("row_count", U32, "index into Launch::counts; kNone: all rows, live or dead"),
        Member("row_begin", U32, "the rows of the instruction"),
        Member("row_end", U32),
        Member(
            "by_machine",
            U32,
            "0, kAwaitsDead, or kByMachine and a bit for each operand word whose words the storer publishes",
        ),
    ),
    aligned=32,
)

TAGGED_REGION = Struct(
    "TaggedRegion",
    "Words of a tagged tensor that an instruction declares to read or write.",
    (
        Member("operand", U32, "operand word that names the tensor"),
        Member("written", U32, "1: written; 0: read"),
        Member("row_begin", U32),
        Member("row_end", U32),
        Member("word_begin", U32),
        Member("word_end", U32),
    ),
    aligned=32,
)

LAUNCH = Struct(
    "Launch",
    "One launch. All pointers are device addresses.",
    (
        Member(
            "instructions",
            "const Words*",
            "static: the queues one after the other; dynamic: the one queue",
        ),
        Member(
            "queue_begin",
            f"const {U32}*",
            "[workers + 1] first instruction of each worker's queue; dynamic: {0, n}",
        ),
        Member("tensors", "const Tensor*", "by handle, as instructions read them"),
        Member("barriers", f"{U32}*", "counters, kBarrierStride words apart"),
        Member("signals", f"const {U32}*", "how often a step signals each barrier"),
        Member("ticket", f"{U32}*", "dynamic: tickets drawn so far in this launch, 0 at its start"),
        Member(
            "exchanges",
            "const Exchange*",
            "of the instructions, in the order of `instructions`",
        ),
        Member("regions", "const TaggedRegion*", "of all exchanges"),
        Member("faults", "FaultRecord*", "[workers][kNumWarps]"),
        Member("abort", f"{U32}*", "0, or 1 when a warp has faulted"),
        Member(
            "trace",
            f"{U64}*",
            "[rows][kTraceColumns]: times of events, and the worker; null unless compiled in",
        ),
        Member("timeout", U64, "ns that a wait may take"),
        Member("first_copy", U32, "step s uses copy (first_copy + s) % kCopies of tagged tensors"),
        Member("steps_before", U32, "steps run by this executable before"),
        Member("steps", U32, "steps of this launch"),
        Member(
            "first_step", U32, "number of the launch's first step (for an instruction run alone)"
        ),
        Member("dynamic", U32, "1: one queue for all workers"),
        Member("alone", U32, "1: an instruction run alone, without waits, signal and hints"),
        Member(
            "counts",
            f"const {U32}*",
            "[kNumCounts] tensors with the numbers of live rows that exchanges name, or kNone",
        ),
        Member(
            "written",
            "const Tensor*",
            "several ranks: by handle, as instructions write them: gathered tensors begin with the "
            "rank's share, in the memory of rank 0",
        ),
        Member(
            "maps",
            U64,
            "address of [tensors][kMapsOfTensor] maps of the operands of matrix products, kMapBytes "
            "each (vm/cuda/boxes.py)",
        ),
        Member("rank", U32),
        Member("shared_barriers", U32, "the first barriers: all ranks signal them"),
        Member(
            "step_barriers",
            U32,
            "the first of two: workers signal them at the end of even and odd steps, counted as steps_before is; "
            "kNone: no instruction exchanges words",
        ),
        Member("step_signals", U32, "how often a step signals its barrier"),
        Member("even_steps", U32, "the value of the first of these barriers before the launch"),
        Member("odd_steps", U32, "that of the second"),
    ),
    aligned=8,
)

# A struct comes after those that it names.
STRUCTS = (TENSOR, HINT, EXCHANGE, TAGGED_REGION, LAUNCH)
