"""The generated C++ view of the instruction set."""

from __future__ import annotations

import copy
import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megavm.instructions import instruction_set
from megavm.instructions.copy import Copy
from megavm.vm import _native, codegen, config
from megavm.vm.abi import U32, U64, Code, Member, Struct
from megavm.vm.cpu import machine as cpu_machine
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cpu.notes import NOTE
from megavm.vm.cuda import launch
from megavm.vm.cuda.faults import FAULT_RECORD, FaultKind, SemaphoreKind
from megavm.vm.events import Event
from megavm.vm.layout import Order
from megavm.vm.operands import Field, FieldKind

ROOT = Path(codegen.__file__).resolve().parents[1]
CPP = {".cpp", ".hpp", ".cu", ".cuh"}
CLASSES = list(instruction_set().values())
HEADER = codegen.isa_header(CLASSES)
LAUNCH_HEADER = codegen.launch_header()
FAULTS_HEADER = codegen.faults_header()
STRUCTS = (*launch.STRUCTS, FAULT_RECORD, NOTE)


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


def test_tensor_operands_are_a_mask_of_operand_words() -> None:
    for cls in CLASSES:
        mask = codegen.tensor_operands(cls)
        for i, field in enumerate(cls.fields):
            assert bool(mask >> i & 1) == (field.kind is FieldKind.TENSOR)
        assert f"static constexpr unsigned int kTensorOperands = {mask:#x}u;" in HEADER
    entries = HEADER[HEADER.index("kTensorMask[kNumOpcodes] = {") :].splitlines()[1:]
    for cls in CLASSES:
        assert entries[cls.opcode].strip() == f"{cls.__name__}::kTensorOperands,"


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
    assert (tmp_path / "declared.hpp").read_text() == codegen.declared_header(CLASSES)
    assert (tmp_path / "note.hpp").read_text() == codegen.note_header()
    time = (tmp_path / "isa.hpp").stat().st_mtime_ns
    subprocess.run(script, check=True)
    assert (tmp_path / "isa.hpp").stat().st_mtime_ns == time, "unchanged files are left alone"


def test_the_interpreter_refuses_declarations_that_it_was_not_compiled_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert codegen.digests(CLASSES) == _native.declared
    *others, last = Copy.fields
    assert last.kind is FieldKind.INTEGER

    def changed(name: str, value: object) -> Field[Any]:
        field = copy.copy(last)
        setattr(field, name, value)
        return field

    for fields in (
        [*Copy.fields, changed("name", "extra")],
        others,
        [*others[:-1], last, others[-1]],
        [*others, changed("name", "other")],
        [*others, changed("kind", FieldKind.REAL)],
    ):
        monkeypatch.setattr(Copy, "fields", fields)
        cpu_machine.check_declarations.cache_clear()
        with pytest.raises(ValueError, match=r"^instructions/copy/__init__.py has changed "):
            CpuMachine()
    # Words for people are no part of it.
    monkeypatch.setattr(Copy, "fields", [*others, changed("doc", "something else")])
    CpuMachine()
    cpu_machine.check_declarations.cache_clear()
    monkeypatch.setattr(Copy, "name", lambda: "renamed")
    with pytest.raises(ValueError, match=r"^instructions/copy/__init__.py has changed "):
        CpuMachine()
    monkeypatch.undo()
    monkeypatch.delattr(_native, "declared")
    with pytest.raises(ValueError, match=r"^vm/config.py has changed "):
        CpuMachine()


def check_cpp(folder: Path, headers: dict[str, str], facts: Iterable[str]) -> None:
    """Compile the headers, and assertions in C++ about them."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    for name, text in headers.items():
        (folder / name).write_text(text)
    includes = [f'#include "{name}"' for name in headers]
    asserted = [f"static_assert({fact});" for fact in facts]
    source = folder / "check.cpp"
    source.write_text("\n".join([*includes, "namespace megavm {", *asserted, "}", ""]))
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-invalid-offsetof"]
    options = ["-std=c++17", *warnings, "-fsyntax-only"]
    subprocess.run([compiler, *options, str(source)], check=True)


def test_the_header_is_plain_cpp_with_the_layout_of_the_encoding(tmp_path: Path) -> None:
    assert "#include" not in HEADER, "device code includes it too"
    opcodes = [f"{c.__name__}::kOpcode == {c.opcode}" for c in CLASSES]
    check_cpp(tmp_path, {"isa.hpp": HEADER}, opcodes)


def test_structs_lie_in_cpp_as_in_numpy_and_ctypes(tmp_path: Path) -> None:
    facts = []
    for struct in STRUCTS:
        dtype = struct.dtype()
        facts.append(f"sizeof({struct.name}) == {dtype.itemsize}")
        facts.append(f"alignof({struct.name}) == {struct.alignment}")
        for name in dtype.names or ():
            offset = dtype.fields[name][1] if dtype.fields else None
            facts.append(f"__builtin_offsetof({struct.name}, {name}) == {offset}")
    made = launch.LAUNCH.ctypes_class()
    fields = launch.LAUNCH.dtype().fields
    assert fields is not None
    assert ctypes.sizeof(made) == launch.LAUNCH.size == 168
    assert {name: getattr(made, name).offset for name in fields} == {
        name: field[1] for name, field in fields.items()
    }
    headers = {
        "isa.hpp": HEADER,
        "faults.hpp": FAULTS_HEADER,
        "launch.hpp": LAUNCH_HEADER,
        "note.hpp": codegen.note_header(),
    }
    check_cpp(tmp_path, headers, facts)


@pytest.mark.parametrize(
    ("enum", "name", "header"),
    [
        (FaultKind, "FaultKind", FAULTS_HEADER),
        (SemaphoreKind, "SemaphoreKind", FAULTS_HEADER),
        (Order, "Layout", LAUNCH_HEADER),
        (Event, "Event", LAUNCH_HEADER),
    ],
)
def test_every_code_is_in_the_enumeration(enum: type[Code], name: str, header: str) -> None:
    begin = header.index(f"enum class {name} : unsigned int {{")
    lines = header[begin : header.index("};", begin)].splitlines()[1:]
    assert [line.split(",")[0].strip() for line in lines] == [
        f"k{codegen.camel(code.name)} = {code.value}" for code in sorted(enum)
    ]
    for code in enum:
        assert code.doc in header


def test_events_have_the_first_columns_of_a_trace() -> None:
    assert sorted(Event) == list(range(launch.WORKER_COLUMN))
    assert f"kTraceColumns = {len(Event) + 1}u;" in LAUNCH_HEADER


def test_every_member_and_its_description_is_in_the_struct() -> None:
    text = LAUNCH_HEADER + FAULTS_HEADER + codegen.note_header()
    for struct in STRUCTS:
        begin = text.index(f" {struct.name} {{")
        lines = text[begin : text.index("};", begin)].splitlines()[1:]
        assert len(lines) == len(struct.members)
        for line, member in zip(lines, struct.members, strict=True):
            assert f" {member.name};" in line
            assert line.endswith(f"// {member.doc}" if member.doc else ";")


def test_every_generated_constant_is_read() -> None:
    """By C++ that people write; a constant of the same name that is defined there does not count."""
    folders = ("cuda", "instructions", "vm")
    paths = [p for f in folders for p in (ROOT / f).rglob("*") if p.suffix in CPP]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    text = re.sub(r"//.*", "", text)
    defined = set(re.findall(r"constexpr [\w ]*?\b(k\w+) =", text))
    generated = [line for line in (HEADER + LAUNCH_HEADER).splitlines() if not line.startswith(" ")]
    names = set(re.findall(r"constexpr unsigned int (k\w+)\b", "\n".join(generated)))
    read = {name for name in names - defined if re.search(rf"(?<!program::)\b{name}\b", text)}
    assert names - read == set()


def test_a_struct_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Pair\.second is at 4: C\+\+ leaves a hole"):
        Struct("Pair", "", (Member("first", U32), Member("second", U64)))


def test_an_unknown_parameter_of_a_launch_is_refused() -> None:
    with pytest.raises(AttributeError):
        launch.LAUNCH.ctypes_class()(steps=1, stpes=2)
