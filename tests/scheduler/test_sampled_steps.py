"""Which sequences and steps need more than the largest logit, and which need the host's masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import EOS, assert_idle, gather, greedy, make_engine, run_all
from hypothesis import given
from hypothesis import strategies as st

from megavm.instructions.sample import Integer, Real
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.restriction import Restriction, mask_of
from megavm.scheduler.engine.sequence import Request, Sequence
from megavm.scheduler.engine.step import Plan

ALLOWED = Restriction(allowed=mask_of(np.arange(8, dtype=np.int32), 40))
BIASED = Restriction(bias={3: 1.0})
AVOIDING = Restriction(bad_words=((1, 2),))

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.0, 0.0, 1e-6, 1.0]),
    top_p=st.sampled_from([1.0, 0.5]),
    top_k=st.sampled_from([-1, 0, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1, 1.0, 1.0, 0.5, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.5, -0.5]),
    seed=st.sampled_from([None, 3]),
    max_tokens=st.sampled_from([None, 9, 20]),
    min_tokens=st.sampled_from([0, 0, 1, 9]),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([None, (), (3, 30)]),
    logprobs=st.sampled_from([None, 2]),
    prompt_logprobs=st.sampled_from([None, 2]),
)


@given(params, st.sampled_from([None, None, ALLOWED, BIASED, AVOIDING]), st.integers(1, 9))
def test_a_sequence_samples_if_and_only_if_its_parameters_in_memory_say_so(
    params: SamplingParams, restriction: Restriction | None, max_output: int
) -> None:
    prompt = np.array([4, 5, 6], dtype=np.int32)
    request = Request(0, prompt, params, restriction=restriction)
    sequence = Sequence(request, 0, 7, max_output, EOS, None, [])
    real, integer = sequence.parameters()
    largest = [toy.takes_largest(real, integer, len(prompt) + n) for n in range(max_output)]
    assert sequence.sampled == (not all(largest))
    if not sequence.sampled:
        assert integer[Integer.MASKED] == integer[Integer.BIASED] == 0


@pytest.mark.parametrize("extreme", [1e-300, 1e-45, 1e-38, 1e39, 1e300])
def test_extreme_divisors_of_logits_are_numbers_of_float32(extreme: float) -> None:
    params = SamplingParams(temperature=extreme, repetition_penalty=extreme)
    request = Request(0, np.array([4], dtype=np.int32), params)
    real, _ = Sequence(request, 0, 7, 1, EOS, None, []).parameters()
    logits = np.array([-80, -1, 0, 1, 80], dtype=np.float32)
    for column in (Real.TEMPERATURE, Real.REPETITION_PENALTY):
        quotients = logits / real[column]
        assert np.isfinite(quotients).all()
        assert (np.diff(quotients) >= 0).all()
    if extreme < 1:
        assert (np.diff(logits / real[Real.TEMPERATURE]) > 1e6 / 2).all()


def steps_of(engine: Engine) -> list[tuple[int, bool, bool]]:
    """Rows of every step to the end, whether it samples, and whether it needs tokens."""
    found: list[tuple[int, bool, bool]] = []
    while (plan := engine.plan()) is not None:
        engine.executor.execute(plan)
        engine.collect(plan)
        found.append((plan.step.num_rows, plan.step.sampled, plan.needs_tokens))
    return found


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 0.5},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"min_tokens": 2},
    ],
)
def test_a_step_samples_while_one_of_its_sequences_does(given: dict[str, Any]) -> None:
    engine = make_engine(overlap=False)
    engine.add([1, 2], greedy(max_tokens=6, ignore_eos=True))
    engine.add([3, 4], greedy(max_tokens=3, stop_token_ids=[39], **given))
    kinds = [sampled for _, sampled, _ in steps_of(engine)]
    assert len(kinds) == 6
    assert kinds == sorted(kinds, reverse=True)
    assert kinds[0]
    assert not kinds[-1]
    assert_idle(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_chunks_of_a_prompt_have_the_kind_of_its_choice(temperature: float) -> None:
    """So a long prompt needs no program that nothing else needs."""
    engine = make_engine(toy.ToyRunner(max_num_batched_tokens=4), overlap=False)
    engine.add(list(range(10)), greedy(max_tokens=3, ignore_eos=True, temperature=temperature))
    assert steps_of(engine) == [(n, temperature > 0, False) for n in (4, 4, 2, 1, 1)]


def test_a_chunk_that_chooses_nothing_leaves_the_kind_to_those_that_choose() -> None:
    engine = make_engine(toy.ToyRunner(max_num_batched_tokens=4), overlap=False)
    engine.add([1], greedy(max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(list(range(5)), greedy(max_tokens=1, temperature=1.0))
    kinds = steps_of(engine)
    assert kinds[:3] == [(4, False, False), (3, True, False), (1, False, False)]


def test_a_launch_needs_tokens_only_for_masks_that_depend_on_them() -> None:
    engine = make_engine(overlap=False)
    for number, restriction in enumerate((None, ALLOWED, BIASED)):
        options = greedy(max_tokens=9, ignore_eos=True, temperature=float(number == 0))
        engine.add([number + 1, 2], options, restriction=restriction)
    assert all(not needs for _, _, needs in steps_of(engine))
    engine.add([1, 2], greedy(max_tokens=9, ignore_eos=True))
    engine.add([2, 2], greedy(max_tokens=4, ignore_eos=True), restriction=AVOIDING)
    needed = [needs for _, _, needs in steps_of(engine)]
    assert needed == [True] * 4 + [False] * 5
    assert_idle(engine)


def test_a_plan_without_its_sequence_with_a_mask_needs_no_tokens() -> None:
    engine = make_engine(overlap=False)
    engine.add([1, 2], greedy(max_tokens=9, ignore_eos=True))
    engine.add([2, 2], greedy(max_tokens=9, ignore_eos=True), restriction=AVOIDING)
    plan = engine.plan()
    assert plan is not None
    slots = [s.slot for s in plan.samplers if s.dynamic]
    ended = np.zeros(engine.runner.max_num_seqs, dtype=np.bool_)
    plan.drop(ended)
    assert plan.needs_tokens
    ended[slots] = True
    plan.drop(ended)
    assert not plan.needs_tokens
    assert len(plan.samplers) == 1


class Counted(tuple[Sequence, ...]):
    """Samplers that count how often they are iterated."""

    rounds = 0

    def __iter__(self) -> Any:
        Counted.rounds += 1
        return super().__iter__()


def test_steady_steps_do_not_look_at_every_sequence() -> None:
    runner = toy.ToyRunner(max_num_seqs=8, num_blocks=128, max_num_batched_tokens=64)
    engine = make_engine(runner, overlap=False)
    for number in range(8):
        options = greedy(max_tokens=30, ignore_eos=True, temperature=1.0, seed=number)
        engine.add([number + 1, 2], options, restriction=ALLOWED if number % 2 else None)
    engine.step()
    engine.step()
    planner = engine.planner
    assert planner._decoders is not None
    planner._decoders = Counted(planner._decoders)
    before = Counted.rounds
    plan: Plan | None = planner.plan()
    assert plan is not None
    assert isinstance(plan.samplers, Counted)
    assert plan.step.sampled
    assert not plan.needs_tokens
    assert Counted.rounds == before


@pytest.mark.parametrize("awaits_masks", [False, True])
@pytest.mark.parametrize("first", [2, 5])
def test_every_launch_that_awaits_masks_is_given_them(first: int, awaits_masks: bool) -> None:
    """Also if the sequences that need them end at a stop token in the launch before."""
    runner = toy.ToyRunner(queues=True, awaits_masks=awaits_masks, max_num_seqs=6)
    engine = make_engine(runner)
    results: Any = {}
    engine.add([9, 9], greedy(max_tokens=40, ignore_eos=True), "plain")
    for number in range(first):
        stops = list(range(number, 40, 3))
        engine.add(
            [number, 2], greedy(max_tokens=20, stop_token_ids=stops), number, restriction=AVOIDING
        )
    engine.add([7], greedy(max_tokens=12, temperature=1.0, seed=1), "sampled")
    while engine.has_work:
        gather(results, engine.step())
        assert not any(launch.awaits_masks for launch in runner.launches)
    assert runner.unmasked == 0
    assert engine.counters.faults == 0
    alone = make_engine(overlap=False)
    for number in range(first):
        stops = list(range(number, 40, 3))
        alone.add(
            [number, 2], greedy(max_tokens=20, stop_token_ids=stops), number, restriction=AVOIDING
        )
    for key, result in run_all(alone).items():
        assert results[key].outcome() == result.outcome()
    assert_idle(engine)
    engine.close()
