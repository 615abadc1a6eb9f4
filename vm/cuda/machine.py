"""CudaMachine: runs a program as one launch of a persistent kernel that is compiled for what it uses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megavm.vm import codegen
from megavm.vm.config import INSTRUCTION_BYTES, NONE, NUM_THREADS, NUM_WARPS, SHARED_BYTES
from megavm.vm.cuda import compiler as cuda_compiler
from megavm.vm.cuda import faults as cuda_faults
from megavm.vm.cuda.faults import FAULT_RECORD, FaultKind, Record
from megavm.vm.cuda.launch import (
    BARRIER_STRIDE,
    DTYPE_SHIFT,
    EXCHANGE,
    LAUNCH,
    LAYOUT_SHIFT,
    TAGGED_SHIFT,
    TENSOR,
    TRACE_COLUMNS,
    WORKER_COLUMN,
)
from megavm.vm.cuda.layouts import names, program_layouts
from megavm.vm.events import Event
from megavm.vm.layout import ROWS, Layout
from megavm.vm.machine import MachineFault, MachineLost, Notes, WorkerState
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.target import TARGETS

TARGET = TARGETS["cuda"]
RECORD_WORDS = FAULT_RECORD.size // 4
EVENTS = {event.label: event.value for event in Event}  # columns of a trace

LaunchParameters = LAUNCH.ctypes_class()
IndexOf = Callable[[Record], int | None]  # the instruction that a warp was at


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


class CudaError(RuntimeError):
    """A call of the CUDA driver failed. ``name`` is the name of the error."""

    def __init__(self, name: str, call: str) -> None:
        super().__init__(f"{call} failed with {name}")
        self.name = name


class _Driver:
    """The CUDA driver calls that launches need, on torch's context of one GPU."""

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver

        self.api: Any = driver
        torch.zeros(1, device=f"cuda:{device}")  # torch creates the context with its own flags
        self.context = self.call("cuDevicePrimaryCtxRetain", self.call("cuDeviceGet", device))
        self._handle = int(self.context)

    def call(self, name: str, *arguments: Any) -> Any:
        """The call's one result, or None. Raises CudaError."""
        result, *values = getattr(self.api, name)(*arguments)
        if result != self.api.CUresult.CUDA_SUCCESS:
            raise CudaError(result.name, name)
        return values[0] if values else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on this thread inside a ``with`` block."""
        if int(self.call("cuCtxGetCurrent")) == self._handle:
            yield
            return
        self.call("cuCtxPushCurrent", self.context)
        try:
            yield
        finally:
            self.api.cuCtxPopCurrent()

    def function(self, cubin: bytes) -> Any:
        """Load the kernel of a cubin and allow it all of an SM's shared memory."""
        with self.current():
            module = self.call("cuModuleLoadData", cubin)
            function = self.call("cuModuleGetFunction", module, cuda_compiler.KERNEL_NAME.encode())
            attribute = (
                self.api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            )
            self.call("cuFuncSetAttribute", function, attribute, SHARED_BYTES)
        return function


class CudaMachine:
    """Runs programs on a GPU, one CTA of its persistent kernel per worker and SM.

    ``workers`` is the number of SMs; schedulers compile for it. A wait that takes longer than ``timeout``
    seconds ends the launch with a fault. With ``trace`` executables record the events of every instruction.
    ``root`` is the folder of the kernels' sources. ``report`` is called with one line when a kernel is
    compiled.

    Raises ValueError when the GPU does not exist or cannot be used.
    """

    name = "cuda"

    def __init__(
        self,
        device: int = 0,
        timeout: float = 10.0,
        trace: bool = False,
        root: Path = cuda_compiler.ROOT,
    ) -> None:
        reason = reason_unavailable(device)
        if reason is not None:
            raise ValueError(f"machine 'cuda' is not available: {reason}")
        self.device = device
        self.memory_device = f"cuda:{device}"
        self.workers = torch.cuda.get_device_properties(device).multi_processor_count
        self.timeout = timeout
        self.trace = trace
        self.root = root
        self.report: cuda_compiler.Report | None = None
        self.lost = ""  # name of the error that made the context unusable
        self._driver = _Driver(device)
        self._functions: dict[str, Any] = {}  # by the header that specialises them

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> CudaExecutable:
        """Verify the program, compile its kernel and give tensors of ``memory`` the layouts it accepts.

        Raises ValueError for a program that does not verify or does not fit the GPU, or a tensor that
        memory does not have on it; CompileError when the kernel does not compile.
        """
        if verify:
            from megavm.vm.verify import verify as verify_program

            verify_program(program, self.name)
        if program.ranks > 1:
            raise ValueError(
                f"the program has {program.ranks} ranks: machine cuda runs one, cpu and reference more"
            )
        self.check_alive()
        if memory.device != torch.device(self.memory_device):
            raise ValueError(
                f"the memory is on {memory.device}, the machine on {self.memory_device}"
            )
        if program.workers > self.workers:
            raise ValueError(
                f"the program is for {program.workers} workers, GPU {self.device} has {self.workers} SMs"
            )
        memory.require(program.tensors)
        layouts = program_layouts(program)
        for name, choice in layouts.items():
            present = memory.layout(name)
            if present not in choice and present != ROWS:
                raise ValueError(
                    f"tensor {name} has the layout {present}, needed is {names(choice)}"
                )
        for spec in program.tensors:
            present = memory.layout(spec.name)
            choice = layouts.get(spec.name, (present,))
            memory.relayout(spec.name, present if present in choice else choice[0])  # joins parts
        return CudaExecutable(self, program, memory, layouts, self._function(program))

    def check_alive(self) -> None:
        """Raise MachineLost when an earlier error has made the context unusable."""
        if self.lost:
            raise MachineLost(
                f"the process's CUDA context is lost since {self.lost}: start the process again"
            )

    def _function(self, program: Program) -> Any:
        header = codegen.program_header(
            program, trace=self.trace, in_order=program.needs_queue_order
        )
        if header not in self._functions:
            kernel = cuda_compiler.compile_kernel(
                header, TARGET.architecture, report=self.report, root=self.root
            )
            self._functions[header] = self._driver.function(kernel.cubin)
        return self._functions[header]

    def _fault(self, error: CudaError) -> MachineFault:
        """The fault for a driver error. Sets ``lost`` when the error made the context unusable."""
        sticky = False
        try:
            with self._driver.current():
                self._driver.call("cuCtxSynchronize")
        except CudaError:
            sticky = True
        if not sticky:
            return MachineFault(f"the GPU failed: {error}")
        self.lost = self.lost or error.name
        return MachineLost(
            f"the GPU failed: {error}; the process's CUDA context is lost: start the process again"
        )


class CudaExecutable:
    """A program on the CudaMachine."""

    def __init__(
        self,
        machine: CudaMachine,
        program: Program,
        memory: Memory,
        layouts: Mapping[str, tuple[Layout, ...]],
        function: Any,
    ) -> None:
        self.program = program
        self.memory = memory
        self._layouts = layouts
        self.broken = False
        self._machine = machine
        self._driver = machine._driver
        self._function = function
        queues = program.queues[:1] if program.dynamic else program.queues
        self._order = np.concatenate([*queues, np.empty(0, np.int32)])
        begin = np.cumsum([0, *map(len, queues)])
        if not program.dynamic:
            begin = np.concatenate([begin, np.full(program.workers + 1 - len(begin), begin[-1])])
        self._begin = begin
        self._instructions = self._upload(program.words[self._order])
        self._queue_begin = self._upload(begin.astype(np.uint32))
        exchanges = program.exchanges
        self._exchange_table = exchanges.table
        self._exchanges = self._upload(exchanges.table[self._order])
        self._regions = self._upload(exchanges.regions)
        self._counts = self._upload(exchanges.counts)
        self._signals = self._upload(np.concatenate([program.signals, exchanges.signals]))
        counters = len(program.barriers) + len(exchanges.signals)
        self._barriers = self._zeros(max(counters, 1) * BARRIER_STRIDE)
        self._ticket = self._zeros(1)
        # The abort word, in the room of a record, then the records.
        self._faults = self._zeros((1 + program.workers * NUM_WARPS) * RECORD_WORDS)
        self._abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._aborted = self._abort.numpy()
        self._alone: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._traces = machine.trace  # whether the kernel was compiled with traces
        self._noting: list[Notes] = []  # of launches that ``finish`` has not waited for
        self._noted: list[Notes] = []
        self._stream: int | None = None  # of launches that ``finish`` has not waited for
        self._resolve()
        self._parameters = LaunchParameters(
            instructions=self._instructions.data_ptr(),
            queue_begin=self._queue_begin.data_ptr(),
            tensors=self._tensors.data_ptr(),
            barriers=self._barriers.data_ptr(),
            signals=self._signals.data_ptr(),
            ticket=self._ticket.data_ptr(),
            exchanges=self._exchanges.data_ptr(),
            regions=self._regions.data_ptr(),
            counts=self._counts.data_ptr(),
            faults=self._faults.data_ptr() + 4 * RECORD_WORDS,
            abort=self._faults.data_ptr(),
            timeout=int(machine.timeout * 1e9),
            dynamic=int(program.dynamic),
        )
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._parameters))

    # Data on the GPU.

    def _upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        return torch.from_numpy(data).to(self._machine.memory_device)

    def _zeros(self, words: int) -> torch.Tensor:
        return torch.zeros(words, dtype=torch.int32, device=self._machine.memory_device)

    def _resolve(self) -> None:
        """Build the table of tensors on the GPU and keep their storage alive.

        Raises MachineFault when a tensor meanwhile has a layout that the program cannot read.
        """
        for name, choice in self._layouts.items():
            if self.memory.layout(name) not in choice:
                raise MachineFault(
                    f"tensor {name} has been given the layout {self.memory.layout(name)} for another "
                    f"program, this one needs {names(choice)}"
                )
        specs = self.program.tensors
        table = np.zeros(max(len(specs), 1), dtype=TENSOR.dtype())
        self._storage = []
        for entry, spec in zip(table, specs, strict=False):
            storage = self.memory.storage(spec.name)
            order = int(self.memory.layout(spec.name).order)
            entry["address"] = (
                storage.data_ptr()
                | spec.dtype.code << DTYPE_SHIFT
                | spec.tagged << TAGGED_SHIFT
                | order << LAYOUT_SHIFT
            )
            entry["rows"], entry["columns"] = spec.rows, spec.columns
            self._storage.append(storage)
        self._tensors = self._upload(table)
        self._relayouts = self.memory.relayouts

    @property
    def barriers(self) -> list[int]:
        """The barriers' counters."""
        counters = self._barriers.cpu().numpy().view(np.uint32)[::BARRIER_STRIDE]
        return [int(value) for value in counters[: len(self.program.barriers)]]

    # Running.

    def run(self, steps: int = 1) -> None:
        """Run the program ``steps`` times and return when it has finished. Advances ``memory.epoch``.

        Raises MachineFault when it cannot finish: the executable then needs ``reset`` to run again;
        MachineLost when the CUDA context is lost.
        """
        self.launch(steps)
        self.finish()

    def launch(self, steps: int = 1) -> None:
        """Start a run on torch's current stream and return; ``finish`` waits for it. Launches run in order.

        Raises MachineFault when the launch is refused.
        """
        if self.broken:
            raise MachineFault("an earlier run of this executable ended in the middle: reset it")
        if steps < 1:
            raise ValueError(f"steps is {steps}: a run has at least one step")
        self._machine.check_alive()
        parameters = self._parameters
        if self._relayouts != self.memory.relayouts:
            self._resolve()
            parameters.tensors = self._tensors.data_ptr()
        if self._traces:
            rows = len(self._order) * steps
            times = self._zeros(max(rows, 1) * TRACE_COLUMNS * 2).view(torch.int64)
            parameters.trace = times.data_ptr()
            self._noting.append(
                Notes(steps, times.view(-1, TRACE_COLUMNS)[:rows], EVENTS, WORKER_COLUMN)
            )
        parameters.epoch = self.memory.epoch & 0xFFFFFFFF
        parameters.steps = steps
        # Also after a fault: words may carry the tags of these steps, which no later step may use again.
        self.memory.epoch += steps
        try:
            self._start(self._pointers, self.program.workers)
        except CudaError as error:
            self.broken = True
            raise self._machine._fault(error) from error
        parameters.steps_before = (parameters.steps_before + steps) & 0xFFFFFFFF

    def finish(self) -> None:
        """Wait for all launches. Raises MachineFault when one of them could not finish."""
        try:
            faulted = self._finish()
        except CudaError as error:
            self.broken = True
            raise self._machine._fault(error) from error
        if faulted:
            self.broken = True
            raise self._machine_fault(self._instruction_at)
        self._noted += self._noting
        self._noting = []

    def reset(self) -> None:
        """Set counters and fault records to those of a fresh load, so that the program runs again.

        Waits for launches in progress: those behind a broken one read its abort word and end. Raises
        MachineLost when the CUDA context is lost.
        """
        self._machine.check_alive()
        try:
            with self._driver.current():
                self._driver.call("cuCtxSynchronize")
                self._barriers.zero_()
                self._faults.zero_()
                # The next launch may be on another stream.
                self._driver.call("cuCtxSynchronize")
        except CudaError as error:
            raise self._machine._fault(error) from error
        self._aborted[0] = 0
        self._parameters.steps_before = 0
        self._noting = []
        self._stream = None
        self.broken = False

    def execute_one(self, index: int, step: int = 0, rank: int = 0) -> None:
        """Run one instruction alone, without its waits and signal, as in step ``step`` of a launch.

        For tools; keeps ``memory.epoch``. Raises MachineFault when the instruction fails or reads a tagged
        word that this step has not written.
        """
        if rank != 0 or not 0 <= index < len(self.program):
            raise IndexError(
                f"instruction {index} of rank {rank}, of {len(self.program)} of one rank"
            )
        self._machine.check_alive()
        if self._relayouts != self.memory.relayouts:
            self._resolve()
            self._parameters.tensors = self._tensors.data_ptr()
        if self._alone is None:
            ends = self._upload(np.array([0, 1], dtype=np.uint32))
            exchanges = self._exchange_table.copy()
            exchanges["hint"]["signal"] = exchanges["hint"]["wait"] = NONE
            table = self._upload(exchanges)
            self._alone = (self._upload(self.program.words), table, ends)
        words, table, ends = self._alone
        parameters = LaunchParameters.from_buffer_copy(self._parameters)
        parameters.instructions = words.data_ptr() + index * INSTRUCTION_BYTES
        parameters.exchanges = table.data_ptr() + index * EXCHANGE.size
        parameters.queue_begin = ends.data_ptr()
        events = self._zeros(TRACE_COLUMNS * 2) if self._traces else None
        parameters.trace = 0 if events is None else events.data_ptr()
        parameters.epoch = self.memory.epoch & 0xFFFFFFFF
        parameters.steps, parameters.first_step = 1, step
        parameters.dynamic, parameters.alone = 0, 1
        try:
            self._start((ctypes.c_void_p * 1)(ctypes.addressof(parameters)), 1)
            faulted = self._finish()
        except CudaError as error:
            raise self._machine._fault(error) from error
        if faulted:
            raise self._machine_fault(lambda _: index)

    def _instruction_at(self, record: Record) -> int | None:
        """Number of the instruction that a warp was at; None past the end of its queue."""
        queue = 0 if self.program.dynamic else record.worker
        place = int(self._begin[queue]) + record.position
        return int(self._order[place]) if place < self._begin[queue + 1] else None

    def _start(self, pointers: ctypes.Array[ctypes.c_void_p], workers: int) -> None:
        driver = self._driver
        stream = torch.cuda.current_stream(self._machine.device).cuda_stream
        with driver.current():
            if self.program.dynamic:
                driver.call("cuMemsetD32Async", self._ticket.data_ptr(), 0, 1, stream)
            driver.call(
                "cuLaunchKernel",
                *(self._function, workers, 1, 1, NUM_THREADS, 1, 1, SHARED_BYTES, stream),
                *(ctypes.addressof(pointers), 0),
            )
            driver.call(
                "cuMemcpyDtoHAsync", self._abort.data_ptr(), self._faults.data_ptr(), 4, stream
            )
        self._stream = stream

    def _finish(self) -> bool:
        """Wait for the stream. Returns whether a warp has faulted."""
        if self._stream is None:
            return False
        with self._driver.current():
            self._driver.call("cuStreamSynchronize", self._stream)
        self._stream = None
        return bool(self._aborted[0])

    # Faults.

    def _machine_fault(self, index_of: IndexOf) -> MachineFault:
        """The fault that the records describe. Clears the records."""
        words = self._faults.cpu().numpy().view(np.uint32).reshape(-1, RECORD_WORDS)[1:]
        records = [
            Record.read(i // NUM_WARPS, i % NUM_WARPS, words[i].tolist())
            for i in np.flatnonzero(words[:, 0]).tolist()
        ]
        self._faults.zero_()
        if not records:
            return MachineFault("a worker stopped and did not say why")
        # Of all warps of one worker and role, keep the record that says most.
        telling: dict[tuple[int, str], Record] = {}
        for record in sorted(records, key=lambda r: r.rank):
            telling.setdefault((record.worker, record.role), record)
        cause = min(records, key=lambda r: r.rank)
        states = tuple(self._state(telling[key], index_of) for key in sorted(telling))
        index = index_of(cause)
        at = "no instruction" if index is None else f"instruction {index}"
        if index is not None and cause.condition is FaultKind.INSTRUCTION:
            inst = self.program.instructions[index]
            text = cuda_faults.sentence(cause, inst, self.program.tensors)
            return MachineFault(f"{at} ({inst.name()}): {text}", states)
        waiting = self._state(cause, index_of).waiting_for
        return MachineFault(
            f"worker {cause.worker} ({cause.role}) gave up after {self._machine.timeout:g} s: "
            f"{at} waits for {waiting}",
            states,
        )

    def _state(self, record: Record, index_of: IndexOf) -> WorkerState:
        index = index_of(record)
        tensors = self.program.tensors
        inst = None if index is None else self.program.instructions[index]
        waiting = cuda_faults.waiting_for(record, inst, tensors, self.program.barriers)
        text = "" if inst is None else inst.disassemble(tensors)
        return WorkerState(record.worker, record.role, index, text, waiting)

    # Traces.

    def trace(self) -> list[Notes]:
        """The traces of all launches finished since the last call, in ns of the GPU's global timer.

        The data stay on the GPU. Raises ValueError when the machine does not trace.
        """
        if not self._traces:
            raise ValueError("nothing is noted: load the program on a CudaMachine(trace=True)")
        noted, self._noted = self._noted, []
        return noted
