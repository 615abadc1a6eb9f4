"""Places: pieces of tensors that every instruction accesses as a whole or not at all."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megavm.vm.config import NONE
from megavm.vm.isa import Instruction
from megavm.vm.tensors import Region, TensorSpec

Ints = npt.NDArray[np.int32]


class Grid:
    """The pieces into which the ends of regions cut a tensor, numbered from ``base``."""

    def __init__(self, base: int, rows: set[int], columns: set[int]) -> None:
        self.base = base
        self.rows, self.columns = sorted(rows), sorted(columns)
        self.width = len(self.columns) - 1
        self.size = (len(self.rows) - 1) * self.width

    def places(self, rows: tuple[int, int], columns: tuple[int, int]) -> list[int]:
        """The pieces of a rectangle whose sides are among the cuts."""
        top, bottom = (bisect_left(self.rows, r) for r in rows)
        left, right = (bisect_left(self.columns, c) for c in columns)
        first = self.base
        return [first + r * self.width + c for r in range(top, bottom) for c in range(left, right)]

    def columns_of(self, offset: int) -> tuple[int, int]:
        column = offset % self.width
        return self.columns[column], self.columns[column + 1]

    def describe(self, place: int) -> str:
        row = (place - self.base) // self.width
        rows, columns = self.rows[row : row + 2], self.columns_of(place - self.base)
        return f"rows [{rows[0]}, {rows[1]}) columns [{columns[0]}, {columns[1]})"


class Places:
    """Numbers for all places that instructions access, on every rank.

    An indexed row may be any row of its tensor. So in a tensor with both kinds of access, every access that
    is not indexed also touches all indexed rows. Earlier reads have places of their own: one for every
    indexed row and step that writes it, and one for its contents before the launch.
    """

    def __init__(
        self,
        tensors: Sequence[TensorSpec],
        regions: Sequence[Region],
        steps: int,
        cut: int | None,
        ranks: int = 1,
    ) -> None:
        self.tensors = tensors
        self.steps = steps
        self.ranks = ranks
        self.of_rank = 0  # number of places of one rank
        self.plain: dict[int, Grid] = {}
        self.indexed: dict[int, Grid] = {}
        self.history: dict[int, int] = {}
        for handle in sorted({r.tensor for r in regions}):
            for indexed, grids in ((False, self.plain), (True, self.indexed)):
                mine = [r for r in regions if (r.tensor, r.indexed) == (handle, indexed)]
                if mine:
                    rows = {end for r in mine for end in r.rows}
                    if cut is not None and min(rows) < cut < max(rows):
                        rows.add(cut)
                    columns = {end for r in mine for end in r.columns}
                    if not indexed and handle in self.indexed:
                        columns |= set(self.indexed[handle].columns)
                    grids[handle] = Grid(self.of_rank, rows, columns)
                    self.of_rank += grids[handle].size
            if any(r.earlier for r in regions if r.tensor == handle):
                self.history[handle] = self.of_rank
                self.of_rank += (steps + 1) * self.indexed[handle].size
        self.count = ranks * self.of_rank

    def of(self, region: Region, step: int, write: bool, rank: int = 0) -> list[int]:
        """The places on a rank of a region that an instruction accesses in a step."""
        return [rank * self.of_rank + place for place in self._of(region, step, write)]

    def _of(self, region: Region, step: int, write: bool) -> list[int]:
        handle = region.tensor
        if not region.indexed:
            places = self.plain[handle].places(region.rows, region.columns)
            if handle in self.indexed:
                places += self._indexed_under(region)
            return places
        grid = self.indexed[handle]
        now = grid.places(region.rows, region.columns)
        if region.earlier:
            return [p for s in range(-1, step) for p in self._written_in(s, now, handle)]
        if write and handle in self.history:
            return now + self._written_in(step, now, handle)
        return now

    def _written_in(self, step: int, places: Sequence[int], handle: int) -> list[int]:
        """The places by which later steps read the indexed rows of a step."""
        grid = self.indexed[handle]
        return [p - grid.base + self.history[handle] + (step + 1) * grid.size for p in places]

    def _indexed_under(self, region: Region) -> list[int]:
        """All indexed rows, of this step and earlier ones, that a region that is not indexed may touch."""
        handle, grid = region.tensor, self.indexed[region.tensor]
        four_dimensions = len(self.tensors[handle].shape) == 4
        now = [
            grid.base + offset
            for offset in range(grid.size)
            if four_dimensions or overlap(grid.columns_of(offset), region.columns)
        ]
        if handle not in self.history:
            return now
        steps = range(-1, self.steps)
        return now + [p for s in steps for p in self._written_in(s, now, handle)]

    def describe(self, place: int) -> str:
        """``rows [0, 1) columns [0, 8) of x``, with the rank if there are several"""
        rank, place = divmod(place, self.of_rank)
        return self._describe(place) + (f" on rank {rank}" if self.ranks > 1 else "")

    def _describe(self, place: int) -> str:
        for kind, grids in (("", self.plain), ("indexed ", self.indexed)):
            for handle, grid in grids.items():
                if grid.base <= place < grid.base + grid.size:
                    return f"{kind}{grid.describe(place)} of {self.tensors[handle].name}"
        for handle, base in self.history.items():
            grid = self.indexed[handle]
            step, offset = divmod(place - base, grid.size)
            if 0 <= step <= self.steps:
                where = grid.describe(grid.base + offset)
                return f"indexed {where} of {self.tensors[handle].name} of step {step - 1}"
        raise KeyError(place)


def numbers(places: Iterable[int]) -> Ints:
    """The distinct places."""
    return np.array(sorted(set(places)), np.int32)


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def whole_words(tensors: Sequence[TensorSpec], region: Region) -> Region:
    """The region; in a tagged tensor, extended to the whole words that it touches."""
    spec = tensors[region.tensor]
    if not spec.tagged:
        return region
    per_word = 4 // spec.dtype.size
    begin, end = region.columns
    columns = begin // per_word * per_word, -(-end // per_word) * per_word
    return Region(region.tensor, region.rows, columns)


def share_of(tensors: Sequence[TensorSpec], region: Region, rank: int) -> Region:
    """Where a rank writes a region that an instruction declares as written."""
    first = tensors[region.tensor].share_begin(rank)
    begin, end = region.columns
    return replace(region, columns=(first + begin, first + end))


def live_part(inst: Instruction, region: Region, live: int | None) -> Region | None:
    """The live rows of a region if ``live`` of the rows that the instruction counts are live.

    None if there are none; the whole region if the instruction does not count its rows.
    """
    row_count = vars(inst).get("row_count", NONE)
    mine = (vars(inst).get("row_begin"), vars(inst).get("row_end"))
    if live is None or row_count == NONE or region.rows != mine:
        return region
    begin, end = region.rows[0], min(region.rows[1], live)
    if begin >= end:
        return None
    return Region(region.tensor, (begin, end), region.columns, region.indexed, region.earlier)
