"""What a compilation may choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Assignment = Literal["balanced", "round_robin", "dynamic"]
Exchange = Literal["barrier", "tagged"]


@dataclass(frozen=True)
class CompileOptions:
    """How a graph becomes a program.

    ``workers``: SMs or threads. ``assignment``: which queue an instruction goes to (assign.py).
    ``exchange``: how activations pass from worker to worker: ``barrier`` counters, or ``tagged``
    words for those of at most ``tagged_bytes`` (storage.py). ``fuse_norm_rows``: see fuse.py.
    ``waves``: column tiles per worker and operation; one fat tile each is best for static queues,
    several let a dynamic queue level out. ``column_unit``: column tiles of products begin at
    multiples of it. ``min_chunk``: least tokens of a split of attention.

    Raises ValueError when a number is not positive, or ``column_unit`` odd.
    """

    workers: int
    assignment: Assignment = "balanced"
    exchange: Exchange = "barrier"
    tagged_bytes: int = 128 * 1024
    fuse_norm_rows: int = 16
    waves: int = 1
    column_unit: int = 16
    min_chunk: int = 256

    def __post_init__(self) -> None:
        for name in ("workers", "waves", "column_unit", "min_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.column_unit % 2:
            raise ValueError(f"column_unit is {self.column_unit}, expected an even number")
        if self.assignment not in ("balanced", "round_robin", "dynamic"):
            raise ValueError(
                f"assignment {self.assignment!r} is not balanced, round_robin or dynamic"
            )
        if self.exchange not in ("barrier", "tagged"):
            raise ValueError(f"exchange {self.exchange!r} is not barrier or tagged")

    def pair_unit(self, head_dim: int) -> int:
        """Rotation pairs that tiles of QkvRope begin at multiples of: they divide half a head."""
        return math.gcd(head_dim // 2, self.column_unit // 2)
