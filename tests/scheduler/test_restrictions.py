"""Grammars, masks and biases through the engine, on the toy runner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import EOS, Results, assert_idle, gather, greedy, make_engine, run_all

from megavm.scheduler.engine.restriction import Follower, Restriction, clear, mask_of
from megavm.scheduler.engine.step import Ints

VOCABULARY = 40


class Counting:
    """A grammar of toy tokens: ``length`` tokens, each with the remainder of its place by 4."""

    def __init__(
        self, length: int, stuck_at: int | None = None, raises_at: int | None = None
    ) -> None:
        self.length = length
        self.stuck_at = stuck_at
        self.raises_at = raises_at
        self.matchers: list[CountingMatcher] = []

    def matcher(self) -> CountingMatcher:
        self.matchers.append(CountingMatcher(self))
        return self.matchers[-1]


class CountingMatcher:
    def __init__(self, grammar: Counting) -> None:
        self.grammar = grammar
        self.tokens: list[int] = []
        self.error = ""

    @property
    def complete(self) -> bool:
        return not self.error and len(self.tokens) == self.grammar.length

    def accept(self, token: int) -> None:
        if token % 4 != len(self.tokens) % 4 or self.complete:
            self.error = self.error or f"token {token} is not at place {len(self.tokens)}"
        self.tokens.append(token)

    def rollback(self, count: int) -> None:
        del self.tokens[len(self.tokens) - count :]

    def fill(self, mask: Ints) -> None:
        place = len(self.tokens)
        if place == self.grammar.stuck_at:
            self.error = "it is stuck"
        if place == self.grammar.raises_at:
            raise OSError("a bug in the matcher")
        mask[:] = mask_of(np.arange(place % 4, VOCABULARY, 4, dtype=np.int32), VOCABULARY)


def counted(tokens: list[int]) -> bool:
    return all(token % 4 == place % 4 for place, token in enumerate(tokens))


@pytest.mark.parametrize("steps_per_launch", [1, 4])
def test_a_grammar_is_followed_and_ends_its_sequence(overlap: bool, steps_per_launch: int) -> None:
    engine = make_engine(overlap=overlap, steps_per_launch=steps_per_launch)
    grammar = Counting(9)
    params = greedy(max_tokens=20, n=3, temperature=1.0, seed=3)
    engine.add([1, 2, 3], params, "g", Restriction(grammar))
    engine.add([4, 5], greedy(max_tokens=12), "plain")
    results = run_all(engine)
    for index in range(3):
        result = results["g", index]
        assert counted(result.token_ids)
        assert (len(result.token_ids), result.finish_reason) == (9, "stop")
        assert result.stop_reason is None
    assert len(grammar.matchers) == 3
    assert len({tuple(results["g", i].token_ids) for i in range(3)}) > 1
    alone = make_engine(overlap=overlap)
    alone.add([4, 5], greedy(max_tokens=12), "plain")
    assert results["plain", 0].outcome() == run_all(alone)["plain", 0].outcome()
    assert_idle(engine)
    engine.close()


def restricted_results(runner: toy.ToyRunner, overlap: bool) -> Results:
    """Three sequences with a grammar, one with words to avoid, two others; some come later."""
    engine = make_engine(runner, overlap=overlap, steps_per_launch=4)
    results: Results = {}
    engine.add([4, 5], greedy(max_tokens=25), "plain")
    engine.add([1, 2, 3], greedy(n=3, temperature=1.0, seed=3), "g", Restriction(Counting(9)))
    for _ in range(3):
        gather(results, engine.step())
    words = Restriction(bad_words=((7, 8), (9, 9)))
    engine.add([6], greedy(max_tokens=8), "words", words)
    engine.add(
        [6, 2], greedy(max_tokens=9, stop_token_ids=[3, 8]), "stops", Restriction(Counting(9))
    )
    engine.add([4, 5], greedy(max_tokens=7), "later")
    run_all(engine, results)
    assert_idle(engine)
    engine.close()
    return results


def test_masks_come_while_their_step_runs() -> None:
    """What is chosen is what is chosen if every step waits for its masks."""
    waiting = toy.ToyRunner(queues=True, awaits_masks=False)
    running = toy.ToyRunner(queues=True)
    expected = restricted_results(toy.ToyRunner(), overlap=False)
    assert restricted_results(waiting, overlap=True) == expected
    assert restricted_results(running, overlap=True) == expected
    assert waiting.given == 0
    assert running.given > 12
    assert running.most_launches == 2


def test_nothing_waits_for_the_caller_between_two_steps() -> None:
    """It may take its time, or never come back: a launch may not need it then."""
    runner = toy.ToyRunner(queues=True)
    engine = make_engine(runner)
    engine.add([1, 2, 3], greedy(max_tokens=20), "g", Restriction(Counting(9)))
    while engine.has_work:
        engine.step()
        assert not any(launch.awaits_masks for launch in runner.launches)
    assert runner.given > 5


@pytest.mark.parametrize("stuck_at", [2, 3, 4, 5])
def test_a_sequence_that_fails_beside_others_may_leave_a_step_without_a_program(
    stuck_at: int,
) -> None:
    """Three rows may queue, two may not: then the step before ends first."""
    runner = toy.ToyRunner(queues=True, least_rows=3)
    engine = make_engine(runner)
    engine.add([1, 2], greedy(max_tokens=20), "stuck", Restriction(Counting(9, stuck_at)))
    for name in ("g", "h"):
        engine.add([3, 4], greedy(max_tokens=20), name, Restriction(Counting(9)))
    results = run_all(engine)
    assert "it is stuck" in (results["stuck", 0].error or "")
    alone = make_engine(overlap=False)
    alone.add([3, 4], greedy(max_tokens=20), "g", Restriction(Counting(9)))
    expected = run_all(alone)["g", 0].outcome()
    assert results["g", 0].outcome() == results["h", 0].outcome() == expected
    assert engine.counters.faults == 0
    assert_idle(engine)


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("what", ["faults", "bugs", "interrupts", "matcher"])
def test_what_fails_while_steps_await_masks_ends_its_requests_alone(what: str, at: int) -> None:
    runner = toy.ToyRunner(queues=True)
    if what != "matcher":
        setattr(runner, what, (at,))
    grammar = Counting(9, raises_at=at if what == "matcher" else None)
    engine = make_engine(runner)
    engine.add([1, 2, 3], greedy(max_tokens=20), "g", Restriction(grammar))
    engine.add([4, 5], greedy(max_tokens=20), "plain")
    results: Results = {}
    for _ in range(2):
        try:
            run_all(engine, results)
        except (KeyError, KeyboardInterrupt, OSError):
            continue
    assert results["g", 0].error is not None
    assert not runner.launches
    assert_idle(engine)
    engine.add([1, 2, 3], greedy(max_tokens=20), "again", Restriction(Counting(9)))
    assert counted(run_all(engine)["again", 0].token_ids)
    engine.close()


def test_only_launches_with_a_grammar_run_one_step() -> None:
    runner = toy.ToyRunner(num_blocks=64)
    steps: list[tuple[bool, int]] = []
    run = runner.run

    def noted(step: Any, count: int = 1, started: Any = None) -> None:
        if len(step.logit_row) == step.num_rows:
            steps.append((step.sampled, count))
        run(step, count, started)

    runner.run = noted  # type: ignore[assignment,method-assign]
    engine = make_engine(runner, overlap=False, steps_per_launch=4)
    engine.add([1, 2], greedy(max_tokens=30), "plain")
    engine.add([3, 4], greedy(max_tokens=20), "g", Restriction(Counting(6)))
    run_all(engine)
    assert {count for sampled, count in steps if sampled} == {1}
    assert 4 in {count for sampled, count in steps if not sampled}
    steps.clear()
    allowed = mask_of(np.arange(8, dtype=np.int32), VOCABULARY)
    engine.add([3, 4], greedy(max_tokens=20), "fixed", Restriction(allowed=allowed))
    tokens = run_all(engine)["fixed", 0].token_ids
    assert set(tokens) <= set(range(8))
    assert (True, 4) in steps, "a mask that does not change needs no host between two steps"


@pytest.mark.parametrize("queues", [False, True])
def test_requests_wait_for_a_program_that_is_being_compiled_and_others_pass_them(
    overlap: bool, queues: bool
) -> None:
    runner = toy.ToyRunner(queues=queues, sampled_coming=True)
    engine = make_engine(runner, overlap=overlap, steps_per_launch=2)
    allowed = Restriction(allowed=mask_of(np.arange(8, dtype=np.int32), VOCABULARY))
    engine.add([1, 2], greedy(max_tokens=6), "before")
    for name in ("held", "dropped"):
        engine.add([3, 4], greedy(max_tokens=6), name, allowed)
    engine.add([5, 6], greedy(max_tokens=6), "behind")
    results: Results = {}
    while len([r for r in results.values() if r.finish_reason]) < 2:
        gather(results, engine.step())
    assert set(results) == {("before", 0), ("behind", 0)}
    assert engine.step() == []
    assert engine.has_work
    assert (engine.num_running, engine.num_waiting) == (0, 2)
    engine.abort("dropped")
    gather(results, engine.step())
    assert results["dropped", 0].finish_reason == "abort"
    assert not any(step.sampled for step in runner.steps_seen)
    engine.add([7, 8], greedy(max_tokens=6), "later")
    gather(results, engine.step())
    runner.sampled_coming = False
    run_all(engine, results)
    assert len(results["later", 0].token_ids) == len(results["held", 0].token_ids) == 6
    assert set(results["held", 0].token_ids) <= set(range(8))
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("seed", range(4))
def test_preemption_and_a_short_cache_change_no_output(overlap: bool, seed: int) -> None:
    def outputs(num_blocks: int) -> tuple[dict[Any, Any], int]:
        runner = toy.ToyRunner(num_blocks=num_blocks, block_size=2)
        engine = make_engine(runner, overlap=overlap, steps_per_launch=3)
        for i in range(4):
            params = greedy(max_tokens=18, temperature=0.7, seed=seed + i)
            restriction = Restriction(Counting(5 + 3 * i)) if i % 2 else None
            engine.add([i + 1] * (2 + i), params, i, restriction)
        results = {key: r.outcome() for key, r in run_all(engine).items()}
        assert_idle(engine)
        engine.close()
        return results, engine.planner.preemptions

    wide, none = outputs(64)
    narrow, some = outputs(15)
    assert none == 0 < some
    assert narrow == wide


def test_a_fault_ends_running_grammars_and_later_ones_run(overlap: bool) -> None:
    runner = toy.ToyRunner(faults=(3,), max_num_seqs=2)
    engine = make_engine(runner, overlap=overlap)
    for i in range(5):
        engine.add([1 + i, 2], greedy(max_tokens=20), i, Restriction(Counting(8)))
    results = run_all(engine)
    reasons = [results[i, 0].finish_reason for i in range(5)]
    assert reasons[:2] == ["error", "error"]
    assert reasons[2:] == ["stop"] * 3
    assert all(counted(results[i, 0].token_ids) for i in range(5))
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize("stuck_at", [0, 1, 5])
def test_a_grammar_that_is_stuck_fails_its_sequence_alone(overlap: bool, stuck_at: int) -> None:
    engine = make_engine(overlap=overlap)
    engine.add([1, 2], greedy(max_tokens=20), "stuck", Restriction(Counting(8, stuck_at)))
    engine.add([3, 2], greedy(max_tokens=20), "good", Restriction(Counting(8)))
    results = run_all(engine)
    stuck, good = results["stuck", 0], results["good", 0]
    assert (stuck.finish_reason, stuck.error) == ("error", "the grammar cannot go on: it is stuck")
    assert len(stuck.token_ids) == stuck_at
    assert (good.finish_reason, len(good.token_ids)) == ("stop", 8)
    assert_idle(engine)
    engine.close()


def test_a_mask_that_is_empty_in_the_end_fails_its_sequence() -> None:
    engine = make_engine()
    allowed = mask_of(np.array([1, 5, 9], dtype=np.int32), VOCABULARY)
    engine.add([1, 2], greedy(max_tokens=20), "g", Restriction(Counting(8), allowed))
    result = run_all(engine)["g", 0]
    assert result.error is not None
    assert "leave no token" in result.error
    assert_idle(engine)


@pytest.mark.parametrize("queues", [False, True])
@pytest.mark.parametrize("beside", [False, True])
def test_the_prompt_of_a_sequence_that_fails_at_once_is_in_the_prefix_cache(
    overlap: bool, queues: bool, beside: bool
) -> None:
    """Its blocks were promised to others when it was planned (the toy runner looks at them)."""
    nothing = Restriction(allowed=np.zeros_like(mask_of(np.array([0], dtype=np.int32), 40)))
    prompt = list(range(13))
    engine = make_engine(toy.ToyRunner(queues=queues), overlap=overlap)
    results: Results = {}
    if beside:
        engine.add([2, 1], greedy(max_tokens=20), "beside", Restriction(Counting(12)))
        for _ in range(3):
            gather(results, engine.step())
    words = replace(nothing, bad_words=((1, 2),))
    engine.add(prompt, greedy(max_tokens=4), "fails", words)
    while ("fails", 0) not in results:
        gather(results, engine.step())
    engine.add(prompt, greedy(max_tokens=4, ignore_eos=True), "plain")
    run_all(engine, results)
    assert "leave no token" in (results["fails", 0].error or "")
    assert results["plain", 0].finish_reason == "length"
    assert engine.blocks.counters.hits > 0
    assert_idle(engine)
    engine.close()


def test_an_abort_in_the_middle_frees_the_sequence() -> None:
    engine = make_engine(overlap=True)
    engine.add([1, 2], greedy(max_tokens=20), "g", Restriction(Counting(15)))
    for _ in range(4):
        engine.step()
    engine.abort("g")
    engine.add([3, 2], greedy(max_tokens=20), "next", Restriction(Counting(6)))
    results = run_all(engine)
    assert counted(results["next", 0].token_ids)
    assert results["next", 0].finish_reason == "stop"
    assert_idle(engine)
    engine.close()


def test_max_tokens_and_stop_tokens_count_under_a_grammar() -> None:
    engine = make_engine()
    engine.add([1, 2], greedy(max_tokens=5), "short", Restriction(Counting(8)))
    stop = [EOS[0], 9, 13, 17, 21, 25, 29, 33, 37, 1]  # every token that may come second
    engine.add([1, 2], greedy(max_tokens=9, stop_token_ids=stop), "stop", Restriction(Counting(8)))
    results = run_all(engine)
    assert (results["short", 0].finish_reason, len(results["short", 0].token_ids)) == ("length", 5)
    assert (results["stop", 0].finish_reason, len(results["stop", 0].token_ids)) == ("stop", 2)
    assert results["stop", 0].stop_reason in stop


def test_a_bias_is_written_for_its_sequence_only() -> None:
    engine = make_engine(toy.ToyRunner(max_num_seqs=1))
    engine.add([1, 2], greedy(max_tokens=6), 0, Restriction(bias={7: 100.0}))
    engine.add([1, 2], greedy(max_tokens=6), 1)
    engine.add([1, 2], greedy(max_tokens=6), 2, Restriction(bias={8: 100.0}))
    results = run_all(engine)
    assert results[0, 0].token_ids == [7] * 6
    assert results[2, 0].token_ids == [8] * 6
    alone = make_engine()
    alone.add([1, 2], greedy(max_tokens=6), 1)
    assert results[1, 0].token_ids == run_all(alone)[1, 0].token_ids


def test_a_word_of_several_tokens_does_not_occur() -> None:
    plain = make_engine()
    plain.add([1, 2], greedy(max_tokens=10), 0)
    tokens = run_all(plain)[0, 0].token_ids
    for length in (2, 3):
        word = tuple(tokens[4 : 4 + length])
        engine = make_engine()
        engine.add([1, 2], greedy(max_tokens=10), 0, Restriction(bad_words=(word,)))
        found = run_all(engine)[0, 0].token_ids
        windows = [tuple(found[i : i + length]) for i in range(len(found))]
        assert word not in windows
        assert found[: 3 + length] == tokens[: 3 + length]


def test_a_follower_goes_back_when_tokens_are_lost() -> None:
    grammar = Counting(8)
    follower = Follower(Restriction(grammar))
    output = np.array([0, 1, 2, 3, 4], dtype=np.int32)
    assert follower.follow(output) == ""
    assert follower.follow(output[:2]) == ""
    assert grammar.matchers[0].tokens == [0, 1]
    other = np.array([0, 1, 6], dtype=np.int32)
    assert follower.follow(other) == ""
    assert grammar.matchers[0].tokens == [0, 1, 6]


def test_a_follower_knows_that_the_first_tokens_may_not_stop() -> None:
    only = mask_of(np.array([7], dtype=np.int32), 64)
    follower = Follower(Restriction(allowed=only, bad_words=((3, 4),)), (7,), min_tokens=2)
    mask = np.zeros(2, dtype=np.int32)
    cause = "allowed_token_ids, bad_words and min_tokens leave no token to choose"
    assert cause in follower.fill(np.array([1], dtype=np.int32), mask)
    assert follower.fill(np.array([1, 2], dtype=np.int32), mask) == ""
    assert mask.tolist() == only.tolist()


@pytest.mark.parametrize("vocabulary", [1, 31, 32, 33, 100])
def test_bits_of_masks(vocabulary: int) -> None:
    tokens = np.arange(0, vocabulary, 3, dtype=np.int32)
    mask = mask_of(tokens, vocabulary)
    assert mask.dtype == np.int32

    def bits() -> list[int]:
        return [t for t in range(len(mask) * 32) if mask[t // 32] >> (t % 32) & 1]

    assert bits() == tokens.tolist()
    clear(mask, int(tokens[-1]))
    assert bits() == tokens[:-1].tolist()
