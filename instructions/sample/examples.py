"""Examples of Sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from megavm.instructions.sample import (
    INTEGER_COLUMNS,
    MASK_BITS,
    REAL_COLUMNS,
    Integer,
    Real,
    Sample,
)
from megavm.vm.config import NONE
from megavm.vm.example import Example, Table
from megavm.vm.tensors import F32, I32, TensorKind

POSITIONS = [5, 0, 11, 30]  # position of the last token of each sequence
LENGTH = 40

Parameters = dict[Real | Integer, float]

CASES: list[tuple[str, int, Parameters]] = [
    ("greedy", 100, {}),
    ("greedy, odd vocabulary", 1003, {}),
    ("repetition penalty", 33, {Real.REPETITION_PENALTY: 3.0}),
    ("presence penalty", 17, {Real.PRESENCE_PENALTY: 2.5, Integer.PROMPT_LENGTH: 3}),
    ("frequency penalty", 17, {Real.FREQUENCY_PENALTY: 0.7, Integer.PROMPT_LENGTH: 2}),
    ("stop tokens are masked", 16, {Integer.MIN_LENGTH: 20, Integer.NUM_STOP: 12}),
    ("temperature", 500, {Real.TEMPERATURE: 0.8}),
    ("cold", 500, {Real.TEMPERATURE: 0.01}),
    ("top-k", 500, {Real.TEMPERATURE: 1.5, Integer.TOP_K: 5}),
    ("top-1", 500, {Real.TEMPERATURE: 1.5, Integer.TOP_K: 1}),
    ("top-k of everything", 20, {Real.TEMPERATURE: 1.5, Integer.TOP_K: 50}),
    ("top-p", 500, {Real.TEMPERATURE: 1.2, Real.TOP_P: 0.6}),
    ("nothing left of top-p", 500, {Real.TEMPERATURE: 1.2, Real.TOP_P: 1e-4}),
    ("min-p", 500, {Real.TEMPERATURE: 2.0, Real.MIN_P: 0.2}),
    (
        "everything",
        777,
        {
            Real.TEMPERATURE: 1.3,
            Real.TOP_P: 0.9,
            Real.MIN_P: 0.01,
            Real.REPETITION_PENALTY: 1.2,
            Real.PRESENCE_PENALTY: 0.5,
            Real.FREQUENCY_PENALTY: 0.25,
            Integer.TOP_K: 60,
            Integer.MIN_LENGTH: 8,
            Integer.NUM_STOP: 3,
            Integer.PROMPT_LENGTH: 4,
        },
    ),
]


def examples(rng: np.random.Generator) -> Iterator[Example]:
    for name, vocabulary, parameters in CASES:
        yield example(rng, name, vocabulary, parameters)
    yield example(rng, "dead rows", 50, {}, live=2)
    yield example(rng, "tagged logits", 50, {Real.TEMPERATURE: 0.7, Integer.TOP_K: 9}, tagged=True)
    yield example(rng, "equal logits", 50, {}, steps_of_logit=0.5)
    yield example(
        rng,
        "equal logits, top-k",
        50,
        {Real.TEMPERATURE: 1.0, Integer.TOP_K: 4},
        steps_of_logit=0.5,
    )
    for name in ("greedy", "repetition penalty", "stop tokens are masked", "everything"):
        ((vocabulary, parameters),) = [(v, p) for n, v, p in CASES if n == name]
        yield example(rng, f"{name}, with peaks", vocabulary, parameters, tile=16)
    yield example(rng, "equal logits, with peaks", 50, {}, steps_of_logit=0.5, tile=7)
    yield example(rng, "peaks alone", 50, {}, tile=32, tagged=True, misleading=True)
    yield from restricted_examples(rng)
    yield example(rng, "not enabled", 50, {Integer.ENABLED: 0}, tagged=True, misleading=True)


def restricted_examples(rng: np.random.Generator) -> Iterator[Example]:
    everything = next(parameters for name, _, parameters in CASES if name == "everything")
    both: Parameters = {Integer.MASKED: 1, Integer.BIASED: 1}
    flags: dict[str, Parameters] = {
        "mask": {Integer.MASKED: 1},
        "bias": {Integer.BIASED: 1},
        "mask and bias": both,
    }
    others: list[tuple[str, int, Parameters]] = [
        ("greedy", 100, {}),
        ("drawn", 1003, {Real.TEMPERATURE: 1.2, Real.TOP_P: 0.9}),
        ("everything", 777, everything),
    ]
    for (what, flag), (how, vocabulary, other) in itertools.product(flags.items(), others):
        yield example(rng, f"{what}, {how}", vocabulary, other | flag, tile=16, restricted=True)
    yield example(rng, "mask and bias, tagged", 90, both, tile=32, tagged=True, restricted=True)
    yield example(rng, "mask not used", 90, {}, tile=32, misleading=True, restricted=True)
    yield example(rng, "neither mask nor bias", 90, both, tile=32, misleading=True)


def example(
    rng: np.random.Generator,
    name: str,
    vocabulary: int,
    parameters: Parameters,
    *,
    live: int = 4,
    tagged: bool = False,
    misleading: bool = False,
    steps_of_logit: float = 0.0,
    tile: int = 0,
    restricted: bool = False,
) -> Example:
    """Four sequences with the same parameters and different seeds; their logit rows are in another order.

    With ``tile`` columns to a tile there are peaks as well, tagged ones if ``tagged``. ``misleading`` logits
    contradict the peaks: a kernel that reads them chooses another token. ``restricted``: there are masks,
    which allow every eighth token or so, and biases.
    """
    table = Table(rng)
    logits = table.normal(4, vocabulary, scale=3.0)
    bias = table.normal(4, vocabulary, scale=2.0) if restricted else None
    if steps_of_logit:
        logits = (logits / steps_of_logit).round() * steps_of_logit
    tokens = table.tensor(rng.integers(0, vocabulary, (4, LENGTH)).astype(np.int32))
    reals = torch.zeros(4, REAL_COLUMNS)
    reals[:, Real.TOP_P] = reals[:, Real.REPETITION_PENALTY] = 1.0
    integers = torch.zeros(4, INTEGER_COLUMNS, dtype=torch.int32)
    integers[:, Integer.ENABLED] = 1
    integers[:, Integer.SEED_LOW] = torch.tensor([1, -1, 12345, 1 << 30])
    integers[:, Integer.SEED_HIGH] = torch.tensor([0, -7, 77, 1 << 20])
    integers[:, Integer.STOP : Integer.MASKED] = table.tensor(
        rng.integers(0, vocabulary + 5, (4, Integer.MASKED - Integer.STOP)).astype(np.int32)
    )
    for column, value in parameters.items():
        (reals if isinstance(column, Real) else integers)[:, column] = value
    inst = Sample(
        logits=table.add(
            "logits",
            (4, vocabulary),
            F32,
            TensorKind.ACTIVATION,
            -logits if misleading else logits,
            tagged=tagged,
        ),
        peaks=table.add(
            "peaks",
            (4, 2 * -(-vocabulary // tile)),
            F32,
            TensorKind.ACTIVATION,
            peaks_of(logits, tile),
            tagged=tagged,
        )
        if tile
        else NONE,
        adjusted=table.output("adjusted", (4, vocabulary), F32),
        tokens=table.add("tokens", (4, LENGTH), I32, TensorKind.STATE, tokens),
        sampling_real=table.add("sampling_real", (4, REAL_COLUMNS), F32, TensorKind.INPUT, reals),
        sampling_integer=table.integers("sampling_integer", integers),
        logit_row=table.integers("logit_row", [5, 0, 3, 1]),
        logit_count=table.integers("logit_count", [live]),
        row_sequence=table.integers("row_sequence", [1, 3, 0, 2, 0, 0]),
        row_position=table.integers(
            "row_position", [POSITIONS[1], POSITIONS[3], 4, POSITIONS[2], 4, POSITIONS[0]]
        ),
        row_begin=0,
        row_end=4,
        allowed=table.integers("allowed", mask(rng, vocabulary)) if restricted else NONE,
        bias=table.add("bias", (4, vocabulary), F32, TensorKind.INPUT, bias)
        if restricted
        else NONE,
        # Masks are numbered without end, so that numbers wrap around.
        masks_written=table.integers("masks_written", [-(1 << 31)]) if restricted else NONE,
        masks_awaited=table.integers("masks_awaited", [(1 << 31) - 1]) if restricted else NONE,
    )
    return Example(name, inst, table.specs, table.values)


def mask(rng: np.random.Generator, vocabulary: int) -> torch.Tensor:
    """Masks of four sequences."""
    bits = rng.integers(0, 1 << 32, (3, 4, -(-vocabulary // MASK_BITS)), dtype=np.uint32)
    words = np.bitwise_and.reduce(bits, axis=0)
    words[:, 0] |= 1 << 3  # a token is always allowed
    return torch.from_numpy(words.view(np.int32))


def peaks_of(logits: torch.Tensor, tile: int) -> torch.Tensor:
    """The largest logit of every ``tile`` columns and its column: [rows, 2 * tiles]."""
    largest = [(part.max(-1).values, part.argmax(-1)) for part in torch.split(logits, tile, -1)]
    pairs = [
        torch.stack([value, (number * tile + column).float()], dim=-1)
        for number, (value, column) in enumerate(largest)
    ]
    return torch.cat(pairs, dim=-1)
