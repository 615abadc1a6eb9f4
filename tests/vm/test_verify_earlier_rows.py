"""The verifier orders reads of rows that earlier steps wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from copy_programs import ACTIVATION, INPUT, STATE, fault

from megavm.instructions.attention import Attention
from megavm.instructions.copy import Copy
from megavm.vm.isa import Wait
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, TensorKind, TensorSpec


def attention_over(kind: TensorKind, waits: Sequence[tuple[int, int]] = ()) -> Program:
    """An attention over a cache of one block, which a copy rewrites as a whole."""
    row: dict[str, Any] = {"row_begin": 0, "row_end": 1}
    tensors = [
        TensorSpec("q", (1, 4), F32, INPUT),
        TensorSpec("cache", (1, 1, 2, 4), F32, kind),
        TensorSpec("new", (1, 4), F32, INPUT),
        TensorSpec("out", (1, 4), F32, ACTIVATION),
        TensorSpec("one", (1,), I32, INPUT),
        TensorSpec("blocks", (1, 1), I32, INPUT),
        TensorSpec("source", (1, 8), F32, INPUT),
    ]
    attention = Attention(
        q=0,
        k_cache=1,
        v_cache=1,
        k_new=2,
        v_new=2,
        out=3,
        row_sequence=4,
        row_position=4,
        row_count=4,
        block_table=5,
        head_begin=0,
        head_end=1,
        split=0,
        num_splits=1,
        chunk=2,
        context=2,
        step_rows=1,
        scale=1.0,
        waits=[Wait(*w) for w in waits],
        signal=1,
        **row,
    )
    refill = Copy(
        x=6,
        out=1,
        x_row=0,
        x_column=0,
        column_begin=0,
        column_end=8,
        waits=[Wait(1, 0)],
        signal=0,
        **row,
    )
    return Program.build(tensors, [refill, attention], [[0], [1]], barriers=["x", "y"])


def test_earlier_rows_are_indexed_rows_of_a_state() -> None:
    assert fault(attention_over(ACTIVATION)) == (
        "instruction 1 (attention): reads earlier rows of cache: "
        "only indexed rows of a state can be read so"
    )


@pytest.mark.parametrize("target", [0, 1])
def test_a_write_that_is_not_indexed_may_hit_what_an_earlier_read_means(target: int) -> None:
    """Of its own step too: such a read waits for signals of earlier steps alone."""
    text = fault(attention_over(STATE, [(0, target)]))
    assert text.startswith(
        "instruction 1 (attention) on worker 1 reads earlier indexed rows [0, 1)"
    )
    assert text.endswith("writes, without an order between them")
