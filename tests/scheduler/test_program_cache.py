"""Programs on disk: the same as compiled ones, and never those of other sizes or other code."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import megavm.instructions
import megavm.scheduler
import megavm.vm
from megavm import LLM, SamplingParams
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.run import buckets, model_programs, program_cache
from megavm.scheduler.run.kv_cache_size import default_bytes
from megavm.scheduler.run.program_cache import cache_path, cached
from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.tensors import F32

Compiled = list[object]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(program_cache.SWITCH, "1")
    return tmp_path / "programs"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """The buckets of programs that are compiled."""
    found: Compiled = []
    compile = buckets.compile_bucket

    def noted(*arguments: object) -> Program:
        found.append(arguments[3])
        return compile(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(model_programs, "compile_bucket", noted)
    return found


def program(number: int = 0) -> Program:
    return Program.build([], [], [[]], metadata={"number": number})


def count(compile: Callable[[], Program] = program) -> tuple[Callable[[], Program], list[int]]:
    calls: list[int] = []

    def counting() -> Program:
        calls.append(1)
        return compile()

    return counting, calls


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_read_is_what_was_compiled(compiled: Compiled, ranks: int) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)

    def run() -> tuple[Any, dict[Any, str]]:
        with LLM(
            "stories", machine="cpu", dtype="float32", workers=1, tensor_parallel_size=ranks
        ) as llm:
            answers = [o.outputs[0] for o in llm.generate(["Once upon", "The fox"], params)]
            programs = {
                bucket: llm.runner.programs.program(bucket).fingerprint()
                for bucket in llm.runner.programs.compiled
            }
            labels = [
                llm.runner.programs.program(bucket).labels
                for bucket in llm.runner.programs.compiled
            ]
            metadata = [
                dict(llm.runner.programs.program(bucket).metadata)
                for bucket in llm.runner.programs.compiled
            ]
            said = [(a.token_ids, a.logprobs, labels, metadata) for a in answers]
            return said, programs

    first = run()
    assert len(compiled) == len(first[1]) >= 2
    assert run() == first
    assert len(compiled) == len(first[1])


def test_what_the_verification_has_found_out_is_kept() -> None:
    """A program for a GPU is not verified once more when it is read."""
    cuda = CompileOptions(4, machine="cuda")
    sizes = Limits(2, 64, 16, 2, 8, 16)
    config = Checkpoint.open(resolve("stories")).config

    def compile() -> Program:
        return buckets.compile_bucket(config, sizes, F32, Bucket(2, 2, 64), lambda rows: cuda)

    first, again = (cached("facts", compile) for _ in range(2))
    assert first.__dict__["needs_queue_order"] is False
    assert again.__dict__["needs_queue_order"] is False
    assert again.fingerprint() == first.fingerprint()
    # On the CPU nobody has asked.
    assert "needs_queue_order" not in cached("other", program).__dict__
    assert "needs_queue_order" not in cached("other", program).__dict__


def test_other_sizes_are_other_programs(compiled: Compiled, folder: Path) -> None:
    for context in (100, 200, 100):
        with LLM("stories", machine="cpu", max_model_len=context, workers=1):
            pass
    assert len(compiled) == len(list(folder.iterdir())) == 2


def test_other_code_makes_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache_path("facts")
    assert before == cache_path("facts") != cache_path("others")
    monkeypatch.setattr(program_cache, "_code", lambda: "changed")
    assert cache_path("facts") != before


@pytest.mark.parametrize(
    ("package", "file"),
    [
        (megavm.vm, "verify/__init__.py"),
        (megavm.instructions, "matmul/lower.py"),
        (megavm.scheduler, "compiler/barriers.py"),
        (megavm.scheduler, "llama/graph.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_the_code_is_all_that_compiles_and_verifies(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: ModuleType, file: str
) -> None:
    """Of a copy of it, the hash is the same until a file changes."""
    code, copy = program_cache._code.__wrapped__, tmp_path / "copy"
    (folder,) = [path for path in package.__path__ if (Path(path) / file).is_file()]
    shutil.copytree(folder, copy, ignore=lambda _, names: [n for n in names if n == "ui"])
    before = code()
    moved = [str(copy) if path == folder else path for path in package.__path__]
    monkeypatch.setattr(package, "__path__", moved)
    assert code() == before
    (copy / file).write_text((copy / file).read_text() + "# changed\n")
    assert code() != before


def test_a_damaged_file_is_compiled_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    compile, calls = count()
    cached("facts", compile)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    for data in (b"", whole[:100], whole[:-30], b"x" * 2000):
        file.write_bytes(data)
        with caplog.at_level(logging.WARNING):
            assert cached("facts", compile).metadata == {"number": 0}
        assert "is damaged" in caplog.text
        assert file.read_bytes() == whole
        caplog.clear()
    assert len(calls) == 5
    cached("facts", compile)
    assert len(calls) == 5


def test_a_folder_that_cannot_be_written_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path / "file"))
    compile, calls = count()
    with caplog.at_level(logging.WARNING):
        assert cached("facts", compile).metadata == {"number": 0}
    assert "cannot be cached" in caplog.text
    assert len(calls) == 1


def test_it_can_be_turned_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(program_cache.SWITCH, "0")
    compile, calls = count()
    for _ in range(2):
        cached("facts", compile)
    assert len(calls) == 2
    assert not folder.exists()


def test_what_is_not_compiled_leaves_nothing(folder: Path) -> None:
    def fail() -> Program:
        raise ValueError("it does not fit")

    with pytest.raises(ValueError, match="it does not fit"):
        cached("facts", fail)
    assert not folder.exists()


def test_those_unused_for_longest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MAX_FILES", 6)
    monkeypatch.setattr(program_cache, "_REMOVED_AT_ONCE", 3)
    for number in range(6):
        cached(number, lambda: program(number))  # noqa: B023 - called at once
        os.utime(cache_path(number), (number, number))
    cached(0, lambda: pytest.fail("it is there"))  # used now
    cached(6, lambda: program(6))
    kept = [number for number in range(7) if cache_path(number).exists()]
    assert kept == [0, 4, 5, 6]


def test_free_memory_that_differs_by_megabytes_has_the_same_programs() -> None:
    target, free = TARGETS["cuda"], 100_200 << 20
    sizes = {default_bytes(target, free + (extra << 20)) for extra in (-20, 0, 20)}
    assert len(sizes) == 1
    assert 0.84 * free < sizes.pop() <= 0.85 * free
    assert default_bytes(target, 1000) == 850
