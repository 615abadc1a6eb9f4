"""The machines by their names."""

from __future__ import annotations

import logging

from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.machine import CudaMachine, reason_unavailable
from megavm.vm.machine import Machine

MACHINES = ("auto", "cpu", "cuda", "reference")

logger = logging.getLogger("megavm")


def choose_machine(name: str) -> str:
    """Resolve "auto" to "cuda" if a GPU is usable, else to "cpu"; return other names unchanged.

    Raises ValueError when the name is unknown.
    """
    if name not in MACHINES:
        raise ValueError(f"machine {name!r} is unknown: expected auto, cpu, cuda or reference")
    if name != "auto":
        return name
    reason = reason_unavailable()
    if reason is not None:
        logger.info("machine auto is cpu, because cuda is not available: %s", reason)
    return "cuda" if reason is None else "cpu"


def make_machine(name: str, workers: int | None = None, ranks: int = 1) -> tuple[Machine, int]:
    """A machine by name ("auto", "cpu", "reference", "cuda") and the workers of each rank.

    ``workers`` defaults to the physical cores for "cpu", which the ranks share, to the SMs of a GPU
    for "cuda", where each rank has a GPU, to 1 for "reference".

    Raises ValueError when the machine is unknown or unavailable, or ``workers`` is out of range.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, expected at least 1")
    chosen = choose_machine(name)
    if chosen == "cuda":
        cuda = CudaMachine(range(ranks))
        if workers is not None and workers > cuda.workers:
            raise ValueError(f"workers is {workers}, the GPU has {cuda.workers} SMs")
        return cuda, workers or cuda.workers
    if chosen == "reference":
        from megavm.vm.reference import ReferenceMachine

        return ReferenceMachine(), workers or 1
    from megavm.vm.cores import physical_cores

    return CpuMachine(), workers or max(1, physical_cores() // ranks)
