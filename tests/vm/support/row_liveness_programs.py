"""Programs whose results differ when a machine breaks an ordering rule that the verifier relies on.

The verifier accepts all of them. Each relies on one rule for instructions:

* ``dead_rows``: an instruction whose rows are dead still waits for its tagged words.
* ``dead_words``: the tagged words of dead rows get their tags.
* ``writes_before_inputs``: an instruction writes nothing before all its tagged inputs have arrived.
* ``words_before_inputs``: no tagged word is visible before the instruction has read all its inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megavm.instructions.copy import Copy
from megavm.instructions.matmul import Matmul
from megavm.instructions.rms_norm import RmsNorm
from megavm.vm.isa import Instruction, Wait
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, TensorKind, TensorSpec

WEIGHT, INPUT, STATE, ACTIVATION = (
    TensorKind.WEIGHT,
    TensorKind.INPUT,
    TensorKind.STATE,
    TensorKind.ACTIVATION,
)
K = 32  # columns of the rows that are normalised
EPS = 100.0  # so large that the result of a normalisation depends on the length of the row
SLOW = 512  # rows and columns of a copy that delays a worker


def copy(
    x: int,
    out: int,
    rows: tuple[int, int],
    columns: tuple[int, int],
    x_row: int | None = None,
    x_column: int | None = None,
    waits: Sequence[tuple[int, int]] = (),
    signal: int | None = None,
) -> Copy:
    """A copy to ``rows`` and ``columns`` of ``out``, from the same place of x by default."""
    return Copy(
        x=x,
        out=out,
        x_row=rows[0] if x_row is None else x_row,
        x_column=columns[0] if x_column is None else x_column,
        row_begin=rows[0],
        row_end=rows[1],
        column_begin=columns[0],
        column_end=columns[1],
        waits=[Wait(*w) for w in waits],
        signal=signal,
    )


def add(x: int, weight: int, bias: int, residual: int, out: int, rows: int) -> Matmul:
    """out := x . weight [+ bias] [+ residual] for the first ``rows`` rows."""
    return Matmul(
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        out=out,
        row_begin=0,
        row_end=rows,
        column_begin=0,
        column_end=K,
        x_rows=rows,
        tile=0,
        part=0,
        part_k=K,
        eps=0.0,
    )


class Tensors:
    """Hands out handles of tensors, and finds them by name."""

    def __init__(self) -> None:
        self.specs: list[TensorSpec] = []

    def __call__(self, name: str, *shape: int, kind: TensorKind, tagged: bool = False) -> int:
        dtype = I32 if name == "row_count" else F32
        self.specs.append(TensorSpec(name, shape, dtype, kind, tagged))
        return len(self.specs) - 1

    def delays(self, count: int) -> list[Copy]:
        """Slow instructions on tensors that no other instruction uses."""
        source = self("slow", SLOW, SLOW, kind=INPUT)
        sinks = [self(f"slow {i}", SLOW, SLOW, kind=ACTIVATION) for i in range(count)]
        return [copy(source, sink, (0, SLOW), (0, SLOW)) for sink in sinks]


def dead_rows(tagged_results: bool = False, delays: int = 3) -> Program:
    """Each step adds 1 to ``x``, normalises its two rows, and adds the results to ``total``.

    Worker 0 makes x, writes both rows of the tagged T, is delayed, and normalises row 0; worker 1
    normalises row 1; worker 2 reads both results when b has been signalled twice. With one live row the
    second RmsNorm has nothing to do. On a machine where it does not wait for T it runs steps ahead, its
    signals count in place of the first one's, and worker 2 reads row 0 before it is written.

    With ``tagged_results`` the results pass as tagged words (``dead_words``).
    """
    t = Tensors()
    x, y = t("x", 2, K, kind=STATE), t("y", 2, K, kind=ACTIVATION)
    one, identity = t("one", K, kind=WEIGHT), t("identity", K, K, kind=WEIGHT)
    gain, row_count = t("gain", K, kind=WEIGHT), t("row_count", 1, kind=INPUT)
    tagged = t("T", 2, K, kind=ACTIVATION, tagged=True)
    out = t("out", 2, K, kind=ACTIVATION, tagged=tagged_results)
    seen, total, sums = (
        t("seen", 2, K, kind=ACTIVATION),
        t("total", 2, K, kind=STATE),
        t("sums", 2, K, kind=ACTIVATION),
    )
    none = 0xFFFFFFFF
    b, c = 0, 1

    def norm(row: int) -> RmsNorm:
        return RmsNorm(
            x=tagged,
            gain=gain,
            out=out,
            row_count=row_count,
            row_begin=row,
            row_end=row + 1,
            eps=EPS,
            signal=b,
        )

    row, both = [(0, 1), (1, 2)], (0, 2)
    # The next step begins after the results of this step were read.
    first: list[Instruction] = [
        add(x, identity, one, none, y, 2),
        copy(y, x, both, (0, K)),
        *(copy(y, tagged, r, (0, K), waits=[(b, 0), (c, 0)]) for r in row),
        *t.delays(delays),
        norm(0),
    ]
    second: list[Instruction] = [norm(1)]
    waits = [] if tagged_results else [(b, 2)]
    third: list[Instruction] = [
        copy(out, seen, both, (0, K), waits=waits, signal=c),
        add(seen, identity, none, total, sums, 2),
        copy(sums, total, both, (0, K)),
    ]
    queues = [first, second, third]
    return _program(t, queues, ["b", "c"])


def dead_words() -> Program:
    """``dead_rows`` with tagged results: worker 2 waits for their words, also for those of dead rows."""
    return dead_rows(tagged_results=True)


def prepare_rows(memory: Memory, live: int) -> None:
    """Contents for ``dead_rows``: x = total = 0."""
    memory["row_count"].fill_(live)
    for name, value in (("x", 0.0), ("total", 0.0), ("one", 1.0), ("gain", 1.0)):
        memory[name].fill_(value)
    memory.write("identity", torch.eye(K, device=memory.device))


def total_of_rows(steps: int) -> float:
    """The expected ``total`` of a live row: all elements of x are s in step s = 1, 2, ..."""
    return sum(float(s / (s * s + EPS) ** 0.5) for s in range(1, steps + 1))


def writes_before_inputs(delays: int = 6) -> Program:
    """Q = P, and then P = T = A: with zeros in P and ones in A, Q must end as zeros.

    Worker 1 is delayed, copies P to Q, and only then copies row 1 of A to T. So worker 0's copy of both rows
    of T to P comes after it. On a machine where that copy writes row 0 before row 1 of T arrives, Q is
    [1, 1, 0, 0].
    """
    t = Tensors()
    a, p, q = t("A", 2, 2, kind=INPUT), t("P", 2, 2, kind=STATE), t("Q", 2, 2, kind=STATE)
    tagged = t("T", 2, 2, kind=ACTIVATION, tagged=True)
    both, columns = (0, 2), (0, 2)
    step = [(0, 0)]  # T and P of the step before are read and written
    queues: list[list[Instruction]] = [
        [copy(tagged, p, both, columns, signal=0)],
        [
            *t.delays(delays),
            copy(p, q, both, columns, waits=step),
            copy(a, tagged, (1, 2), columns, waits=step),
        ],
        [copy(a, tagged, (0, 1), columns, waits=step)],
    ]
    return _program(t, queues, ["P is written"])


WORDS_ROWS, WORDS_COLUMNS = 512, 2048  # of T in words_before_inputs


def words_before_inputs() -> Program:
    """T = P, and then the last words of P = the first words of T: T must end with the old zeros of P.

    P begins with 7 and ends with zeros. Worker 0 waits for the first words of T and writes the last elements
    of P. On a machine where those words are visible while worker 1 still copies, T ends with 7.
    """
    t = Tensors()
    rows, columns = (0, WORDS_ROWS), (0, WORDS_COLUMNS)
    p = t("P", WORDS_ROWS, WORDS_COLUMNS, kind=STATE)
    tagged = t("T", WORDS_ROWS, WORDS_COLUMNS, kind=ACTIVATION, tagged=True)
    last = (WORDS_ROWS - 1, WORDS_ROWS), (WORDS_COLUMNS - 2, WORDS_COLUMNS)
    queues: list[list[Instruction]] = [
        [copy(tagged, p, *last, x_row=0, x_column=0, signal=0)],
        [copy(p, tagged, rows, columns, waits=[(0, 0)])],
    ]
    return _program(t, queues, ["P is written"])


def _program(
    tensors: Tensors, queues: Sequence[Sequence[Instruction]], barriers: Sequence[str]
) -> Program:
    instructions = [inst for queue in queues for inst in queue]
    ends = [sum(len(q) for q in queues[: i + 1]) for i in range(len(queues))]
    numbers = [range(end - len(q), end) for q, end in zip(queues, ends, strict=True)]
    return Program.build(tensors.specs, instructions, numbers, barriers=barriers)
