"""`megavm doctor`: a report of this computer's hardware and software, and of usable machines.

Only inspects: it compiles, downloads and allocates nothing on a GPU. Missing parts are reported and
never raise.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import megavm
from megavm.vm.cores import physical_cores
from megavm.vm.target import TARGETS

EXTENSION: Final = "megavm.vm._native"

# Instruction set extensions that the CPU machine can use, as spelled in /proc/cpuinfo.
_ISA_FLAGS: Final = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "amx_tile", "amx_bf16", "asimd", "bf16", "sve", "sve2",
)  # fmt: skip
_PACKAGES: Final = ("numpy", "tokenizers", "safetensors", "huggingface_hub", "jinja2")

_CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: Final = 16
_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: Final = 75
_CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: Final = 76


def examine() -> dict[str, Any]:
    """The report as JSON values: versions, CPU, memory (bytes), GPU, and one entry per machine.

    `machines` maps "reference", "cpu" and "cuda" to {"available": bool, "reasons": [str, ...]},
    where `reasons` explain why a machine is unavailable; `auto` is the machine that --machine auto
    takes, or None.
    """
    torch = _examine_torch()
    extension = _examine_extension()
    gpu = _examine_gpu()
    machines = _examine_machines(torch, extension, gpu)
    order = ("cuda", "cpu", "reference")
    return {
        "megavm": megavm.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch,
        "packages": {name: _version(name) for name in _PACKAGES},
        "extension": extension,
        "cpu": _examine_cpu(),
        "memory": _examine_memory(),
        "gpu": gpu,
        "machines": machines,
        "auto": next((name for name in order if machines[name]["available"]), None),
    }


def format_report(report: dict[str, Any]) -> str:
    """The report of `examine` as text, one fact per line."""
    cpu, memory, gpu, torch = (report[key] for key in ("cpu", "memory", "gpu", "torch"))
    extension = report["extension"]
    packages = ", ".join(
        f"{name} {version or 'missing'}" for name, version in report["packages"].items()
    )
    lines = [
        ("megavm", f"{report['megavm']}, Python {report['python']}"),
        ("platform", report["platform"]),
        ("torch", torch["version"] if torch["available"] else f"not usable: {torch['error']}"),
        ("packages", packages),
        ("extension", "compiled" if extension["available"] else extension["error"]),
        (
            "CPU",
            f"{cpu['model']}, {cpu['cores']} cores usable here, {cpu['usable']} of"
            f" {cpu['logical']} logical",
        ),
        ("CPU flags", " ".join(cpu["flags"]) or "none of those that matter"),
        ("memory", f"{_gib(memory['total'])}, {_gib(memory['available'])} available"),
        ("GPU driver", gpu["driver"] or f"none: {gpu['error']}"),
    ]
    lines += [
        (
            f"GPU {index}",
            f"{device['name']}, {_gib(device['memory'])}, compute capability"
            f" {device['compute_capability']}, {device['sms'] or 'unknown'} SMs",
        )
        for index, device in enumerate(gpu["devices"])
    ]
    text = [f"{name:12} {value}" for name, value in lines]
    text += ["", "machine      runs here"]
    for name, machine in report["machines"].items():
        answer = "yes" if machine["available"] else "no: " + "; ".join(machine["reasons"])
        chosen = " (what --machine auto takes)" if name == report["auto"] else ""
        text.append(f"{name:12} {answer}{chosen}")
    return "\n".join(text)


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / (1 << 30):.1f} GiB"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _examine_torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries does not load
        return {"available": False, "version": _version("torch"), "error": str(error)}
    return {
        "available": True,
        "version": str(torch.__version__),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }


def _examine_extension() -> dict[str, Any]:
    try:
        importlib.import_module(EXTENSION)
    except ImportError as error:
        text = f"not usable: {error}; install megavm with pip, which compiles it"
        return {"available": False, "reason": "the compiled extension is missing", "error": text}
    # Without torch, which has a line of its own, nothing runs.
    with contextlib.suppress(ImportError, OSError):
        from megavm.vm.cpu.machine import check_declarations

        try:
            check_declarations()
        except ValueError as error:
            reason = "the compiled extension is of other declarations"
            return {"available": False, "reason": reason, "error": f"not usable: {error}"}
    return {"available": True}


def cpu_name() -> str:
    """The processor's name as the operating system reports it."""
    name: str = _examine_cpu()["model"]
    return name


def _examine_cpu() -> dict[str, Any]:
    """Model name, cores usable by this process, logical CPUs (all and usable) and flags."""
    fields: dict[str, str] = {}
    for line in _read_lines("/proc/cpuinfo"):
        name, _, value = (part.strip() for part in line.partition(":"))
        fields.setdefault(name, value)
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    logical = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    return {
        "model": fields.get("model name") or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": physical_cores(),
        "logical": logical,
        "usable": usable,
        "flags": [flag for flag in _ISA_FLAGS if flag in flags],
    }


def _examine_memory() -> dict[str, int | None]:
    """Total and available bytes; a control group's limit counts if it is lower."""
    fields = {}
    for line in _read_lines("/proc/meminfo"):
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            fields[words[0]] = int(words[1]) * 1024
    total, available = fields.get("MemTotal"), fields.get("MemAvailable")
    limit = _read_number("/sys/fs/cgroup/memory.max")
    if limit is not None and total is not None and limit < total:
        used = _read_number("/sys/fs/cgroup/memory.current") or 0
        total, available = limit, min(available or limit, max(limit - used, 0))
    return {"total": total, "available": available}


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _read_number(path: str) -> int | None:
    words = " ".join(_read_lines(path)).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _examine_gpu() -> dict[str, Any]:
    """The NVIDIA driver and its devices, from libcuda.so.1, else from nvidia-smi."""
    report = _ask_libcuda()
    if report["driver"] is None:
        report = _ask_nvidia_smi() or report
    return {**report, "cuda_core": _version("cuda-core"), "nvrtc": _find_nvrtc()}


def _find_nvrtc() -> str | None:
    """The version of the installed package of NVIDIA's run-time compiler, or None."""
    names = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu13", "nvidia-cuda-nvrtc-cu12")
    return next((version for name in names if (version := _version(name))), None)


class _DriverError(Exception):
    """A call of libcuda failed; the message names the call and the error code."""


class _Libcuda:
    """The few calls of the CUDA driver API that describe a device."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise _DriverError(f"{name} failed with CUDA error {code}")

    def integer(self, name: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        self.call(name, ctypes.byref(value), *arguments)
        return value.value

    def device(self, index: int) -> dict[str, Any]:
        handle = self.integer("cuDeviceGet", index)
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, len(name), handle)
        memory = ctypes.c_size_t()
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        major, minor, sms = (
            self.integer("cuDeviceGetAttribute", attribute, handle)
            for attribute in (
                _CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                _CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                _CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            )
        )
        return {
            "name": name.value.decode("utf-8", errors="replace"),
            "memory": memory.value,
            "compute_capability": f"{major}.{minor}",
            "sms": sms,
        }


def _ask_libcuda() -> dict[str, Any]:
    try:
        library = _Libcuda()
    except OSError:
        return {"driver": None, "devices": [], "error": "libcuda.so.1 is not on this machine"}
    try:
        library.call("cuInit", 0)
        version = library.integer("cuDriverGetVersion")
        count = library.integer("cuDeviceGetCount")
        devices = [library.device(index) for index in range(count)]
    except (_DriverError, AttributeError) as error:  # AttributeError: not NVIDIA's library
        return {"driver": None, "devices": [], "error": f"libcuda.so.1: {error}"}
    driver = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return {"driver": driver, "devices": devices, "error": None if devices else "no NVIDIA GPU"}


def _ask_nvidia_smi() -> dict[str, Any] | None:
    """The report from nvidia-smi, for when libcuda cannot be loaded; None if that fails too."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = "--query-gpu=name,memory.total,compute_cap,driver_version"
    try:
        done = subprocess.run(
            [program, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    devices = []
    driver = None
    for line in done.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4:
            memory = int(fields[1]) << 20 if fields[1].isdigit() else None
            driver = f"driver {fields[3]} (libcuda.so.1 is not on the library path)"
            devices.append(
                {
                    "name": fields[0],
                    "memory": memory,
                    "compute_capability": fields[2],
                    "sms": None,
                }
            )
    return {"driver": driver, "devices": devices, "error": None} if devices else None


def _examine_machines(
    torch: dict[str, Any], extension: dict[str, Any], gpu: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """For each machine whether it can execute programs here, and if not, why."""
    no_torch = [] if torch["available"] else ["torch cannot be imported"]
    no_extension = [] if extension["available"] else [extension["reason"]]
    reasons = {
        "reference": no_torch,
        "cpu": no_torch + no_extension,
        "cuda": no_torch + no_extension + _missing_for_cuda(torch, gpu),
    }
    return {
        name: {"available": not missing, "reasons": missing} for name, missing in reasons.items()
    }


def _missing_for_cuda(torch: dict[str, Any], gpu: dict[str, Any]) -> list[str]:
    missing = []
    if sys.platform != "linux":
        missing.append(f"{sys.platform} is not supported, Linux is")
    if not gpu["devices"]:
        missing.append(gpu["error"] or "no NVIDIA GPU")
    elif not any(
        _capability(device) == TARGETS["cuda"].compute_capability for device in gpu["devices"]
    ):
        names = ", ".join(device["name"] for device in gpu["devices"])
        wanted = ".".join(map(str, TARGETS["cuda"].compute_capability or ()))
        missing.append(f"{names} is not of compute capability {wanted} (Hopper)")
    if torch["available"] and torch["cuda"] is None:
        missing.append("torch was built without CUDA")
    if gpu["cuda_core"] is None:
        missing.append('cuda-core is not installed; pip install "megavm[cuda]" brings it')
    elif torch["available"] and not missing:
        from megavm.vm.cuda.machine import reason_unavailable

        missing += [reason for reason in (reason_unavailable(),) if reason is not None]
    return missing


def _capability(device: dict[str, Any]) -> tuple[int, int]:
    major, _, minor = device["compute_capability"].partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
