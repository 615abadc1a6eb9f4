"""Memory of several GPUs in one range of addresses, which all of them read and write."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from megavm.vm.cuda.driver import CudaError, Driver
from megavm.vm.cuda.launch import COPY_SHIFT, RANK_SHIFT

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
    that of rank 0. So an address of one rank is known on all of them. With several ``copies``, each tensor has
    that many, as its first dimension: copy c begins ``c << COPY_SHIFT`` bytes after the first, whose addresses
    have zeros there.

    Ranks may share a GPU. Memory is returned when no tensor of the arena is left.

    Raises ValueError when two of the GPUs cannot access each other's memory.
    """

    def __init__(self, drivers: Sequence[Driver], copies: int = 1) -> None:
        self._drivers = tuple(drivers)
        self._ranks, self._copies = len(self._drivers), copies
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
        size = reserved_bytes(self._ranks, copies)
        reserved = int(first.call("cuMemAddressReserve", size, 0, 0, 0))
        self._begin = first_place(reserved, copies)
        self._used = self._mapped = 0  # bytes of each copy of each rank
        mappings: list[tuple[int, int, Any]] = []  # address, bytes, handle
        self._mappings = mappings
        weakref.finalize(self, _free, self._drivers, reserved, size, mappings)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Zeros of a shape, one tensor for each rank; with several copies, [copies, *shape].

        Raises torch.OutOfMemoryError when a GPU has no room.
        """
        count = math.prod(shape)
        size = max(count, 1) * dtype.itemsize
        offset = self._used
        end = offset + -(-size // ALIGNMENT) * ALIGNMENT
        if end > self._mapped:
            try:
                self._map(end - self._mapped)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()  # memory that torch holds free, of all GPUs
                self._map(end - self._mapped)
        self._used = end
        return tuple(
            _with_copies(self._tensor(rank, offset, size), shape, dtype, self._copies).zero_()
            for rank in range(self._ranks)
        )

    def fill(self, value: int) -> None:
        """Fill all that was allocated with a word, int32."""
        for rank, copy in self._places():
            if self._used:
                self._bytes(rank, copy << COPY_SHIFT, self._used).view(torch.int32).fill_(value)

    def _places(self) -> list[tuple[int, int]]:
        """The numbers of all ranks and copies."""
        return [(r, c) for r in range(self._ranks) for c in range(self._copies)]

    def _tensor(self, rank: int, offset: int, size: int) -> torch.Tensor:
        """The bytes from the first copy of a tensor to the end of its last one."""
        return self._bytes(rank, offset, (self._copies - 1 << COPY_SHIFT) + size)

    def _bytes(self, rank: int, place: int, size: int) -> torch.Tensor:
        """Bytes of a rank; ``place`` counts from its first one."""
        mapped = _Mapped(self, self._begin + (rank << RANK_SHIFT) + place, size)
        return torch.as_tensor(mapped, device=f"cuda:{self._drivers[rank].device}")

    def _map(self, size: int) -> None:
        """Give every copy of every rank at least ``size`` more bytes."""
        at_once = MAPPED_AT_ONCE // self._copies
        size = -(-max(size, at_once) // self._granularity) * self._granularity
        most = 1 << (RANK_SHIFT if self._copies == 1 else COPY_SHIFT)
        if self._mapped + size > most:
            raise torch.OutOfMemoryError(
                f"the tensors that workers exchange need {self._mapped + size} bytes, at most {most} fit"
            )
        self._map_all(size)
        self._mapped += size

    def _map_all(self, size: int) -> None:
        """Map so many bytes behind those that every copy of every rank has."""
        before = len(self._mappings)
        for rank, copy in self._places():
            driver = self._drivers[rank]
            address = self._begin + (rank << RANK_SHIFT) + (copy << COPY_SHIFT) + self._mapped
            try:
                with driver.current():
                    handle = driver.call("cuMemCreate", size, self._properties[rank], 0)
                    self._mappings.append((address, size, handle))
                    driver.call("cuMemMap", address, size, 0, handle, 0)
                    driver.call("cuMemSetAccess", address, size, self._access, len(self._access))
            except CudaError as error:
                # What was mapped is returned, so that a later call may succeed.
                added = self._mappings[before:]
                del self._mappings[before:]
                _release(driver, added)
                if error.name != "CUDA_ERROR_OUT_OF_MEMORY":
                    raise
                raise torch.OutOfMemoryError(
                    f"GPU {driver.device} has no room for {size} bytes that workers exchange: {error}"
                ) from error


def reserved_bytes(ranks: int, copies: int) -> int:
    """The addresses that an arena takes, those before ``first_place`` included."""
    return ranks + (copies > 1) << RANK_SHIFT


def first_place(reserved: int, copies: int) -> int:
    """Where an arena begins in memory that begins at ``reserved``."""
    return reserved if copies == 1 else reserved + -reserved % (1 << RANK_SHIFT)


def _with_copies(
    stored: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, copies: int
) -> torch.Tensor:
    """The bytes of a tensor and its copies as a tensor."""
    count = math.prod(shape)
    first = stored[: count * dtype.itemsize].view(dtype).view(shape)
    if copies == 1:
        return first
    apart = (1 << COPY_SHIFT) // dtype.itemsize
    return first.as_strided((copies, *shape), (apart, *first.stride()))


def _free(
    drivers: Sequence[Driver], begin: int, size: int, mappings: list[tuple[int, int, Any]]
) -> None:
    """Unmap and release everything; after a lost context nothing can be released."""
    for driver in dict.fromkeys(drivers):
        with driver.current():
            driver.api.cuCtxSynchronize()  # a kernel may still run
    _release(drivers[0], mappings)
    drivers[0].api.cuMemAddressFree(begin, size)


def _release(driver: Driver, mappings: list[tuple[int, int, Any]]) -> None:
    """Unmap and release, whatever fails: the last one may not have been mapped."""
    for address, length, handle in mappings:
        driver.api.cuMemUnmap(address, length)
        driver.api.cuMemRelease(handle)
