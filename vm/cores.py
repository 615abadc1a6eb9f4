"""How many workers the CPU machine should have."""

from __future__ import annotations

import os
from pathlib import Path


def physical_cores() -> int:
    """Cores that this process may use; the hardware threads of one core count once."""
    allowed = (
        os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = set()
    for cpu in allowed:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return len(cores)
