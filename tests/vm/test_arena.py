"""Memory that ranks exchange words in, with a driver that fails at one of its calls."""

from __future__ import annotations

import contextlib
from typing import Any, cast

import pytest
import torch

from megavm.vm.cuda.arena import Arena
from megavm.vm.cuda.driver import CudaError, Driver
from megavm.vm.cuda.launch import COPY_SHIFT, RANK_SHIFT

RANKS, COPIES = 2, 4
SIZE = 2 << 20
CALLS = ("cuMemCreate", "cuMemMap", "cuMemSetAccess")


class Full:
    """A driver whose call number ``failing`` fails, until that is None."""

    device = 0

    def __init__(self, failing: int, error: str) -> None:
        self.failing: int | None = failing
        self.error = error
        self.called: list[str] = []
        self.created: set[int] = set()
        self.mapped: dict[int, int] = {}  # address -> handle
        self.accessible: set[int] = set()
        self.api = self

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def call(self, name: str, *arguments: Any) -> Any:
        if len(self.called) == self.failing:
            raise CudaError(self.error, name)
        self.called.append(name)
        if name == "cuMemCreate":
            handle = len(self.called)
            self.created.add(handle)
            return handle
        if name == "cuMemMap":
            address, _, _, handle, _ = arguments
            assert address not in self.mapped
            self.mapped[address] = handle
        else:
            assert name == "cuMemSetAccess"
            self.accessible.add(arguments[0])
        return None

    def cuMemUnmap(self, address: int, size: int) -> None:
        assert size == SIZE
        self.accessible.discard(address)
        self.mapped.pop(address, None)

    def cuMemRelease(self, handle: int) -> None:
        assert handle not in self.mapped.values()
        self.created.remove(handle)


def arena_of(driver: Full) -> Arena:
    """An arena without its constructor, which asks a real driver for addresses."""
    arena = Arena.__new__(Arena)
    arena._drivers = (cast(Driver, driver),) * RANKS
    arena._ranks, arena._copies = RANKS, COPIES
    arena._properties, arena._access = [None] * RANKS, []
    arena._begin = arena._used = arena._mapped = 0
    arena._mappings = []
    return arena


@pytest.mark.parametrize("failing", range(RANKS * COPIES * len(CALLS)))
@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_NOT_SUPPORTED"])
def test_a_call_that_fails_leaves_nothing_behind(failing: int, error: str) -> None:
    driver = Full(failing, error)
    arena = arena_of(driver)
    kind: type[Exception] = CudaError
    sentence = f"{CALLS[failing % len(CALLS)]} failed with {error}"
    if error == "CUDA_ERROR_OUT_OF_MEMORY":
        kind = torch.OutOfMemoryError
        sentence = f"GPU 0 has no room for {SIZE} bytes that workers exchange: {sentence}"
    with pytest.raises(kind, match=f"^{sentence}$"):
        arena._map_all(SIZE)
    kept = (driver.created, driver.mapped, driver.accessible, arena._mappings)
    assert not any(kept), kept
    driver.failing = None
    arena._map_all(SIZE)
    places = {(r << RANK_SHIFT) + (c << COPY_SHIFT) for r in range(RANKS) for c in range(COPIES)}
    assert driver.accessible == set(driver.mapped) == places
    assert len(driver.created) == len(arena._mappings) == len(places)
