"""The environment of a trace: machine, device, versions, bandwidth and rate of products."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import torch

from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Machine

GPU_READ_BYTES: Final = 1 << 30  # bytes read to measure bandwidth; far more than any cache holds
CPU_READ_BYTES: Final = 1 << 28
LEAST_READ_BYTES: Final = 1 << 27  # with less, caches would be measured
GPU_PRODUCT_SIZE: Final = 8192  # rows and columns of the bfloat16 matrices that are multiplied
CPU_PRODUCT_SIZE: Final = 1024  # and of the float32 ones
GPU_PASSES: Final = 8  # in a row: the cost of launches becomes negligible
ROUNDS: Final = 8  # at least
SECONDS: Final = 0.5  # at least: long enough for clocks to rise and for neighbours to be seen


def describe_machine(machine: Machine) -> dict[str, Any]:
    """The members of a trace's ``machine`` that need no measurement."""
    if isinstance(machine, CudaMachine):
        device, clock = torch.cuda.get_device_name(machine.devices[0]), "globaltimer"
        return {"name": machine.name, "device": device, "clock": clock}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": machine.name, "device": _processor(), "clock": "steady clock", "cores": cores}


def measure_ceilings(machine: Machine) -> dict[str, Any]:
    """The ceilings of the machine's memory and arithmetic: members of a trace's ``machine``.

    See ``measure_bandwidth``, ``measure_multiplication`` and ``of_all_gpus``. Takes a second or a
    little more.
    """
    device = machine.memory_device
    threads = machine.workers if isinstance(machine, CpuMachine) else None
    found = measure_bandwidth(device) | measure_multiplication(device, threads)
    return of_all_gpus(machine, found)


def of_all_gpus(machine: Machine, rates: Mapping[str, float]) -> dict[str, float]:
    """The ceilings of a machine, from those of its first GPU: the others count as equal to it."""
    gpus = len(set(machine.devices)) if isinstance(machine, CudaMachine) else 1
    return {name: gpus * rate for name, rate in rates.items()}


def measure_bandwidth(device: str) -> dict[str, float]:
    """The rate at which a torch device sums an array in its memory, in bytes/s.

    ``bandwidth`` is that of the fastest round, ``bandwidth_median`` that of the median one; a large
    difference means that other work used the machine, or its clock fell. Empty when there is too
    little free memory.
    """
    where = torch.device(device)
    size = CPU_READ_BYTES
    if where.type == "cuda":
        size = min(GPU_READ_BYTES, torch.cuda.mem_get_info(where)[0] // 4)
    if size < LEAST_READ_BYTES:
        return {}

    def prepare() -> Callable[[], object]:
        return torch.ones(size // 4, dtype=torch.float32, device=where).sum

    return _measure("bandwidth", size // 4 * 4, where, prepare)


def measure_multiplication(device: str, threads: int | None = None) -> dict[str, float]:
    """The rate of products of square matrices of random numbers on a torch device, in FLOP/s.

    On a GPU the matrices are bfloat16, and its tensor cores multiply them. On the CPU they are
    float32, and at most ``threads`` of torch's threads do.

    ``flops_per_second`` is that of the fastest round, ``flops_per_second_median`` that of the
    median one. Empty when there is too little free memory.
    """
    where = torch.device(device)
    gpu = where.type == "cuda"
    size = GPU_PRODUCT_SIZE if gpu else CPU_PRODUCT_SIZE
    dtype = torch.bfloat16 if gpu else torch.float32

    def prepare() -> Callable[[], object]:
        a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b, out=out)

    before = torch.get_num_threads()
    torch.set_num_threads(min(threads or before, before))
    try:
        return _measure("flops_per_second", 2 * size**3, where, prepare)
    finally:
        torch.set_num_threads(before)


def _measure(
    name: str, amount: int, where: torch.device, prepare: Callable[[], Callable[[], object]]
) -> dict[str, float]:
    """The best and the median rate of work that does ``amount``, per second, under two names.

    ``prepare`` allocates what the work needs. Empty when the device has not enough memory for it.
    """
    try:
        rates = _rates(prepare(), amount, where)
    except RuntimeError:  # out of memory
        return {}
    finally:
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return {name: max(rates), f"{name}_median": float(np.median(rates))}


def _rates(work: Callable[[], object], amount: int, where: torch.device) -> list[float]:
    """The rate of every round of work that does ``amount``, per second; the first is not timed."""
    gpu = where.type == "cuda"
    passes = GPU_PASSES if gpu else 1
    rates: list[float] = []
    work()
    end = time.perf_counter() + SECONDS
    while len(rates) < ROUNDS or time.perf_counter() < end:
        if gpu:
            torch.cuda.synchronize(where)
        begin = time.perf_counter()
        for _ in range(passes):
            work()
        if gpu:
            torch.cuda.synchronize(where)
        rates.append(passes * amount / (time.perf_counter() - begin))
    return rates


def _processor() -> str:
    """The processor's name as the operating system reports it."""
    from megavm.doctor import cpu_name

    return cpu_name()


def environment() -> dict[str, str]:
    """Versions of Python, the system, torch, numpy and the CUDA driver."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "torch": version("torch"),
        "numpy": np.__version__,
        **_driver(),
    }


def _driver() -> dict[str, str]:
    """The version of the CUDA driver; empty without a GPU."""
    if not torch.cuda.is_available():
        return {}
    from cuda.bindings import driver

    number = int(driver.cuDriverGetVersion()[1])
    return {"cuda driver": f"{number // 1000}.{number % 1000 // 10}"}


def version(package: str) -> str:
    """The installed version of a package, or "unknown"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
