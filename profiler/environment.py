"""The environment of a trace: machine, device, versions, and bandwidth of the memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time
from typing import Any, Final

import numpy as np
import torch

from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Machine

GPU_READ_BYTES: Final = 1 << 30  # bytes read to measure bandwidth; far more than any cache holds
CPU_READ_BYTES: Final = 1 << 28
LEAST_READ_BYTES: Final = 1 << 27  # with less, caches would be measured
ROUNDS: Final = 8  # at least
SECONDS: Final = 0.5  # at least: long enough for clocks to rise and for neighbours to be seen


def describe_machine(machine: Machine) -> dict[str, Any]:
    """The members of a trace's ``machine`` that need no measurement."""
    if isinstance(machine, CudaMachine):
        device, clock = torch.cuda.get_device_name(machine.devices[0]), "globaltimer"
        return {"name": machine.name, "device": device, "clock": clock}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"name": machine.name, "device": _processor(), "clock": "steady clock", "cores": cores}


def measure_bandwidth(device: str) -> dict[str, Any]:
    """What plain sums over memory of a torch device reach: members of a trace's ``machine``.

    ``bandwidth`` is that of the fastest round, ``bandwidth_median`` that of the median one, both in
    bytes per second; a large difference means that other work used the machine. Takes half a
    second or a little more. Empty when there is too little free memory to measure it.
    """
    where = torch.device(device)
    size, passes = CPU_READ_BYTES, 1
    if where.type == "cuda":
        # Several passes in a row make the cost of launches negligible.
        size, passes = min(GPU_READ_BYTES, torch.cuda.mem_get_info(where)[0] // 4), 8
    if size < LEAST_READ_BYTES:
        return {}
    try:
        rates = _rates(torch.ones(size // 4, dtype=torch.float32, device=where), passes)
    except RuntimeError:  # out of memory
        return {}
    finally:
        if where.type == "cuda":
            torch.cuda.empty_cache()
    return {"bandwidth": max(rates), "bandwidth_median": float(np.median(rates))}


def _rates(data: torch.Tensor, passes: int) -> list[float]:
    """Bytes per second of every round."""
    rates: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(rates) < ROUNDS or time.perf_counter() < end:
        rates.append(passes * data.nbytes / _seconds_to_sum(data, passes))
    return rates


def _seconds_to_sum(data: torch.Tensor, passes: int) -> float:
    begin = time.perf_counter()
    for _ in range(passes):
        total = data.sum()
    float(total)
    return time.perf_counter() - begin


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
