"""The environment that is saved with every result."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


# Field of nvidia-smi -> name in the results.
GPU_FACTS = {
    "name": "name",
    "driver_version": "driver",
    "memory.total": "memory",
    "clocks.current.sm": "sm_clock",
    "clocks.max.sm": "sm_clock_max",
    "clocks.current.memory": "memory_clock",
    "clocks.max.memory": "memory_clock_max",
    "power.limit": "power_limit",
    "temperature.gpu": "temperature_c",
}


def describe_gpus() -> list[dict[str, str]]:
    """The state of every GPU from nvidia-smi; [] without nvidia-smi."""
    query = [f"--query-gpu={','.join(GPU_FACTS)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
    return [dict(zip(GPU_FACTS.values(), row, strict=False)) for row in rows]


def version(package: str) -> str:
    """The version of an installed package; "absent" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def describe() -> dict[str, Any]:
    """CPU, GPU, versions, commit and command of this run."""
    from megavm.doctor import cpu_name

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    packages = (
        *("megavm", "torch", "transformers", "numpy", "triton", "cuda-core"),
        *("nvidia-cuda-nvrtc", "llguidance", "xgrammar"),
    )
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpus": describe_gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(name: str, results: dict[str, Any]) -> Path:
    """Write results and environment to benchmarks/results/<name>.json; returns the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": describe(), **results}, indent=2) + "\n")
    return path
