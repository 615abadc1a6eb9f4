"""CudaMachine: runs a program as one launch of a persistent kernel on each GPU, compiled for what it uses."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megavm.vm.alike import find_alike
from megavm.vm.cuda import compiler as cuda_compiler
from megavm.vm.cuda.arena import Arena
from megavm.vm.cuda.clocks import Clocks, Offset
from megavm.vm.cuda.driver import CudaError, Driver
from megavm.vm.cuda.executable import CudaExecutable
from megavm.vm.cuda.launch import COPIES as NUM_COPIES
from megavm.vm.cuda.launch import RANK_SHIFT
from megavm.vm.cuda.layouts import names, program_layouts
from megavm.vm.layout import COPIES, ROWS, Layout
from megavm.vm.machine import MachineFault, MachineLost, require_ranks
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.specialisation import Specialisation, program_header, program_specialisation
from megavm.vm.target import TARGETS

TARGET = TARGETS["cuda"]

_Needs = tuple[dict[str, tuple[Layout, ...]], Specialisation]


def reason_unavailable(device: int = 0) -> str | None:
    """Why the CudaMachine cannot run here, in words; None when it can."""
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        return "torch sees no GPU" if built else "this torch was built without CUDA"
    if device >= torch.cuda.device_count():
        return f"there is no GPU {device}, torch sees {torch.cuda.device_count()}"
    capability = torch.cuda.get_device_capability(device)
    if capability != TARGET.compute_capability:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {capability[0]}.{capability[1]}, the kernels are for 9.0"
    return cuda_compiler.reason_unavailable()


def free_memory(device: int = 0) -> int:
    """Free bytes of a GPU's memory; memory that torch's allocator caches counts as free."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


class CudaMachine:
    """Runs programs on GPUs, one for each rank of a program, one CTA of the persistent kernel per worker and SM.

    ``device`` is the number of a GPU, or a sequence with one for each rank. Ranks may share a GPU, which then
    divides its SMs among them; this is for tests. ``workers`` is the number of SMs that each rank has;
    schedulers compile for it. A wait that takes longer than ``timeout`` seconds ends the launch with a
    fault. With ``trace`` executables record the events of every instruction. ``root`` is the folder of the
    kernels' sources. ``report`` is called with one line when a kernel is compiled.

    Raises ValueError when a GPU does not exist or cannot be used, or the GPUs do not fit together.
    """

    name = "cuda"

    def __init__(
        self,
        device: int | Sequence[int] = 0,
        timeout: float = 10.0,
        trace: bool = False,
        root: Path = cuda_compiler.ROOT,
    ) -> None:
        devices = (device,) if isinstance(device, int) else tuple(device)
        for number in devices:
            reason = reason_unavailable(number)
            if reason is not None:
                raise ValueError(f"machine 'cuda' is not available: {reason}")
        drivers = {number: Driver(number) for number in dict.fromkeys(devices)}
        of_ranks = [drivers[number] for number in devices]
        self._initialise(devices, of_ranks, _shared_workers(devices), timeout, trace, root)

    def _initialise(
        self,
        devices: tuple[int, ...],
        drivers: Sequence[Driver],
        workers: int,
        timeout: float,
        trace: bool,
        root: Path,
    ) -> None:
        self.devices = devices
        self.drivers = drivers  # of each rank
        self.memory_device = drivers[0].memory_device
        self.workers = workers
        self.timeout = timeout
        self.trace = trace
        self.root = root
        self.report: cuda_compiler.Report | None = None
        self.lost = ""  # name of the error that made the context unusable
        # Memory that all ranks write; None for one rank.
        self.arena = self._make_arena() if len(devices) > 1 else None
        # Streams of the ranks that share a GPU with an earlier rank.
        self.side_streams = [
            torch.cuda.Stream(number) if number in devices[:rank] else None  # type: ignore[no-untyped-call]
            for rank, number in enumerate(devices)
        ]
        self._clocks: Clocks | None = None
        # Kernels for each rank, by the header that specialises them.
        self._functions: dict[str, list[Any]] = {}
        self._known_needs: weakref.WeakKeyDictionary[Program, _Needs] = weakref.WeakKeyDictionary()

    def _make_arena(self, copies: int = 1) -> Arena:
        """Memory that all ranks write."""
        return Arena(self.drivers, copies)

    def memory(self, ranks: int = 1) -> Memory:
        """See ``Machine.memory``."""
        if ranks != len(self.devices):
            raise ValueError(f"the machine has {len(self.devices)} ranks, not {ranks}")
        devices = [driver.memory_device for driver in self.drivers]
        return Memory(devices, allocate_shares=self.arena.allocate if self.arena else None)

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> CudaExecutable:
        """Verify the program, compile its kernel and give tensors of ``memory`` the layouts it accepts.

        Raises ValueError for a program that does not verify or does not fit the GPU, or a tensor that
        memory does not have on it; CompileError when the kernel does not compile.
        """
        if verify:
            from megavm.vm.verify import verify as verify_program

            verify_program(program, self.name)
        self.check_alive()
        require_ranks(program, memory)
        if program.ranks != len(self.devices):
            raise ValueError(
                f"the program has {program.ranks} ranks, the machine {len(self.devices)} GPUs"
            )
        for own, driver in zip(memory.ranks, self.drivers, strict=True):
            if own.device != torch.device(driver.memory_device):
                raise ValueError(
                    f"the memory is on {own.device}, the machine on {driver.memory_device}"
                )
        if program.workers > self.workers:
            raise ValueError(
                f"the program is for {program.workers} workers, GPU {self.devices[0]} has "
                f"{self.workers} SMs{' for each rank' if program.ranks > 1 else ''}"
            )
        layouts, found = self._needs(program)
        for own in memory.ranks:
            own.require(program.tensors)
            for name, choice in layouts.items():
                present = own.layout(name)
                if present not in choice and present != ROWS:
                    raise ValueError(
                        f"tensor {name} has the layout {present}, needed is {names(choice)}"
                    )
        self._give_copies(program, memory)
        for own in memory.ranks:
            for spec in program.tensors:
                present = own.layout(spec.name)
                choice = layouts.get(spec.name, (present,))
                own.relayout(spec.name, present if present in choice else choice[0])  # joins parts
        _check_shares(program, memory)
        functions = self._function(program, found)
        box_rows = found.common.get("matrix_rows", 0)
        uses_maps = bool(box_rows or found.common.get("runs"))
        return CudaExecutable(
            self, program, memory, layouts, functions, box_rows if uses_maps else None
        )

    def moves(self, program: Program, memory: Memory) -> bool:
        """Whether ``load`` stores a tensor of ``memory`` in another way: then no launch may run."""
        layouts, _ = self._needs(program)
        return any(
            own.layout(spec.name) not in layouts.get(spec.name, (own.layout(spec.name),))
            or len(own.stored_parts(spec.name)) > 1
            for own in memory.ranks
            for spec in program.tensors
            if not spec.tagged  # no launch uses one that is stored as the CPU does
        )

    def _give_copies(self, program: Program, memory: Memory) -> None:
        names = [spec.name for spec in program.tensors if spec.tagged]
        if all(memory.layout(name) == COPIES for name in names):
            return
        if memory.words is None:
            memory.words = self._make_arena(NUM_COPIES)
        memory.give_copies(names)

    def clock_offsets(self) -> list[Offset]:
        """How far the clock of each rank's GPU is from that of rank 0, measured now."""
        if self.arena is None:
            return [Offset(0, 0)]
        if self._clocks is None:
            self._clocks = Clocks(self.drivers, self.arena, self.root)
        return self._clocks.measure()

    def check_alive(self) -> None:
        """Raise MachineLost when an earlier error has made the context unusable."""
        if self.lost:
            raise MachineLost(
                f"the process's CUDA context is lost since {self.lost}: start the process again"
            )

    def prepare(self, program: Program) -> None:
        """Do what ``load`` takes time for: compile the kernel into the cache, and make the tables.

        Does not use the GPU, so that any thread may call it. Raises CompileError when the kernel does
        not compile.
        """
        _, found = self._needs(program)
        header = self._header(program, found)
        if header not in self._functions:
            self._compile(header)
        _ = program.exchanges  # the program keeps them

    def _needs(self, program: Program) -> _Needs:
        """Layouts that a program accepts, and what specialises its kernel: found once."""
        known = self._known_needs.get(program)
        if known is None:
            alike = tuple(find_alike(program.words, program.tensors))
            known = (
                program_layouts(program, alike),
                program_specialisation(program, alike),
            )
            self._known_needs[program] = known
        return known

    def _header(self, program: Program, found: Specialisation) -> str:
        """The header that specialises the kernel of a program."""
        return program_header(
            program, trace=self.trace, in_order=program.needs_queue_order, found=found
        )

    def _function(self, program: Program, found: Specialisation) -> list[Any]:
        """The kernel of a program, loaded for each rank."""
        header = self._header(program, found)
        if header not in self._functions:
            self._functions[header] = self._load(self._compile(header))
        return self._functions[header]

    def _compile(self, header: str) -> Any:
        """The kernel that a header specialises, compiled."""
        return cuda_compiler.compile_kernel(
            header, TARGET.architecture, report=self.report, root=self.root
        )

    def _load(self, compiled: Any) -> list[Any]:
        """A compiled kernel, loaded for each rank."""
        loaded = {driver: driver.function(compiled.cubin) for driver in set(self.drivers)}
        return [loaded[driver] for driver in self.drivers]

    def _fault(self, error: CudaError) -> MachineFault:
        """The fault for a driver error. Sets ``lost`` when the error made the context unusable."""
        sticky = False
        for driver in set(self.drivers):
            try:
                with driver.current():
                    driver.call("cuCtxSynchronize")
            except CudaError:
                sticky = True
        # The contexts of all GPUs report the same error: it does not tell which one was first.
        which = "the GPU" if len(self.devices) == 1 else f"one of the GPUs {self.devices}"
        if not sticky:
            return MachineFault(f"{which} failed: {error}")
        self.lost = self.lost or error.name
        return MachineLost(
            f"{which} failed: {error}; the process's CUDA context is lost: start the process again"
        )


def _shared_workers(devices: Sequence[int]) -> int:
    """The SMs that each rank has.

    Raises ValueError when the GPUs differ, or launches of several ranks cannot run at the same time.
    """
    first, *others = (torch.cuda.get_device_properties(number) for number in devices)
    for number, other in zip(devices[1:], others, strict=True):
        if (other.name, other.multi_processor_count) != (first.name, first.multi_processor_count):
            raise ValueError(
                f"GPU {devices[0]} is a {first.name} with {first.multi_processor_count} SMs, GPU "
                f"{number} a {other.name} with {other.multi_processor_count}: ranks need equal GPUs"
            )
    if others and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        raise ValueError(
            "CUDA_LAUNCH_BLOCKING is set: the launch of one rank would wait for its end, and it waits "
            "for the other ranks; unset it"
        )
    return int(first.multi_processor_count) // max(devices.count(number) for number in devices)


def _check_shares(program: Program, memory: Memory) -> None:
    """Raise ValueError when a tensor with shares is not where all ranks can write it."""
    for spec in program.tensors:
        if spec.shares > 1:
            places = [own.storage(spec.name).data_ptr() for own in memory.ranks]
            if any(place != places[0] + (r << RANK_SHIFT) for r, place in enumerate(places)):
                raise ValueError(
                    f"tensor {spec.name} has shares and is not in memory that all ranks write: "
                    "use a memory of CudaMachine.memory"
                )
