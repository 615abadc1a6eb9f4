"""The machine code of a kernel, disassembled by nvdisasm."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from importlib.metadata import PackageNotFoundError, files
from typing import NamedTuple

_PLACE = re.compile(r'\s*//## File "([^"]+)", line (\d+)')
_LABEL = re.compile(r"\s*(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_x_\d+)\)")


class MachineInstruction(NamedTuple):
    """An instruction: where it is in the kernel, in bytes, and the source lines it is from.

    ``places``: (file, line), that of the innermost function first. Empty without line numbers.
    """

    offset: int
    text: str
    places: tuple[tuple[str, int], ...]


class MachineCode(NamedTuple):
    """A kernel's instructions, and the number of the one behind each label."""

    instructions: list[MachineInstruction]
    labels: dict[str, int]


class Loop(NamedTuple):
    """An innermost loop that multiplies matrices: how many instructions of each kind it has."""

    multiplications: int  # wgmma
    waits: int  # for wgmma
    reloads: int  # loads of registers that were spilled
    spills: int  # stores of registers
    beside: int  # exponentials behind a wait that leaves products in flight, before the next wait


def disassembler() -> str | None:
    """The path of nvdisasm: from the package nvidia-cuda-nvdisasm or the CUDA toolkit; or None."""
    try:
        for file in files("nvidia-cuda-nvdisasm") or ():
            if file.name == "nvdisasm":
                return str(file.locate())
    except PackageNotFoundError:
        pass
    return shutil.which("nvdisasm")


def disassemble(cubin: bytes) -> MachineCode:
    """The code of the only kernel of a cubin. Raises RuntimeError when there is no nvdisasm."""
    nvdisasm = disassembler()
    if nvdisasm is None:
        raise RuntimeError("nvdisasm is not installed: it is in the package nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [nvdisasm, "-gi", "-c", file.name]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = MachineCode([], {})
    places: list[tuple[str, int]] = []
    begins = True  # whether the next place is that of another instruction
    for line in listing.splitlines():
        if place := _PLACE.match(line):
            if begins:
                places = []
            places.append((place[1], int(place[2])))
            begins = False
        elif label := _LABEL.match(line):
            code.labels[label[1]] = len(code.instructions)
        elif found := _INSTRUCTION.match(line):
            code.instructions.append(
                MachineInstruction(int(found[1], 16), found[2].strip(), tuple(places))
            )
            begins = True
    return code


def matrix_loops(code: MachineCode) -> list[Loop]:
    """The innermost loops that contain wgmma, in the order of the code."""
    texts = [instruction.text for instruction in code.instructions]
    loops = []
    for end, text in enumerate(texts):
        branch = _BRANCH.search(text)
        if branch and code.labels.get(branch[1], end + 1) <= end:
            loops.append((code.labels[branch[1]], end + 1))
    around = {
        min((loop for loop in loops if loop[0] <= i < loop[1]), key=lambda loop: loop[1] - loop[0])
        for i, text in enumerate(texts)
        if "HGMMA" in text and any(begin <= i < end for begin, end in loops)
    }
    names = "HGMMA", "WARPGROUP.DEPBAR", "LDL", "STL"
    bodies = [texts[begin:end] for begin, end in sorted(around)]
    return [
        Loop._make(
            [*(sum(name in text for text in body) for name in names), _exponentials_beside(body)]
        )
        for body in bodies
    ]


def _exponentials_beside(texts: list[str]) -> int:
    in_flight, count = False, 0
    for text in texts:
        if "WARPGROUP.DEPBAR" in text:
            in_flight = not text.endswith("0x0")
        count += in_flight and "MUFU.EX2" in text
    return count
