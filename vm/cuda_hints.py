"""Hints: relaxed counters that tell when tagged words are likely there; they order nothing."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from megavm.vm.config import NONE
from megavm.vm.isa import Region
from megavm.vm.program import Program


def make_hints(program: Program) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """The hints of every instruction, uint32 [n, 2] (signal, wait), and the signals of their counters.

    Of the tagged regions that an instruction reads, the largest has a counter, if several
    instructions write it and about as many read it: they would all poll. Whose results begin in
    several such regions signals the largest. Counters are numbered after the program's barriers.
    """
    tensors = program.tensors
    is_tagged = [spec.tagged for spec in tensors]

    def tagged(regions: Iterable[Region]) -> list[Region]:
        return [r for r in regions if is_tagged[r.tensor]]

    def columns(region: Region) -> int:
        return region.columns[1] - region.columns[0]

    def holds(region: Region, written: Region) -> bool:
        return (
            region.rows[0] <= written.rows[0] < region.rows[1]
            and region.columns[0] <= written.columns[0] < region.columns[1]
        )

    read = [tagged(i.reads(tensors)) for i in program.instructions]
    largest = [max(regions, key=columns) if regions else None for regions in read]
    readers = Counter(region for region in largest if region is not None)
    by_tensor: dict[int, list[Region]] = defaultdict(list)
    for region in readers:
        by_tensor[region.tensor].append(region)
    begun = [
        [r for w in tagged(i.writes(tensors)) for r in by_tensor[w.tensor] if holds(r, w)]
        for i in program.instructions
    ]
    writers = Counter(region for regions in begun for region in set(regions))
    hinted = [r for r in readers if 1 < writers[r] <= 2 * readers[r]]
    number = {region: i for i, region in enumerate(hinted)}
    hints = np.full((len(program), 2), NONE, dtype=np.uint32)
    signals = np.zeros(len(hinted), dtype=np.uint32)
    for i, (results, source) in enumerate(zip(begun, largest, strict=True)):
        counted = [r for r in results if r in number]
        if counted:
            signalled = number[max(counted, key=columns)]
            hints[i, 0] = len(program.barriers) + signalled
            signals[signalled] += 1
        if source is not None and source in number:
            hints[i, 1] = len(program.barriers) + number[source]
    return hints, signals
