"""Progress and order: asks the analysis in C++, and puts what it finds into sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megavm.vm import _native
from megavm.vm.alike import Alike, tag_orders
from megavm.vm.config import HEADER_WORDS
from megavm.vm.isa import TagOrder
from megavm.vm.operands import ROWS
from megavm.vm.tensors import Region, TensorKind
from megavm.vm.verify.check import Check, Ints
from megavm.vm.verify.error import Access, VerificationError
from megavm.vm.verify.expand import expand

_WEAKER = (TagOrder.READS_LATE, TagOrder.WRITES_EARLY)  # orders with fewer guarantees than KEPT


class OrderCheck(Check):
    """Whether a program ends, and computes the same at any timing."""

    def check(self, accesses: Ints, alike: Sequence[Alike]) -> None:
        """``accesses`` and ``alike`` are those of DeclarationCheck.

        Raises VerificationError when the program deadlocks or does not order its accesses.
        """
        program = self.program
        traits = [
            (t.tagged, t.kind is TensorKind.ACTIVATION, whole_rows)
            for t, whole_rows in zip(self.tensors, self._indexed_by_rows(), strict=True)
        ]
        whole = expand(program, accesses)
        # All machines but the GPU keep the order of tagged words for every instruction.
        orders = np.full(len(self.words), TagOrder.KEPT.value)
        if self.machine == "cuda":
            orders = tag_orders(self.words, self.tensors, alike)
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
        conflicting = [
            self._access(whole.accesses[number], step)
            for number, step in ((first, first_step), (second, second_step))
            if number >= 0
        ]
        raise VerificationError(getattr(self, f"_{rule}")(*conflicting), rule, tuple(conflicting))

    def _indexed_by_rows(self) -> list[bool]:
        """Of each tensor, whether its indexed regions consist of whole rows of the tensor."""
        result = [True] * len(self.tensors)
        for cls, numbers in self._by_class():
            for word, field in enumerate(cls.fields, HEADER_WORDS):
                if field.index == ROWS:
                    continue
                for handle in np.unique(self.words[numbers, word]):
                    spec = self.tensors[handle]
                    result[handle] = field.entry_columns(spec) == spec.columns
        return result

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
