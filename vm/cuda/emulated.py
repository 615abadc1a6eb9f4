"""A machine that runs the GPU's kernel on the CPU: for tests, and for authors of instructions without a GPU.

The host's compiler translates the same sources that NVRTC does, with the functions of cuda/ptx replaced by
those of cuda/emulated. A lane takes about a microsecond for each instruction in which it meets the other lanes
of its warp, so only small programs are practical.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import mmap
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from megavm.vm.cache import cache_directory
from megavm.vm.cuda import compiler as cuda_compiler
from megavm.vm.cuda.arena import ALIGNMENT, Arena, first_place, reserved_bytes
from megavm.vm.cuda.clocks import Offset
from megavm.vm.cuda.driver import CudaError, Driver
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.cuda.launch import MAP_BYTES, RANK_SHIFT
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.target import TARGETS

ENTRY = "cuda/emulated/launch.cpp"
RUNTIME = "cuda/emulated/builtins.hpp"  # ENTRY includes it first; it depends on no program
MAP_NORESERVE = 0x4000  # Linux; mmap has it since Python 3.13
# With -O1 kernels take 1.4 to 1.7 times as long to compile, and a quarter less to run. Most run once.
FLAGS = ("-std=c++20", "-Og", "-fPIC", "-shared", "-pthread", "-w", "-fno-strict-aliasing")


def reason_unavailable() -> str | None:
    """Why kernels cannot be emulated here, in words; None when they can."""
    if _compiler() is None:
        return "there is no C++ compiler (c++, g++ or clang++, or $CXX)"
    if importlib.util.find_spec("cuda") is None:
        return 'the package cuda-core is missing: install megavm with the extra "cuda"'
    return None


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


Kept = TypeVar("Kept")


class _Living(Generic[Kept]):
    """Those of its objects that something else keeps alive. Any thread may add one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._references: list[weakref.ref[Kept]] = []

    def add(self, one: Kept) -> Kept:
        with self._lock:
            kept = [known for known in self._references if known() is not None]
            self._references = [*kept, weakref.ref(one)]
        return one

    def __iter__(self) -> Iterator[Kept]:
        references = self._references  # is replaced, not changed
        return (one for known in references if (one := known()) is not None)


class EmulatedMachine(CudaMachine):
    """A CudaMachine of ``ranks`` GPUs that have ``workers`` SMs each and are emulated: memory is the host's.

    A wait that takes longer than ``timeout`` seconds ends the launch with a fault. ``seed`` determines
    the order of warps and copies. In turn ``stop_turn`` of its lanes every worker is told to stop, as it is
    when another one has failed (0: never). A launch that does what a GPU does not allow ends with a
    MachineFault that says what, where and which lane.

    Raises ValueError when kernels cannot be emulated here.
    """

    def __init__(
        self,
        workers: int = TARGETS["cuda"].workers,
        timeout: float = 60.0,
        trace: bool = False,
        root: Path = cuda_compiler.ROOT,
        seed: int = 0,
        stop_turn: int = 0,
        ranks: int = 1,
    ) -> None:
        reason = reason_unavailable()
        if reason is not None:
            raise ValueError(f"kernels cannot be emulated: {reason}")
        self.seed, self.stop_turn = seed, stop_turn
        self._started: list[tuple[Any, Any, int]] = []  # function, parameters, workers
        self._loaded: _Living[CudaExecutable] = _Living()
        self._emulated = [EmulatedDriver(self) for _ in range(ranks)]
        drivers: list[Driver] = [*self._emulated]
        self._initialise(tuple(range(ranks)), drivers, workers, timeout, trace, root)

    def _make_arena(self, copies: int = 1) -> Arena:
        return HostArena(len(self.devices), copies)

    def clock_offsets(self) -> list[Offset]:
        """See ``CudaMachine.clock_offsets``: all ranks have the host's clock."""
        return [Offset(0, 0)] * len(self.devices)

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> CudaExecutable:
        """See ``CudaMachine.load``."""
        executable = super().load(program, memory, verify=verify)
        self._loaded.add(executable)
        return executable

    def _regions(self) -> ctypes.Array[_Region]:
        """The memory that a launch may access: tensors of all programs, their counters, and their tables."""
        named = [("a table", table) for driver in self._emulated for table in driver.tables]
        for rank in (rank for executable in self._loaded for rank in executable._ranks):
            named.append(("the counters", rank.counters))
            named += [(f"tensor {name}", storage) for name, storage in rank.storages.items()]
        regions = [
            _Region(piece.data_ptr(), piece.data_ptr() + piece.nbytes, name.encode())
            for name, given in named
            for piece in ([given] if given.is_contiguous() else given)  # copies
        ]
        return (_Region * len(regions))(*regions)

    def _run_started(self) -> None:
        """Run what all ranks have started, side by side. Raises CudaError."""
        started, self._started = self._started, []
        if not started:
            return
        function, _, workers = started[0]
        launches = (ctypes.c_void_p * len(started))(*(parameters for _, parameters, _ in started))
        regions = self._regions()
        problem = function(
            launches, len(started), workers, self.seed, self.stop_turn, regions, len(regions)
        )
        if problem is not None:
            raise CudaError(problem.decode(), "the emulated kernel")

    def _compile(self, header: str) -> Path:
        return compile_library(header, self.root)

    def _load(self, compiled: Path) -> list[Any]:
        library = ctypes.CDLL(str(compiled))
        library.emulated_launch.restype = ctypes.c_char_p
        return [library.emulated_launch] * len(self.devices)


class _Region(ctypes.Structure):
    """Region of cuda/emulated/gpu.hpp."""

    _fields_ = (
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
    )


class HostArena(Arena):
    """An Arena in the host's memory."""

    def __init__(self, ranks: int, copies: int = 1) -> None:
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        size = reserved_bytes(ranks, copies)
        reserved = torch.frombuffer(mmap.mmap(-1, size, flags=kind), dtype=torch.uint8)
        self._memory = reserved[first_place(reserved.data_ptr(), copies) - reserved.data_ptr() :]
        self._ranks, self._copies, self._granularity = ranks, copies, ALIGNMENT
        self._used = self._mapped = 0

    def _bytes(self, rank: int, place: int, size: int) -> torch.Tensor:
        begin = (rank << RANK_SHIFT) + place
        return self._memory[begin : begin + size]

    def _map_all(self, size: int) -> None:
        """The system maps what is touched."""


class EmulatedDriver(Driver):
    """The calls of the CUDA driver that launches need.

    A launch runs when the host copies from memory or waits, so after the launches of all ranks.
    """

    memory_device = "cpu"

    def __init__(self, machine: EmulatedMachine) -> None:
        from cuda.bindings import driver

        self.api: Any = driver
        self.maps = {}
        self._machine = machine
        self.tables: _Living[torch.Tensor] = _Living()  # that were uploaded or made

    def call(self, name: str, *arguments: Any) -> Any:
        """See ``Driver.call``."""
        return getattr(self, f"_{name}")(*arguments)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See ``Driver.current``."""
        yield

    def stream(self) -> int:
        """See ``Driver.stream``."""
        return 0

    def mark(self) -> Callable[[], None]:
        """See ``Driver.mark``: all launches have ended."""
        return lambda: None

    def host_word(self) -> torch.Tensor:
        """See ``Driver.host_word``."""
        return torch.zeros(1, dtype=torch.int32)

    def upload(self, data: torch.Tensor) -> torch.Tensor:
        """See ``Driver.upload``."""
        return self.tables.add(data.clone())

    def zeros(self, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """See ``Driver.zeros``."""
        return self.tables.add(super().zeros(count, dtype))

    def _cuLaunchKernel(self, function: Any, workers: int, *others: Any) -> None:
        pointers = ctypes.cast(others[-2], ctypes.POINTER(ctypes.c_void_p))
        self._machine._started.append((function, pointers[0], workers))

    def _cuTensorMapEncodeTiled(self, *arguments: Any) -> Any:
        """BoxMap of cuda/emulated/cuda/ptx/memory.cuh."""
        kind, _, address, sizes, strides, box, _, _, swizzle, *_ = arguments
        kinds, swizzles = self.api.CUtensorMapDataType, self.api.CUtensorMapSwizzle
        size = {
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: 2,
            kinds.CU_TENSOR_MAP_DATA_TYPE_UINT64: 8,
        }[kind]
        bits = {swizzles.CU_TENSOR_MAP_SWIZZLE_NONE: 0, swizzles.CU_TENSOR_MAP_SWIZZLE_128B: 3}
        words = [address, *map(int, sizes), *map(int, strides), *map(int, box)]
        words += [size, bits[swizzle]]
        return _Map(np.array([*words, *[0] * (MAP_BYTES // 8 - len(words))], np.uint64))

    def _cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> None:
        assert value == 0
        ctypes.memset(address, 0, 4 * count)

    def _cuMemcpyDtoHAsync(self, to: int, source: int, count: int, stream: int) -> None:
        self._machine._run_started()
        ctypes.memmove(to, source, count)

    def _cuStreamSynchronize(self, stream: int) -> None:
        pass

    def _cuCtxSynchronize(self) -> None:
        self._machine._run_started()


class _Map:
    def __init__(self, opaque: Any) -> None:
        self.opaque = opaque


def compile_library(program_header: str, root: Path = cuda_compiler.ROOT) -> Path:
    """Compile the kernel that ``program_header`` specialises for the CPU, or find it in the cache.

    Raises CompileError with the compiler's log.
    """
    generated = cuda_compiler.generated_headers(program_header)
    compiler = _compiler()
    assert compiler is not None
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    include = (str(root / "cuda/emulated"), str(root))
    for part in cuda_compiler.included_sources(ENTRY, generated, root):
        digest.update(part.encode() + b"\0")
    for path in sorted((root / "cuda/emulated").rglob("*.*h*")):
        digest.update(path.read_bytes())
    folder = cache_directory()
    library = folder / f"{digest.hexdigest()}.so"
    if library.is_file():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    precompiled = _precompile_runtime(compiler, root)
    with tempfile.TemporaryDirectory(prefix="megavm-") as place:
        for name, text in generated.items():
            Path(place, name).write_text(text, encoding="utf-8")
        built = Path(place, "kernel.so")
        _run_compiler([compiler, *FLAGS], (str(precompiled), place, *include), root / ENTRY, built)
        partial = folder / f".{library.name}.{os.getpid()}"
        shutil.copyfile(built, partial)
        os.replace(partial, library)
    return library


def _precompile_runtime(compiler: str, root: Path) -> Path:
    """A folder of the cache with ``RUNTIME`` as a precompiled header (some 80 MB).

    It halves the time of g++, which looks for it in the folders of includes. Other compilers ignore it.
    """
    source = root / RUNTIME
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for part in cuda_compiler.included_sources(RUNTIME, {}, root):
        digest.update(part.encode() + b"\0")
    folder = cache_directory() / f"{digest.hexdigest()}.headers"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(prefix=".headers-", dir=folder.parent) as place:
            built = Path(place, f"made/{RUNTIME}.gch")
            built.parent.mkdir(parents=True)
            flags = [flag for flag in FLAGS if flag != "-shared"]
            _run_compiler([compiler, *flags, "-x", "c++-header"], (str(root),), source, built)
            with contextlib.suppress(OSError):  # another process was faster
                os.replace(Path(place, "made"), folder)
    return folder


def _run_compiler(command: list[str], include: Iterable[str], source: Path, built: Path) -> None:
    """Raises CompileError with the compiler's log."""
    includes = [f"-I{path}" for path in include]
    done = subprocess.run(
        [*command, *includes, str(source), "-o", str(built)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise cuda_compiler.CompileError(
            f"{source.name} does not compile: {done.stderr or done.returncode}"
        )
