"""Compiles the GPU's kernel for what a program uses, with NVRTC, and caches the result on disk.

Needs no GPU. The cache key is the hash of everything that goes into the kernel.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from megavm.vm import codegen
from megavm.vm.cache import cache_directory, write_whole
from megavm.vm.target import TARGETS

# The folder that holds the sources "cuda/..." and "instructions/...".
ROOT = Path(__file__).resolve().parents[2]
ENTRY = "cuda/megakernel.cu"
KERNEL_NAME = "megavm_kernel"
CACHE_FORMAT = 1

logger = logging.getLogger("megavm")

Report = Callable[[str], None]


class CompileError(RuntimeError):
    """A kernel does not compile; the text has the compiler's log."""


@dataclass(frozen=True)
class CompilerOptions:
    """Options of NVRTC besides the architecture."""

    std: str = "c++20"
    lineinfo: bool = False
    ptxas: tuple[str, ...] = ("-v",)


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, and what the compiler said about it.

    ``spill_stores``, ``spill_loads`` and ``stack`` (its largest stack frame) are in bytes. ``seconds`` is
    the time that the compilation took, also for a cached kernel. ``path`` is its file in the cache, None
    when it could not be stored.
    """

    cubin: bytes = field(repr=False)
    architecture: str
    log: str
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    seconds: float
    cached: bool
    path: Path | None

    @property
    def warnings(self) -> list[str]:
        """The lines of the log that contain a warning, also of lost performance."""
        return [line for line in self.log.splitlines() if _WARNING.search(line)]


def reason_unavailable() -> str | None:
    """Why kernels cannot be compiled here, in words; None when they can."""
    try:
        import cuda.core
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except ImportError as error:
        name = error.name or "cuda-core"
        return (
            f"the package that compiles and loads kernels is not usable ({name}: {error}): install"
            ' megavm with the extra "cuda"'
        )
    except Exception as error:  # cuda-pathfinder raises its own type for a missing library
        return f"NVRTC, which compiles kernels, cannot be loaded: {error}"
    version = tuple(int(part) for part in re.findall(r"\d+", cuda.core.__version__)[:2])
    if version < (1, 0):
        return f"cuda-core is {cuda.core.__version__}, 1.0 or later is needed"
    if not (ROOT / ENTRY).is_file():
        return f"this installation of megavm has no {ENTRY}"
    return None


def compile_kernel(
    program_header: str,
    architecture: str = TARGETS["cuda"].architecture,
    options: CompilerOptions | None = None,
    *,
    report: Report | None = None,
    root: Path = ROOT,
    entry: str = ENTRY,
) -> Kernel:
    """Compile the kernel that ``program_header`` specialises, or load it if cached.

    ``report`` is called with one line when a compilation begins. Warnings of the compiler, which are mostly
    about speed, are logged. ``root`` and ``entry`` are for tests.

    Raises CompileError with the compiler's log when it does not compile, ImportError when there is no
    compiler.
    """
    options = options or CompilerOptions()
    generated = generated_headers(program_header)
    path = _cache_path(cache_key(generated, architecture, options, root, entry))
    known = read_cached(path)
    if known is not None:
        return known
    line = f"compiling the kernel for {architecture} ..."
    logger.info(line)
    if report is not None:
        report(line)
    begin = time.perf_counter()
    cubin, log = run_nvrtc(generated, architecture, options, root, entry)
    kernel = Kernel(
        cubin=cubin,
        architecture=architecture,
        log=log,
        seconds=time.perf_counter() - begin,
        cached=False,
        path=path,
        **resource_usage(log),
    )
    for warning in kernel.warnings:
        logger.warning("a kernel for %s: %s", architecture, warning)
    try:
        write_cached(path, kernel)
    except OSError as error:
        logger.warning("the kernel cannot be cached in %s: %s", path.parent, error)
        return Kernel(**{**vars(kernel), "path": None})
    return kernel


def compile_ahead(
    program_headers: Sequence[str],
    architecture: str = TARGETS["cuda"].architecture,
    *,
    processes: int | None = None,
    root: Path = ROOT,
) -> list[str]:
    """Compile kernels into the cache, several at a time; return the headers that it did not hold.

    NVRTC compiles one kernel at a time in a process, so each kernel has its own. ``processes``: how
    many at a time; by default, as many as there are cores that this process may use. A kernel that
    does not compile, or cannot be stored, is left to ``compile_kernel``, which says why.
    """
    options = CompilerOptions()
    missing = [
        header
        for header in program_headers
        if not _cache_path(
            cache_key(generated_headers(header), architecture, options, root)
        ).is_file()
    ]
    most = processes or len(os.sched_getaffinity(0))
    if most < 2 or len(missing) < 2:
        return missing
    waiting, running = list(missing), list[subprocess.Popen[str]]()
    try:
        while waiting or running:
            while waiting and len(running) < most:
                running.append(_start_compiler(waiting.pop(), architecture, root))
            running.pop(0).wait()
    finally:
        for process in running:
            process.kill()
            process.wait()
    return missing


def _start_compiler(program_header: str, architecture: str, root: Path) -> subprocess.Popen[str]:
    """Start a process that compiles a kernel into the cache (see the end of this file)."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, architecture, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(program_header)
        process.stdin.close()
    except BrokenPipeError:  # it has ended; compile_kernel says why
        pass
    return process


def generated_headers(program_header: str) -> dict[str, str]:
    """The generated headers, by the names under which sources include them."""
    from megavm.instructions import instruction_set

    return {
        "isa.hpp": codegen.isa_header(instruction_set().values()),
        "launch.hpp": codegen.launch_header(),
        "faults.hpp": codegen.faults_header(),
        "program.hpp": program_header,
    }


def run_nvrtc(
    generated: Mapping[str, str],
    architecture: str,
    options: CompilerOptions,
    root: Path = ROOT,
    entry: str = ENTRY,
) -> tuple[bytes, str]:
    """(cubin, log). Raises CompileError with the log when the source has errors."""
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="megavm-") as folder:
        for name, text in generated.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        chosen = ProgramOptions(
            name=entry,
            arch=architecture,
            std=options.std,
            lineinfo=options.lineinfo or None,
            ptxas_options=list(options.ptxas),
            include_path=[folder, str(root)],
            no_source_include=True,
            device_as_default_execution_space=True,
            no_cache=True,  # results from NVRTC's own cache lack the report of registers and spills
        )
        program = Program((root / entry).read_text(encoding="utf-8"), "c++", chosen)
        try:
            code = program.compile("cubin", logs=log).code
        except Exception as error:
            # cuda-core raises its own type with the log in its text. Other errors are not the compiler's.
            if "compilation log" not in str(error) and "NVRTC" not in type(error).__name__:
                raise
            text = str(error).replace(folder + os.sep, "")
            raise CompileError(f"{entry} does not compile for {architecture}: {text}") from error
        finally:
            program.close()
    return bytes(code), log.getvalue().replace(folder + os.sep, "").replace("\0", "").strip()


_WARNING = re.compile(r"(: |ptxas )warning\b|Potential Performance Loss", re.IGNORECASE)
_USAGE = {
    "registers": re.compile(r"Used (\d+) registers"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
}


def resource_usage(log: str) -> dict[str, int]:
    """Registers, spills and stack from ptxas' report: the maximum over all functions."""
    return {
        name: max((int(found) for found in pattern.findall(log)), default=0)
        for name, pattern in _USAGE.items()
    }


# The cache.


def _cache_path(key: str) -> Path:
    """Where the cache has the kernel with a key (``cache_key``)."""
    return cache_directory() / f"{key}.kernel"


def cache_key(
    generated: Mapping[str, str],
    architecture: str,
    options: CompilerOptions,
    root: Path = ROOT,
    entry: str = ENTRY,
) -> str:
    """SHA-256 over every source that is included, the options, the architecture and the compiler."""
    from cuda.bindings import nvrtc

    digest = hashlib.sha256()
    _, *version = nvrtc.nvrtcVersion()
    facts = [CACHE_FORMAT, architecture, asdict(options), entry, list(version)]
    for part in (json.dumps(facts), *included_sources(entry, generated, root)):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def included_sources(entry: str, generated: Mapping[str, str], root: Path = ROOT) -> Sequence[str]:
    """Names and texts of ``entry`` and all that it includes in quotes, each once, in order of inclusion.

    A missing header has an empty text; the compiler reports it.
    """
    seen: dict[str, str] = {}
    pending = [entry]
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        text = generated.get(name)
        if text is None:
            try:
                text = (root / name).read_text(encoding="utf-8")
            except OSError:
                text = ""
        seen[name] = text
        pending += reversed(_INCLUDE.findall(text))
    return [part for pair in seen.items() for part in pair]


def read_cached(path: Path) -> Kernel | None:
    """A kernel from the cache; None when it is absent or damaged."""
    try:
        header, _, cubin = path.read_bytes().partition(b"\n")
        facts = json.loads(header)
        if facts.pop("sha256") != hashlib.sha256(cubin).hexdigest():
            raise ValueError("the hash does not match")
        return Kernel(cubin=cubin, cached=True, path=path, **facts)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("%s is damaged and will be compiled again: %s", path, error)
        return None


def write_cached(path: Path, kernel: Kernel) -> None:
    """Store a kernel; another process sees all of it or nothing. Raises OSError."""
    facts = {
        name: value
        for name, value in vars(kernel).items()
        if name not in ("cubin", "cached", "path")
    }
    facts["sha256"] = hashlib.sha256(kernel.cubin).hexdigest()
    write_whole(path, json.dumps(facts).encode() + b"\n" + kernel.cubin)


if __name__ == "__main__":  # a process of compile_ahead
    compile_kernel(sys.stdin.read(), sys.argv[1], root=Path(sys.argv[2]))
