"""The verifier names what is malformed: words, queues, and parts that do not fit together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from copy_programs import CHAIN, IDS, TENSORS, N, W, edit, fault, program
from llama_decode import llama

from megavm.instructions.matmul import Matmul
from megavm.vm.config import NONE
from megavm.vm.verify import verify


def test_a_program_without_instructions_is_accepted() -> None:
    verify(program([], [[], []]))


@pytest.mark.parametrize(
    ("word", "value", "sentence"),
    [
        (0, 999, "instruction 1: opcode 999 is unknown"),
        (1, 2, "instruction 1 (copy, op1): signals barrier 2, the program has 2"),
        (2, 7, "instruction 1 (copy, op1): wait 0 is for barrier 7, the program has 2"),
        (
            3,
            2,
            "instruction 1 (copy, op1): waits for barrier 0 (x) to reach 2, but one step signals it 1 times",
        ),
        (5, 1, "instruction 1 (copy, op1): wait 1 has target 1 but no barrier"),
        (6, 0, "instruction 1 (copy, op1): wait 2 is used but wait 1 is not"),
        (4, 0, "instruction 1 (copy, op1): waits twice for barrier 0 (x)"),
        (8, 70, "instruction 1 (copy, op1): x is tensor 70, the program has 7"),
        (8, NONE, "instruction 1 (copy, op1): x is NONE, but it is not optional"),
        (8, IDS, "instruction 1 (copy, op1): x is ids of I32, expected F32 or BF16"),
        (9, W, "instruction 1 (copy, op1): writes w, which is a weight"),
        (9, N, "instruction 1 (copy, op1): writes n, which is an input"),
        (
            10,
            2,
            "instruction 1 (copy, op1): reads rows [2, 3) outside tensor b of 2 rows",
        ),
        (
            11,
            1,
            "instruction 1 (copy, op1): reads columns [1, 9) outside tensor b of 8 columns",
        ),
        (13, 3, "instruction 1 (copy, op1): rows [0, 3) is empty or outside [0, 2)"),
        (13, 0, "instruction 1 (copy, op1): rows [0, 0) is empty or outside [0, 2)"),
        (20, 5, "instruction 1 (copy, op1): word 20 is 5, expected 0: no field uses it"),
        (31, 1, "instruction 1 (copy, op1): word 31 is 1, expected 0: no field uses it"),
    ],
)
def test_a_wrong_word_is_named(word: int, value: int, sentence: str) -> None:
    assert fault(edit(CHAIN, 1, word, value)) == sentence


def test_a_real_operand_must_be_finite() -> None:
    words = llama(1, 2).words
    matmul = int(np.flatnonzero(words[:, 0] == Matmul.opcode)[0])
    eps = 8 + [f.name for f in Matmul.fields].index("eps")
    assert "eps is nan, expected a finite number" in fault(
        edit(llama(1, 2), matmul, eps, 0x7FC00000)
    )
    assert fault(edit(llama(1, 2), matmul, eps, 0xBF800000)).endswith(
        "(matmul, layers.0.o_proj): eps is -1.0, expected at least 0"
    )


@pytest.mark.parametrize(
    ("queues", "sentence"),
    [
        ([[0], []], "instruction 1 (copy, op1) stands 0 times in the queues, expected once"),
        (
            [[0, 1], [1]],
            "instruction 1 (copy, op1) stands 2 times in the queues (workers 0, 1), expected once",
        ),
        ([[0], [1, 2]], "the queue of worker 1 holds instruction 2 of 2"),
        ([[0], [-1, 1]], "the queue of worker 1 holds instruction -1 of 2"),
    ],
)
def test_every_instruction_stands_once_in_the_queues(
    queues: list[list[int]], sentence: str
) -> None:
    assert fault(replace(CHAIN, queues=tuple(np.array(q, np.int32) for q in queues))) == sentence


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"workers": 0}, "the program is for 0 workers, expected 1 to 4096"),
        ({"workers": 10**6}, "the program is for 1000000 workers, expected 1 to 4096"),
        (
            {"workers": 3},
            "the program has 2 queues, expected 3: a static program has one for each of its 3 workers",
        ),
        (
            {"dynamic": True},
            "the program has 2 queues, expected 1: a dynamic program has one for all workers",
        ),
        ({"labels": ("one",)}, "1 labels for 2 instructions"),
        (
            {"words": np.zeros((2, 31), np.uint32)},
            "instruction words are uint32 of shape (2, 31), expected uint32 of (n, 32)",
        ),
        ({"tensors": (*TENSORS, TENSORS[1])}, "tensors 1 and 7 are both called b"),
    ],
)
def test_the_parts_of_a_program_fit_together(change: dict[str, object], sentence: str) -> None:
    assert fault(replace(CHAIN, **change)) == sentence  # type: ignore[arg-type]
