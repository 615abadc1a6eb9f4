"""After a fault of the machine an LLM goes on: what ran fails, and everything else is right."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sabotage import Sabotage, impatient_machines, run_name

from megavm import LLM, SamplingParams
from megavm.instructions.sample import Integer, Real
from megavm.outputs import GenerationError, RequestOutput
from megavm.profiler.recorder import Recorder
from megavm.scheduler.engine.step import Step
from megavm.vm.machine import MachineFault, MachineLost

TEXTS = [
    "Once upon a time",
    "The little fox",
    "One fine day, a girl named Anna went to the market. She wanted to buy a red apple for her",
    "A",
    "There was a big storm, and the old bear was afraid.",
]
DIAGNOSIS = r"the machine stopped: .*instruction \d+ waits for "
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16}
MACHINES: dict[str, dict[str, Any]] = {
    "cpu": {"machine": "cpu", "workers": 2, "overlap": False},
    "cpu-overlap": {"machine": "cpu", "workers": 2, "overlap": True, "steps_per_launch": 3},
    "cuda": {"machine": "cuda"},
}


@pytest.fixture(scope="module", params=MACHINES)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of an LLM on each machine."""
    if request.param == "cuda":
        request.getfixturevalue("real_gpu")
    return {**OPTIONS, **MACHINES[request.param]}


@pytest.fixture(scope="module")
def right(options: dict[str, Any]) -> Iterator[Callable[[list[str]], list[list[int]]]]:
    """The tokens of an LLM whose machine never faulted."""
    with LLM("stories", **options) as healthy:
        yield lambda texts: [ids(o) for o in healthy.generate(texts, greedy())]


@pytest.fixture
def llm(options: dict[str, Any]) -> Iterator[LLM]:
    with impatient_machines(), LLM("stories", **options) as model:
        yield model
        while model.engine.has_work:  # a launch of sequences that have ended
            model.engine.step()
        assert model.engine.blocks.num_held == 0
        model.engine.blocks.check()


@pytest.fixture
def sabotage(llm: LLM) -> Sabotage:
    return Sabotage(llm.runner)


Right = Callable[[list[str]], list[list[int]]]


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **values})


def ids(output: RequestOutput) -> list[int]:
    assert output.error is None
    return output.outputs[0].token_ids


def assert_failed(output: RequestOutput) -> None:
    assert output.error is not None
    assert output.outputs[0].finish_reason == "error"
    assert re.match(DIAGNOSIS, output.error)


@pytest.mark.parametrize("run", [0, 1, 4])
def test_requests_in_flight_fail_and_those_that_wait_run(
    llm: LLM, sabotage: Sabotage, right: Right, run: int
) -> None:
    sabotage.fail(run)
    outputs = llm.generate(TEXTS, greedy())
    # Two run at a time; what the launch behind the broken one has admitted has not run.
    failed = [output for output in outputs if output.error is not None]
    assert 1 <= len(failed) <= 2
    for output, expected in zip(outputs, right(TEXTS), strict=True):
        if output.error is None:
            assert ids(output) == expected
        else:
            assert_failed(output)
    assert llm.engine.counters.faults == 1
    assert [ids(o) for o in llm.generate(TEXTS, greedy())] == right(TEXTS)
    assert llm.engine.counters.faults == 1


def test_faults_may_come_again_and_again(llm: LLM, sabotage: Sabotage, right: Right) -> None:
    for round in range(6):
        sabotage.fail(round % 3)
        failed = llm.generate(TEXTS[:2], greedy())
        assert any(output.error is not None for output in failed)
        assert [ids(o) for o in llm.generate(TEXTS[1:3], greedy())] == right(TEXTS[1:3])
    # Without a good run between them. Two requests run at a time. On a GPU a launch behind a broken
    # one has a number too.
    sabotage.fail(*range(10))
    for output in llm.generate(TEXTS[:1] * 10, greedy()):
        assert_failed(output)
    sabotage.at.clear()
    assert [ids(o) for o in llm.generate(TEXTS, greedy())] == right(TEXTS)


@pytest.mark.parametrize("run", [0, 1, 3])
def test_the_prefix_cache_has_nothing_of_a_broken_run(
    llm: LLM, sabotage: Sabotage, right: Right, run: int
) -> None:
    text = " ".join(TEXTS * 3)  # of several steps and many KV blocks
    expected = right([text])
    llm.generate(TEXTS[0], greedy())
    sabotage.fail(run)
    assert_failed(llm.generate(text, greedy())[0])
    assert llm.engine.blocks.num_cached == 0
    again = llm.generate(text, greedy())[0]
    assert ids(again) == expected[0]
    assert again.timings["cached_prompt_tokens"] == 0
    once_more = llm.generate(text, greedy())[0]
    assert ids(once_more) == expected[0]
    assert once_more.timings["cached_prompt_tokens"] > 0


def test_a_stream_ends_with_the_diagnosis_and_the_next_is_right(
    llm: LLM, sabotage: Sabotage, right: Right
) -> None:
    expected = right(TEXTS[:1])[0]
    sabotage.fail(3)
    seen: list[int | None] = []
    with pytest.raises(GenerationError, match=DIAGNOSIS):
        seen.extend(chunk.token_id for chunk in llm.stream(TEXTS[0], greedy()))
    assert seen == [*expected[: len(seen) - 1], None]
    assert 1 < len(seen) < len(expected)
    assert [c.token_id for c in llm.stream(TEXTS[0], greedy())] == expected


def test_requests_of_other_threads_fail_or_are_right(
    llm: LLM, sabotage: Sabotage, right: Right
) -> None:
    expected = right(TEXTS)
    outputs: list[list[RequestOutput]] = [[] for _ in TEXTS]

    def work(i: int) -> None:
        for _ in range(3):
            outputs[i] += llm.generate(TEXTS[i], greedy())

    sabotage.fail(3, 20)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    everything = [output for some in outputs for output in some]
    assert 2 <= sum(output.error is not None for output in everything) <= 4
    for some, tokens in zip(outputs, expected, strict=True):
        assert all(output.error is not None or ids(output) == tokens for output in some)


def test_logits_raise_the_fault_and_are_right_the_next_time(llm: LLM, sabotage: Sabotage) -> None:
    tokens = llm.tokenizer.encode(TEXTS[2])
    expected = llm.logits(tokens)
    sabotage.fail(1)
    with pytest.raises(MachineFault, match=r"instruction \d+ waits for"):
        llm.logits(tokens)
    np.testing.assert_allclose(llm.logits(tokens), expected, atol=1e-4)


def test_a_trace_goes_on_after_a_fault(llm: LLM, sabotage: Sabotage, right: Right) -> None:
    expected = right(TEXTS[:1])[0]
    recorder = Recorder()
    llm.record(recorder)
    assert ids(llm.generate(TEXTS[0], greedy())[0]) == expected
    steps = len(recorder)
    sabotage.fail(2)
    assert_failed(llm.generate(TEXTS[1], greedy())[0])
    between = len(recorder)
    assert ids(llm.generate(TEXTS[0], greedy())[0]) == expected
    llm.record(None)
    assert len(recorder) - between == steps
    trace = recorder.trace()
    assert len(trace.step_program) == len(recorder)


def test_ctrl_c_in_the_middle_of_a_step_leaves_a_working_llm() -> None:
    options = {**OPTIONS, **MACHINES["cpu"]}
    with LLM("stories", **options) as llm:
        expected = [ids(o) for o in llm.generate(TEXTS, greedy())]
        # The run waits for what never comes, much longer than the test.
        Sabotage(llm.runner).fail(3)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, greedy())
        assert time.monotonic() - begin < 8
        assert llm.engine.blocks.num_held == 0
        assert llm.engine.last_fault == "the run was interrupted"
        assert [ids(o) for o in llm.generate(TEXTS, greedy())] == expected


def test_requests_of_other_threads_hear_of_ctrl_c() -> None:
    options = {**OPTIONS, **MACHINES["cpu"]}
    with LLM("stories", **options) as llm:
        expected = [ids(o) for o in llm.generate(TEXTS[:2], greedy())]
        other = llm.engine.add(llm.tokenizer.encode(TEXTS[1]), greedy())
        Sabotage(llm.runner).fail(3)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS[0], greedy())
        (delta,) = [d for d in llm.engine.step() if d.request is other]
        assert delta.error == "the machine stopped: the run was interrupted"
        assert [ids(o) for o in llm.generate(TEXTS[:2], greedy())] == expected


def test_when_the_machine_is_lost_all_requests_are_told_so(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(TEXTS[0], greedy())

    def lost(*_: Any) -> None:
        raise MachineLost("the context is lost")

    monkeypatch.setattr(llm.runner._step, run_name(llm.runner), lost)
    for _ in range(2):
        for output in llm.generate(TEXTS, greedy()):
            assert output.error == "the machine stopped: the context is lost"
    assert llm.engine.lost
    # Those that waited were not tried one after the other: the first prompts, the others, all.
    assert llm.engine.counters.faults == 3


@pytest.mark.usefixtures("real_gpu")
def test_workers_that_stop_between_matrix_products_leave_the_context() -> None:
    # A warp that ends while the other three of its warpgroup go on to a wgmma loses the context.
    rows = 320
    with LLM("stories", dtype="bfloat16", machine="cuda", max_num_batched_tokens=rows) as llm:
        runner = llm.runner
        blocks = -(-rows // runner.limits.block_size)
        runner.write_tokens(0, np.arange(rows, dtype=np.int32) % 100)
        integer = np.zeros_like(runner.sampling_integer[0])
        integer[Integer.ENABLED] = 1
        runner.sampling_integer[0] = integer
        runner.sampling_real[0, [Real.TOP_P, Real.REPETITION_PENALTY]] = 1.0
        step = Step(
            np.zeros(rows, np.int32),
            np.arange(rows, dtype=np.int32),
            np.array([rows - 1], np.int32),
            rows,
        )
        for i in range(4 * blocks):
            runner.write_blocks(0, 0, np.arange(blocks, dtype=np.int32))
            runner.run(step)
            runner.write_blocks(0, i % blocks, np.array([10**6], dtype=np.int32))
            with pytest.raises(MachineFault, match="block table entry"):
                runner.run(step)
