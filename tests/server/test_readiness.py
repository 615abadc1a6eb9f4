"""What a server compiles when it is ready, so that no step waits for its program."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from serving import RunningServer, serving, wait_until

from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Bucket
from megavm.scheduler.run import model_programs
from megavm.scheduler.run.buckets import compile_bucket
from megavm.scheduler.run.stand_ins import can_stand_in
from megavm.vm.program import Program

Kind = Callable[[bool], None]  # whether the model's default parameters sample


@pytest.fixture
def by_default(monkeypatch: pytest.MonkeyPatch) -> Kind:
    """Lets the model's default parameters sample or be greedy."""
    opened = Checkpoint.open

    def choose(sampled: bool) -> None:
        def open_changed(*given: Any, **named: Any) -> Checkpoint:
            checkpoint = opened(*given, **named)
            checkpoint.generation["do_sample"] = sampled
            return checkpoint

        monkeypatch.setattr(Checkpoint, "open", open_changed)

    return choose


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], threading.Event]]:
    """Lets programs of a kind wait in the background until the event is set."""
    events: list[threading.Event] = []

    def hold(sampled: bool) -> threading.Event:
        go_on = threading.Event()
        events.append(go_on)

        def compile_late(*given: Any) -> Program:
            ahead = threading.current_thread().name == "megavm-programs"
            if ahead and given[3].sampled == sampled:
                assert go_on.wait(60)
            return compile_bucket(*given)

        monkeypatch.setattr(model_programs, "compile_bucket", compile_late)
        return go_on

    yield hold
    for event in events:
        event.set()


@contextlib.contextmanager
def noting(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bucket]]:
    """The buckets of the programs that run meanwhile."""
    runner = server.llm.runner
    used: list[Bucket] = []
    loaded = runner._loaded

    def note(bucket: Bucket, started: Callable[[], None]) -> Any:
        used.append(bucket)
        return loaded(bucket, started)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_loaded", note)
        yield used


def complete(server: RunningServer, **body: Any) -> str:
    answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 5, **body})
    assert answer.status == 200, answer.content
    return str(answer.json["choices"][0]["text"])


@pytest.mark.parametrize("default", [False, True])
def test_there_will_be_a_program_for_all_steps_of_each_usual_number_of_rows(
    by_default: Kind, default: bool
) -> None:
    """Whatever their context, and whether they sample."""
    by_default(default)
    with serving() as server:
        runner = server.llm.runner

        def ready(bucket: Bucket) -> bool:
            return bucket in set(runner.programs.compiled)

        for sampled in (False, True):
            for rows in (1, 2, 4, 8, 16, 32, 64):
                sized = partial(runner.programs.bucket, rows, sampled=sampled)
                every = sized(rows, runner.max_model_len)
                wait_until(partial(ready, every))
                for own in (sized(1, 1), sized(rows, 100, decode=True)):
                    assert can_stand_in(every, own)


def test_there_will_be_a_program_for_all_steps_of_more_rows() -> None:
    """So that the first prompts of a server do not run in parts of a few rows."""
    with serving(max_num_batched_tokens=1000) as server:
        runner = server.llm.runner
        for sampled in (True, False):
            for rows in range(65, 1001, 11):
                own = runner.programs.bucket(
                    rows, runner.max_logit_rows, runner.max_model_len, sampled=sampled
                )

                def has_program(own: Bucket = own) -> bool:
                    return any(can_stand_in(every, own) for every in set(runner.programs.compiled))

                wait_until(has_program)


@pytest.mark.parametrize("default", [False, True])
def test_a_server_is_ready_with_programs_of_the_kind_that_its_defaults_need(
    by_default: Kind, held: Callable[[bool], threading.Event], default: bool
) -> None:
    by_default(default)
    go_on = held(not default)
    with serving() as server:
        runner = server.llm.runner
        assert server.llm.samples_by_default == default
        assert {bucket.sampled for bucket in set(runner.programs.compiled)} == {default}
        assert runner.programs.stand_in(sampled=default) in set(runner.programs.compiled)
        assert runner.is_coming(sampled=True) != default
        go_on.set()


def test_greedy_requests_run_by_programs_that_sample_until_theirs_are_ready(
    held: Callable[[bool], threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = held(False)
    with serving() as server:
        runner = server.llm.runner
        with noting(server, monkeypatch) as used:
            first = complete(server, temperature=0)
        assert used
        assert all(bucket.sampled for bucket in used)
        go_on.set()
        every = runner.programs.bucket(1, 1, runner.max_model_len)
        wait_until(lambda: every in set(runner.programs.compiled))

        def runs_by_its_own() -> bool:
            with noting(server, monkeypatch) as used:
                assert complete(server, temperature=0) == first
            return not any(bucket.sampled for bucket in used)

        wait_until(runs_by_its_own)


def test_requests_that_sample_wait_for_their_programs_where_greedy_is_the_default(
    by_default: Kind,
    held: Callable[[bool], threading.Event],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    by_default(False)
    go_on = held(True)
    with serving() as server:
        runner = server.llm.runner
        assert runner.is_coming(sampled=True)
        texts: list[str] = []
        with noting(server, monkeypatch) as used:
            waiting = threading.Thread(
                target=lambda: texts.append(complete(server, temperature=1.0, seed=1))
            )
            waiting.start()
            for _ in range(2):
                complete(server, temperature=0)
            complete(server)
            assert not texts
            assert not any(bucket.sampled for bucket in used)
            go_on.set()
            waiting.join(60)
        assert len(texts) == 1
        assert any(bucket.sampled for bucket in used)
