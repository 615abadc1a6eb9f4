"""The compiler of GPU kernels: what it caches, what it says about errors, what it reports. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from megavm.vm.cache import cache_directory
from megavm.vm.cuda import compiler as cuda_compiler
from megavm.vm.cuda.compiler import (
    CompileError,
    CompilerOptions,
    Kernel,
    cache_key,
    compile_ahead,
    compile_kernel,
    included_sources,
    resource_usage,
)

pytestmark = pytest.mark.usefixtures("compiler")

ENTRY = """\
#include "program.hpp"
#include "cuda/first.cuh"
extern "C" __global__ void megavm_kernel(float* p) { p[threadIdx.x] = first(kFactor); }
"""
FIRST = """\
#pragma once
  #  include "cuda/second.cuh"
__device__ float first(float x) { return second(x) + 1; }
"""
SECOND = "#pragma once\n__device__ float second(float x) { return 2 * x; }\n"
HEADER = "#pragma once\nconstexpr float kFactor = 3;\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a small kernel, and a cache of its own."""
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path / "cache"))
    tree = tmp_path / "tree"
    (tree / "cuda").mkdir(parents=True)
    for name, text in (("megakernel.cu", ENTRY), ("first.cuh", FIRST), ("second.cuh", SECOND)):
        (tree / "cuda" / name).write_text(text)
    return tree


def compiled(root: Path, header: str = HEADER, options: CompilerOptions | None = None) -> Kernel:
    return compile_kernel(header, options=options, root=root)


def test_a_kernel_is_compiled_once_and_then_read_from_the_cache(root: Path) -> None:
    lines: list[str] = []
    first = compile_kernel(HEADER, report=lines.append, root=root)
    second = compile_kernel(HEADER, report=lines.append, root=root)
    assert lines == ["compiling the kernel for sm_90a ..."]
    assert (first.cached, second.cached) == (False, True)
    assert first.cubin == second.cubin
    assert first.cubin.startswith(b"\x7fELF")
    assert first.path == second.path
    assert first.path is not None
    assert first.path.parent == root.parent / "cache"
    assert first.registers == second.registers > 0
    assert (first.spill_stores, first.spill_loads, first.warnings) == (0, 0, [])
    assert [p.name for p in first.path.parent.iterdir()] == [first.path.name]


def test_kernels_are_compiled_side_by_side_and_errors_are_left_to_compile_kernel(
    root: Path,
) -> None:
    broken = HEADER.replace("3", "what")
    headers = [HEADER, HEADER.replace("3", "4"), broken]
    assert compile_ahead(headers, processes=2, root=root) == headers
    assert [compiled(root, header).cached for header in headers[:2]] == [True, True]
    with pytest.raises(CompileError, match="what"):
        compiled(root, broken)
    assert compile_ahead(headers, processes=2, root=root) == [broken]


@pytest.mark.parametrize("name", ["megakernel.cu", "first.cuh", "second.cuh"])
def test_a_change_of_any_included_file_compiles_anew(root: Path, name: str) -> None:
    before = compiled(root).path
    path = root / "cuda" / name
    path.write_text(path.read_text() + "// changed\n")
    after = compiled(root)
    assert not after.cached
    assert after.path != before


def test_header_options_and_architecture_are_part_of_the_key(root: Path) -> None:
    generated = {"program.hpp": HEADER}
    options = CompilerOptions()
    keys = {
        cache_key(generated, "sm_90a", options, root),
        cache_key({"program.hpp": HEADER + " "}, "sm_90a", options, root),
        cache_key(generated, "sm_90", options, root),
        cache_key(generated, "sm_90a", CompilerOptions(lineinfo=True), root),
    }
    assert len(keys) == 4
    assert cache_key(generated, "sm_90a", CompilerOptions(), root) in keys


def test_a_file_that_is_not_included_does_not_matter(root: Path) -> None:
    compiled(root)
    (root / "cuda" / "other.cuh").write_text("// not included")
    assert compiled(root).cached


def test_includes_are_followed_once_and_in_order(root: Path) -> None:
    names = included_sources(cuda_compiler.ENTRY, {"program.hpp": HEADER}, root)[::2]
    assert names == ["cuda/megakernel.cu", "program.hpp", "cuda/first.cuh", "cuda/second.cuh"]


@pytest.mark.parametrize("damage", [b"", b"{}\n", b"not json\n...", b'{"sha256": "0"}\ncubin'])
def test_a_damaged_cache_file_is_made_again(
    root: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    first = compiled(root)
    assert first.path is not None
    first.path.write_bytes(damage)
    again = compiled(root)
    assert not again.cached
    assert again.cubin == first.cubin
    assert "is damaged and will be compiled again" in caplog.text
    assert compiled(root).cached


def test_a_cut_off_cache_file_is_made_again(root: Path) -> None:
    first = compiled(root)
    assert first.path is not None
    first.path.write_bytes(first.path.read_bytes()[:-1])
    assert not compiled(root).cached


def test_a_cache_that_cannot_be_written_is_no_obstacle(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (root.parent / "file").write_text("")
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(root.parent / "file" / "cache"))
    made = compiled(root)
    assert made.path is None
    assert made.cubin
    assert "cannot be cached" in caplog.text


def test_an_error_comes_with_file_line_and_text(root: Path) -> None:
    (root / "cuda" / "second.cuh").write_text("__device__ float second(float x) { return y; }\n")
    with pytest.raises(
        RuntimeError, match=r'second\.cuh\(1\): error: identifier "y" is undefined'
    ) as c:
        compiled(root)
    assert "cuda/megakernel.cu does not compile for sm_90a" in str(c.value)


def test_a_header_that_is_missing_is_named(root: Path) -> None:
    (root / "cuda" / "second.cuh").unlink()
    with pytest.raises(RuntimeError, match=r"cuda/second\.cuh"):
        compiled(root)


def test_warnings_are_kept_with_the_kernel_and_logged_once(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (root / "cuda" / "second.cuh").write_text(
        "__device__ float second(float x) { int unused; return 2 * x; }\n"
    )
    for cached in (False, True):
        kernel = compiled(root)
        assert kernel.cached == cached
        assert len(kernel.warnings) == 1
        assert "unused" in kernel.warnings[0]
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"a kernel for sm_90a: {kernel.warnings[0]}"
    ]


def test_the_largest_function_counts() -> None:
    log = """\
ptxas info    : Function properties for helper
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for megavm_kernel
ptxas         .     160 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 160 bytes cumulative stack size
"""
    want = {"registers": 168, "spill_stores": 12, "spill_loads": 16, "stack": 160}
    assert resource_usage(log) == want


def test_spills_are_reported(root: Path) -> None:
    text = ENTRY.replace("__global__ void", "__global__ void __launch_bounds__(1024, 2)")
    body = (
        "float a[64]; for (int i = 0; i < 64; ++i) a[i] = p[i * 64 + threadIdx.x]; __syncthreads();"
    )
    body += "float z = 0; for (int i = 0; i < 64; ++i) { z = z * a[i] + a[63 - i]; }"
    text = text.replace("{ p[threadIdx.x] = first", f"{{ {body} p[threadIdx.x] = z + first")
    (root / "cuda" / "megakernel.cu").write_text(text)
    kernel = compiled(root)
    assert kernel.spill_stores > 0
    assert kernel.spill_loads > 0


@pytest.mark.parametrize(
    ("environment", "want"),
    [
        ({"MEGAVM_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/megavm"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/megavm"),
        ({}, "/home/me/.cache/megavm"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], want: str
) -> None:
    for name in ("MEGAVM_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **environment}.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(want)


def test_an_installation_without_the_sources_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cuda_compiler, "ROOT", tmp_path)
    reason = cuda_compiler.reason_unavailable()
    assert reason == "this installation of megavm has no cuda/megakernel.cu"
