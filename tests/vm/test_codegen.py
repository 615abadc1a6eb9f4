"""The generated C++ view of the instruction set."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megavm.instructions import instruction_set
from megavm.vm import codegen, config
from megavm.vm.isa import FieldKind

ROOT = Path(codegen.__file__).resolve().parents[1]
CLASSES = list(instruction_set().values())
HEADER = codegen.isa_header(CLASSES)


def test_every_instruction_and_field_is_there() -> None:
    for cls in CLASSES:
        assert f"struct alignas(kInstructionBytes) {cls.__name__} {{" in HEADER
        for field in cls.fields:
            kind = "float" if field.kind is FieldKind.REAL else "unsigned int"
            assert f"  {kind} {field.name};  // {field.doc}" in HEADER


def test_constants_are_those_of_the_configuration() -> None:
    assert f"constexpr unsigned int kPageBytes = {config.PAGE_BYTES}u;" in HEADER
    assert f"constexpr unsigned int kNone = {config.NONE}u;" in HEADER
    assert "constexpr unsigned int kSplitColumns" in HEADER
    assert "enum Real : unsigned int { kTemperature = 0," in HEADER


def test_kernel_table_lists_kernels_by_opcode() -> None:
    table = codegen.kernel_table(CLASSES)
    entries = table[table.index("kKernels[kNumOpcodes] = {") :].splitlines()[1:]
    for cls in CLASSES:
        assert entries[cls.opcode].strip() == f"run_kernel<{cls.__name__}>,"
        assert f'#include "instructions/{cls.name()}/cpu.hpp"' in table


def test_the_script_needs_nothing_but_python(tmp_path: Path) -> None:
    """The build's Python may have neither torch nor numpy nor megavm."""
    script = [sys.executable, "-I", "-S", str(ROOT / "vm" / "codegen.py"), str(tmp_path)]
    subprocess.run(script, check=True)
    assert (tmp_path / "isa.hpp").read_text() == HEADER
    time = (tmp_path / "isa.hpp").stat().st_mtime_ns
    subprocess.run(script, check=True)
    assert (tmp_path / "isa.hpp").stat().st_mtime_ns == time, "unchanged files are left alone"


def test_the_header_is_plain_cpp_with_the_layout_of_the_encoding(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "isa.hpp").write_text(HEADER)
    assert "#include" not in HEADER, "device code includes it too"
    (tmp_path / "check.cpp").write_text(
        "\n".join(
            ['#include "isa.hpp"']
            + [f"static_assert(megavm::{c.__name__}::kOpcode == {c.opcode});" for c in CLASSES]
        )
    )
    options = [
        "-std=c++17",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fsyntax-only",
        "-Wno-invalid-offsetof",
    ]
    subprocess.run([compiler, *options, str(tmp_path / "check.cpp")], check=True)
