"""The ring of pages between a worker's loader and its consumers, page by page."""

from __future__ import annotations

from typing import Final

import numpy as np

from megavm.profiler.trace import Floats, Longs

EARLY_PAGES: Final = 4  # that products of up to 8 rows take early on a GPU (kPreload)

_PAGES: Final = 512  # so many pages of an instruction are replayed one by one


class Rings:
    """The rings of all workers, in several scenarios at once.

    A loader asks for pages in the order of its worker's queue, each ``late`` ns after its place in
    the ring is free. A page arrives ``way`` ns later, and not sooner than an interval after the one
    before, which is the worker's share of the memory. Consumers take pages as they arrive,
    once the inputs of their instruction are there, and compute each; its place is free when it is
    taken. When they turn to an instruction, they take at most ``early`` pages of those that are
    there.

    ``pages``: of a ring in each scenario. ``first``: when the loader of each worker begins, ns.
    """

    def __init__(
        self,
        pages: Longs,
        early: int,
        first: Floats,
        way: float,
        late: float = 0.0,
    ) -> None:
        workers, scenarios = len(first), len(pages)
        self._pages, self._early, self._way, self._late = pages, early, way, late
        # When places became free, when loaders can ask next, and when their last page arrived.
        self._free = np.full((int(pages.max()), workers, scenarios), -np.inf)
        self._asked = np.repeat(first[:, None], scenarios, axis=1)
        self._arrived = np.full((workers, scenarios), -np.inf)
        self._taken = np.zeros((workers, scenarios), np.int64)  # number of the next page

    def load(
        self,
        worker: Longs,
        pages: Longs,
        begin: Floats,
        inputs: Floats,
        not_before: Floats,
        computing: Floats,
        factor: Floats,
        interval: Floats,
    ) -> Floats:
        """When the last page of the next instruction of each ``worker`` arrives: [w, scenarios].

        The instruction has ``pages`` in each scenario; its loads begin ``not_before`` a time.
        Consumers turn to it at ``begin`` and have its inputs at ``inputs``. ``computing``: how long
        it takes if all pages are there. ``factor``: of the times of its loads. ``interval``: ns
        from page to page, [w, 2]: of those that fit into a ring, and of those behind them.
        """
        # Those with the most pages come first, so that those with another page are a slice.
        order = np.argsort(-pages.max(axis=1), kind="stable")
        worker, pages = worker[order], pages[order]
        largest, alike = pages.max(axis=1), bool((pages == pages[:, :1]).all())
        begin, done, factor = begin[order], inputs[order].copy(), factor[order]
        asked = np.maximum(self._asked[worker], not_before[order])
        arrived, each = self._arrived[worker], computing[order] / np.maximum(pages, 1)
        way, (fitting, behind) = self._way * factor, interval[order].T[:, :, None] * factor
        early = np.ones(begin.shape, np.bool_)
        scenario = np.arange(len(self._pages))
        # After many rounds of the ring, pages come at a steady pace.
        most = max(_PAGES, 4 * len(self._free))
        halfway = arrived
        for page in range(min(int(largest.max(initial=0)), most)):
            if page == most // 2:
                halfway = arrived.copy()
            n = int(np.searchsorted(-largest, -page))
            here = True if alike else page < pages[:n]
            at = (self._taken[worker[:n]] + page) % self._pages, worker[:n, None], scenario
            free = self._free[at]
            np.maximum(asked[:n], free + self._late, out=asked[:n], where=here)
            gap = np.where(page < self._pages, fitting[:n], behind[:n])
            came = np.maximum(arrived[:n] + gap, asked[:n] + way[:n])
            np.copyto(arrived[:n], came, where=here)
            early[:n] &= (page < self._early) & (came <= begin[:n])
            taken = np.maximum(came, done[:n])
            np.copyto(done[:n], taken + each[:n], where=here)
            np.copyto(free, np.where(early[:n], begin[:n], taken), where=here)
            self._free[at] = free
        more = np.zeros_like(arrived)
        if largest.max(initial=0) > most:
            # Others may have loaded nothing yet.
            gained = np.subtract(arrived, halfway, out=more.copy(), where=pages > most)
            more += np.maximum(pages - most, 0) * gained / (most - most // 2)
        self._free[:, worker] += more
        self._asked[worker], self._arrived[worker] = asked + more, arrived + more
        self._taken[worker] += np.minimum(pages, most)
        result = np.empty_like(arrived)
        result[order] = np.where(pages > 0, arrived + more, -np.inf)
        return result
