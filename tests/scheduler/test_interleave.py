"""Rows that decode are dealt out to the tiles of attention; the step means the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import megavm.scheduler.run.interleave as interleave_module
import megavm.scheduler.run.runner as runner_module
from megavm.instructions.attention import Attention
from megavm.scheduler.compiler.options import CompileOptions
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Limits
from megavm.scheduler.run.interleave import RowRanges, interleave, row_ranges
from megavm.scheduler.run.runner import Runner

LIMITS = Limits(
    max_num_seqs=20,
    max_model_len=64,
    max_num_batched_tokens=64,
    max_logit_rows=20,
    num_blocks=80,
    block_size=16,
)
LAYERS = 2


def ints(values: list[int]) -> Any:
    return np.array(values, dtype=np.int32)


def step_of(decoding: list[int], chunks: list[tuple[int, int]]) -> Step:
    """Rows of sequences that decode at these positions, then chunks (first position, tokens).

    Each chunk chooses a token at its end.
    """
    sequences, positions = list(range(len(decoding))), list(decoding)
    logit_rows = list(range(len(decoding)))
    for number, (begin, tokens) in enumerate(chunks, len(decoding)):
        sequences += [number] * tokens
        positions += range(begin, begin + tokens)
        logit_rows.append(len(positions) - 1)
    return Step(ints(sequences), ints(positions), ints(logit_rows), max(positions) + 1)


def tokens_of(step: Step) -> list[tuple[int, int]]:
    return list(zip(step.row_sequence.tolist(), step.row_position.tolist(), strict=True))


STEPS = st.builds(
    step_of,
    st.lists(st.integers(0, 900), max_size=40),
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 70)), min_size=1, max_size=6),
)


RANGES = st.builds(RowRanges, st.integers(1, 64), st.integers(1, 20))


@given(STEPS, RANGES)
def test_a_step_has_the_same_tokens_and_chooses_for_the_same(step: Step, ranges: RowRanges) -> None:
    found = interleave(step, ranges)
    before, after = tokens_of(step), tokens_of(found)
    assert sorted(after) == sorted(before)
    assert [after[row] for row in found.logit_row] == [before[row] for row in step.logit_row]
    assert found.row_sequence.dtype == found.row_position.dtype == found.logit_row.dtype == np.int32
    assert found.context == step.context
    for sequence in set(step.row_sequence.tolist()):  # prompts stay in order
        rows = [token for token in after if token[0] == sequence]
        assert rows == sorted(rows)


@given(STEPS, RANGES)
def test_as_many_ranges_as_workers_process_at_a_time_have_equal_shares(
    step: Step, ranges: RowRanges
) -> None:
    sequences, counts = np.unique(step.row_sequence, return_counts=True)
    lone = set(sequences[counts == 1].tolist())
    found = interleave(step, ranges)
    single = [s in lone for s in found.row_sequence.tolist()]
    parts = [single[i : i + ranges.rows] for i in range(0, step.num_rows, ranges.rows)]
    whole = step.num_rows // ranges.rows  # the last one may have few rows
    used = parts[: min(ranges.abreast, whole)]
    if found is step:
        few = 0 < len(lone) <= (len(used) - 1) * ranges.rows < step.num_rows
        assert not few or len(lone) == step.num_rows or ranges.rows == 1
        return
    if len(lone) == step.num_rows:
        return
    assert all(sorted(part, reverse=True) == part for part in parts)  # they come first
    assert sum(map(sum, used)) == len(lone)
    assert max(map(sum, used)) - min(map(sum, used)) <= 1


def test_long_contexts_are_spread_too() -> None:
    step = step_of([10, 11, 12, 13, 500, 501, 502, 503], [(0, 24)])
    found = interleave(step, RowRanges(8, 4))
    firsts = [found.row_position[begin : begin + 2].tolist() for begin in range(0, 32, 8)]
    assert firsts == [[503, 10], [502, 11], [501, 12], [500, 13]]


UNEVEN = [5, 1500, 400, 30, 2600, 8, 900, 70, 7000, 60, 300, 9, 12]


def test_rows_that_decode_alone_are_dealt_out_by_their_contexts() -> None:
    step = step_of(UNEVEN, [])
    found = interleave(step, RowRanges(4, 16))
    ranges = [found.row_position[begin : begin + 4].tolist() for begin in range(0, 13, 4)]
    # The longest has the shortest ones beside it; the last range has room for one row.
    assert ranges == [[7000, 9, 8, 5], [2600, 60, 30, 12], [1500, 400, 300, 70], [900]]
    assert [found.row_position[row] for row in found.logit_row] == UNEVEN
    # It is known that the rows belong to different sequences.
    step.distinct = True
    assert tokens_of(interleave(step, RowRanges(4, 16))) == tokens_of(found)


def test_neighbours_that_have_one_worker_do_not_get_the_longest_together() -> None:
    step = step_of([9000 - 100 * i for i in range(8)] + [50] * 8, [])
    for abreast, firsts in (
        (8, [9000, 8900, 8800, 8700, 8600, 8500, 8400, 8300]),
        (4, [9000, 8600, 8900, 8500, 8800, 8400, 8700, 8300]),
        (2, [9000, 8800, 8600, 8400, 8900, 8700, 8500, 8300]),
    ):
        found = interleave(step, RowRanges(2, abreast))
        assert found.row_position[::2].tolist() == firsts
    # Ranges of one row, of which eight have one worker.
    step = step_of([9000, 8000] + [100] * 14, [])
    found = interleave(step, RowRanges(1, 2))
    assert found.row_position[[0, 8]].tolist() == [9000, 8000]
    assert interleave(step, RowRanges(1, 16)) is step


@given(st.lists(st.integers(0, 9000), min_size=2, max_size=80, unique=True), st.integers(2, 16))
def test_a_context_goes_to_the_range_that_has_least(contexts: list[int], size: int) -> None:
    step = step_of(contexts, [])
    found = interleave(step, RowRanges(size, 20))
    if max(contexts) - min(contexts) < 512 or size >= len(contexts):
        assert found is step
        return
    ends = range(size, len(contexts), size)
    ranges = [part.tolist() for part in np.split(found.row_position, ends)]
    assert all(len(part) == size for part in ranges[:-1])
    for context in contexts:
        # What each range had before it, with the tokens of the rows themselves; None: it was full.
        longer = [[other + 1 for other in part if other > context] for part in ranges]
        sums = [
            sum(part) if len(part) < len(whole) else None
            for part, whole in zip(longer, ranges, strict=True)
        ]
        own = next(i for i, part in enumerate(ranges) if context in part)
        assert sums[own] == min(tokens for tokens in sums if tokens is not None)


def test_steps_that_nothing_can_be_gained_for_stay_as_they_are() -> None:
    for step in (step_of([4, 5, 6, 7], []), step_of([], [(0, 20), (3, 9)])):
        assert interleave(step, RowRanges(2, 4)) is step
    step = step_of([4, 5], [(0, 10)])
    for ranges in (None, RowRanges(12, 4), RowRanges(100, 4)):
        assert interleave(step, ranges) is step
    # Single rows that keep all workers busy.
    full = step_of(list(range(9)), [(0, 40)])
    assert interleave(full, RowRanges(4, 3)) is full
    assert interleave(full, RowRanges(4, 4)) is not full


@pytest.fixture(scope="module")
def directory(make_llama: Callable[..., tuple[Path, Any]]) -> Path:
    path, _ = make_llama(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    return path


def logits_of(directory: Path, step: Step) -> Any:
    """The logits of a step whose sequences have been read before up to its positions."""
    runner = Runner.for_checkpoint(
        Checkpoint.open(directory), LIMITS, workers=8, options=CompileOptions(8)
    )
    draw = np.random.default_rng(1)
    for slot in range(LIMITS.max_num_seqs):
        runner.write_tokens(slot, draw.integers(0, 50, 64, dtype=np.int32))
        runner.write_blocks(slot, 0, np.arange(4 * slot, 4 * slot + 4, dtype=np.int32))
    for sequence in sorted(set(step.row_sequence.tolist())):
        begin = int(step.row_position[step.row_sequence == sequence][0])
        if begin:
            positions = np.arange(begin, dtype=np.int32)
            before = np.full_like(positions, sequence)
            runner.run(Step(before, positions, positions[-1:], begin))
    runner.run(step)
    return runner.logits[: len(step.logit_row)].copy()


@pytest.mark.parametrize(
    "step",
    [
        step_of([5, 40, 17, 3, 30, 8], [(0, 21), (9, 20)]),
        replace(step_of([5, 40, 17, 3, 30, 8, 61, 2, 9, 44], []), distinct=True),
    ],
    ids=["beside chunks", "that decode"],
)
def test_the_machine_computes_the_same_in_either_order(
    directory: Path, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interleave_module, "UNEVEN_TOKENS", 16)
    orders: list[list[tuple[int, int]]] = []

    def noted(step: Step, ranges: RowRanges | None) -> Step:
        found = interleave(step, ranges)
        orders.append(tokens_of(found))
        return found

    monkeypatch.setattr(runner_module, "interleave", noted)
    dealt_out = logits_of(directory, step)
    assert orders[-1] != tokens_of(step)
    monkeypatch.setattr(runner_module, "interleave", lambda step, ranges: step)
    assert np.array_equal(logits_of(directory, step), dealt_out)
    assert len(np.unique(dealt_out[:, 0])) == len(dealt_out)


def test_a_program_says_how_many_rows_a_tile_of_attention_has(directory: Path) -> None:
    runner = Runner.for_checkpoint(
        Checkpoint.open(directory), LIMITS, workers=8, options=CompileOptions(8)
    )
    program = runner.programs.program(runner.programs.bucket(47, 8, 41))
    found = [(i.row_begin, i.row_end) for i in program.instructions if isinstance(i, Attention)]
    ranges = row_ranges(program)
    assert ranges is not None
    assert 0 < ranges.rows < 47
    assert set(found) == {(i, i + ranges.rows) for i in range(0, 64, ranges.rows)}
    assert ranges.abreast == 8 // (found.count(found[0]) // LAYERS)
