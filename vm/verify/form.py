"""The form of a program: header and operand words, handles and types of tensors, queues."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megavm.instructions import instruction_set
from megavm.vm.config import HEADER_WORDS, INSTRUCTION_WORDS, MAX_WAITS, NONE
from megavm.vm.isa import Instruction
from megavm.vm.operands import Field, FieldKind
from megavm.vm.program import Program
from megavm.vm.tensors import TensorSpec
from megavm.vm.verify.check import Check, Ints
from megavm.vm.verify.error import VerificationError

MAX_WORKERS = 4096  # more than any machine has; a larger number is a mistake
MAX_ELEMENTS = 1 << 48  # elements of a tensor, likewise


class FormCheck(Check):
    """Whether all words, tensors and queues of a program are well-formed."""

    def __init__(self, program: Program, machine: str) -> None:
        super().__init__(program, machine)
        # One tensor of each form, and the form of every tensor; the last entry stands for no tensor.
        form_of = [(t.dtype, t.tagged, len(t.shape), bool(t.parts)) for t in self.tensors]
        forms = dict(zip(form_of, self.tensors, strict=True))
        self._forms = list(forms.values())
        numbers = {form: number for number, form in enumerate(forms)}
        self._form_of = np.array([*(numbers[form] for form in form_of), len(forms)])

    def check(self) -> None:
        """Raises VerificationError when something is not well-formed."""
        self._check_shape()
        self._check_queues()
        self._check_headers()
        for cls, numbers in self._by_class():
            self._check_operands(cls, numbers)

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
