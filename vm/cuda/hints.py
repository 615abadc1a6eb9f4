"""Hints: relaxed counters that tell when tagged words are likely available. They order nothing."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megavm.vm.alike import Ints, tagged_regions
from megavm.vm.config import NONE
from megavm.vm.program import Program


def make_hints(
    program: Program, regions: Ints | None = None
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The hints of every instruction, uint32 [n, 2] (signal, wait), and the signals of their counters.

    The largest tagged region that an instruction reads has a counter if several instructions write it and
    several, at least half as many, read it; without a hint all readers would poll its words. A single reader's polls
    delay nobody, and it may await these words behind work that needs none of them: the last part of a product adds up
    the other parts when its own is computed. An instruction whose
    results begin in several such regions signals the largest. A counter counts writers on its own rank: those
    on others are about as far, and adding to counters of other GPUs was slower. Counters are numbered after the program's
    barriers. ``regions``: the program's tagged regions, if known.
    """
    if regions is None:
        regions = tagged_regions(program.words, program.tensors)
    write = regions[:, 6] != 0
    reads, writes = regions[~write, :6], regions[write, :6]
    largest = reads[_first_largest(reads[:, 0], reads[:, 5] - reads[:, 4])]
    known: dict[tuple[int, ...], int] = {}
    numbered = [known.setdefault(tuple(region), len(known)) for region in largest[:, 1:].tolist()]
    source = np.array(numbered, np.int64)
    regions = np.array(list(known), np.int64).reshape(-1, 5)
    # Instructions whose results begin in one of these: rows (place among the writes, instruction, region).
    begun = [np.empty((0, 3), np.int64)]
    for tensor in np.unique(regions[:, 0]):
        here = np.flatnonzero(writes[:, 1] == tensor)
        candidates = np.flatnonzero(regions[:, 0] == tensor)
        top, left = writes[here, 2, None], writes[here, 4, None]
        _, first_row, last_row, first, last = regions[candidates].T
        inside = (first_row <= top) & (top < last_row) & (first <= left) & (left < last)
        write, region = np.nonzero(inside)
        begun.append(np.column_stack([here[write], writes[here[write], 0], candidates[region]]))
    begins = np.concatenate(begun)
    begins = begins[np.argsort(begins[:, 0], kind="stable")]
    readers = np.bincount(source, minlength=len(regions))
    writers = np.bincount(np.unique(begins[:, 1:], axis=0)[:, 1], minlength=len(regions))
    hinted = (writers > 1) & (readers > 1) & (writers <= 2 * readers)
    number = np.where(hinted, len(program.barriers) + np.cumsum(hinted) - 1, NONE)
    begins = begins[hinted[begins[:, 2]]]
    width = regions[begins[:, 2], 4] - regions[begins[:, 2], 3]
    results = begins[_first_largest(begins[:, 1], width)]
    hints = np.full((len(program), 2), NONE, dtype=np.uint32)
    hints[results[:, 1], 0] = number[results[:, 2]]
    hints[largest[:, 0], 1] = number[source]
    signals = np.bincount(results[:, 2], minlength=len(regions))[hinted]
    return hints, signals.astype(np.uint32)


def _first_largest(
    instruction: npt.NDArray[np.int64], width: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The row with the largest width of each instruction; the first of equals."""
    order = np.lexsort((-width, instruction))
    return order[np.unique(instruction[order], return_index=True)[1]]
