"""Examples of Sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from megavm.instructions.sample import (
    INTEGER_COLUMNS,
    REAL_COLUMNS,
    Integer,
    Real,
    Sample,
    is_limited,
    segment_words,
)
from megavm.vm.config import NONE
from megavm.vm.example import Example, Table
from megavm.vm.tensors import F32, I32, TensorKind

POSITIONS = [5, 0, 11, 30]  # position of the last token of each sequence
LENGTH = 40

Parameters = dict[str, float]  # by name in Real or Integer

CASES: list[tuple[str, int, Parameters]] = [
    ("greedy", 100, {}),
    ("greedy, odd vocabulary", 1003, {}),
    ("repetition penalty", 33, {"REPETITION_PENALTY": 3.0}),
    ("presence penalty", 17, {"PRESENCE_PENALTY": 2.5, "PROMPT_LENGTH": 3}),
    ("frequency penalty", 17, {"FREQUENCY_PENALTY": 0.7, "PROMPT_LENGTH": 2}),
    ("stop tokens are masked", 16, {"MIN_LENGTH": 20, "NUM_STOP": 12}),
    ("temperature", 500, {"TEMPERATURE": 0.8}),
    ("cold", 500, {"TEMPERATURE": 0.01}),
    ("top-k", 500, {"TEMPERATURE": 1.5, "TOP_K": 5}),
    ("top-1", 500, {"TEMPERATURE": 1.5, "TOP_K": 1}),
    ("top-k of everything", 20, {"TEMPERATURE": 1.5, "TOP_K": 50}),
    ("top-p", 500, {"TEMPERATURE": 1.2, "TOP_P": 0.6}),
    ("nothing left of top-p", 500, {"TEMPERATURE": 1.2, "TOP_P": 1e-4}),
    ("min-p", 500, {"TEMPERATURE": 2.0, "MIN_P": 0.2}),
    (
        "everything",
        777,
        {
            "TEMPERATURE": 1.3,
            "TOP_P": 0.9,
            "MIN_P": 0.01,
            "REPETITION_PENALTY": 1.2,
            "PRESENCE_PENALTY": 0.5,
            "FREQUENCY_PENALTY": 0.25,
            "TOP_K": 60,
            "MIN_LENGTH": 8,
            "NUM_STOP": 3,
            "PROMPT_LENGTH": 4,
        },
    ),
]
# Of many tokens: some are found in few segments, some among more candidates than the GPU's scratch holds.
LARGE: list[tuple[str, float, Parameters]] = [
    ("top-k", 3.0, {"TEMPERATURE": 1.0, "TOP_K": 20}),
    ("top-k of many", 3.0, {"TEMPERATURE": 1.0, "TOP_K": 3000}),
    ("peaked, top-p", 9.0, {"TEMPERATURE": 1.0, "TOP_P": 0.9}),
    ("flat, top-p", 1.0, {"TEMPERATURE": 1.0, "TOP_P": 0.9}),
    ("flat, small top-p", 1.0, {"TEMPERATURE": 1.0, "TOP_P": 0.05}),
    ("peaked, min-p", 9.0, {"TEMPERATURE": 1.0, "MIN_P": 0.01}),
    ("flat, min-p", 0.5, {"TEMPERATURE": 1.0, "MIN_P": 0.2}),
    ("min-p and top-p", 1.0, {"TEMPERATURE": 1.0, "MIN_P": 0.3, "TOP_P": 0.5}),
    (
        "top-k, min-p and top-p",
        2.0,
        {"TEMPERATURE": 1.0, "TOP_K": 100, "MIN_P": 0.05, "TOP_P": 0.7},
    ),
]


def case(name: str) -> Parameters:
    """The parameters of one of ``CASES``."""
    return next(parameters for known, _, parameters in CASES if known == name)


def examples(rng: np.random.Generator) -> Iterator[Example]:
    yield example(rng, "largest logit", 100)
    yield example(rng, "largest logit, odd vocabulary", 1003)
    yield example(rng, "largest logit, whatever the parameters", 100, case("everything"))
    yield example(rng, "dead rows", 50, live=2)
    yield example(rng, "equal logits", 50, steps_of_logit=0.5)
    yield example(rng, "largest peak", 100, tile=16)
    yield example(rng, "equal logits, with peaks", 50, steps_of_logit=0.5, tile=7)
    yield example(rng, "peaks alone", 50, tile=32, tagged=True, misleading=True)
    off: Parameters = {"ENABLED": 0}
    yield example(rng, "not enabled", 50, off, tagged=True, misleading=True)
    for name, vocabulary, parameters in CASES:
        yield drawn(rng, f"{name}, drawn", vocabulary, parameters)
    top_k: Parameters = {"TEMPERATURE": 1.0, "TOP_K": 4}
    yield drawn(rng, "equal logits, top-k", 50, top_k, steps_of_logit=0.5)
    yield drawn(rng, "dead rows, drawn", 50, case("top-p"), live=2)
    yield drawn(rng, "not enabled, drawn", 50, off)
    for name, scale, parameters in LARGE:
        yield drawn(rng, f"large vocabulary, {name}", 20_011, parameters, scale=scale)
    yield drawn(rng, "as many equal logits", 3000, top_k, steps_of_logit=50.0)
    alone: dict[str, Any] = {"tile": 16, "has_logits": False}
    yield example(rng, "no logits", 500, **alone)
    yield example(rng, "no logits, one tagged row", 500, **alone, rows=1, tagged=True)
    yield example(rng, "no logits, tagged dead row", 500, **alone, rows=1, tagged=True, live=0)


def example(
    rng: np.random.Generator,
    name: str,
    vocabulary: int,
    parameters: Parameters | None = None,
    *,
    rows: int = 4,
    live: int = 4,
    tagged: bool = False,
    misleading: bool = False,
    steps_of_logit: float = 0.0,
    tile: int = 0,
    has_logits: bool = True,
) -> Example:
    """The largest logit of the first ``rows`` of four sequences.

    With ``tile`` columns to a tile there are peaks as well, tagged ones if ``tagged``, or alone without
    ``has_logits``. ``misleading`` logits contradict the peaks: a kernel that reads them chooses another token.
    """
    table = Table(rng)
    logits = rounded(table.normal(4, vocabulary, scale=3.0), steps_of_logit)
    shown = -logits if misleading else logits
    handle = peaks = NONE
    if has_logits:
        shape = (4, vocabulary)
        handle = table.add("logits", shape, F32, TensorKind.ACTIVATION, shown, tagged=tagged)
    if tile:
        shape = (4, 2 * -(-vocabulary // tile))
        values = peaks_of(logits, tile)
        peaks = table.add("peaks", shape, F32, TensorKind.ACTIVATION, values, tagged=tagged)
    sequences = add_sequences(table, vocabulary, parameters or {}, live)
    inst = Sample(logits=handle, peaks=peaks, **sequences, row_begin=0, row_end=rows)
    return Example(name, inst, table.specs, table.values)


def drawn(
    rng: np.random.Generator,
    name: str,
    vocabulary: int,
    parameters: Parameters,
    *,
    live: int = 4,
    scale: float = 3.0,
    steps_of_logit: float = 0.0,
) -> Example:
    """A choice from adjusted logits, whose segments are those of one instruction."""
    from megavm.instructions.adjust_logits.reference import summaries

    table = Table(rng)
    adjusted = rounded(table.normal(4, vocabulary, scale=scale), steps_of_logit)
    handles = add_sequences(table, vocabulary, parameters, live)
    reals, integers = (table.values[n] for n in ("sampling_real", "sampling_integer"))
    segments = torch.zeros(4, segment_words(vocabulary))
    for row, step_row in enumerate(LOGIT_ROW):
        sequence = ROW_SEQUENCE[step_row]
        real, whole = reals[sequence].tolist(), integers[sequence].tolist()
        position = POSITIONS[sequence]
        found = summaries(adjusted[row], 0, position, whole, real, is_limited(real, whole))
        segments[row] = torch.tensor(found).flatten()
    inst = Sample(
        adjusted=table.add("adjusted", (4, vocabulary), F32, TensorKind.ACTIVATION, adjusted),
        segments=table.add("segments", tuple(segments.shape), F32, TensorKind.ACTIVATION, segments),
        **handles,
        row_begin=0,
        row_end=4,
    )
    return Example(name, inst, table.specs, table.values)


def rounded(logits: torch.Tensor, steps: float) -> torch.Tensor:
    """The logits as multiples of ``steps``; as they are with 0."""
    return (logits / steps).round() * steps if steps else logits


# Four sequences whose logit rows are in another order, beside rows without logits.
LOGIT_ROW = [5, 0, 3, 1]
ROW_SEQUENCE = [1, 3, 0, 2, 0, 0]


def add_sequences(
    table: Table, vocabulary: int, parameters: Parameters, live: int
) -> dict[str, Any]:
    """Tensors of four sequences with the same parameters and different seeds; their handles by operand."""
    rng = table.rng
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
    set_parameters(reals, integers, parameters)
    positions = [POSITIONS[s] if r in LOGIT_ROW else 4 for r, s in enumerate(ROW_SEQUENCE)]
    return {
        "tokens": table.add("tokens", (4, LENGTH), I32, TensorKind.STATE, tokens),
        "sampling_real": table.add(
            "sampling_real", (4, REAL_COLUMNS), F32, TensorKind.INPUT, reals
        ),
        "sampling_integer": table.integers("sampling_integer", integers),
        "logit_row": table.integers("logit_row", LOGIT_ROW),
        "logit_count": table.integers("logit_count", [live]),
        "row_sequence": table.integers("row_sequence", ROW_SEQUENCE),
        "row_position": table.integers("row_position", positions),
    }


def set_parameters(reals: torch.Tensor, integers: torch.Tensor, parameters: Parameters) -> None:
    """Write parameters to the rows of all sequences."""
    for name, value in parameters.items():
        # NOTE: members of both enumerations are equal if their columns are.
        if name in Real.__members__:
            reals[:, Real[name]] = value
        else:
            integers[:, Integer[name]] = int(value)


def peaks_of(logits: torch.Tensor, tile: int) -> torch.Tensor:
    """The largest logit of every ``tile`` columns and its column: [rows, 2 * tiles]."""
    largest = [(part.max(-1).values, part.argmax(-1)) for part in torch.split(logits, tile, -1)]
    pairs = [
        torch.stack([value, (number * tile + column).float()], dim=-1)
        for number, (value, column) in enumerate(largest)
    ]
    return torch.cat(pairs, dim=-1)
