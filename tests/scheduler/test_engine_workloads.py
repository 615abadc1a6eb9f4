"""The engine gives every request of a random workload what it would get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import Result, Results, alone, assert_idle, gather, make_engine, run_all
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.logprobs import log_softmax
from megavm.scheduler.engine.restriction import Restriction, mask_of
from megavm.scheduler.engine.sequence import Request

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


# Every choice but the first has a mask that depends on the token before it.
FROM_13 = Restriction(bad_words=tuple((a, b) for a in range(40) for b in range(13)))

# And the first choice has none that is left.
NOTHING = replace(FROM_13, allowed=mask_of(np.array([], dtype=np.int32), 40))


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
                st.sampled_from([None, None, None, FROM_13, FROM_13, NOTHING]),
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
            "queues": draw(st.booleans()),
            "least_rows": draw(st.sampled_from([0, 0, 2, 3])),
            "part_rows": draw(st.sampled_from([0, 0, 1, 2, 5])),
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
            prompt, params, _, leave, restriction = requests[number]
            try:
                made[number] = engine.add(prompt, params, number, restriction)
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
    for number, (prompt, params, _, _, restriction) in requests.items():
        for index in range(params.n):
            if number in refused:
                assert (number, index) not in results
                continue
            result = results[number, index]
            if restriction is None:
                expected = alone(prompt, params, index, runner)
            else:
                expected = restricted_alone(prompt, params, restriction, workload)[index]
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


def restricted_alone(
    prompt: list[int], params: SamplingParams, restriction: Restriction, workload: dict[str, Any]
) -> dict[int, tuple[Any, ...]]:
    """By sequence, what an engine answers that has no other request and plans no step ahead."""
    sizes = {**workload["runner"], "faults": (), "queues": False}
    engine = make_engine(toy.ToyRunner(**sizes), overlap=False)
    engine.add(prompt, params, 0, restriction)
    results = run_all(engine)
    for index in range(params.n):
        tokens = results[0, index].token_ids
        assert min(tokens[1:], default=13) >= 13
    return {index: results[0, index].outcome() for index in range(params.n)}


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
