"""Proves before a launch that a program is well-formed, ends, and computes the same at any timing.

``verify`` checks, in this order:

1. *Form.* Header and operand words, tensor handles and types, queues, and each instruction's own checks
   of its operands; every tile lies inside its tensor; no instruction writes a weight or an input. On
   the CPU, every instruction fits into the working memory. On the GPU, it fits into scratch, and the
   program needs one kernel and one layout of each tensor.
2. *Progress.* Every tagged word that is read has one writer in a step. The program does not deadlock: with
   static queues in their order, with a dynamic queue for any number of workers.
3. *Order.* Every execution orders any two accesses to overlapping regions if one is a write, within a
   step and from step to step. Activations are written before they are read. (A read of rows that
   earlier steps wrote is ordered after those writes, and conflicts with no other.)

C++ checks the second and third; happens_before.hpp states the model, and why two steps are enough. A program
of several ranks is checked as one program: expand.py makes one queue of each rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm import _native
from megavm.vm.alike import accesses_of, find_alike, tag_orders
from megavm.vm.codegen import specialisation
from megavm.vm.config import (
    HEADER_WORDS,
    INSTRUCTION_WORDS,
    MAX_WAITS,
    MIN_PAGES,
    NONE,
    WORKING_BYTES,
)
from megavm.vm.cuda.layouts import program_layouts
from megavm.vm.cuda.memory import SCRATCH_BYTES
from megavm.vm.isa import Instruction, TagOrder
from megavm.vm.operands import Field, FieldKind
from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.tensors import Region, TensorKind, TensorSpec
from megavm.vm.verify.expand import expand

MAX_WORKERS = 4096  # more than any machine has; a larger number is a mistake
MAX_ELEMENTS = 1 << 48  # elements of a tensor, likewise

Ints = npt.NDArray[np.int64]

_WEAKER = (TagOrder.READS_LATE, TagOrder.WRITES_EARLY)  # orders with fewer guarantees than KEPT


class VerificationError(ValueError):
    """A program must not be launched; the message is one sentence that says why.

    ``rule`` is "form", "deadlock", "unordered", "unwritten", "tag_unreachable", "tag_ambiguous", or "limit":
    the program is too large to be analysed.
    ``accesses`` are the accesses at fault, in the order of the execution that was analysed.
    """

    def __init__(
        self, sentence: str, rule: str = "form", accesses: tuple[Access, ...] = ()
    ) -> None:
        super().__init__(sentence)
        self.rule = rule
        self.accesses = accesses


@dataclass(frozen=True)
class Access:
    """A region that an instruction reads or writes in a step."""

    instruction: int
    region: Region
    write: bool
    step: int = 0
    rank: int = 0  # of the instruction
    tensor_rank: int = 0


def verify(program: Program, machine: str = "reference") -> None:
    """Return if the program may be launched on a machine, for any number of steps.

    ``machine``: "cpu", "cuda", or "reference", which runs every well-formed program.

    Raises VerificationError, with one sentence that names instruction, field and values; ValueError when
    the machine is unknown.
    """
    if machine not in TARGETS:
        raise ValueError(f"machine {machine!r} is unknown: expected {', '.join(TARGETS)}")
    _Verifier(program, machine).verify()


class _Verifier:
    def __init__(self, program: Program, machine: str) -> None:
        self.program = program
        self.machine = machine
        self.tensors = program.tensors
        self.words = program.words
        # One tensor of each form, and the form of every tensor; the last entry stands for no tensor.
        form_of = [(t.dtype, t.tagged, len(t.shape), bool(t.parts)) for t in self.tensors]
        forms = dict(zip(form_of, self.tensors, strict=True))
        self._forms = list(forms.values())
        numbers = {form: number for number, form in enumerate(forms)}
        self._form_of = np.array([*(numbers[form] for form in form_of), len(forms)])

    def verify(self) -> None:
        self._check_shape()
        self._check_queues()
        self._check_headers()
        accesses = self._declared_accesses()
        self._check_constants(accesses)
        self._check_order(accesses)

    # Sentences.

    def _name(self, instruction: int) -> str:
        """``instruction 118 (matmul, layers.3.o_proj)``"""
        cls = instruction_set()[int(self.words[instruction, 0])]
        label = self.program.labels[instruction]
        return f"instruction {instruction} ({cls.name()}{f', {label}' if label else ''})"

    def _place(self, instruction: int, rank: int = 0) -> str:
        """``_name``, with the worker of a static queue and the rank, if there are several."""
        worker = f"worker {self.program.worker_of()[instruction]}"
        if self.program.dynamic:
            worker = "any worker" if self.program.ranks > 1 else ""
        if self.program.ranks > 1:
            worker += f" of rank {rank}"
        return f"{self._name(instruction)}{worker and f' on {worker}'}"

    def _barrier(self, number: int) -> str:
        name = self.program.barriers[number]
        return f"barrier {number}{f' ({name})' if name else ''}"

    def _fail(self, instruction: int | np.integer[Any], sentence: str) -> NoReturn:
        raise VerificationError(f"{self._name(int(instruction))}: {sentence}")

    # 1. Form.

    def _check_shape(self) -> None:
        program, words = self.program, self.words
        if words.ndim != 2 or words.shape[1] != INSTRUCTION_WORDS or words.dtype != np.uint32:
            raise VerificationError(
                f"instruction words are {words.dtype} of shape {words.shape}, "
                f"expected uint32 of (n, {INSTRUCTION_WORDS})"
            )
        if len(program.labels) != len(words):
            raise VerificationError(f"{len(program.labels)} labels for {len(words)} instructions")
        if not 1 <= program.workers <= MAX_WORKERS:
            raise VerificationError(
                f"the program is for {program.workers} workers, expected 1 to {MAX_WORKERS}"
            )
        if not 1 <= program.ranks <= MAX_WORKERS // program.workers:
            raise VerificationError(
                f"the program is for {program.ranks} ranks of {program.workers} workers, expected "
                f"1 to {MAX_WORKERS // program.workers}"
            )
        if not 0 <= program.shared_barriers <= len(program.barriers):
            raise VerificationError(
                f"{program.shared_barriers} barriers are shared, the program has {len(program.barriers)}"
            )
        queues = 1 if program.dynamic else program.workers
        if len(program.queues) != queues:
            why = "a dynamic program has one for all workers"
            if not program.dynamic:
                why = f"a static program has one for each of its {queues} workers"
            raise VerificationError(
                f"the program has {len(program.queues)} queues, expected {queues}: {why}"
            )
        names: dict[str, int] = {}
        for handle, spec in enumerate(self.tensors):
            if spec.name in names:
                raise VerificationError(
                    f"tensors {names[spec.name]} and {handle} are both called {spec.name}"
                )
            names[spec.name] = handle
            if spec.shares not in (1, program.ranks):
                raise VerificationError(
                    f"tensor {spec.name} has {spec.shares} shares, the program {program.ranks} ranks"
                )
            if spec.rows * spec.columns > MAX_ELEMENTS:
                raise VerificationError(f"tensor {spec.name} has shape {spec.shape}: too large")
        known = np.fromiter(instruction_set(), dtype=np.uint32)
        for i in np.flatnonzero(~np.isin(words[:, 0], known))[:1]:
            raise VerificationError(f"instruction {i}: opcode {words[i, 0]} is unknown")

    def _check_queues(self) -> None:
        count = len(self.words)
        for worker, queue in enumerate(self.program.queues):
            where = "the queue" if self.program.dynamic else f"the queue of worker {worker}"
            if queue.ndim != 1 or not np.issubdtype(queue.dtype, np.integer):
                raise VerificationError(f"{where} holds {queue.dtype} of shape {queue.shape}")
            for entry in queue[(queue < 0) | (queue >= count)][:1]:
                raise VerificationError(f"{where} holds instruction {entry} of {count}")
        entries = self._entries()
        times = np.bincount(entries, minlength=count)
        for i in np.flatnonzero(times != 1)[:1]:
            workers = [w for w, q in enumerate(self.program.queues) for entry in q if entry == i]
            where = ""
            if workers and not self.program.dynamic:
                where = f" (workers {', '.join(map(str, workers))})"
            raise VerificationError(
                f"{self._name(int(i))} stands {times[i]} times in the queues{where}, expected once"
            )

    def _entries(self) -> npt.NDArray[np.int32]:
        return np.concatenate([*self.program.queues, np.empty(0, np.int32)]).astype(np.int32)

    def _check_headers(self) -> None:
        barriers = len(self.program.barriers)
        signal = self.words[:, 1]
        for i in np.flatnonzero((signal != NONE) & (signal >= barriers))[:1]:
            self._fail(i, f"signals barrier {signal[i]}, the program has {barriers}")
        waits = self.words[:, 2:HEADER_WORDS].reshape(-1, MAX_WAITS, 2)
        barrier, target = waits[:, :, 0], waits[:, :, 1]
        used = barrier != NONE
        for i, k in np.argwhere(used & (barrier >= barriers))[:1]:
            self._fail(i, f"wait {k} is for barrier {barrier[i, k]}, the program has {barriers}")
        for i, k in np.argwhere(~used & (target != 0))[:1]:
            self._fail(i, f"wait {k} has target {target[i, k]} but no barrier")
        for i, k in np.argwhere(~used[:, :-1] & used[:, 1:])[:1]:
            self._fail(i, f"wait {k + 1} is used but wait {k} is not")
        limit = np.append(self.program.signals, 0)[np.where(used, barrier, barriers)]
        for i, k in np.argwhere(target > limit)[:1]:
            self._fail(
                i,
                f"waits for {self._barrier(int(barrier[i, k]))} to reach {target[i, k]}, "
                f"but one step signals it {limit[i, k]} times",
            )
        for j in range(1, MAX_WAITS):
            same = used[:, j, None] & (barrier[:, :j] == barrier[:, j, None])
            for i in np.flatnonzero(same.any(axis=1))[:1]:
                self._fail(i, f"waits twice for {self._barrier(int(barrier[i, j]))}")

    def _check_operands(self, cls: type[Instruction], numbers: Ints) -> None:
        """The operand words of instructions of one class."""
        operands = self.words[numbers, HEADER_WORDS:]
        for row, k in np.argwhere(operands[:, len(cls.fields) :] != 0)[:1]:
            word = HEADER_WORDS + len(cls.fields) + k
            self._fail(
                numbers[row],
                f"word {word} is {operands[row, len(cls.fields) + k]}, expected 0: no field uses it",
            )
        for k, field in enumerate(cls.fields):
            values = operands[:, k]
            if field.kind is FieldKind.REAL:
                reals = (
                    values.view(np.float32)
                    if values.flags.c_contiguous
                    else values.copy().view(np.float32)
                )
                for row in np.flatnonzero(~np.isfinite(reals))[:1]:
                    self._fail(
                        numbers[row], f"{field.name} is {reals[row]}, expected a finite number"
                    )
                for row in np.flatnonzero(reals < field.least)[:1]:
                    self._fail(
                        numbers[row],
                        f"{field.name} is {reals[row]}, expected at least {field.least:g}",
                    )
                continue
            if not field.optional:
                for row in np.flatnonzero(values == NONE)[:1]:
                    self._fail(numbers[row], f"{field.name} is NONE, but it is not optional")
            if field.kind is FieldKind.TENSOR:
                self._check_handles(field, values, numbers)

    def _check_handles(
        self, field: Field[Any], values: npt.NDArray[np.uint32], numbers: Ints
    ) -> None:
        count = len(self.tensors)
        for row in np.flatnonzero((values != NONE) & (values >= count))[:1]:
            self._fail(
                numbers[row], f"{field.name} is tensor {values[row]}, the program has {count}"
            )
        # A field accepts either all tensors of one form or none.
        fits = np.array([*(_misfit(field, spec) == "" for spec in self._forms), True])
        for row in np.flatnonzero(~fits[self._form_of[np.where(values == NONE, count, values)]])[
            :1
        ]:
            self._fail(numbers[row], _misfit(field, self.tensors[int(values[row])]))

    def _check_constants(self, accesses: Ints) -> None:
        """No instruction writes a tensor that kernels read before all waits."""
        written = np.zeros(len(self.tensors) + 1, bool)
        written[accesses[accesses[:, 6] != 0, 1]] = True
        for cls, numbers in self._by_class():
            constant = [
                (HEADER_WORDS + k, field)
                for k, field in enumerate(cls.fields)
                if field.kind is FieldKind.TENSOR and not field.produced
            ]
            places = np.array([word for word, _ in constant], np.int64)
            handles = self.words[np.ix_(numbers, places)]
            handles[handles == NONE] = len(self.tensors)
            for row, k in np.argwhere(written[handles])[:1]:
                tensor = int(handles[row, k])
                writer = accesses[(accesses[:, 6] != 0) & (accesses[:, 1] == tensor), 0][0]
                by = (
                    "it writes itself" if writer == numbers[row] else f"{self._name(writer)} writes"
                )
                self._fail(
                    numbers[row],
                    f"{constant[k][1].name} is {self.tensors[tensor].name}, which {by}, "
                    "but kernels read this operand before all waits",
                )

    def _by_class(self) -> Iterator[tuple[type[Instruction], Ints]]:
        """The instruction classes that occur in the program, and the numbers of their instructions."""
        for opcode, cls in instruction_set().items():
            numbers = np.flatnonzero(self.words[:, 0] == opcode)
            if len(numbers):
                yield cls, numbers

    # Declared accesses. Layers repeat the same tiles on tensors of the same shapes, and a declaration
    # depends on nothing else, so one instruction of each kind is asked.

    def _declared_accesses(self) -> Ints:
        """Rows (instruction, tensor, rows, columns, write, indexed, earlier), sorted by instruction.

        They include only accesses to tensors that instructions may write.
        """
        for cls, numbers in self._by_class():
            self._check_operands(cls, numbers)
        alike = self._alike = tuple(find_alike(self.words, self.tensors))
        accesses = accesses_of(alike, 8, self._declaration)
        if self.machine == "cuda":
            try:
                chosen = (inst for same in alike for inst in same.representatives)
                specialisation(chosen, self.tensors)
                program_layouts(self.program, alike)
            except ValueError as error:
                raise VerificationError(str(error)) from error
        return accesses

    def _declaration(self, number: int, inst: Instruction) -> list[tuple[int, ...]]:
        """Accesses of one instruction: (tensor, rows, columns, write, indexed, earlier)."""
        fields = [field for field in inst.fields if field.kind is FieldKind.TENSOR]
        handles = [vars(inst)[field.name] for field in fields]
        try:
            for sentence in inst.check(self.tensors):
                self._fail(number, sentence)
            self._check_budget(number, inst)
            regions = [
                (region, write)
                for declared, write in ((inst.reads, False), (inst.writes, True))
                for region in self._regions(number, declared, write, handles)
                if self.tensors[region.tensor].writable
            ]
            self._check_gathered(number, fields, handles, regions)
            if all(field.produced for field in fields if handles.count(vars(inst)[field.name]) > 1):
                self._check_in_place(number, regions, handles)
            return [
                (region.tensor, *self._span(region), write, region.indexed, region.earlier)
                for region, write in regions
            ]
        except (ArithmeticError, LookupError) as error:
            self._fail(number, f"its operands contradict each other ({error!r})")

    def _check_gathered(
        self,
        number: int,
        fields: Sequence[Field[Any]],
        handles: Sequence[int],
        regions: Sequence[tuple[Region, bool]],
    ) -> None:
        """A tensor with shares is written by an operand that may be gathered, and not read as well."""
        for tensor in {r.tensor for r, write in regions if write}:
            spec = self.tensors[tensor]
            if spec.shares == 1:
                continue
            names = [f for f, handle in zip(fields, handles, strict=True) if handle == tensor]
            if len(names) > 1 or any(r.tensor == tensor for r, write in regions if not write):
                self._fail(
                    number, f"writes {spec.name}, which has shares, and names or reads it twice"
                )
            if not names[0].gathered:
                self._fail(
                    number,
                    f"{names[0].name} is {spec.name}, which has shares: kernels write this operand on "
                    "their own rank only",
                )

    def _check_in_place(
        self, number: int, regions: Sequence[tuple[Region, bool]], handles: Sequence[int]
    ) -> None:
        """A tile that one operand reads and a tile that another writes are equal or do not overlap.

        Kernels process a tile in any order.
        """
        for written in (region for region, write in regions if write):
            if handles.count(written.tensor) == 1:
                continue
            for read in (region for region, write in regions if not write):
                if read != written and _overlap(read, written):
                    self._fail(
                        number,
                        f"reads rows [{read.rows[0]}, {read.rows[1]}) columns [{read.columns[0]}, "
                        f"{read.columns[1]}) of {self.tensors[read.tensor].name} by one operand and writes "
                        "some of them by another, in no particular order",
                    )

    def _check_budget(self, number: int, inst: Instruction) -> None:
        """The instruction fits into the memory of a worker."""
        if self.machine == "cpu":
            need = inst.working_bytes(self.tensors)
            if need > WORKING_BYTES:
                self._fail(
                    number,
                    f"needs {need} bytes of working memory, a worker of the CPU has {WORKING_BYTES}",
                )
        elif self.machine == "cuda":
            need = inst.scratch_bytes(self.tensors)
            if need > SCRATCH_BYTES:
                self._fail(
                    number,
                    f"needs {need} bytes of scratch, a worker of the GPU has {SCRATCH_BYTES} "
                    f"beside {MIN_PAGES} pages",
                )

    def _regions(
        self,
        number: int,
        declared: Callable[[Sequence[TensorSpec]], Iterator[Region]],
        write: bool,
        handles: list[int],
    ) -> Iterator[Region]:
        """The declared regions, after checks that they fit their tensors and that no two writes overlap."""
        verb = "writes" if write else "reads"
        seen: list[Region] = []
        for region in declared(self.tensors):
            if region.tensor not in handles:
                self._fail(number, f"{verb} tensor {region.tensor}, which is none of its operands")
            spec = self.tensors[region.tensor]
            rows = NONE if region.indexed else spec.rows
            columns = spec.own_columns if write else spec.columns
            for what, (begin, end), size in (
                ("rows", region.rows, rows),
                ("columns", region.columns, spec.entry_columns if region.indexed else columns),
            ):
                if begin >= end:
                    self._fail(number, f"{verb} the empty {what} [{begin}, {end}) of {spec.name}")
                if not 0 <= begin < end <= size:
                    where = f"outside tensor {spec.name} of {size} {what}"
                    self._fail(number, f"{verb} {what} [{begin}, {end}) {where}")
            if write and not spec.writable:
                self._fail(number, f"writes {spec.name}, which is {_article(spec.kind)}")
            if spec.tagged and region.indexed:
                self._fail(number, f"{verb} indexed rows of {spec.name}, which is tagged")
            if region.earlier and (
                write or not region.indexed or spec.kind is not TensorKind.STATE
            ):
                self._fail(
                    number,
                    f"{verb} earlier rows of {spec.name}: only indexed rows of a state can be read so",
                )
            per_word = 4 // spec.dtype.size
            if spec.tagged and write and any(c % per_word for c in region.columns):
                begin, end = region.columns
                self._fail(
                    number,
                    f"writes columns [{begin}, {end}) of {spec.name}, which is tagged: "
                    f"words of {per_word} {spec.dtype.name} are written as a whole",
                )
            if write and any(_overlap(region, other) for other in seen):
                self._fail(number, f"writes parts of {spec.name} twice, in no particular order")
            seen.append(region)
            yield region

    def _span(self, region: Region) -> tuple[int, int, int, int]:
        """Rows and columns; the columns of a tagged tensor are rounded to whole words."""
        begin, end = region.columns
        spec = self.tensors[region.tensor]
        if spec.tagged:
            per_word = 4 // spec.dtype.size
            begin, end = begin // per_word * per_word, -(-end // per_word) * per_word
        return *region.rows, begin, end

    # 2. and 3. Progress and order.

    def _check_order(self, accesses: Ints) -> None:
        program = self.program
        traits = [
            (t.tagged, t.kind is TensorKind.ACTIVATION, t.entry_columns == t.columns)
            for t in self.tensors
        ]
        whole = expand(program, accesses)
        # All machines but the GPU keep the order of tagged words for every instruction.
        orders = np.full(len(self.words), TagOrder.KEPT.value)
        if self.machine == "cuda":
            orders = tag_orders(self.words, self.tensors, self._alike)
        try:
            fault, needs_queue_order = _native.analyse(
                barriers=whole.barriers,
                dynamic=program.dynamic,
                queues=whole.queues,
                lengths=whole.lengths,
                waits=whole.waits,
                signals=whole.signals,
                orders=np.tile(
                    np.stack([orders == o.value for o in _WEAKER], axis=1), (program.ranks, 1)
                ),
                accesses=whole.accesses,
                traits=np.tile(np.array(traits, bool).reshape(-1, 3), (program.ranks, 1)),
            )
        except ValueError as error:
            raise VerificationError(str(error), "limit") from error
        if fault is None:
            if self.machine == "cuda":  # cached: Program.needs_queue_order
                program.__dict__["needs_queue_order"] = needs_queue_order
            return
        rule, first, first_step, second, second_step, blocked = fault
        if rule == "deadlock":
            raise VerificationError(self._deadlock(blocked), rule)
        found = [
            self._access(whole.accesses[number], step)
            for number, step in ((first, first_step), (second, second_step))
            if number >= 0
        ]
        raise VerificationError(getattr(self, f"_{rule}")(*found), rule, tuple(found))

    def _access(self, row: Ints, step: int) -> Access:
        number, tensor, top, bottom, left, right, write, indexed, earlier = (int(v) for v in row)
        rank, number = divmod(number, len(self.words))
        tensor_rank, tensor = divmod(tensor, len(self.tensors))
        region = Region(tensor, (top, bottom), (left, right), bool(indexed), bool(earlier))
        return Access(number, region, bool(write), step, rank, tensor_rank)

    def _does(self, access: Access) -> str:
        """``instruction 118 (matmul, o_proj) on worker 4 writes rows [0, 1) columns [0, 128) of x``"""
        region = access.region
        return (
            f"{self._place(access.instruction, access.rank)} {'writes' if access.write else 'reads'} "
            f"{'earlier ' if region.earlier else ''}{'indexed ' if region.indexed else ''}rows [{region.rows[0]}, {region.rows[1]}) "
            f"columns [{region.columns[0]}, {region.columns[1]}) of {self.tensors[region.tensor].name}"
            f"{f' of rank {access.tensor_rank}' if access.tensor_rank != access.rank else ''}"
        )

    def _unordered(self, first: Access, second: Access) -> str:
        step = " in the step before" if first.step < second.step else ""
        verb = "writes" if first.write else "reads"
        return (
            f"{self._does(second)}, which {self._place(first.instruction, first.rank)} {verb}{step}, "
            "without an order between them"
        )

    def _unwritten(self, *accesses: Access) -> str:
        """``accesses``: a write that comes after the read, if any, and the read."""
        text = f"{self._does(accesses[-1])}, some of which no instruction has written before in the step"
        if len(accesses) == 1:
            return f"{text}, and none does later"
        return f"{text}: {self._does(accesses[0])}, but not before"

    def _tag_unreachable(self, access: Access) -> str:
        return (
            f"{self._does(access)}, which is tagged, and some of whose words no instruction writes"
        )

    def _tag_ambiguous(self, first: Access, second: Access) -> str:
        return (
            f"{self._does(second)}, which is tagged, and which {self._place(first.instruction, first.rank)} "
            "writes too"
        )

    def _deadlock(self, blocked: Sequence[tuple[int, int, int, int, int]]) -> str:
        """Describes the cycle of waits that blocks the program."""
        program, count = self.program, len(self.words)
        of_rank = program.worker_of()
        worker_of = np.concatenate([of_rank + r * program.workers for r in range(program.ranks)])
        heads = {int(worker_of[b[0]]): b for b in blocked}
        chain: list[int] = []
        worker = min(heads)
        while worker not in chain:
            chain.append(worker)
            worker = int(worker_of[heads[worker][4]])

        def number(instruction: int) -> str:
            rank, own = divmod(instruction, count)
            return f"{own} of rank {rank}" if program.ranks > 1 else f"{own}"

        cycle = chain[chain.index(worker) :]
        parts = []
        for worker in cycle:
            instruction, barrier, value, target, missing = heads[worker]
            if barrier >= 0:
                if barrier >= program.shared_barriers:
                    barrier -= (instruction // count) * (
                        len(program.barriers) - program.shared_barriers
                    )
                what = f"{self._barrier(barrier)} to reach {target} (it stands at {value})"
                action = "signalled by"
            else:
                what, action = "tagged words", "written by"
            head = heads[int(worker_of[missing])][0]
            text = f"{self._place(instruction % count, instruction // count)} waits for {what}, {action} "
            of = f" of rank {missing // count}" if program.ranks > 1 else ""
            text += "itself" if missing == instruction else f"{self._name(missing % count)}{of}"
            if missing not in (instruction, head):
                text += f", which stands behind instruction {number(head)}"
            parts.append(text)
        others = len(blocked) - len(cycle)
        more = f" ({others} more workers wait behind them)" if others else ""
        return f"deadlock: {'; '.join(parts)}{more}"


def _misfit(field: Field[Any], spec: TensorSpec) -> str:
    """Why the field does not accept the tensor; "" if it does."""
    what = f"{field.name} is {spec.name}"
    if field.dtypes and spec.dtype not in field.dtypes:
        allowed = " or ".join(t.name for t in field.dtypes)
        return f"{what} of {spec.dtype.name}, expected {allowed}"
    if spec.tagged and not field.tagged:
        return f"{what}, which is tagged: kernels read and write no tags of this operand"
    if spec.parts and not field.parts:
        return f"{what}, which has parts: kernels read this operand as one tensor"
    if field.rank not in (None, len(spec.shape)):
        return f"{what} of shape {spec.shape}, expected {field.shape}"
    return ""


def _overlap(one: Region, two: Region) -> bool:
    """Whether two regions of an instruction may share an element."""
    if one.tensor != two.tensor:
        return False
    return one.indexed != two.indexed or all(
        a[0] < b[1] and b[0] < a[1] for a, b in ((one.rows, two.rows), (one.columns, two.columns))
    )


def _article(kind: TensorKind) -> str:
    return f"{'an' if kind is TensorKind.INPUT else 'a'} {kind.value}"
