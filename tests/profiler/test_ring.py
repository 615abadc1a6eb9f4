"""Rings of pages, against times that can be worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megavm.profiler.ring import Rings


def last_arrival(
    pages: int,
    ring: int,
    *,
    early: int = 0,
    interval: float = 100.0,
    way: float = 500.0,
    inputs: float = 10_000.0,
    computing: float = 0.0,
    begin: float = 0.0,
    late: float = 0.0,
    behind: float | None = None,
) -> float:
    """When the last page of one worker's first instruction arrives; its loader begins at 0."""
    rings = Rings(np.array([ring]), early, np.zeros(1), way, late)
    intervals = np.array([[interval, interval if behind is None else behind]])
    times = [*(np.array([[t]]) for t in (begin, inputs, 0.0, computing, 1.0)), intervals]
    found = rings.load(np.zeros(1, np.int64), np.array([[pages]]), *times)
    return float(found[0, 0])


def test_pages_that_fit_come_as_fast_as_the_memory_brings_them() -> None:
    assert last_arrival(8, ring=8) == 500 + 7 * 100


def test_a_page_that_does_not_fit_is_asked_for_when_the_first_is_taken() -> None:
    assert last_arrival(9, ring=8) == 10_000 + 500
    assert last_arrival(12, ring=8) == 10_000 + 500 + 3 * 100


def test_pages_behind_a_ring_come_faster_if_others_have_filled_theirs() -> None:
    assert last_arrival(8, ring=8, behind=40.0) == 500 + 7 * 100
    assert last_arrival(12, ring=8, behind=40.0) == 10_000 + 500 + 3 * 40


def test_a_loader_that_sees_a_free_place_late_asks_late() -> None:
    assert last_arrival(8, ring=8, late=50.0) == 500 + 7 * 100
    assert last_arrival(12, ring=8, late=50.0) == 10_000 + 50 + 500 + 3 * 100


def test_a_ring_shorter_than_the_way_of_a_page_limits_the_stream() -> None:
    # Two pages come in every 500 ns.
    assert last_arrival(42, ring=2, inputs=0.0) == pytest.approx(500 * 21, rel=0.01)


def test_consumers_that_are_slow_hold_up_the_loader() -> None:
    found = last_arrival(108, ring=8, computing=108 * 300.0)
    assert found == 10_000 + 99 * 300 + 500


def test_pages_taken_early_make_the_ring_longer() -> None:
    assert last_arrival(12, ring=8, early=4, begin=2000.0) == 2000 + 500 + 3 * 100
    # Those that have not arrived when consumers turn to the instruction stay.
    assert last_arrival(12, ring=8, early=4, begin=650.0) == 10_000 + 500 + 1 * 100


@pytest.mark.parametrize("computing", [0.0, 200.0])
def test_many_pages_come_at_a_steady_pace(computing: float) -> None:
    found = last_arrival(100_000, ring=13, computing=100_000 * computing)
    assert found == pytest.approx(10_000 + 100_000 * max(computing, 100), rel=0.001)


def test_scenarios_may_load_other_pages() -> None:
    rings = Rings(np.array([8, 8, 8, 8]), 0, np.zeros(1), 500.0)
    interval = np.full((1, 2), 100.0)
    times = [*(np.full((1, 4), time) for time in (0.0, 10_000.0, 0.0, 0.0, 1.0)), interval]
    found = rings.load(np.zeros(1, np.int64), np.array([[8, 4, 12, 0]]), *times)
    assert found[0].tolist() == [500 + 7 * 100, 500 + 3 * 100, 10_000 + 500 + 3 * 100, -np.inf]
    # The next instruction's first page follows.
    times = [*(np.full((1, 4), time) for time in (10_000.0, 20_000.0, 0.0, 0.0, 1.0)), interval]
    found = rings.load(np.zeros(1, np.int64), np.ones((1, 4), np.int64), *times)
    assert found[0].tolist() == [10_500, 900, 10_900, 500]


def test_a_scenario_without_loads_leaves_the_others_as_they_are() -> None:
    """Instructions so long that only a part of their pages is replayed, beside one of no pages."""

    def last_pages(pages: list[int]) -> list[list[float]]:
        count = len(pages)
        rings = Rings(np.full(count, 13), 0, np.zeros(1), 1600.0)
        interval = np.full((1, 2), 400.0)
        none, never = np.zeros((1, count)), np.full((1, 1), -np.inf)
        of, worker = np.array([pages]), np.zeros(1, np.int64)
        return [
            rings.load(worker, of, none, none, never, none, none + 1, interval)[0].tolist()
            for _ in range(2)
        ]

    both, alone = last_pages([100_000, 0]), last_pages([100_000])
    assert [row[0] for row in both] == [row[0] for row in alone]
    assert not any(np.isnan(row).any() for row in both)
