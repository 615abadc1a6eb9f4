"""Choices of tokens, held against transformers' processors of logits and the probabilities that they leave."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from megavm.instructions.adjust_logits import AdjustLogits
from megavm.instructions.sample import (
    INTEGER_COLUMNS,
    MASK_BITS,
    REAL_COLUMNS,
    SEGMENT_TOKENS,
    Integer,
    Real,
    Sample,
    segment_words,
)
from megavm.instructions.sample.examples import Parameters, set_parameters
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.emulated import EmulatedMachine
from megavm.vm.cuda.machine import CudaMachine, reason_unavailable
from megavm.vm.isa import Wait
from megavm.vm.machine import Machine
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import F32, I32, DType, TensorKind, TensorSpec

HISTORY = 24  # tokens that a sequence has; all are its prompt
PROCESSORS = {
    "REPETITION_PENALTY": RepetitionPenaltyLogitsProcessor,
    "TEMPERATURE": TemperatureLogitsWarper,
    "MIN_P": MinPLogitsWarper,
    "TOP_K": TopKLogitsWarper,
    "TOP_P": TopPLogitsWarper,
}


class Chooser:
    """A program in which sequences with the same logits and different seeds choose a token.

    ``tiles``: instructions that share the tokens of a row.
    """

    def __init__(self, machine: Machine, sequences: int, vocabulary: int, tiles: int) -> None:
        self.sequences, self.vocabulary = sequences, vocabulary
        shapes: dict[str, tuple[tuple[int, ...], DType, TensorKind]] = {
            "logits": ((sequences, vocabulary), F32, TensorKind.INPUT),
            "adjusted": ((sequences, vocabulary), F32, TensorKind.ACTIVATION),
            "segments": ((sequences, segment_words(vocabulary)), F32, TensorKind.ACTIVATION),
            "tokens": ((sequences, HISTORY + 1), I32, TensorKind.STATE),
            "sampling_real": ((sequences, REAL_COLUMNS), F32, TensorKind.INPUT),
            "sampling_integer": ((sequences, INTEGER_COLUMNS), I32, TensorKind.INPUT),
            "logit_row": ((sequences,), I32, TensorKind.INPUT),
            "row_sequence": ((sequences,), I32, TensorKind.INPUT),
            "row_position": ((sequences,), I32, TensorKind.INPUT),
            "logit_count": ((1,), I32, TensorKind.INPUT),
            "allowed": ((sequences, -(-vocabulary // MASK_BITS)), I32, TensorKind.INPUT),
            "bias": ((sequences, vocabulary), F32, TensorKind.INPUT),
            "masks_written": ((1,), I32, TensorKind.INPUT),
            "masks_awaited": ((1,), I32, TensorKind.INPUT),
        }
        specs = {name: TensorSpec(name, *shape) for name, shape in shapes.items()}
        handles: dict[str, Any] = {name: number for number, name in enumerate(specs)}
        segments = -(-vocabulary // SEGMENT_TOKENS)
        cuts = [SEGMENT_TOKENS * (segments * i // tiles) for i in range(tiles)] + [vocabulary]
        rows: dict[str, Any] = {"row_begin": 0, "row_end": sequences}
        sampled = {n: handles[n] for n in (f.name for f in Sample.fields) if n in handles}
        del sampled["logits"]
        instructions = [
            AdjustLogits(**handles, **rows, column_begin=a, column_end=b, signal=0)
            for a, b in pairwise(cuts)
        ]
        choice = Sample(**sampled, **rows, waits=[Wait(0, tiles)])
        program = Program.build(
            list(specs.values()), [*instructions, choice], [range(tiles + 1)], barriers=["adjusted"]
        )
        self.memory = Memory(machine.memory_device)
        self.memory.allocate(specs.values())
        self.executable = machine.load(program, self.memory)
        count = torch.arange(sequences, dtype=torch.int32)
        for name in ("logit_row", "row_sequence"):
            self.memory.write(name, count)
        self.memory.write("row_position", torch.full((sequences,), HISTORY - 1))
        self.memory.write("logit_count", torch.tensor([sequences]))

    def choose(
        self, logits: torch.Tensor, history: torch.Tensor, parameters: Parameters, seed: int
    ) -> list[int]:
        """A token of each sequence."""
        reals, integers = (
            torch.zeros(self.sequences, REAL_COLUMNS),
            torch.zeros(self.sequences, INTEGER_COLUMNS, dtype=torch.int32),
        )
        reals[:, Real.TOP_P] = reals[:, Real.REPETITION_PENALTY] = 1.0
        integers[:, Integer.ENABLED], integers[:, Integer.PROMPT_LENGTH] = 1, HISTORY
        integers[:, Integer.SEED_LOW] = torch.arange(self.sequences) + seed * self.sequences
        set_parameters(reals, integers, parameters)
        tokens = torch.zeros(self.sequences, HISTORY + 1, dtype=torch.int32)
        tokens[:, :HISTORY] = history
        self.memory.write("logits", logits.expand(self.sequences, -1))
        self.memory.write("sampling_real", reals)
        self.memory.write("sampling_integer", integers)
        self.memory.write("tokens", tokens)
        self.executable.run()
        found: list[int] = self.memory["tokens"][:, HISTORY].tolist()
        return found


def probabilities(
    logits: torch.Tensor, history: torch.Tensor, parameters: Parameters
) -> torch.Tensor:
    """Those that transformers' processors leave."""
    processors: Any = LogitsProcessorList()
    for name, kind in PROCESSORS.items():
        if name in parameters:
            processors.append(kind(parameters[name]))
    scores = processors(history[None].long(), logits[None].clone())
    return torch.softmax(scores[0].double(), 0)


@pytest.fixture(scope="module")
def gpu() -> Machine:
    """A GPU; an emulated one where there is none."""
    return EmulatedMachine(seed=1) if reason_unavailable() else CudaMachine()


CASES: list[Parameters] = [
    {"TEMPERATURE": 1.0},
    {"TEMPERATURE": 0.6, "TOP_P": 0.9},
    {"TEMPERATURE": 1.3, "TOP_K": 12},
    {"TEMPERATURE": 1.0, "MIN_P": 0.1},
    {"TEMPERATURE": 0.9, "MIN_P": 0.02, "TOP_K": 40, "TOP_P": 0.8},
    {"TEMPERATURE": 0.8, "REPETITION_PENALTY": 1.3, "TOP_P": 0.95},
]


@pytest.mark.parametrize("parameters", CASES, ids=lambda p: ", ".join(name.lower() for name in p))
def test_tokens_come_as_often_as_transformers_says(parameters: Parameters) -> None:
    rng = np.random.default_rng(5)
    vocabulary, sequences, rounds = 1200, 256, 16
    logits = torch.tensor(rng.normal(0, 2.5, vocabulary), dtype=torch.float32)
    history = torch.tensor(rng.integers(0, vocabulary, HISTORY), dtype=torch.int32)
    history[0] = int(logits.argmax())
    expected = probabilities(logits, history, parameters).numpy()
    chooser = Chooser(CpuMachine(workers=1), sequences, vocabulary, tiles=3)
    chosen = [
        token for i in range(rounds) for token in chooser.choose(logits, history, parameters, i)
    ]
    counts = np.bincount(chosen, minlength=vocabulary)
    assert not counts[expected == 0].any()
    # Pearson's statistic over tokens that are expected ten times, and all others together.
    draws = sequences * rounds
    often = expected * draws >= 10
    seen = np.array([*counts[often], counts[~often].sum()])
    wanted = np.array([*expected[often], expected[~often].sum()]) * draws
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    # Its mean is `degrees`, its variance twice that. The seeds are fixed, so that it never changes.
    assert degrees >= 3
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize("seed", range(6))
def test_machines_choose_the_same_among_what_transformers_leaves(
    scale: float, seed: int, gpu: Machine
) -> None:
    """Flat and peaked distributions: the GPU finds thresholds among few candidates or in whole rows."""
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.choice([700, 5003, 20_000]))
    parameters: Parameters = {"TEMPERATURE": float(rng.uniform(0.5, 1.5))}
    if rng.random() < 0.6:
        parameters["TOP_P"] = float(rng.uniform(0.05, 0.98))
    if rng.random() < 0.4:
        parameters["MIN_P"] = float(rng.uniform(0.005, 0.5))
    if rng.random() < 0.4:
        parameters["TOP_K"] = int(rng.choice([1, 7, 60, 2000]))
    if rng.random() < 0.3:
        parameters["REPETITION_PENALTY"] = float(rng.uniform(1.05, 1.5))
    logits = torch.tensor(rng.normal(0, scale, vocabulary), dtype=torch.float32)
    history = torch.tensor(rng.integers(0, vocabulary, HISTORY), dtype=torch.int32)
    left = probabilities(logits, history, parameters) > 0
    chosen = [
        Chooser(machine, 8, vocabulary, tiles).choose(logits, history, parameters, seed)
        for machine, tiles in ((CpuMachine(workers=1), 1), (gpu, 2))
    ]
    assert chosen[0] == chosen[1]
    assert bool(left[torch.tensor(chosen[0])].all())
