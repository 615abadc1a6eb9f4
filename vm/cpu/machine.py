"""CpuMachine: the C++ interpreter of the same instruction streams that the GPU runs."""

from __future__ import annotations

import functools
import threading

import torch

from megavm.instructions import instruction_set
from megavm.vm import _native, codegen
from megavm.vm.alike import exchanged_regions, figures
from megavm.vm.cpu.notes import EVENTS, WORKER_COLUMN
from megavm.vm.machine import MachineFault, Notes, WorkerState, memory_on_cpu, require_ranks
from megavm.vm.memory import Memory
from megavm.vm.program import Program

# cpu/bindings.cpp describes a fault as (kind, cause, worker, reports), with one report per worker:
# (instruction, kind of condition, barrier or tensor, row, word, target, value).
Report = tuple[int, str, int, int, int, int, int]
Fault = tuple[str, str, int, list[Report]]


class CpuMachine:
    """Runs programs on threads, one per worker of each rank of the program.

    Schedulers compile for ``workers`` (default: the processors of this process). A program has its own number
    of workers, which may exceed the number of processors. A run that cannot make progress faults after
    ``timeout`` seconds. ``level`` forces one of the instruction-set levels of ``levels()``. With
    ``check_resources`` an instruction faults when it uses more working memory than it declares. With
    ``trace`` executables record the events of every instruction.

    Raises ValueError when an instruction is declared otherwise than when the interpreter was compiled.
    """

    name = "cpu"
    memory_device = "cpu"
    memory = staticmethod(memory_on_cpu)

    def __init__(
        self,
        workers: int | None = None,
        timeout: float = 10.0,
        *,
        level: str | None = None,
        check_resources: bool = False,
        trace: bool = False,
    ) -> None:
        check_declarations()
        self.workers = workers or _native.num_processors()
        self.timeout = timeout
        self.check_resources = check_resources
        self.trace = trace
        self._interpreter = _native.Interpreter(level, timeout)

    @property
    def level(self) -> str:
        """The instruction-set level of the kernels: "generic", "avx2", "avx512", "avx512bf16" or "amx"."""
        return self._interpreter.level

    def load(self, program: Program, memory: Memory, *, verify: bool = True) -> CpuExecutable:
        """Verify the program and resolve its tensors in ``memory``.

        Raises ValueError for a program that does not verify or a tensor that memory does not have.
        """
        if verify:
            from megavm.vm.verify import verify as verify_program

            verify_program(program, self.name)
        return CpuExecutable(self, program, memory)


def levels() -> list[str]:
    """The instruction-set levels that this processor runs, from the plainest to the fastest."""
    return _native.levels()


@functools.cache
def check_declarations() -> None:
    """Raises ValueError when a declaration is not what it was when the interpreter was compiled.

    Instructions that are new are refused when a program with them is loaded.
    """
    now = codegen.digests(instruction_set().values())
    # An interpreter from before there were digests has none.
    for source, digest in getattr(_native, "declared", {"vm/config.py": ""}).items():
        if now.get(source) != digest:
            raise ValueError(
                f"{source} has changed since the interpreter was compiled. It might read instructions in "
                "another way: install megavm again (pip install --no-build-isolation --no-deps -e .)"
            )


class CpuExecutable:
    """A program on the CpuMachine."""

    def __init__(self, machine: CpuMachine, program: Program, memory: Memory) -> None:
        self.program = program
        self.memory = memory
        self._machine = machine
        self._interpreter = machine._interpreter
        self.arena_used = 0
        self._trace = machine.trace
        # The interpreter holds pointers to the tensors, so keep them alive.
        require_ranks(program, memory)
        self._storage = []
        for rank in memory.ranks:
            rank.require(program.tensors, rows=True)
            self._storage.append([_resolve(spec.name, rank) for spec in program.tensors])
        self._loaded = self._interpreter.load(
            words=program.words.astype("<u4").tobytes(),
            tensors=[
                [
                    (
                        [(part.data_ptr(), len(part)) for part in parts],
                        spec.rows,
                        spec.columns,
                        spec.own_columns,
                        # Kernels use the shapes of KV caches only, which have four dimensions.
                        list(spec.shape) if len(spec.shape) <= 4 else [spec.rows, spec.columns],
                        spec.dtype.code,
                        spec.tagged,
                    )
                    for spec, parts in zip(program.tensors, storage, strict=True)
                ]
                for storage in self._storage
            ],
            queues=[queue.astype("<i4").tobytes() for queue in program.queues],
            dynamic=program.dynamic,
            workers=program.workers,
            signals=program.signals.astype("<u4").tobytes(),
            shared_barriers=program.shared_barriers,
            exchanged=exchanged_regions(program.words, program.tensors),
            arena_limits=self._arena_limits() if machine.check_resources else [],
        )

    def _arena_limits(self) -> list[int]:
        tensors = self.program.tensors
        needs = figures(self.program.words, tensors, 1, lambda i: (i.working_bytes(tensors),))
        return [int(need) for need in needs[:, 0]]

    @property
    def barriers(self) -> list[int]:
        """The barriers' counters, rank by rank."""
        return self._loaded.barriers

    def run(self, steps: int = 1) -> None:
        """Run the program ``steps`` times and return when it has finished. Advances ``memory.epoch``.

        Raises MachineFault when it cannot finish; the executable then needs ``reset`` to run again.
        """
        if self._loaded.broken:
            raise MachineFault("an earlier run of this executable ended in the middle: reset it")
        if steps < 1:
            raise ValueError(f"steps is {steps}: a run has at least one step")
        epoch = self.memory.epoch
        # Also after a fault: words may carry the tags of these steps, which no later step may use again.
        self.memory.epoch += steps
        main_thread = threading.current_thread() is threading.main_thread()
        fault = self._interpreter.run(
            self._loaded, steps, epoch & 0xFFFFFFFF, main_thread, self._trace
        )
        if fault is not None:
            raise self._machine_fault(fault)

    def reset(self) -> None:
        """Set the barriers to those of a fresh load, so that the program runs again after a fault."""
        self._loaded.reset()

    def execute_one(self, index: int, step: int = 0, rank: int = 0) -> None:
        """Run one instruction of a rank alone, without its waits and signal, as in step ``step`` of a launch.

        Sets ``arena_used`` to the bytes of working memory that it took. Raises MachineFault when it
        faults or reads a tagged word that this step has not written.
        """
        tag = (self.memory.epoch + step + 1) & 0xFFFFFFFF
        fault, self.arena_used = self._interpreter.execute_one(self._loaded, rank, index, step, tag)
        if fault is not None:
            raise self._machine_fault(fault)

    def trace(self) -> list[Notes]:
        """The traces of all runs since the last call, in nanoseconds of the steady clock.

        A kernel does not separate computing from storing, so ``computed`` equals ``end``. ``inputs`` is
        ``ready`` plus the total time that the kernel waited for tagged words. May be called while the
        program runs. Raises ValueError when the machine does not trace.
        """
        if not self._trace:
            raise ValueError("nothing is noted: load the program on a CpuMachine(trace=True)")
        ranks = self.program.ranks
        rows = max(ranks * sum(map(len, self.program.queues)), 1)
        offsets = ((0, 0),) * ranks if ranks > 1 else ()  # they have one clock
        return [
            Notes(len(times) // rows, torch.from_numpy(times), EVENTS, WORKER_COLUMN, offsets)
            for times in self._loaded.take_notes()
        ]

    def _machine_fault(self, fault: Fault) -> MachineFault:
        kind, cause, worker, reports = fault
        states = tuple(self._state(number, report) for number, report in enumerate(reports))
        index = reports[worker][0]
        if kind == "instruction":
            name = self.program.instructions[index].name()
            return MachineFault(f"instruction {index} ({name}): {cause}", states)
        if kind == "interrupted":
            return MachineFault("the run was interrupted", states)
        waiting = states[worker].waiting_for
        return MachineFault(f"no worker can go on: instruction {index} waits for {waiting}", states)

    def _state(self, number: int, report: Report) -> WorkerState:
        index, kind, thing, row, word, target, value = report
        rank, worker = divmod(number, self.program.workers)
        of_rank = rank if self.program.ranks > 1 else None
        if index < 0:
            return WorkerState(worker, "worker", None, "", "", of_rank)
        waiting = ""
        if kind == "barrier":
            waiting = (
                f"barrier {thing} ({self.program.barriers[thing]}): value {value}, target {target}"
            )
        elif kind == "tag":
            waiting = (
                f"tensor {self.program.tensors[thing].name}, row {row}, word {word}: "
                f"epoch {value}, expected {target}"
            )
        text = self.program.instructions[index].disassemble(self.program.tensors)
        return WorkerState(worker, "worker", index, text, waiting, of_rank)


def _resolve(name: str, memory: Memory) -> tuple[torch.Tensor, ...]:
    """Storage of a tensor that memory has. Raises ValueError when the interpreter cannot read it."""
    parts = memory.stored_parts(name)
    if any(part.device.type != "cpu" or not part.is_contiguous() for part in parts):
        raise ValueError(f"tensor {name} must be contiguous and on the CPU")
    return parts
