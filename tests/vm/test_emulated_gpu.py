"""Instructions on an emulated GPU, and what the emulation refuses.

``pytest --emulate-gpu`` runs all tests of the GPU there, which takes long.
"""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from against_reference import (
    check_behind_copies,
    check_example,
    check_missing_mask,
    emulated_examples,
    examples_of,
    name_of,
)
from changed_sources import changed_sources
from faults_of_lanes import CASES, Case, check_fault_of_lanes

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.instructions.gate_up import GateUp
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.compiler import ROOT
from megavm.vm.cuda.emulated import FLAGS, EmulatedMachine, reason_unavailable
from megavm.vm.example import Example
from megavm.vm.isa import Instruction
from megavm.vm.machine import Machine, MachineFault
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.reference import ReferenceMachine
from megavm.vm.tensors import BF16, F32

pytestmark = pytest.mark.skipif(reason_unavailable() is not None, reason="no C++ compiler")

LIBRARY = Path(__file__).parent / "support" / "emulation.cpp"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = tmp_path_factory.mktemp("emulation") / "emulation.so"
    include = [f"-I{ROOT / 'cuda' / 'emulated'}", f"-I{ROOT}"]
    subprocess.run(["c++", *FLAGS, *include, str(LIBRARY), "-o", str(made)], check=True)
    loaded = ctypes.CDLL(str(made))
    for name in (
        "diverging_lanes",
        "different_operands",
        "different_waits",
        "second_barrier",
        "misaligned_load",
        "load_beyond_shared_memory",
        "elements_of_one_word",
        "one_arrival_too_many",
        "early_read",
        "multiply_fragments",
        "multiply_warpgroup",
    ):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "diverging_lanes",
            "lane 5: this lane is at __syncwarp, another one of its warp at __ballot_sync",
        ),
        ("different_operands", "the warps of a warpgroup multiply different operands"),
        ("different_waits", "the warps of a warpgroup wait at different places"),
        ("second_barrier", "__syncthreads waits for all warps of a worker, which do different"),
        ("misaligned_load", "address 8 of shared memory is no multiple of 16"),
        ("load_beyond_shared_memory", "shared memory has no 4 bytes at 65536"),
        ("one_arrival_too_many", "the semaphore at 0 counts 8 arrivals, this is one more"),
    ],
)
def test_what_a_gpu_does_not_allow_is_refused(library: Any, name: str, text: str) -> None:
    assert text in getattr(library, name)().decode()


def test_two_lanes_that_store_into_one_tagged_word_are_refused(library: Any) -> None:
    found = {}
    for in_turn in (False, True):
        word = ctypes.c_uint64(0)
        problem = library.elements_of_one_word(ctypes.byref(word), ctypes.c_bool(in_turn))
        found[in_turn] = problem.decode(), word.value & 0xFFFFFFFF
    assert found[True] == ("", 3 << 8)
    sentence = "lane 9: lane 8 stores the other element of a tagged word at the same time: one of"
    assert sentence in found[False][0]


def test_a_copy_is_garbage_until_it_has_arrived(library: Any) -> None:
    words = np.zeros(64, np.uint32)
    aligned = words[(-words.ctypes.data // 4) % 4 :]
    aligned[:4] = 17
    early, late = ctypes.c_uint32(0), ctypes.c_uint32(0)
    problem = library.early_read(
        ctypes.c_void_p(aligned.ctypes.data), ctypes.byref(early), ctypes.byref(late)
    )
    assert problem == b""
    assert (early.value, late.value) == (0xFFFFFFFF, 17)


class _Matrices(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in "abd"]


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("multiply_fragments", 16, 8), ("multiply_warpgroup", 64, 16)]
)
def test_matrix_instructions_multiply(library: Any, name: str, rows: int, columns: int) -> None:
    rng = np.random.default_rng(rows)
    a, b = (rng.integers(-9, 9, (n, 16)).astype(np.float32) for n in (rows, columns))
    d = np.full((rows, columns), np.nan, np.float32)
    matrices = _Matrices(*(m.ctypes.data for m in (a, b, d)))
    assert getattr(library, name)(ctypes.byref(matrices)) == b""
    assert np.array_equal(d, a @ b.T)


@pytest.fixture(scope="module")
def emulated() -> EmulatedMachine:
    return EmulatedMachine(seed=3)


@pytest.mark.parametrize("example", list(emulated_examples()), ids=name_of)
def test_instructions_mean_what_the_reference_says(
    emulated: EmulatedMachine, example: Example
) -> None:
    check_behind_copies(emulated, example)


def test_a_kernel_that_reads_before_its_inputs_are_ready_is_found(tmp_path: Path) -> None:
    file = "instructions/rms_norm/cuda.cuh"
    root = changed_sources(tmp_path, file, "    consumer.wait_ready();\n", "")
    example = next(e for e in examples_of(RmsNorm) if not any(t.tagged for t in e.tensors))
    check_example(EmulatedMachine(root=root), example, alone=False)

    def run_often() -> None:
        for seed in range(50):  # few are enough where nothing else runs
            check_behind_copies(EmulatedMachine(root=root, seed=seed), example)

    with pytest.raises(AssertionError, match="elements of out differ"):
        run_often()


def test_a_page_that_nobody_finishes_is_found(tmp_path: Path) -> None:
    file = "instructions/attention/fast.cuh"
    root = changed_sources(tmp_path, file, "        consumer.finish_pages(count);\n", "")
    fast = [e for e in examples_of(Attention) if e.name.startswith("fast")]
    # Of few pages: with more than there are, the loader waits for one, and says so after a minute.
    example = min(fast, key=lambda e: e.instruction.bytes(e.tensors))
    with pytest.raises(MachineFault, match=r"has filled page \d+ and the consumers have not"):
        check_example(EmulatedMachine(root=root), example, alone=False)


@pytest.mark.parametrize(
    ("kind", "text", "other", "beyond"),
    [
        (
            Copy,
            "read_element(x, source[0], from + j,",
            "read_element(x, x.rows, j,",
            "x of 960 bytes",
        ),
        (
            Copy,
            "write(out, row[0], column, begin, end,",
            "write(out, out.rows, 0, 0, 2,",
            "out of 640 bytes",
        ),
        (
            Attention,
            "loader.copy(in_page * kRowBytes, base_of(keys) + from, bytes)",
            "loader.copy(in_page * kRowBytes, base_of(keys) + keys.rows * keys.columns * 2 - 16, bytes)",
            "k_cache of ",
        ),
    ],
    ids=["load", "store", "copy"],
)
def test_accesses_beyond_a_tensor_are_refused(
    kind: type[Instruction], text: str, other: str, beyond: str, tmp_path: Path
) -> None:
    # NOTE: right behind it, where the host's memory has a gap.
    file = "fast.cuh" if kind is Attention else "cuda.cuh"
    root = changed_sources(tmp_path, f"instructions/{kind.name()}/{file}", text, other)
    example = next(e for e in examples_of(kind) if e.name.startswith(("fast", "f32 to f32")))
    with pytest.raises(MachineFault, match=rf"ends \d+ bytes beyond tensor {beyond}"):
        check_example(EmulatedMachine(root=root), example, alone=False)


@pytest.mark.parametrize("kind", [EmulatedMachine, CpuMachine, ReferenceMachine])
def test_a_choice_whose_mask_does_not_come_says_so(kind: type[Machine]) -> None:
    machine = EmulatedMachine(timeout=0.5) if kind is EmulatedMachine else kind()
    check_missing_mask(machine)


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.instruction in (Copy, Attention, AdjustLogits)], ids=str
)
def test_what_some_lanes_find_is_told_of_their_instruction(case: Case) -> None:
    check_fault_of_lanes(EmulatedMachine(timeout=3.0, seed=3), case)


def test_results_of_one_program_are_of_two_kinds(emulated: EmulatedMachine) -> None:
    """bfloat16 and float32, of the same product: its epilogue tells them apart."""
    example = next(e for e in examples_of(GateUp) if e.name == "quads")
    operands = {f.name: getattr(example.instruction, f.name) for f in GateUp.fields}
    out = example.tensors[operands["out"]]
    tensors = [*example.tensors, replace(out, name="wide", dtype=F32)]
    wide = GateUp(**operands | {"out": len(tensors) - 1})
    program = Program.build(tensors, [example.instruction, wide], [[0, 1]])
    both = replace(example, tensors=tensors)
    memories = both.memory(), both.memory(device=emulated.memory_device)
    reference = ReferenceMachine().load(program, memories[0], verify=False)
    reference.execute_one(0)
    reference.execute_one(1)
    emulated.load(program, memories[1], verify=False).run()
    for name in (out.name, "wide"):
        expected, found = (memory[name].float().cpu() for memory in memories)
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2e-3)
    assert memories[1]["wide"].abs().max() > 0


def test_a_tensor_that_a_gpu_cannot_load_is_refused(emulated: EmulatedMachine) -> None:
    """It was bound, and begins two bytes after a multiple of 16."""
    example = next(e for e in examples_of(GateUp) if e.name == "quads")
    memory = example.memory(device=emulated.memory_device)
    spec = next(t for t in example.tensors if t.dtype is BF16 and not t.tagged)
    odd = torch.zeros(memory[spec.name].numel() + 1, dtype=torch.bfloat16)[1:]
    bound = Memory(emulated.memory_device)
    bound.bind(spec, odd.reshape(memory[spec.name].shape))
    bound.allocate(example.tensors)
    program = Program.build(example.tensors, [example.instruction], [[0]])
    with pytest.raises(ValueError, match=f"tensor {spec.name} begins at .* a multiple of that"):
        emulated.load(program, bound, verify=False)
