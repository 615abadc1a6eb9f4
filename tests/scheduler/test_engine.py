"""Steps of the engine: chunks, stops, preemption, prefix caching, aborts, planning ahead."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import Results, alone, assert_idle, gather, greedy, make_engine, run_all

from megavm.instructions.sample import Integer
from megavm.sampling_params import SamplingParams


def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=5, max_num_seqs=2)
    engine = make_engine(runner, overlap=overlap)
    prompt = [i % 7 for i in range(23)]
    engine.add(prompt, greedy(max_tokens=2))
    results = run_all(engine)
    assert results[0, 0].outcome() == alone(prompt, greedy(max_tokens=2))
    assert [s.num_rows for s in runner.steps_seen] == [5, 5, 5, 5, 3, 1]
    assert [len(s.logit_row) for s in runner.steps_seen] == [0, 0, 0, 0, 1, 1]


def test_decode_goes_on_while_another_prompt_is_computed() -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=6, max_num_seqs=2)
    engine = make_engine(runner, overlap=False)
    engine.add([1, 2, 3], greedy(max_tokens=10))
    engine.step()
    engine.add(list(range(20)), greedy(max_tokens=3))
    results: Results = {}
    for _ in range(4):
        deltas = engine.step()
        gather(results, deltas)
        assert 0 in {d.request.id for d in deltas}
    assert len(results[1, 0].token_ids) == 1


@pytest.mark.parametrize("seed", [0, 1, 1 << 31, 0x1234567_89ABCDEF, (1 << 63) - 1])
def test_a_seed_is_written_as_two_words(seed: int) -> None:
    (sequence,) = make_engine().add([1], SamplingParams(seed=seed)).sequences
    _, integer = sequence.parameters()
    words = integer[Integer.SEED_LOW : Integer.SEED_HIGH + 1].view(np.uint32)
    assert words.tolist() == [seed & 0xFFFFFFFF, seed >> 32]


@pytest.mark.parametrize("queues", [False, True])
def test_only_machines_that_keep_a_thread_busy_have_one(queues: bool) -> None:
    runner = toy.ToyRunner(queues=queues)
    engine, before = make_engine(runner), threading.active_count()
    for i, max_tokens in enumerate((1, 1, 4)):
        assert threading.active_count() == before, "launches with none behind them need no other"
        engine.add([1, 2, i], greedy(max_tokens=max_tokens))
        expected = alone([1, 2, i], greedy(max_tokens=max_tokens), 0, runner)
        assert run_all(engine)[i, 0].outcome() == expected
    assert threading.active_count() == before + (not queues)
    assert_idle(engine)
    engine.close()


def test_a_decode_step_of_known_length_runs_no_row_too_many(overlap: bool) -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=8))
    run_all(engine)
    assert sum(s.num_rows for s in runner.steps_seen) == 3 + 7


def test_a_stop_token_ends_the_rows_of_its_sequence_at_once(overlap: bool) -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=overlap)
    tokens = alone([1, 2, 3], greedy(max_tokens=20))[0]
    stop = tokens[6]
    params = greedy(max_tokens=20, stop_token_ids=[stop])
    engine.add([1, 2, 3], params)
    results = run_all(engine)
    assert results[0, 0].outcome() == alone([1, 2, 3], params)
    assert results[0, 0].stop_reason == stop
    length = len(results[0, 0].token_ids)
    # Behind a step in progress, the next one begins before the stop token is seen.
    assert sum(s.num_rows for s in runner.steps_seen) == 3 + length - 1 + runner.queues


def test_a_slot_is_used_again_while_a_step_in_progress_still_chooses_for_its_last_sequence(
    overlap: bool,
) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, vocab_size=12)
    engine = make_engine(runner, overlap=overlap)
    long = greedy(max_tokens=40)
    # Every token ends these sequences, also the one after their end.
    short = greedy(min_tokens=3, max_tokens=9, stop_token_ids=list(range(12)))
    prompts = [[1, 2, 3], *([4, i] for i in range(9))]
    for i, prompt in enumerate(prompts):
        engine.add(prompt, long if i == 0 else short, i)
    results = run_all(engine)
    for i, prompt in enumerate(prompts):
        assert results[i, 0].outcome() == alone(prompt, long if i == 0 else short, 0, runner)
    assert_idle(engine)


def test_blocks_running_out_preempts_the_youngest_and_changes_no_text(overlap: bool) -> None:
    runner = toy.ToyRunner(num_blocks=9, block_size=4, max_num_seqs=3)
    engine = make_engine(runner, overlap=overlap, prefix_caching=False)
    requests = [[1, 2, 3, 4, 5], [9, 8, 7], [20, 21, 22, 23]]
    for prompt in requests:
        engine.add(prompt, greedy(max_tokens=16))
    results = run_all(engine)
    assert engine.planner.preemptions > 0
    for i, prompt in enumerate(requests):
        assert results[i, 0].outcome() == alone(prompt, greedy(max_tokens=16), 0, runner)
    assert_idle(engine)


def test_others_pass_a_sequence_that_waits_for_one_that_is_held() -> None:
    """The first sequence of a request scores the prompt, and its program is being compiled."""

    class Compiling(toy.ToyRunner):
        coming = True

        def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
            return self.coming and wants_logits

    runner = Compiling()
    engine = make_engine(runner)
    engine.add([1, 2, 3], greedy(max_tokens=3, n=2, prompt_logprobs=1))
    engine.add([4, 5], greedy(max_tokens=3))
    results: Results = {}
    for _ in range(10):
        gather(results, engine.step())
    assert list(results) == [(1, 0)]
    runner.coming = False
    assert set(run_all(engine, results)) == {(0, 0), (0, 1), (1, 0)}
    for (number, index), result in results.items():
        prompt = [4, 5] if number else [1, 2, 3]
        assert result.token_ids == alone(prompt, greedy(max_tokens=3), index)[0]
    assert_idle(engine)


def test_a_sequence_that_outgrows_the_whole_cache_fails_alone(overlap: bool) -> None:
    runner = toy.ToyRunner(num_blocks=6, block_size=4, max_num_seqs=3)
    engine = make_engine(runner, overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=40))
    engine.add([4, 5, 6], greedy(max_tokens=12))
    engine.add([7, 8, 9], greedy(max_tokens=12))
    results = run_all(engine)
    assert results[0, 0].finish_reason == "error"
    assert results[0, 0].error == (
        "the KV cache is full: 6 blocks of 4 tokens do not hold the 3 tokens of the prompt"
        " and more than 22 new ones"
    )
    assert results[0, 0].token_ids == alone([1, 2, 3], greedy(max_tokens=40))[0][:22]
    for i, prompt in ((1, [4, 5, 6]), (2, [7, 8, 9])):
        assert results[i, 0].outcome() == alone(prompt, greedy(max_tokens=12))
    assert_idle(engine)


def test_a_generation_ends_with_the_context(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add([1] * 60, greedy(max_tokens=None))
    engine.add([2] * 60, greedy(max_tokens=100))
    results = run_all(engine)
    for i in range(2):
        assert len(results[i, 0].token_ids) == 4
        assert results[i, 0].finish_reason == "length"


def test_an_equal_prompt_is_not_computed_twice(overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=64)
    engine = make_engine(runner, overlap=overlap)
    prompt = [i % 9 for i in range(22)]
    engine.add(prompt, greedy())
    first = run_all(engine)
    rows = sum(s.num_rows for s in runner.steps_seen)
    request = engine.add(prompt, greedy())
    second = run_all(engine)
    assert request.cached_tokens == 20
    assert sum(s.num_rows for s in runner.steps_seen) - rows == rows - 20
    assert second[1, 0].outcome() == first[0, 0].outcome()
    assert engine.blocks.counters.hits == 5


@pytest.mark.parametrize("steps", [1, 3, 9])
def test_a_conversation_finds_its_own_answer_in_the_cache(steps: int) -> None:
    engine = make_engine(overlap=False, steps_per_launch=steps)
    prompt = [1, 2, 3, 4, 5]
    engine.add(prompt, greedy(max_tokens=12))
    answer = run_all(engine)[0, 0].token_ids
    request = engine.add([*prompt, *answer, 7, 7, 7], greedy())
    run_all(engine)
    assert request.cached_tokens == 16  # four blocks; a launch of nine steps fills two or three


def test_several_sequences_of_a_request_share_its_prompt(overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=64)
    engine = make_engine(runner, overlap=overlap)
    prompt = [i % 9 for i in range(22)]
    params = greedy(n=3, temperature=1.0, seed=3)
    engine.add(prompt, params)
    results = run_all(engine)
    outcomes = [results[0, i].outcome() for i in range(3)]
    assert outcomes == [alone(prompt, params, i) for i in range(3)]
    assert outcomes[0] != outcomes[1] != outcomes[2]
    assert sum(s.num_rows for s in runner.steps_seen) == 22 + 2 * 2 + 3 * 7


def test_requests_without_a_seed_draw_from_the_engines_generator() -> None:
    def texts(seed: int) -> list[str]:
        engine = make_engine(seed=seed)
        for _ in range(2):
            engine.add([1, 2, 3], SamplingParams(ignore_eos=True))
        return [r.text for r in run_all(engine).values()]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert texts(0)[0] != texts(0)[1]


def test_an_abort_frees_everything_at_once(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=50), "gone")
    engine.add([4, 5, 6], greedy(max_tokens=10), "stays")
    results: Results = {}
    for _ in range(4):
        gather(results, engine.step())
    held = engine.blocks.num_held
    assert engine.abort("gone")
    assert engine.blocks.num_held < held
    assert not engine.abort("gone")
    assert not engine.abort("never there")
    run_all(engine, results)
    assert results["gone", 0].finish_reason == "abort"
    assert results["stays", 0].token_ids == alone([4, 5, 6], greedy(max_tokens=10))[0]
    assert_idle(engine)


def test_planning_ahead_of_a_running_step_is_the_same_as_waiting_for_it() -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner)
    engine.add([1, 2, 3], greedy(max_tokens=6))
    results: Results = {}
    plan = engine.plan()
    while plan is not None:
        following = engine.plan()  # before the first has run
        engine.executor.execute(plan)
        gather(results, engine.collect(plan))
        plan = following
    assert results[0, 0].outcome() == alone([1, 2, 3], greedy(max_tokens=6))


def test_logits_of_a_text_are_those_of_each_prefix_and_disturb_nobody(overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, num_blocks=12, max_logit_rows=5)
    engine = make_engine(runner, overlap=overlap)
    for i in range(2):
        engine.add([1, 2, i], greedy(max_tokens=20))
    results: Results = {}
    for _ in range(3):
        gather(results, engine.step())
    text = [i % 11 for i in range(13)]
    logits = engine.logits(text)
    assert logits.shape == (13, 40)
    assert logits.dtype == np.float32
    for i in range(13):
        np.testing.assert_array_equal(logits[i], toy.toy_logits(text[: i + 1], 40))
    while engine.has_work:
        gather(results, engine.step())
    for i in range(2):
        assert results[i, 0].outcome() == alone([1, 2, i], greedy(max_tokens=20), 0, runner)
    assert_idle(engine)


def test_several_steps_per_launch_bring_several_tokens_at_a_time() -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=False, steps_per_launch=4)
    engine.add([1, 2, 3], greedy(max_tokens=10))
    counts = []
    while engine.has_work:
        counts += [len(d.token_ids) for d in engine.step()]
    assert counts == [1, 4, 4, 1]


@pytest.mark.parametrize(
    ("params", "steps"),
    [
        ({}, 4),
        ({"stop_token_ids": [39]}, 1),
        ({"stop": ["never"]}, 1),
    ],
)
def test_a_request_that_waits_for_a_seat_shortens_launches_only_if_one_may_come_early(
    params: dict[str, Any], steps: int
) -> None:
    runner = toy.ToyRunner(max_num_seqs=2)
    engine = make_engine(runner, overlap=False, steps_per_launch=4)
    for i, max_tokens in enumerate((13, 17, 5)):
        engine.add([1, 2, i], greedy(max_tokens=max_tokens, **params), i)
    launches = []
    while engine.has_work:
        deltas = engine.step()
        launches.append({d.request.id: len(d.token_ids) for d in deltas})
    assert launches[:2] == [{0: 1, 1: 1}, {0: steps, 1: steps}]
    # None goes on past the end of the first, behind which the third has a seat.
    ends = next(i for i, launch in enumerate(launches) if 2 in launch)
    assert sum(launch.get(0, 0) for launch in launches[:ends]) == 13
    assert launches[ends][1] == 1


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(overlap: bool) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=9, max_tokens=20, stop=["a", "b", "c", "d"])
    engine = make_engine(overlap=overlap)
    engine.add([1, 2, 3], params)
    result = run_all(engine)[0, 0]
    assert result.outcome() == alone([1, 2, 3], params)
    assert len(result.token_ids) >= 10


def test_closing_frees_everything(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=40))
    engine.step()
    engine.close()
    assert engine.blocks.num_held == 0
