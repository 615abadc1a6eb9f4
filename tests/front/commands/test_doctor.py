"""`megavm doctor`: the machines, the GPUs and what is missing."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from command_line import Run

from megavm import doctor
from megavm.instructions.copy import Copy
from megavm.vm.cpu.machine import check_declarations


def test_doctor_says_what_runs_here_and_why_not(run: Run) -> None:
    report = json.loads(run("doctor", "--json").out)
    assert set(report["machines"]) == {"reference", "cpu", "cuda"}
    assert report["machines"]["reference"]["available"]
    for machine in report["machines"].values():
        assert machine["available"] == (machine["reasons"] == [])
    assert report["cpu"]["usable"] >= 1
    assert report["memory"]["total"] is None or report["memory"]["total"] > 1 << 28
    text = run("doctor").out
    assert re.search(r"^reference +yes", text, re.MULTILINE)
    assert "what --machine auto takes" in text


def test_doctor_works_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTENSION", "megavm.vm.nothing_such")
    monkeypatch.setattr(doctor, "_read_lines", lambda path: [])
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine()
    assert report["auto"] is None
    assert "torch cannot be imported" in report["machines"]["cpu"]["reasons"]
    assert "the compiled extension is missing" in report["machines"]["cpu"]["reasons"]
    assert "not usable" in doctor.format_report(report)


def test_doctor_says_that_declarations_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Copy, "fields", Copy.fields[:-1])
    check_declarations.cache_clear()
    report = doctor.examine()
    assert report["machines"]["cpu"]["reasons"] == [
        "the compiled extension is of other declarations"
    ]
    assert "not usable: instructions/copy/__init__.py has changed" in doctor.format_report(report)


def test_doctor_describes_the_gpus_that_libcuda_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """The driver API of a machine with one GPU, as ctypes would call it."""

        def cuInit(self, flags: int) -> int:
            return 0

        def cuDriverGetVersion(self, out: Any) -> int:
            out._obj.value = 13000
            return 0

        def cuDeviceGetCount(self, out: Any) -> int:
            out._obj.value = 1
            return 0

        def cuDeviceGet(self, out: Any, index: int) -> int:
            out._obj.value = index
            return 0

        def cuDeviceGetName(self, out: Any, size: int, device: int) -> int:
            out.value = b"NVIDIA H200"
            return 0

        def cuDeviceTotalMem_v2(self, out: Any, device: int) -> int:
            out._obj.value = 140 << 30
            return 0

        def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
            out._obj.value = {75: 9, 76: 0, 16: 132}[attribute]
            return 0

    monkeypatch.setattr("shutil.which", lambda name: None)  # no nvidia-smi, even where there is one
    monkeypatch.setattr("ctypes.CDLL", lambda name: Library())
    report = doctor.examine()
    assert report["gpu"]["driver"] == "CUDA 13.0"
    assert report["gpu"]["devices"] == [
        {"name": "NVIDIA H200", "memory": 140 << 30, "compute_capability": "9.0", "sms": 132}
    ]
    assert "NVIDIA H200, 140.0 GiB" in doctor.format_report(report)
    monkeypatch.setattr(Library, "cuInit", lambda self, flags: 100)
    assert "cuInit failed with CUDA error 100" in doctor.examine()["gpu"]["error"]
