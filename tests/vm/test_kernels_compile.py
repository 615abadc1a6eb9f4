"""The device code compiles for every value of every constant that specialises kernels."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest
from against_reference import behind_copies, emulated_examples, examples_of, name_of

from megavm.instructions import instruction_set
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.run.kernels import kernel_headers
from megavm.vm.config import MAX_GROUP_ROWS
from megavm.vm.cuda.compiler import ROOT, generated_headers
from megavm.vm.cuda.emulated import ENTRY, FLAGS, reason_unavailable
from megavm.vm.specialisation import program_header
from megavm.vm.tensors import BF16

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason="no C++ compiler")

# Sizes of memory, which have many values and choose no code.
SIZES = {"kMaxK", "kMaxScratch", "kPages", "kPanelBytes", "kPartialFloats", "kScratchBytes"}


def values_of(header: str) -> set[tuple[str, str]]:
    """The constants of a header that choose code, and their values."""
    values = re.findall(r"constexpr [\w ]+ (k\w+) = (.*);", header)
    return {(name, value) for name, value in values if name not in SIZES}


@functools.cache
def kernels() -> dict[str, str]:
    """Headers of kernels of single examples, which together have every value of every constant.

    But for values of kernels that test_emulated_gpu.py runs.
    """
    constants: dict[str, set[tuple[str, str]]] = {}
    names = {}
    for cls in instruction_set().values():
        for example in examples_of(cls):
            header = program_header(example.program())
            constants[header] = values_of(header)
            names[header] = name_of(example)
    chosen = {}
    left = set[tuple[str, str]]().union(*constants.values())
    for example in emulated_examples():
        left -= values_of(program_header(behind_copies(example)[0]))
    while left:
        header = max(constants, key=lambda header: len(constants[header] & left))
        chosen[names[header]] = header
        left -= constants[header]
    return chosen


def accept(header: str, folder: Path) -> None:
    """Let the front end of the host's compiler check a kernel, its static assertions too."""
    for file, text in generated_headers(header).items():
        (folder / file).write_text(text, encoding="utf-8")
    include = [f"-I{path}" for path in (folder, ROOT / "cuda" / "emulated", ROOT)]
    command = ["c++", *FLAGS, *include, "-fsyntax-only", str(ROOT / ENTRY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("header", kernels().values(), ids=kernels())
def test_the_compiler_accepts_a_kernel(header: str, tmp_path: Path) -> None:
    accept(header, tmp_path)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(8, 4, 8), (6, 2, 80)])
def test_the_compiler_accepts_kernels_of_models_with_other_heads(
    heads: int, kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    """Values of several constants that no example has together: heads for which no kernel is fast
    beside prompts of many rows."""
    config = LlamaConfig(192, 64, 112, 2, heads, kv_heads, head_dim)
    checked = 0
    for header, rows in kernel_headers(config, BF16).items():
        if min(rows) > MAX_GROUP_ROWS:
            accept(header, tmp_path)
            checked += 1
    assert checked > 2
