"""Examples of AdjustLogits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.sample import MASK_BITS, segment_words
from megavm.instructions.sample.examples import (
    CASES,
    Parameters,
    add_sequences,
    case,
    rounded,
)
from megavm.vm.example import Example, Table
from megavm.vm.tensors import F32, TensorKind


def examples(rng: np.random.Generator) -> Iterator[Example]:
    for name, vocabulary, parameters in CASES:
        yield example(rng, name, vocabulary, parameters)
    yield example(rng, "dead rows", 50, {}, live=2)
    yield example(rng, "not enabled", 50, {"ENABLED": 0})
    yield example(rng, "equal logits", 50, {}, steps_of_logit=0.5)
    ways: dict[str, Parameters] = {
        "greedy": {},
        "drawn": {"TEMPERATURE": 0.9},
        "everything": case("everything"),
    }
    for name, vocabulary, columns in (
        ("some columns", 1003, (256, 768)),
        ("the last columns", 1003, (768, 1003)),
        ("nine segments", 4 * 777, (512, 512 + 9 * 256)),
    ):
        for how, chosen in ways.items():
            yield example(rng, f"{name}, {how}", vocabulary, chosen, columns=columns)
    yield from restricted_examples(rng)


def restricted_examples(rng: np.random.Generator) -> Iterator[Example]:
    everything = case("everything")
    both: Parameters = {"MASKED": 1, "BIASED": 1}
    flags: dict[str, Parameters] = {
        "mask": {"MASKED": 1},
        "bias": {"BIASED": 1},
        "mask and bias": both,
    }
    others: list[tuple[str, int, Parameters]] = [
        ("greedy", 100, {}),
        ("drawn", 1003, {"TEMPERATURE": 1.2, "TOP_P": 0.9}),
        ("everything", 777, everything),
    ]
    for (what, flag), (how, vocabulary, other) in itertools.product(flags.items(), others):
        yield example(rng, f"{what}, {how}", vocabulary, other | flag)
    yield example(rng, "nothing allowed in most segments", 2000, both, rare=True)


def example(
    rng: np.random.Generator,
    name: str,
    vocabulary: int,
    parameters: Parameters,
    *,
    live: int = 4,
    steps_of_logit: float = 0.0,
    columns: tuple[int, int] | None = None,
    rare: bool = False,
) -> Example:
    """Four sequences with the same parameters and different seeds; their logit rows are in another order.

    Masks allow every eighth token or so, with ``rare`` one token.
    """
    table = Table(rng)
    logits = rounded(table.normal(4, vocabulary, scale=3.0), steps_of_logit)
    begin, end = columns or (0, vocabulary)
    words = torch.zeros(4, -(-vocabulary // MASK_BITS), dtype=torch.int32)
    words[:, -1] = 1 << 3
    inst = AdjustLogits(
        logits=table.add("logits", (4, vocabulary), F32, TensorKind.ACTIVATION, logits),
        adjusted=table.output("adjusted", (4, vocabulary), F32),
        segments=table.output("segments", (4, segment_words(vocabulary)), F32),
        **add_sequences(table, vocabulary, parameters, live),
        allowed=table.integers("allowed", words if rare else mask(rng, vocabulary)),
        bias=table.add(
            "bias", (4, vocabulary), F32, TensorKind.INPUT, table.normal(4, vocabulary, scale=2.0)
        ),
        # Masks are numbered without end, so that numbers wrap around.
        masks_written=table.integers("masks_written", [-(1 << 31)]),
        masks_awaited=table.integers("masks_awaited", [(1 << 31) - 1]),
        row_begin=0,
        row_end=4,
        column_begin=begin,
        column_end=end,
    )
    return Example(name, inst, table.specs, table.values)


def mask(rng: np.random.Generator, vocabulary: int) -> torch.Tensor:
    """Masks of four sequences."""
    bits = rng.integers(0, 1 << 32, (3, 4, -(-vocabulary // MASK_BITS)), dtype=np.uint32)
    words = np.bitwise_and.reduce(bits, axis=0)
    words[:, 0] |= 1 << 3  # a token is always allowed
    return torch.from_numpy(words.view(np.int32))
