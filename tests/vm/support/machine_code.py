"""What ptxas made of a kernel's loops, from its disassembly by nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import NamedTuple

_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


class Loop(NamedTuple):
    """An innermost loop that multiplies matrices: how many instructions of each kind it has."""

    multiplications: int  # wgmma
    waits: int  # for wgmma
    reloads: int  # of spilled registers
    spills: int


def disassembler() -> str | None:
    """The path of nvdisasm: from the package nvidia-cuda-nvdisasm or the CUDA toolkit; None without it."""
    try:
        for file in files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return str(file.locate())
    except PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


def matrix_loops(cubin: bytes, nvdisasm: str, folder: Path) -> list[Loop]:
    """The innermost loops that contain wgmma, in the order of the code. ``folder``: for a file."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    listing = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True)
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in listing.stdout.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    loops = []
    for end, text in enumerate(code):
        branch = _BRANCH.search(text)
        if branch and labels.get(branch[1], end + 1) <= end:
            loops.append((labels[branch[1]], end + 1))
    around = {
        min((loop for loop in loops if loop[0] <= i < loop[1]), key=lambda loop: loop[1] - loop[0])
        for i, text in enumerate(code)
        if "HGMMA" in text and any(begin <= i < end for begin, end in loops)
    }

    names = "HGMMA", "WARPGROUP.DEPBAR", "LDL", "STL"
    return [
        Loop(*(sum(name in text for text in code[begin:end]) for name in names))
        for begin, end in sorted(around)
    ]
