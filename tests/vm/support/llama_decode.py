"""One decode step of a Llama-like model of any size, as a program built by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megavm.instructions.attention import Attention
from megavm.instructions.attention_merge import AttentionMerge
from megavm.instructions.embed import Embed
from megavm.instructions.gate_up import GateUp
from megavm.instructions.matmul import Matmul
from megavm.instructions.qkv_rope import QkvRope
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Sample
from megavm.vm.isa import Instruction, Wait
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, I32, DType, TensorKind, TensorSpec


class Builder:
    """Collects operations; every instruction waits for all instructions of the previous operation."""

    def __init__(self, workers: int, tagged: bool) -> None:
        self.workers = workers
        self.tagged = tagged
        self.tensors: list[TensorSpec] = []
        self.instructions: list[Instruction] = []
        self.labels: list[str] = []
        self.barriers: list[str] = []
        self.queues: list[list[int]] = [[] for _ in range(workers)]
        self.sizes: list[int] = []

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: DType,
        kind: TensorKind,
        tagged: bool = False,
    ) -> int:
        self.tensors.append(TensorSpec(name, shape, dtype, kind, tagged))
        return len(self.tensors) - 1

    def activation(self, name: str, *shape: int) -> int:
        return self.tensor(name, shape, F32, TensorKind.ACTIVATION, self.tagged)

    def add(self, label: str, tiles: Iterator[Instruction], wait: bool, signal: bool) -> None:
        """Append an operation. ``wait``: it waits for the last operation that signals."""
        waits = [Wait(len(self.barriers) - 1, self.sizes[-1])] if wait else []
        if signal:
            self.barriers.append(label)
        count = 0
        for i, tile in enumerate(tiles):
            self.queues[i % self.workers].append(len(self.instructions))
            self.instructions.append(
                tile.with_sync(waits, len(self.barriers) - 1 if signal else None)
            )
            self.labels.append(label)
            count += 1
        if signal:
            self.sizes.append(count)

    def cut(self, size: int, unit: int) -> Iterator[tuple[int, int]]:
        units = size // unit
        pieces = min(units, self.workers)
        for i in range(pieces):
            yield units * i // pieces * unit, units * (i + 1) // pieces * unit


def llama(layers: int, workers: int, tagged: bool = False, dynamic: bool = False) -> Program:
    """One decode step with the shapes of Llama-3 8B, including split attention."""
    hidden, heads, kv_heads, d, inter, vocabulary, splits = 4096, 32, 8, 128, 14336, 128256, 16
    b = Builder(workers, tagged)
    every_wait = not tagged
    row: dict[str, Any] = {"row_begin": 0, "row_end": 1}
    step: dict[str, Any] = {
        name: b.tensor(name, shape, I32, TensorKind.INPUT)
        for name, shape in (
            ("row_sequence", (1,)),
            ("row_position", (1,)),
            ("row_count", (1,)),
            ("block_table", (1, 256)),
        )
    }
    count: dict[str, Any] = {"row_count": step["row_count"]}
    tokens = b.tensor("tokens", (1, 4096), I32, TensorKind.STATE)
    table = b.tensor("table", (vocabulary, hidden), BF16, TensorKind.WEIGHT)
    rope = b.tensor("rope", (4096, d), F32, TensorKind.WEIGHT)
    x = b.activation("embedded", 1, hidden)

    def weight(name: str, *shape: int) -> int:
        return b.tensor(name, shape, BF16, TensorKind.WEIGHT)

    def columns(begin: int, end: int) -> dict[str, Any]:
        return {**row, "column_begin": begin, "column_end": end}

    b.add(
        "embed",
        (
            Embed(
                table=table,
                tokens=tokens,
                row_sequence=step["row_sequence"],
                row_position=step["row_position"],
                out=x,
                **count,
                **columns(*c),
            )
            for c in b.cut(hidden, 64)
        ),
        wait=False,
        signal=every_wait,
    )
    for layer in range(layers):
        at = f"layers.{layer}"
        q, attended = b.activation(f"{at}.q", 1, hidden), b.activation(f"{at}.attended", 1, hidden)
        partial = b.activation(f"{at}.partial", 1, splits, heads, d + 2)
        cache: dict[str, Any] = {
            f"{name}_cache": b.tensor(
                f"{at}.{name}_cache", (256, kv_heads, 16, d), BF16, TensorKind.STATE
            )
            for name in "kv"
        }
        qkv = weight(f"{at}.qkv_weight", hidden + 2 * kv_heads * d, hidden)
        b.add(
            f"{at}.qkv",
            (
                QkvRope(
                    x=x,
                    weight=qkv,
                    q=q,
                    rope=rope,
                    eps=1e-5,
                    pair_begin=first,
                    pair_end=last,
                    **cache,
                    **step,
                    **row,
                )
                for first, last in b.cut(hidden // 2 + kv_heads * d, 8)
            ),
            wait=every_wait,
            signal=True,
        )
        b.add(
            f"{at}.attention",
            (
                Attention(
                    q=q,
                    partial=partial,
                    head_begin=head,
                    head_end=head + 1,
                    split=split,
                    num_splits=splits,
                    chunk=256,
                    context=4096,
                    step_rows=1,
                    scale=d**-0.5,
                    **cache,
                    **step,
                    **row,
                )
                for head in range(kv_heads)
                for split in range(splits)
            ),
            wait=True,
            signal=every_wait,
        )
        b.add(
            f"{at}.merge",
            (
                AttentionMerge(
                    partial=partial,
                    out=attended,
                    head_begin=head,
                    head_end=head + 1,
                    head_dim=d,
                    num_splits=splits,
                    **count,
                    **row,
                )
                for head in range(heads)
            ),
            wait=every_wait,
            signal=every_wait,
        )
        between = b.activation(f"{at}.between", 1, hidden)
        after = b.activation(f"{at}.after", 1, hidden)
        act = b.activation(f"{at}.act", 1, inter)

        def product(
            label: str, source: int, residual: int, out: int, k: int, every_wait: bool = every_wait
        ) -> None:
            matrix = weight(f"{label}_weight", hidden, k)
            b.add(
                label,
                (
                    Matmul(
                        x=source,
                        weight=matrix,
                        residual=residual,
                        out=out,
                        x_rows=1,
                        tile=0,
                        part=0,
                        part_k=k,
                        eps=0.0,
                        **count,
                        **columns(*c),
                    )
                    for c in b.cut(hidden, 16)
                ),
                wait=every_wait,
                signal=every_wait,
            )

        product(f"{at}.o_proj", attended, x, between, hidden)
        mlp = weight(f"{at}.gate_up_weight", 2 * inter, hidden)
        b.add(
            f"{at}.gate_up",
            (
                GateUp(x=between, weight=mlp, out=act, eps=1e-5, **count, **columns(*c))
                for c in b.cut(inter, 16)
            ),
            wait=every_wait,
            signal=every_wait,
        )
        product(f"{at}.down_proj", act, between, after, inter)
        x = after
    logits = b.tensor("logits", (1, vocabulary), F32, TensorKind.ACTIVATION)
    b.add(
        "lm_head",
        (
            Matmul(
                x=x,
                weight=table,
                out=logits,
                x_rows=1,
                tile=0,
                part=0,
                part_k=hidden,
                eps=0.0,
                **count,
                **columns(*c),
            )
            for c in b.cut(vocabulary, 16)
        ),
        wait=every_wait,
        signal=True,
    )
    sample = Sample(
        logits=logits,
        tokens=tokens,
        sampling_real=b.tensor("sampling_real", (1, REAL_COLUMNS), F32, TensorKind.INPUT),
        sampling_integer=b.tensor("sampling_integer", (1, INTEGER_COLUMNS), I32, TensorKind.INPUT),
        logit_row=b.tensor("logit_row", (1,), I32, TensorKind.INPUT),
        logit_count=b.tensor("logit_count", (1,), I32, TensorKind.INPUT),
        row_sequence=step["row_sequence"],
        row_position=step["row_position"],
        **row,
    )
    b.add("sample", iter([sample]), wait=True, signal=True)
    last = Wait(len(b.barriers) - 1, 0)
    for i, instruction in enumerate(b.instructions):
        if isinstance(instruction, Embed):
            b.instructions[i] = instruction.with_sync([last], instruction.signal)
    return Program.build(
        b.tensors,
        b.instructions,
        [range(len(b.instructions))] if dynamic else b.queues,
        barriers=b.barriers,
        dynamic=dynamic,
        workers=workers,
        labels=b.labels,
    )
