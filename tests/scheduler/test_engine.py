"""The engine gives every request what it would get alone, and frees everything."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.logprobs import log_softmax, token_logprobs
from megavm.scheduler.engine.sequence import Delta, Request, derived_seed
from megavm.scheduler.engine.text import TextStream
from megavm.vm.machine import MachineFault

EOS = (5, 11)


@dataclass
class Result:
    """What came out for one sequence."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.token_ids += delta.token_ids
        self.text += delta.text
        self.logprobs += delta.logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason, self.error = delta.stop_reason, delta.error

    def outcome(self) -> tuple[Any, ...]:
        return (self.token_ids, self.text, self.finish_reason, self.stop_reason)


Results = dict[tuple[Hashable, int], Result]


def make_engine(runner: Any = None, **options: Any) -> Engine:
    return Engine(
        runner or toy.ToyRunner(), eos_token_ids=EOS, new_decoder=toy.ToyDecoder, **options
    )


def gather(results: Results, deltas: list[Delta]) -> None:
    for delta in deltas:
        results.setdefault((delta.request.id, delta.index), Result()).add(delta)


def run_all(engine: Engine, results: Results | None = None) -> Results:
    results = {} if results is None else results
    for _ in range(5000):
        if not engine.has_work:
            return results
        gather(results, engine.step())
    raise AssertionError("the engine does not come to an end")


def assert_idle(engine: Engine) -> None:
    """Nothing is held any more."""
    assert not engine.has_work
    assert engine.blocks.num_held == 0
    assert engine.num_running == engine.num_waiting == 0
    assert sorted(engine.planner._free_slots) == list(range(engine.runner.max_num_seqs))
    assert not engine.planner._computing
    assert not engine._requests
    engine.blocks.check()


def alone(
    prompt: list[int], params: SamplingParams, index: int = 0, runner: Any = None
) -> tuple[Any, ...]:
    """What the sequence should be, worked out token by token without an engine."""
    sizes = runner or toy.ToyRunner()
    stops = [] if params.ignore_eos else list(EOS)
    stops += params.stop_token_ids or ()
    room = sizes.max_model_len - len(prompt)
    longest = room if params.max_tokens is None else min(params.max_tokens, room)
    real = np.ones(REAL_COLUMNS, dtype=np.float32)
    real[Real.TEMPERATURE] = params.temperature
    integer = np.zeros(INTEGER_COLUMNS, dtype=np.int32)
    seed = derived_seed(params.seed or 0, index)
    words = np.array([seed & 0xFFFFFFFF, seed >> 32], dtype=np.uint32).view(np.int32)
    integer[Integer.SEED_LOW : Integer.SEED_HIGH + 1] = words
    integer[Integer.MIN_LENGTH] = len(prompt) + min(params.min_tokens, longest)
    integer[Integer.NUM_STOP] = len(stops)
    integer[Integer.STOP : Integer.STOP + len(stops)] = stops
    output: list[int] = []
    decoder = toy.ToyDecoder()
    text, searched = "", 0
    while True:
        tokens = prompt + output
        logits = toy.toy_logits(tokens, sizes.vocab_size)
        token = toy.toy_token(tokens, logits, real, integer)
        output.append(token)
        stopped = token in stops and len(output) > min(params.min_tokens, longest)
        if not stopped or params.include_stop_str_in_output:
            text += decoder.step(token)
        if len(output) <= params.min_tokens:
            searched = len(text)
        found = [(text.find(s, searched), i) for i, s in enumerate(params.stop_strings)]
        begin, which = min((f for f in found if f[0] >= 0), default=(-1, -1))
        if begin >= 0:
            stop = params.stop_strings[which]
            end = begin + (len(stop) if params.include_stop_str_in_output else 0)
            return output, text[:end], "stop", stop
        reason: tuple[str, int | None] | None = None
        if stopped:
            own = params.ignore_eos or token not in EOS
            reason = ("stop", token if own else None)
        elif len(output) == longest:
            reason = ("length", None)
        elif len(prompt) + len(output) > sizes.num_blocks * sizes.block_size:
            reason = ("error", None)
        if reason is not None:
            text += decoder.flush()
            found = [(text.find(s, searched), i) for i, s in enumerate(params.stop_strings)]
            begin, which = min((f for f in found if f[0] >= 0), default=(-1, -1))
            if begin >= 0:
                stop = params.stop_strings[which]
                text = text[: begin + (len(stop) if params.include_stop_str_in_output else 0)]
                if reason[0] == "length":
                    return output, text, "stop", stop
            return output, text, *reason


# Random workloads.

prompts = st.one_of(
    st.lists(st.integers(0, 39), min_size=1, max_size=12),
    # Prompts that begin alike.
    st.builds(
        lambda n, tail: ([1, 2, 3, 4] * 8)[:n] + tail,
        st.integers(1, 30),
        st.lists(st.integers(0, 39), max_size=4),
    ),
)
params_strategy = st.builds(
    SamplingParams,
    n=st.sampled_from([1, 1, 1, 2, 3]),
    temperature=st.sampled_from([0.0, 0.0, 1.0]),
    seed=st.integers(0, 5),
    max_tokens=st.one_of(st.none(), st.integers(1, 20)),
    min_tokens=st.just(0),
    ignore_eos=st.booleans(),
    stop=st.sampled_from([None, None, "dd", ["abc", "bca"], ["a", "ab"], "bdbd"]),
    stop_token_ids=st.sampled_from([None, None, [3], [30, 31, 32]]),
    include_stop_str_in_output=st.booleans(),
    logprobs=st.sampled_from([None, None, None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, None, 0, 2]),
)


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    seqs = draw(st.integers(1, 5))
    requests = draw(
        st.lists(
            st.tuples(
                prompts,
                params_strategy,
                st.integers(0, 12),  # arrives before this step
                st.one_of(st.none(), st.none(), st.integers(0, 15)),  # aborted so many steps later
            ),
            min_size=1,
            max_size=8,
        )
    )
    return {
        "runner": {
            "max_num_seqs": seqs,
            "max_model_len": 48,
            "max_num_batched_tokens": seqs + draw(st.sampled_from([0, 1, 3, 20, 60])),
            "num_blocks": draw(st.integers(34, 120)) // block_size,
            "block_size": block_size,
            "max_logit_rows": seqs + draw(st.sampled_from([0, 1, 10])),
            "faults": draw(st.sampled_from([(), (), (), (3,), (0, 1), (5, 20)])),
        },
        "engine": {
            "prefix_caching": draw(st.booleans()),
            "overlap": draw(st.booleans()),
            "steps_per_launch": draw(st.sampled_from([1, 1, 3])),
        },
        "requests": requests,
    }


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(workload=workloads())
def test_random_workloads_give_each_request_what_it_gets_alone(workload: dict[str, Any]) -> None:
    runner = toy.ToyRunner(**workload["runner"])
    engine = make_engine(runner, **workload["engine"])
    requests = dict(enumerate(workload["requests"]))
    results: Results = {}
    todo = sorted(requests, key=lambda i: requests[i][2])
    aborts: dict[int, list[int]] = {}
    refused, aborted = set(), set()
    made: dict[int, Request] = {}
    now = 0
    while todo or engine.has_work:
        while todo and requests[todo[0]][2] <= now:
            number = todo.pop(0)
            prompt, params, _, leave = requests[number]
            try:
                made[number] = engine.add(prompt, params, number)
            except ValueError:
                assert len(prompt) > runner.num_blocks * runner.block_size or len(prompt) >= 48
                refused.add(number)
                continue
            if leave is not None:
                aborts.setdefault(now + leave, []).append(number)
        for number in aborts.pop(now, ()):
            aborted.add(number)
            engine.abort(number)
        gather(results, engine.step())
        engine.blocks.check()
        now += 1
        assert now < 3000
    for number, (prompt, params, _, _) in requests.items():
        for index in range(params.n):
            if number in refused:
                assert (number, index) not in results
                continue
            result = results[number, index]
            expected = alone(prompt, params, index, runner)
            ended = number in aborted and result.finish_reason == "abort"
            if ended or result.error == "the machine stopped: worker 0 gave up":
                assert runner.faults or ended
                assert result.token_ids == expected[0][: len(result.token_ids)]
                continue
            assert result.outcome() == expected
            assert (result.error is None) == (result.finish_reason != "error")
            check_logprobs(result, prompt, params, runner)
            check_prompt_logprobs(made[number], runner)
    engine.close()
    assert_idle(engine)


def check_logprobs(result: Result, prompt: list[int], params: SamplingParams, runner: Any) -> None:
    if params.logprobs is None:
        assert result.logprobs == []
        return
    assert len(result.logprobs) == len(result.token_ids)
    tokens = list(prompt)
    for token, entry in zip(result.token_ids, result.logprobs, strict=True):
        values = log_softmax(toy.toy_logits(tokens, runner.vocab_size))
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(values[token])
        best = np.argsort(-values)[: params.logprobs]
        assert [t for t, _ in entry.top] == best.tolist()
        assert entry.rank == 1 + int((values > values[token]).sum())
        tokens.append(token)


def check_prompt_logprobs(request: Request, runner: Any) -> None:
    count = request.params.prompt_logprobs
    if count is None:
        assert request.prompt_logprobs is None
        return
    assert request.prompt_logprobs is not None
    first, *others = request.prompt_logprobs
    assert first is None
    tokens = request.prompt.tolist()
    for i, entry in enumerate(others, 1):
        values = log_softmax(toy.toy_logits(tokens[:i], runner.vocab_size))
        assert entry is not None
        assert entry.token_id == tokens[i]
        assert entry.logprob == pytest.approx(values[tokens[i]])
        assert [t for t, _ in entry.top] == np.argsort(-values)[:count].tolist()


# Single facts.


@pytest.fixture(params=[True, False], ids=["overlap", "in_turn"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **values})


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
    assert sum(s.num_rows for s in runner.steps_seen) == 3 + length - 1


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


def test_a_sequence_that_outgrows_the_whole_cache_fails_alone(overlap: bool) -> None:
    runner = toy.ToyRunner(num_blocks=6, block_size=4, max_num_seqs=3)
    engine = make_engine(runner, overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=40))
    engine.add([4, 5, 6], greedy(max_tokens=12))
    engine.add([7, 8, 9], greedy(max_tokens=12))
    results = run_all(engine)
    assert results[0, 0].finish_reason == "error"
    assert "the KV cache is full: 6 blocks of 4 tokens" in (results[0, 0].error or "")
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


def test_a_conversation_finds_its_own_answer_in_the_cache() -> None:
    engine = make_engine()
    prompt = [1, 2, 3, 4, 5]
    engine.add(prompt, greedy(max_tokens=12))
    answer = run_all(engine)[0, 0].token_ids
    request = engine.add([*prompt, *answer, 7, 7, 7], greedy())
    run_all(engine)
    assert request.cached_tokens == 16


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


@pytest.mark.parametrize("fault", range(6))
@pytest.mark.parametrize("steps", [1, 3])
def test_a_fault_ends_what_runs_and_nothing_else(fault: int, steps: int, overlap: bool) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, faults=(fault,), max_num_batched_tokens=8)
    engine = make_engine(runner, overlap=overlap, steps_per_launch=steps)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 2, 3, 4, 5, 6, 7]]
    for prompt in prompts:
        engine.add(prompt, greedy(max_tokens=12))
    results = run_all(engine)
    failed = [i for i in range(4) if results[i, 0].finish_reason == "error"]
    assert failed == [0, 1]
    for i in range(4):
        if i in failed:
            assert results[i, 0].error == "the machine stopped: worker 0 gave up"
        else:
            assert results[i, 0].outcome() == alone(prompts[i], greedy(max_tokens=12), 0, runner)
    assert engine.counters.faults == 1
    engine.add([1, 2, 3], greedy(max_tokens=12))
    assert run_all(engine)[4, 0].outcome() == alone([1, 2, 3], greedy(max_tokens=12), 0, runner)
    assert_idle(engine)


def test_a_request_that_has_not_run_when_a_fault_comes_waits_again() -> None:
    runner = toy.ToyRunner(max_num_batched_tokens=8, faults=(0,))
    engine = make_engine(runner)
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9], [7, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    requests = [engine.add(prompt, greedy(max_tokens=8), i) for i, prompt in enumerate(prompts)]
    first = engine.plan()
    second = engine.plan()  # before the first has run
    assert first is not None
    assert second is not None
    assert [s.request.id for s in second.admitted] == [1, 2, 3]
    engine.execute(first)
    engine.execute(second)
    results: Results = {}
    gather(results, engine.collect(first))
    assert list(results) == [(0, 0)]
    assert results[0, 0].error == "the machine stopped: worker 0 gave up"
    assert [s.request.id for s in engine.planner.waiting] == [1, 2, 3]
    assert requests[1].times.admitted == 0
    gather(results, engine.collect(second))
    run_all(engine, results)
    for i in (1, 2, 3):
        assert results[i, 0].outcome() == alone(prompts[i], greedy(max_tokens=8), 0, runner)
    assert_idle(engine)


def test_a_lost_machine_ends_what_runs_and_what_waits(overlap: bool) -> None:
    engine = make_engine(toy.ToyRunner(max_num_seqs=2, lost=3), overlap=overlap)
    for i in range(5):
        engine.add([1, 2, i], greedy(max_tokens=12, n=2))
    results = run_all(engine)
    assert len(results) == 10
    assert {r.error for r in results.values()} == {"the machine stopped: the context is lost"}
    assert engine.lost
    assert engine.counters.faults == 1
    assert_idle(engine)


@pytest.mark.parametrize("run", range(4))
def test_an_interrupt_ends_what_runs_and_is_raised(run: int) -> None:
    runner = toy.ToyRunner(max_num_seqs=2, interrupts=(run,))
    engine = make_engine(runner, overlap=False)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    for prompt in prompts:
        engine.add(prompt, greedy(max_tokens=12))
    results: Results = {}
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, results)
    run_all(engine, results)
    for i in range(2):
        assert results[i, 0].error == "the machine stopped: the run was interrupted"
    assert results[2, 0].outcome() == alone(prompts[2], greedy(max_tokens=12), 0, runner)
    assert_idle(engine)


@pytest.mark.parametrize("method", ["execute", "collect"])
def test_an_interrupt_between_planning_and_running_leaves_nothing_that_was_not_computed(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=False)
    prompt = list(range(1, 14))

    def interrupt(plan: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, method, interrupt)
        engine.add(prompt, greedy())
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    results = run_all(engine)
    assert results[0, 0].error == "the machine stopped: the run was interrupted"
    engine.add(prompt, greedy())
    assert run_all(engine)[1, 0].outcome() == alone(prompt, greedy(), 0, runner)
    assert_idle(engine)


def test_a_bug_in_the_runner_is_raised_after_cleaning_up(overlap: bool) -> None:
    engine = make_engine(toy.ToyRunner(bugs=(2,)), overlap=overlap)
    engine.add([1, 2, 3], greedy())
    results: Results = {}
    with pytest.raises(KeyError, match="a bug in the runner"):
        run_all(engine, results=results)
    run_all(engine, results=results)
    assert results[0, 0].finish_reason == "error"
    assert results[0, 0].error == "the machine stopped: KeyError: 'a bug in the runner'"
    assert_idle(engine)


def test_planning_ahead_of_a_running_step_is_the_same_as_waiting_for_it() -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner)
    engine.add([1, 2, 3], greedy(max_tokens=6))
    results: Results = {}
    plan = engine.plan()
    while plan is not None:
        following = engine.plan()  # before the first has run
        engine.execute(plan)
        gather(results, engine.collect(plan))
        plan = following
    assert results[0, 0].outcome() == alone([1, 2, 3], greedy(max_tokens=6))


def test_a_third_plan_without_a_collect_is_refused() -> None:
    engine = make_engine()
    engine.add([1, 2, 3], greedy())
    engine.plan()
    engine.plan()
    with pytest.raises(RuntimeError, match="two plans are not collected yet"):
        engine.plan()


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


def test_a_fault_during_logits_is_raised_and_leaves_a_working_engine() -> None:
    runner = toy.ToyRunner(faults=(0,))
    engine = make_engine(runner)
    with pytest.raises(MachineFault, match="worker 0 gave up"):
        engine.logits([1, 2, 3])
    assert_idle(engine)
    np.testing.assert_array_equal(engine.logits([1])[0], toy.toy_logits([1], 40))


def test_several_steps_per_launch_bring_several_tokens_at_a_time() -> None:
    runner = toy.ToyRunner()
    engine = make_engine(runner, overlap=False, steps_per_launch=4)
    engine.add([1, 2, 3], greedy(max_tokens=10))
    counts = []
    while engine.has_work:
        counts += [len(d.token_ids) for d in engine.step()]
    assert counts == [1, 4, 4, 1]


def test_min_tokens_holds_back_stop_tokens_and_stop_strings(overlap: bool) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=9, max_tokens=20, stop=["a", "b", "c", "d"])
    engine = make_engine(overlap=overlap)
    engine.add([1, 2, 3], params)
    result = run_all(engine)[0, 0]
    assert result.outcome() == alone([1, 2, 3], params)
    assert len(result.token_ids) >= 10


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([1, 40], r"token id 40 at position 1 is outside the vocabulary \[0, 40\)"),
        ([-1], "token id -1 at position 0"),
        ([1.5], "not a list of token ids"),
        ([[1], [2]], "not a list of token ids"),
        ([[1], [2, 3]], "not a list of token ids"),
        ([1 << 70], "not a list of token ids"),
        (["a"], "not a list of token ids"),
        ([1] * 64, "the prompt has 64 tokens; the context of 64 must hold it"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_refused(prompt: list[Any], message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, SamplingParams())
    assert_idle(engine)


def test_a_prompt_larger_than_the_cache_is_refused() -> None:
    engine = make_engine(toy.ToyRunner(num_blocks=5, block_size=4))
    with pytest.raises(ValueError, match=r"has 21 tokens; the KV cache has room for 20 \(5 blocks"):
        engine.add([1] * 21, SamplingParams())


def test_too_many_stop_tokens_are_refused() -> None:
    engine = make_engine()
    ids = list(range(6, 37))  # 11 is an end of sequence as well
    with pytest.raises(ValueError, match="are 33 tokens, at most 32"):
        engine.add([1], SamplingParams(stop_token_ids=[*ids, 37]))


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    engine = Engine(toy.ToyRunner())
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.add([1], SamplingParams(stop="a"))


def test_an_id_is_used_once_at_a_time() -> None:
    engine = make_engine()
    engine.add([1], greedy(), "x")
    with pytest.raises(ValueError, match="a request with the id 'x' is being worked on already"):
        engine.add([1], greedy(), "x")
    run_all(engine)
    engine.add([1], greedy(), "x")


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens is 3, less than max_num_seqs, 4"),
        ({"max_logit_rows": 2}, "max_logit_rows is 2, less than max_num_seqs, 4"),
    ],
)
def test_a_runner_too_small_for_its_sequences_is_refused(
    sizes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(toy.ToyRunner(**sizes))


def test_closing_frees_everything(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    engine.add([1, 2, 3], greedy(max_tokens=40))
    engine.step()
    engine.close()
    assert engine.blocks.num_held == 0


# Text and log-probabilities.


@given(
    tokens=st.lists(st.integers(0, 39), max_size=30),
    stops=st.lists(st.text("abcd", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
@example(tokens=[2, 2, 3, 1], stops=["ccd"], include=False)
def test_streamed_text_is_the_text_up_to_the_first_stop_string(
    tokens: list[int], stops: list[str], include: bool
) -> None:
    whole = "".join(map(toy.piece, tokens))
    stream = TextStream(toy.ToyDecoder(), stops, include)
    text, stop = "", None
    for token in tokens:
        piece, stop = stream.push(token)
        text += piece
        assert not any(s in text for s in stops) or stop is not None
        if stop is not None:
            break
    else:
        rest, stop = stream.finish()
        text += rest
    if stop is None:
        assert text == whole
        assert not any(s in whole for s in stops)
    else:
        begin = whole.index(stop)
        assert text == whole[: begin + (len(stop) if include else 0)]


def test_logprobs_of_impossible_tokens_are_minus_infinity() -> None:
    logits = np.array([0.0, -np.inf, 1.0], dtype=np.float32)
    entry = token_logprobs(logits, 1, 3)
    assert entry.logprob == -np.inf
    assert entry.rank == 3
    assert [t for t, _ in entry.top] == [2, 0, 1]


def test_equal_logits_rank_the_lowest_token_first() -> None:
    entry = token_logprobs(np.zeros(6, dtype=np.float32), 4, 2)
    assert entry.rank == 1
    assert [t for t, _ in entry.top] == [0, 1]


def test_derived_seeds_differ_and_the_first_is_the_seed_itself() -> None:
    assert derived_seed(42, 0) == 42
    assert len({derived_seed(42, i) for i in range(1000)}) == 1000
