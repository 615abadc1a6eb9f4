"""What the regions of a tensor leave out of a rectangle."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from megavm.vm.tensors import Region


def first_uncovered(
    regions: Iterable[Region], rows: tuple[int, int], columns: tuple[int, int]
) -> tuple[int, int] | None:
    """Row and column of the first element of a rectangle that is in none of the regions, or None.

    The regions are of one tensor and not indexed.
    """
    bounds = np.array([(*r.rows, *r.columns) for r in regions], np.int64).reshape(-1, 4)
    # An element of the mask stands for all rows and columns between two bounds.
    tops = np.unique([*rows, *bounds[:, :2].ravel()])
    lefts = np.unique([*columns, *bounds[:, 2:].ravel()])
    mask = np.zeros((len(tops), len(lefts)), np.bool_)
    places = np.searchsorted(tops, bounds[:, :2]), np.searchsorted(lefts, bounds[:, 2:])
    for (top, bottom), (left, right) in zip(*places, strict=True):
        mask[top:bottom, left:right] = True
    (top, bottom), (left, right) = np.searchsorted(tops, rows), np.searchsorted(lefts, columns)
    missing = np.argwhere(~mask[top:bottom, left:right])
    if not len(missing):
        return None
    row, column = missing[0]
    return int(tops[top + row]), int(lefts[left + column])
