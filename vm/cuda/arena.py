"""Memory of several GPUs in one range of addresses, which all of them read and write."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megavm.vm.cuda.driver import CudaError, Driver
from megavm.vm.cuda.launch import RANK_SHIFT

ALIGNMENT = 256  # bytes: every tensor begins at a multiple
MAPPED_AT_ONCE = 32 << 20  # bytes that each rank takes from its GPU at a time, at least


class _Mapped:
    """Mapped memory, as torch.as_tensor takes it."""

    def __init__(self, arena: Arena, address: int, size: int) -> None:
        self.arena = arena  # torch keeps this object, and so the arena, while the tensor lives
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Arena:
    """Storage of tensors that every rank has at the same place: rank r's begins ``r << RANK_SHIFT`` bytes after
    that of rank 0. So an address of one rank is known on all of them.

    Ranks may share a GPU. Memory is returned when no tensor of the arena is left.

    Raises ValueError when two of the GPUs cannot access each other's memory.
    """

    def __init__(self, drivers: Sequence[Driver]) -> None:
        self._drivers = tuple(drivers)
        first = self._drivers[0]
        devices = dict.fromkeys(driver.device for driver in self._drivers)
        for one in devices:
            for other in devices:
                if one != other and not first.call("cuDeviceCanAccessPeer", one, other):
                    raise ValueError(
                        f"GPU {one} cannot access the memory of GPU {other}: the ranks of a program "
                        "need GPUs that are linked, by NVLink or PCIe peer access"
                    )
        api = first.api
        kind = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._properties = []
        for driver in self._drivers:
            properties = api.CUmemAllocationProp()
            properties.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            properties.location.type, properties.location.id = kind, driver.device
            self._properties.append(properties)
        self._access = []
        for device in devices:
            access = api.CUmemAccessDesc()
            access.location.type, access.location.id = kind, device
            access.flags = api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self._access.append(access)
        granularity = api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granularity = max(
            int(first.call("cuMemGetAllocationGranularity", properties, granularity))
            for properties in self._properties
        )
        size = len(self._drivers) << RANK_SHIFT
        self._begin = int(first.call("cuMemAddressReserve", size, 0, 0, 0))
        self._used = self._mapped = 0  # bytes of each rank
        mappings: list[tuple[int, int, Any]] = []  # address, bytes, handle
        self._mappings = mappings
        weakref.finalize(self, _free, first, self._begin, size, mappings)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Zeros of a shape, one tensor for each rank.

        Raises torch.OutOfMemoryError when a GPU has no room.
        """
        count = math.prod(shape)
        size = max(count, 1) * dtype.itemsize
        offset = self._used
        end = offset + -(-size // ALIGNMENT) * ALIGNMENT
        if end > self._mapped:
            self._map(end - self._mapped)
        self._used = end
        return tuple(
            self._tensor(rank, offset, size).view(dtype)[:count].view(shape).zero_()
            for rank in range(len(self._drivers))
        )

    def _tensor(self, rank: int, offset: int, size: int) -> torch.Tensor:
        mapped = _Mapped(self, self._begin + (rank << RANK_SHIFT) + offset, size)
        return torch.as_tensor(mapped, device=f"cuda:{self._drivers[rank].device}")

    def _map(self, size: int) -> None:
        """Give every rank at least ``size`` more bytes."""
        size = -(-max(size, MAPPED_AT_ONCE) // self._granularity) * self._granularity
        if self._mapped + size > 1 << RANK_SHIFT:
            raise torch.OutOfMemoryError(
                f"the tensors that ranks gather need {self._mapped + size} bytes on each, at most "
                f"{1 << RANK_SHIFT} fit"
            )
        for rank, (driver, properties) in enumerate(
            zip(self._drivers, self._properties, strict=True)
        ):
            address = self._begin + (rank << RANK_SHIFT) + self._mapped
            with driver.current():
                try:
                    handle = driver.call("cuMemCreate", size, properties, 0)
                except CudaError as error:
                    raise torch.OutOfMemoryError(
                        f"GPU {driver.device} has no room for {size} bytes that ranks gather: {error}"
                    ) from error
                driver.call("cuMemMap", address, size, 0, handle, 0)
                self._mappings.append((address, size, handle))
                driver.call("cuMemSetAccess", address, size, self._access, len(self._access))
        self._mapped += size


def _free(driver: Driver, begin: int, size: int, mappings: list[tuple[int, int, Any]]) -> None:
    """Unmap and release everything; after a lost context nothing can be released."""
    for address, length, handle in mappings:
        driver.api.cuMemUnmap(address, length)
        driver.api.cuMemRelease(handle)
    driver.api.cuMemAddressFree(begin, size)
