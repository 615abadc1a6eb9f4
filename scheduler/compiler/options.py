"""Compile options, and their defaults for each machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megavm.instructions.matmul import PART_COLUMNS
from megavm.vm.target import TARGETS, Exchange, Target

Assignment = Literal["balanced", "round_robin", "dynamic"]
Halves = Literal["none", "preferred", "all"]
AllReduce = Literal["preferred", "gather", "scatter"]


@dataclass(frozen=True)
class CompileOptions:
    """How a graph becomes a program.

    - ``workers``: number of SMs or threads.
    - ``machine``: "cpu", "cuda" or "reference"; the program must fit it (megavm.vm.verify).
    - ``assignment``: which queue an instruction goes to (assign.py).
    - ``exchange``: how activations pass between workers. ``barrier``: counters. ``tagged``: tagged
      words for activations of at most ``tagged_bytes`` per rank, counters for others (storage.py).
      ``preferred``: as ``tagged``, but an activation is tagged only if all instructions that read
      it prefer words (Instruction.prefers_words).
    - ``fuse_norm``: fuse RMSNorm into the operations around it (rewrites/norm.py).
    - ``waves``: column tiles per worker and operation. One large tile each is best for static
      queues; several let a dynamic queue balance the load.
    - ``column_unit``: column tiles of products begin at multiples of it.
    - ``min_chunk``: smallest number of tokens of a split of attention.
    - ``part_of_k``: split-K. Products of longer rows are split into parts of at least this many
      columns, which different workers multiply. 0 turns it off.
    - ``halves``: which operations are cut in two halves of their rows if ranks exchange results, so
      that one half is computed while the other travels (rewrites/halves.py): ``none``, ``all``, or
      ``preferred``: those whose halves are predicted to take hardly longer than the whole
      (Target.matrix_times; without predictions none). On two H100s it brought nothing.
    - ``all_reduce``: how sums over ranks are added up. ``gather``: every rank gets all values.
      ``scatter``: every rank adds up a share of the columns and stores it on all ranks.
      ``preferred``: the one that is predicted to be faster (rewrites/scatter.py,
      Target.link_bytes_per_second). Both add up in the order of the ranks.
    - ``fixed_order``: every sum is added up in an order that depends on the shapes of the model and
      the rows of the step, but not on the number of workers or of ranks that gather results. So
      programs for any of them compute the same bits, on one machine. Products are not split along
      K, contexts are not split, and a GPU runs another kernel (Program.fixed_order), all of which
      is slower. Not for the reference machine, whose sums torch computes tile by tile.

    Raises ValueError when a number is not a positive integer, ``column_unit`` is odd, ``part_of_k``
    is not a multiple of PART_COLUMNS, a name is unknown, or the machine does not keep a
    ``fixed_order``.
    """

    workers: int
    machine: str = "cpu"
    assignment: Assignment = "balanced"
    exchange: Exchange = "barrier"
    tagged_bytes: int = TARGETS["cpu"].most_tagged_bytes(1)
    fuse_norm: bool = True
    waves: int = 1
    column_unit: int = TARGETS["cpu"].column_unit
    min_chunk: int = TARGETS["cpu"].min_chunk
    part_of_k: int = 0
    halves: Halves = "none"
    all_reduce: AllReduce = "preferred"
    fixed_order: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "waves", "column_unit", "min_chunk"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value}, expected an integer of at least 1")
        part_of_k = self.part_of_k
        if not isinstance(part_of_k, int) or part_of_k < 0 or part_of_k % PART_COLUMNS:
            raise ValueError(
                f"part_of_k is {self.part_of_k}, expected a multiple of {PART_COLUMNS}"
            )
        _target_of(self.machine)
        if self.column_unit % 2:
            raise ValueError(f"column_unit is {self.column_unit}, expected an even number")
        if self.assignment not in ("balanced", "round_robin", "dynamic"):
            raise ValueError(
                f"assignment {self.assignment!r} is not balanced, round_robin or dynamic"
            )
        if self.exchange not in ("barrier", "preferred", "tagged"):
            raise ValueError(f"exchange {self.exchange!r} is not barrier, preferred or tagged")
        if self.halves not in ("none", "preferred", "all"):
            raise ValueError(f"halves {self.halves!r} is not none, preferred or all")
        if self.all_reduce not in ("preferred", "gather", "scatter"):
            raise ValueError(f"all_reduce {self.all_reduce!r} is not preferred, gather or scatter")
        if self.fixed_order and self.machine == "reference":
            raise ValueError("machine reference has no fixed order of additions: use cpu or cuda")
        if self.fixed_order and self.exchange == "tagged" and self.target.matrix_rows:
            # Words or not depends on the size of a rank's share, and words are no matrix operand.
            raise ValueError("fixed_order needs exchange barrier or preferred on this machine")

    @property
    def target(self) -> Target:
        """The machine that the program is for."""
        return _target_of(self.machine)


def default_options(
    machine: str, workers: int, rows: int, *, fixed_order: bool = False
) -> CompileOptions:
    """The options for steps of up to ``rows`` rows on a machine.

    Raises ValueError as ``CompileOptions`` does.
    """
    target = _target_of(machine)
    part_of_k = 0
    if 1 < rows <= target.group_rows:
        part_of_k = target.part_of_k
    elif rows <= target.matrix_part_rows:
        part_of_k = target.matrix_part
    return CompileOptions(
        workers,
        machine=machine,
        assignment="round_robin" if 0 < target.balanced_rows < rows else "balanced",
        exchange=target.exchange,
        tagged_bytes=target.most_tagged_bytes(rows),
        column_unit=target.column_unit,
        min_chunk=target.min_chunk,
        part_of_k=part_of_k if rows > 1 else 0,
        fixed_order=fixed_order,
    )


def _target_of(machine: str) -> Target:
    if machine not in TARGETS:
        raise ValueError(f"machine {machine!r} is not {', '.join(TARGETS)}")
    return TARGETS[machine]
