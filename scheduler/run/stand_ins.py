"""Which programs run a step while its own is compiled: one that can, or several of fewer rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from megavm.scheduler.engine.step import Step, power_of_two
from megavm.scheduler.llama.graph import Bucket

# Programs of up to so many rows stand in for those of any fewer, larger ones for up to so many
# times fewer. For 1024, 512 and 256 rows of 1B, a program of 2048 takes 1.4, 1.7 and 2.2 times as
# long as their own on an H100, parts of 64 rows 4.4, 2.9 and 1.9 times as long
# (benchmarks/stand_ins_cuda.py).
STAND_IN_ROWS: Final = 64
STAND_IN_FACTOR: Final = 4
# A step whose program is still being compiled runs in parts: of STAND_IN_ROWS rows or more, or in
# at most so many of fewer.
MOST_PARTS: Final = 32

Part = tuple[Bucket, Step]


def can_stand_in(bucket: Bucket, own: Bucket) -> bool:
    """Whether the program of a bucket can run the steps of another one.

    One that samples can also run greedy steps.
    """
    return (
        own.rows <= bucket.rows <= max(STAND_IN_FACTOR * own.rows, STAND_IN_ROWS)
        and (bucket.sampled or not own.sampled)
        and bucket.logit_rows >= own.logit_rows
        and bucket.context >= own.context
        and (own.decode or own.rows == 1 or not bucket.decode)
    )


def best_stand_in(
    own: Bucket, ready: Collection[Bucket], loaded: Callable[[Bucket], bool]
) -> Bucket | None:
    """The smallest bucket of ``ready`` that can run the steps of ``own``, or None.

    One that is loaded comes first: others must be loaded while no launch runs. Of those of as many
    rows, one of the same kind is preferred, greedy or sampled.
    """

    def rank(bucket: Bucket) -> tuple[bool, int, bool, int, int]:
        other_kind = bucket.sampled != own.sampled
        return not loaded(bucket), bucket.rows, other_kind, bucket.context, bucket.logit_rows

    return min((b for b in ready if can_stand_in(b, own)), key=rank, default=None)


def in_parts(step: Step, find: Callable[[Step], Bucket | None]) -> list[Part]:
    """The largest parts of ``step`` for all of which ``find`` has a program, and these; or []."""
    size = power_of_two(step.num_rows) // 2
    while size and (size >= STAND_IN_ROWS or size * MOST_PARTS >= step.num_rows):
        found: list[Part] = []
        for part in step.parts(size):
            bucket = find(part)
            if bucket is None:
                break
            found.append((bucket, part))
        else:
            return found
        size //= 2
    return []
