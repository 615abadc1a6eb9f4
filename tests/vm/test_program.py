"""Programs: building, printing, fingerprints, saving and loading, files that are not programs."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megavm.instructions.copy import Copy
from megavm.instructions.noop import Noop
from megavm.vm.config import NONE
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program, with_header
from megavm.vm.tensors import BF16, F32, Part, TensorKind, TensorSpec

TENSORS = (
    TensorSpec("source", (2, 8), F32, TensorKind.STATE),
    TensorSpec("between", (2, 8), BF16, TensorKind.ACTIVATION, tagged=True),
    TensorSpec("result", (2, 8), F32, TensorKind.ACTIVATION),
    TensorSpec(
        "joined", (8, 4), F32, TensorKind.WEIGHT, parts=(Part("upper", 6), Part("lower", 2))
    ),
)


def copy(x: int, out: int, waits: list[Wait], signal: int | None) -> Copy:
    return Copy(
        x=x,
        out=out,
        x_row=0,
        x_column=0,
        row_begin=0,
        row_end=2,
        column_begin=0,
        column_end=8,
        waits=waits,
        signal=signal,
    )


INSTRUCTIONS: list[Instruction] = [
    copy(0, 1, [Wait(1, 0)], None),
    copy(1, 2, [], 0),
    Noop(waits=[Wait(0, 1)], signal=1),
]


@pytest.fixture
def program() -> Program:
    return Program.build(
        TENSORS,
        INSTRUCTIONS,
        [[0], [1, 2]],
        barriers=["copied", "joined"],
        labels=["first", "second", ""],
        metadata={"model": "none", "bucket": [1, 2]},
    )


def same(a: Program, b: Program) -> bool:
    return (
        a.tensors == b.tensors
        and np.array_equal(a.words, b.words)
        and len(a.queues) == len(b.queues)
        and all(map(np.array_equal, a.queues, b.queues))
        and (a.dynamic, a.workers, a.barriers, a.labels)
        == (b.dynamic, b.workers, b.barriers, b.labels)
        and dict(a.metadata) == dict(b.metadata)
    )


def test_a_program_gives_back_what_it_was_built_from(program: Program) -> None:
    assert list(program.instructions) == INSTRUCTIONS
    assert len(program) == 3
    assert program.workers == 2
    assert program.worker_of().tolist() == [0, 1, 1]
    assert program.signals.tolist() == [1, 1]
    assert str(program) == (
        "program of 3 instructions, 2 barriers, 4 tensors, static queues for 2 workers"
    )


def test_the_disassembly_goes_queue_by_queue(program: Program) -> None:
    assert list(program.disassemble()) == [
        "worker 0:",
        "       0  copy x=source out=between x_row=0 x_column=0 row_begin=0 row_end=2 column_begin=0 "
        "column_end=8 wait(b1 >= 0)  ; first",
        "worker 1:",
        "       1  copy x=between out=result x_row=0 x_column=0 row_begin=0 row_end=2 column_begin=0 "
        "column_end=8 signal(b0)  ; second",
        "       2  noop wait(b0 >= 1) signal(b1)",
    ]
    dynamic = Program.build(TENSORS, INSTRUCTIONS, [[0, 1, 2]], dynamic=True, workers=5)
    assert next(iter(dynamic.disassemble())) == "queue (dynamic):"
    assert str(dynamic).endswith("dynamic queues for 5 workers")


def test_an_instruction_in_no_queue_has_no_worker() -> None:
    program = Program.build(TENSORS, INSTRUCTIONS, [[2], [0]])
    assert program.worker_of().tolist() == [1, -1, 0]


def test_a_signal_of_a_barrier_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="barrier 1 is signalled, the program has 1"):
        _ = Program.build(TENSORS, INSTRUCTIONS, [[0, 1, 2]], barriers=["one"]).signals


def test_an_unknown_opcode_is_an_error(program: Program) -> None:
    words = program.words.copy()
    words[1, 0] = 12345
    with pytest.raises(ValueError, match="opcode 12345 is unknown"):
        _ = replace(program, words=words).instructions


def test_with_header_replaces_waits_and_signal_only(program: Program) -> None:
    words = with_header(program.words[0], [(4, 5), (6, 7)], 8)
    assert words[:8].tolist() == [Copy.opcode, 8, 4, 5, 6, 7, NONE, 0]
    assert np.array_equal(words[8:], program.words[0, 8:])
    changed = INSTRUCTIONS[0].with_sync([Wait(4, 5), Wait(6, 7)], 8)
    assert words.astype("<u4").tobytes() == changed.encode()
    assert with_header(words, [(1, 0)], None).astype("<u4").tobytes() == INSTRUCTIONS[0].encode()


# Fingerprints.


def test_the_fingerprint_is_stable(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "p.npz")
    assert Program.load(tmp_path / "p.npz").fingerprint() == program.fingerprint()
    assert replace(program, metadata={}, labels=("",) * 3).fingerprint() == program.fingerprint()
    assert len(program.fingerprint()) == 64


def test_the_fingerprint_sees_everything_that_is_executed(program: Program) -> None:
    words = program.words.copy()
    words[2, 31] = 1
    tensors = (*TENSORS[:2], replace(TENSORS[2], dtype=BF16))
    a, b = program.queues
    others = [
        replace(program, words=words),
        replace(program, tensors=tensors),
        replace(program, tensors=(*TENSORS[:1], replace(TENSORS[1], tagged=False), TENSORS[2])),
        replace(program, queues=(b, a)),
        replace(program, queues=(np.concatenate([a, b]),)),
        replace(program, queues=(a, b[:1], b[1:])),
        replace(program, dynamic=True),
        replace(program, workers=3),
        replace(program, barriers=("copied", "other")),
        replace(program, fixed_order=True),
        program,
    ]
    assert len({p.fingerprint() for p in others}) == len(others)


# Files.


def test_a_saved_program_loads_equal(program: Program, tmp_path: Path) -> None:
    program.save(tmp_path / "p.npz")
    assert same(program, Program.load(tmp_path / "p.npz"))


@pytest.mark.parametrize("queues", [[], [[]], [[], []]])
def test_programs_without_instructions_or_queues_can_be_saved(
    queues: list[list[int]], tmp_path: Path
) -> None:
    empty = Program.build((), (), queues)
    empty.save(tmp_path / "p.npz")
    assert same(empty, Program.load(tmp_path / "p.npz"))


def test_a_missing_file_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Program.load(tmp_path / "nothing.npz")


def refused(path: Path) -> str:
    with pytest.raises(ValueError, match="is not a megavm program: ") as error:
        Program.load(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04", b"\x93NUMPY\x01\x00"])
def test_a_file_that_is_no_archive_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    path.write_bytes(content)
    refused(path)


def test_an_array_file_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "p.npy", np.zeros(3))
    refused(tmp_path / "p.npy")


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, header=np.array([{"format": 1}], dtype=object))
    assert "allow_pickle" in refused(path)


def test_every_truncation_is_refused(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    program.save(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        refused(path)


def test_a_damaged_file_is_refused_or_loads_the_same(program: Program, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    program.save(path)
    content = path.read_bytes()
    rng = random.Random(0)
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 2, 8))):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            loaded = Program.load(path)
        except ValueError:
            refused(path)
        else:
            assert same(loaded, program)  # archive members are protected by checksums


def write(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> Path:
    """A program file whose header and arrays ``change`` has changed."""
    program = Program.build(TENSORS, INSTRUCTIONS, [[0], [1, 2]], barriers=["a", "b"])
    program.save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    header = json.loads(arrays["header"].tobytes())
    change(header, arrays)
    if "header" in arrays:
        arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    with open(path, "wb") as out:
        np.savez(out, **arrays)
    return path


HOSTILE: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
    (lambda h, a: h.update(format=1), "format 1, this version reads 6"),
    (lambda h, a: h.pop("format"), "format"),
    (lambda h, a: h.update(workers="8"), "workers is '8', not int"),
    (lambda h, a: h.update(workers=True), "workers is True, not int"),
    (lambda h, a: h.update(dynamic="no"), "dynamic is 'no', not bool"),
    (lambda h, a: h.update(barriers="ab"), "barriers is 'ab', not list"),
    (lambda h, a: h.update(barriers=[1]), "barriers are not all strings"),
    (lambda h, a: h.update(labels=[1, 2, 3]), "labels are not all strings"),
    (lambda h, a: h.update(labels=["x"]), "1 labels for 3 instructions"),
    (lambda h, a: h.update(metadata=[]), "metadata is [], not dict"),
    (lambda h, a: h.update(tensors=7), "tensors is 7, not list"),
    (lambda h, a: h["tensors"][0].pop(), "not enough values"),
    (lambda h, a: h["tensors"][0].__setitem__(0, 5), "tensor 5 has no name"),
    (lambda h, a: h["tensors"][0].__setitem__(1, [2, 1.5]), "tensor source has shape [2, 1.5]"),
    (lambda h, a: h["tensors"][0].__setitem__(1, [0]), "every size must be a positive integer"),
    (lambda h, a: h["tensors"][0].__setitem__(1, "22"), "tensor source has shape '22'"),
    (lambda h, a: h["tensors"][0].__setitem__(2, "F8"), "F8"),
    (lambda h, a: h["tensors"][0].__setitem__(3, "register"), "register"),
    (lambda h, a: h["tensors"][0].__setitem__(4, 1), "is tagged 1"),
    (lambda h, a: h["tensors"][3].__setitem__(5, [["upper", True]]), "part ['upper', True]"),
    (lambda h, a: h["tensors"][3].__setitem__(5, [["upper", 9]]), "8 rows, its parts have 9"),
    (lambda h, a: h["tensors"][0].__setitem__(5, [["x", 2]]), "has parts but is state"),
    (lambda h, a: h["tensors"][0].__setitem__(5, 7), "not iterable"),
    (lambda h, a: a.pop("words"), "words"),
    (lambda h, a: a.pop("header"), "header"),
    (lambda h, a: a.update(words=a["words"][:, :31]), "instruction words of shape (3, 31)"),
    (lambda h, a: a.update(words=a["words"].astype(np.int64)), "and int64"),
    (lambda h, a: a.update(words=np.uint32(1)), "instruction words of shape ()"),
    (lambda h, a: a.update(queue_lengths=np.array([1, 1])), "do not add up"),
    (lambda h, a: a.update(queue_lengths=np.array([-1, 4])), "do not add up"),
    (
        lambda h, a: a.update(queue_lengths=np.array([1.0, 2.0])),
        "queue lengths of shape (2,) and float64",
    ),
    (lambda h, a: a.update(queue_lengths=np.array(3)), "queue lengths of shape ()"),
    (
        lambda h, a: a.update(queue_entries=np.zeros((3, 1), np.int32)),
        "queue entries of shape (3, 1)",
    ),
    (
        lambda h, a: a.update(queue_entries=np.array(["a", "b", "c"])),
        "queue entries of shape (3,) and <U1",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), HOSTILE, ids=[s for _, s in HOSTILE])
def test_a_file_with_a_wrong_part_is_refused(
    change: Callable[[dict[str, Any], dict[str, Any]], None], sentence: str, tmp_path: Path
) -> None:
    assert sentence in refused(write(tmp_path / "p.npz", change))


def test_a_header_that_is_not_an_object_is_refused(tmp_path: Path) -> None:
    for text in (b"[]", b"7", b"null", b"{", b"\xff\xfe", b"[" * 100_000):
        path = write(tmp_path / "p.npz", lambda h, a: None)
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        arrays["header"] = np.frombuffer(text, np.uint8)
        with open(path, "wb") as out:
            np.savez(out, **arrays)
        refused(path)
