"""Steps behind each other on a GPU: the next one begins before the tokens of the last are read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from engine_runs import Results, assert_idle, gather, run_all
from random_weights import bind_random_weights

from megavm.sampling_params import SamplingParams
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.restriction import Restriction
from megavm.scheduler.engine.step import Bools, Launch, Step
from megavm.scheduler.engine.step_memory import DeviceStepMemory
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Limits
from megavm.scheduler.run import runner as runner_module
from megavm.scheduler.run.runner import Runner
from megavm.vm.cuda.emulated import EmulatedMachine
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.tensors import BF16

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=128,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
)
LIMITS = Limits(
    max_num_seqs=3,
    max_model_len=64,
    max_num_batched_tokens=8,
    max_logit_rows=3,
    num_blocks=12,
    block_size=16,
)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10], [11, 12], [1, 2, 3, 4]]


class Watched:
    """Notes when steps of a runner begin and end."""

    def __init__(self, runner: Runner) -> None:
        self.in_progress = self.most = self.started = 0
        self._start = runner.start
        runner.start = self.start  # type: ignore[method-assign]

    def start(self, step: Step, steps: int = 1, started: Any = None) -> Launch | None:
        launch = self._start(step, steps, started)
        assert launch is not None
        self.started += 1
        self.in_progress += 1
        self.most = max(self.most, self.in_progress)
        return WatchedLaunch(self, launch)


class WatchedLaunch:
    def __init__(self, watched: Watched, launch: Launch) -> None:
        self.watched = watched
        self.launch = launch

    def finish(self, gone: Bools | None = None) -> None:
        self.watched.in_progress -= 1
        self.launch.finish(gone)

    def cancel(self) -> None:
        self.watched.in_progress -= 1
        self.launch.cancel()


@pytest.fixture(scope="module")
def runner(gpu: CudaMachine) -> Iterator[Runner]:
    """A small random Llama, with step memory as on a GPU."""
    memory = gpu.memory()
    bind_random_weights(memory, LLAMA, LIMITS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "StepMemory", DeviceStepMemory)
        yield Runner(
            LLAMA, memory, LIMITS, BF16, gpu, lambda rows: default_options("cuda", 3, rows)
        )


@pytest.fixture
def watched(runner: Runner) -> Iterator[Watched]:
    start = runner.start
    yield Watched(runner)
    runner.start = start  # type: ignore[method-assign]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "ignore_eos": True, **values})


def tokens_alone(runner: Runner) -> list[list[int]]:
    """What each prompt is continued with, one after the other and step by step."""
    engine = Engine(runner, overlap=False, prefix_caching=False)
    results: Results = {}
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, params(), i)
        run_all(engine, results)
    return [results[i, 0].token_ids for i in range(len(PROMPTS))]


@pytest.mark.parametrize("steps", [1, 3])
def test_requests_that_join_and_end_get_the_tokens_they_get_in_turn(
    runner: Runner, watched: Watched, steps: int
) -> None:
    expected = tokens_alone(runner)
    assert watched.most == 1
    engine = Engine(runner, steps_per_launch=steps)
    results: Results = {}
    stops: dict[int, int] = {}
    for i, prompt in enumerate(PROMPTS):
        own = params()
        if i in (1, 3):  # end at a token, while others go on
            stops[i] = next(j for j in range(3, 9) if expected[i][j] not in expected[i][:j])
            own = params(stop_token_ids=[expected[i][stops[i]]])
        engine.add(prompt, own, i)
        for _ in range(2 if i == 2 else 0):
            gather(results, engine.step())
    run_all(engine, results)
    for i, tokens in enumerate(expected):
        assert results[i, 0].token_ids == tokens[: stops.get(i, len(tokens)) + 1]
    assert watched.most == 2
    assert watched.in_progress == 0
    engine.close()
    assert_idle(engine)


def test_masks_that_depend_on_the_last_token_come_while_their_step_runs(
    runner: Runner, watched: Watched, gpu: CudaMachine
) -> None:
    if isinstance(gpu, EmulatedMachine):
        pytest.skip("the host runs an emulated kernel itself")
    plain = tokens_alone(runner)
    words = Restriction(bad_words=tuple((a, b) for own in plain for a, b in pairwise(own)))

    def tokens(**options: Any) -> list[list[int]]:
        engine = Engine(runner, prefix_caching=False, steps_per_launch=3, **options)
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, params(), i, words if i in (0, 3) else None)
        results = run_all(engine)
        engine.close()
        assert_idle(engine)
        return [results[i, 0].token_ids for i in range(len(PROMPTS))]

    expected = tokens(overlap=False)
    watched.most = 0
    assert tokens() == expected
    assert watched.most == 2
    assert runner.can_await_masks
    assert runner._step._given > 8  # type: ignore[attr-defined]
    for i, own in enumerate(expected):
        assert (own == plain[i]) is (i not in (0, 3))
        avoided = i in (0, 3) and set(words.bad_words) & set(pairwise(own))
        assert not avoided


def test_no_kernel_is_loaded_while_a_launch_awaits_masks(
    runner: Runner, gpu: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver would wait for the launch, and the copy of its masks for the driver."""
    if isinstance(gpu, EmulatedMachine):
        pytest.skip("the host runs an emulated kernel itself")
    programs, give = runner.programs, runner.give_masks
    words = Restriction(bad_words=tuple((a, b) for a in range(96) for b in (a - 1, a) if b >= 0))

    def run() -> tuple[list[list[int]], int]:
        engine = Engine(runner, prefix_caching=False)
        for i, prompt in enumerate(PROMPTS):
            engine.add(prompt, params(), i, words)
        results = run_all(engine)
        faults = engine.counters.faults
        engine.close()
        return [results[i, 0].token_ids for i in range(len(PROMPTS))], faults

    expected = run()
    other = programs.bucket(8, 1, 1)
    program = programs.compiled.get(other, programs.compiler())
    threads: list[threading.Thread] = []

    def give_later() -> None:
        if runner._step._given != runner._step._awaited and not threads:  # type: ignore[attr-defined]
            programs.loaded.pop((other, False), None)
            monkeypatch.setattr(gpu, "_functions", {})
            threads.append(threading.Thread(target=programs._load_beside, args=(other, program)))
            threads[0].start()
            time.sleep(0.3)
            assert (other, False) not in programs.loaded
        give()

    monkeypatch.setattr(runner, "give_masks", give_later)
    assert run() == expected
    threads[0].join()
    assert (other, False) in programs.loaded
    assert expected[1] == 0


def test_steps_behind_a_broken_one_leave_nothing(
    runner: Runner, watched: Watched, gpu: CudaMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not isinstance(gpu, EmulatedMachine):
        pytest.skip("only an emulated GPU can be told to stop")
    expected = tokens_alone(runner)
    engine = Engine(runner, prefix_caching=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, params(), i)
    results: Results = {}
    for _ in range(4):
        gather(results, engine.step())
    # Workers that need not wait for each other take fewer than 1000 turns for a step.
    monkeypatch.setattr(gpu, "stop_turn", 300)
    begun = watched.started
    while not engine.counters.faults:
        assert engine.has_work, "a launch must stop before all requests have ended"
        gather(results, engine.step())
    monkeypatch.setattr(gpu, "stop_turn", 0)
    assert watched.started > begun
    run_all(engine, results)
    failed = [i for i in range(len(PROMPTS)) if results[i, 0].error is not None]
    assert failed
    for i, tokens in enumerate(expected):
        own = results[i, 0].token_ids
        assert own == (tokens[: len(own)] if i in failed else tokens)
    assert watched.in_progress == 0
    for i, prompt in enumerate(PROMPTS):
        engine.add(prompt, params(), i)
    again = run_all(engine)
    assert [again[i, 0].token_ids for i in range(len(PROMPTS))] == expected
    engine.close()
    assert_idle(engine)
