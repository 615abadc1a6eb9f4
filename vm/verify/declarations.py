"""The accesses that instructions declare, checked against their tensors and the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from megavm.vm.alike import accesses_of, find_alike
from megavm.vm.config import HEADER_WORDS, MIN_PAGES, NONE
from megavm.vm.cuda.layouts import program_layouts
from megavm.vm.isa import Instruction
from megavm.vm.operands import Field, FieldKind
from megavm.vm.program import Program
from megavm.vm.specialisation import specialisation
from megavm.vm.target import TARGETS
from megavm.vm.tensors import Region, TensorKind, TensorSpec
from megavm.vm.verify.check import Check, Ints
from megavm.vm.verify.error import VerificationError

MOST_REGIONS = 4096  # that an instruction may read or write; bounds the time to verify


class DeclarationCheck(Check):
    """Whether what the instructions of a well-formed program declare fits the program and the machine.

    Layers repeat the same tiles on tensors of the same shapes, and a declaration depends on nothing else,
    so one instruction of each kind (``alike``) is asked.
    """

    def __init__(self, program: Program, machine: str) -> None:
        super().__init__(program, machine)
        self.alike = tuple(find_alike(self.words, self.tensors))

    def accesses(self) -> Ints:
        """Rows (instruction, tensor, rows, columns, write, indexed, earlier, only), sorted by instruction.

        ``only``: the one rank that a write reaches (Region.only), or -1.
        They include only accesses to tensors that instructions may write.
        Raises VerificationError when a declaration contradicts the program or the machine.
        """
        alike = self.alike
        accesses = accesses_of(alike, 9, self._declaration)
        if self.machine == "cuda":
            try:
                chosen = (inst for same in alike for inst in same.representatives)
                specialisation(chosen, self.tensors)
                program_layouts(self.program, alike)
            except ValueError as error:
                raise VerificationError(str(error)) from error
        self._check_constants(accesses)
        return accesses

    def _declaration(self, number: int, inst: Instruction) -> list[tuple[int, ...]]:
        """Accesses of one instruction: (tensor, rows, columns, write, indexed, earlier, only)."""
        fields = [field for field in inst.fields if field.kind is FieldKind.TENSOR]
        handles = [vars(inst)[field.name] for field in fields]
        operands = dict(zip(handles, fields, strict=True))
        try:
            for sentence in inst.check(self.tensors):
                self._fail(number, sentence)
            self._check_budget(number, inst)
            regions = [
                (region, write)
                for declared, write in ((inst.reads, False), (inst.writes, True))
                for region in self._regions(number, declared, write, operands)
                if self.tensors[region.tensor].writable
            ]
            self._check_gathered(number, fields, handles, regions)
            # A result that is a constant as well is ``_check_constants``'s.
            constants = {h for f, h in zip(fields, handles, strict=True) if not f.produced}
            twice = [
                (field, handle)
                for field, handle in zip(fields, handles, strict=True)
                if handle not in {NONE, *constants} and handles.count(handle) > 1
            ]
            self._check_in_place(number, twice, regions)
            return [
                (
                    *(region.tensor, *self._span(region), write),
                    *(region.indexed, region.earlier, region.only_number),
                )
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
        self,
        number: int,
        twice: Sequence[tuple[Field[Any], int]],
        regions: Sequence[tuple[Region, bool]],
    ) -> None:
        """A tile that one operand reads and a tile that another writes are equal or do not overlap.

        Kernels process a tile in any order. ``twice``: the operands whose handle another one has too.
        """
        for field, handle in twice:
            if field.workspace:
                self._fail(
                    number,
                    f"{field.name} is {self.tensors[handle].name}, which another operand names too, but "
                    "kernels store anything there",
                )
        shared = {handle for _, handle in twice}
        for written in (r for r, write in regions if write and r.tensor in shared):
            for read in (region for region, write in regions if not write):
                if read != written and read.may_overlap(written):
                    self._fail(
                        number,
                        f"reads rows [{read.rows[0]}, {read.rows[1]}) columns [{read.columns[0]}, "
                        f"{read.columns[1]}) of {self.tensors[read.tensor].name} by one operand and writes "
                        "some of them by another, in no particular order",
                    )

    def _check_budget(self, number: int, inst: Instruction) -> None:
        """The instruction fits into the memory of a worker."""
        target = TARGETS[self.machine]
        for most, declared, memory, worker, beside in (
            (target.working_bytes, inst.working_bytes, "working memory", "CPU", ""),
            (
                target.scratch_bytes,
                inst.scratch_bytes,
                "scratch",
                "GPU",
                f" beside {MIN_PAGES} pages",
            ),
        ):
            if most and (need := declared(self.tensors)) > most:
                sizes = f"{need} bytes of {memory}, a worker of the {worker} has {most}"
                self._fail(number, f"needs {sizes}{beside}")

    def _regions(
        self,
        number: int,
        declared: Callable[[Sequence[TensorSpec]], Iterator[Region]],
        write: bool,
        operands: Mapping[int, Field[Any]],
    ) -> Iterator[Region]:
        """The declared regions, after checks that they fit their tensors and that no two writes overlap."""
        verb = "writes" if write else "reads"
        seen: list[Region] = []
        for count, region in enumerate(declared(self.tensors)):
            if count == MOST_REGIONS:
                self._fail(number, f"{verb} more than {MOST_REGIONS} regions")
            if region.tensor not in operands:
                self._fail(number, f"{verb} tensor {region.tensor}, which is none of its operands")
            spec = self.tensors[region.tensor]
            rows = NONE if region.indexed else spec.rows
            columns = spec.own_columns if write else spec.columns
            if region.indexed:
                columns = operands[region.tensor].entry_columns(spec)
            for what, (begin, end), size in (
                ("rows", region.rows, rows),
                ("columns", region.columns, columns),
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
            if region.only is not None:
                self._check_only(number, region, write)
            if write and any(region.may_overlap(other) for other in seen):
                self._fail(number, f"writes parts of {spec.name} twice, in no particular order")
            seen.append(region)
            yield region

    def _check_only(self, number: int, region: Region, write: bool) -> None:
        """A region for one rank is of a tensor that ranks gather, and the rank exists."""
        spec = self.tensors[region.tensor]
        where = f"{spec.name} on rank {region.only} alone"
        if not write:
            self._fail(number, f"reads {where}, but instructions read on their own rank")
        if spec.shares == 1:
            self._fail(number, f"writes {where}, but ranks do not gather it")
        if spec.tagged:
            self._fail(number, f"writes {where}, but it is tagged: its words go to all ranks")
        if not 0 <= region.only_number < self.program.ranks:
            self._fail(number, f"writes {where} of {self.program.ranks}")

    def _span(self, region: Region) -> tuple[int, int, int, int]:
        """Rows and columns; the columns of a tagged tensor are rounded to whole words."""
        begin, end = region.columns
        spec = self.tensors[region.tensor]
        if spec.tagged:
            per_word = 4 // spec.dtype.size
            begin, end = begin // per_word * per_word, -(-end // per_word) * per_word
        return *region.rows, begin, end

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


def _article(kind: TensorKind) -> str:
    return f"{'an' if kind is TensorKind.INPUT else 'a'} {kind.value}"
