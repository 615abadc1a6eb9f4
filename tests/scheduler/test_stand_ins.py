"""Steps run while their programs are compiled: in parts, or by programs that stand in."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
from slow_compiler import SECONDS, Slow, step, wait_until

from megavm import LLM, SamplingParams
from megavm.profiler.recorder import Recorder
from megavm.scheduler.engine.sequence import State
from megavm.scheduler.engine.step import Step, power_of_two
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.run import model_programs
from megavm.scheduler.run import runner as runner_module
from megavm.scheduler.run.buckets import compile_bucket
from megavm.scheduler.run.programs import Programs
from megavm.scheduler.run.stand_ins import best_stand_in, can_stand_in
from megavm.server.engine.warm_up import _first_programs
from megavm.vm.machine import Executable
from megavm.vm.program import Program
from megavm.vm.target import TARGETS
from megavm.vm.tensors import BF16

pytestmark = pytest.mark.usefixtures("compiler_threads_end")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Slow:
    """Compiles as always, but waits before buckets of eight rows."""
    original, slow = compile_bucket, Slow()

    def compile_slowly(*arguments: Any) -> Program:
        bucket = arguments[3]
        slow.held = (bucket,) if bucket.rows == 8 else ()
        slow(bucket)
        return original(*arguments)

    monkeypatch.setattr(model_programs, "compile_bucket", compile_slowly)
    return slow


@pytest.fixture
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Of one rank, or as many as the test asks for."""
    with LLM(
        "stories",
        machine="cpu",
        workers=1,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        tensor_parallel_size=getattr(request, "param", 1),
    ) as llm:
        yield llm


def test_steps_run_while_another_size_is_compiled(llm: LLM, slow: Slow) -> None:
    runner = llm.runner
    runner.programs.compile_ahead()
    assert slow.began.wait(SECONDS)
    for rows in (1, 2, 4, 3):
        runner.run(step(rows))
    assert {bucket.rows for bucket in runner.programs.compiled} == {1, 2, 4}
    slow.go_on.set()
    runner.run(step(8))
    assert sum(bucket == runner.programs.bucket(8, 1, 8) for bucket in slow.compiled) == 1


def test_a_step_runs_in_parts_while_its_program_is_compiled(llm: LLM, slow: Slow) -> None:
    prompt, params = [5, 6, 7, 8, 9, 10, 11, 12], SamplingParams(temperature=0.0, max_tokens=3)
    with LLM(
        "stories", machine="cpu", workers=1, max_num_seqs=4, max_num_batched_tokens=4
    ) as fours:
        expected = [fours.generate(p, params)[0].outputs[0].token_ids for p in (prompt, prompt[:5])]
    runner = llm.runner
    runner.programs.compile_ahead()
    assert slow.began.wait(SECONDS)
    for rows in (1, 2, 4):
        runner.run(step(rows))
    for p, tokens in zip((prompt, prompt[:5]), expected, strict=True):
        assert llm.generate(p, params)[0].outputs[0].token_ids == tokens
    eight = runner.programs.bucket(8, 1, 8)
    assert eight not in set(runner.programs.compiled)
    slow.go_on.set()
    wait_until(lambda: eight in set(runner.programs.compiled))
    llm.engine.blocks.forget_all()
    assert llm.generate(prompt, params)[0].outputs[0].token_ids == expected[0]
    assert (eight, False) in runner.programs.loaded


def note_programs(runner: runner_module.Runner, monkeypatch: pytest.MonkeyPatch) -> list[Bucket]:
    """The buckets of the programs that run from now on."""
    used: list[Bucket] = []
    loaded = runner._loaded

    def note(bucket: Bucket, started: Callable[[], None]) -> Executable:
        used.append(bucket)
        return loaded(bucket, started)

    monkeypatch.setattr(runner, "_loaded", note)
    return used


def test_a_step_runs_by_another_program_of_as_many_rows_while_its_own_is_compiled(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch whose context grows goes on, whether it wants logits or not."""
    runner, original, held = llm.runner, compile_bucket, Slow()
    short, middle, every = Bucket(2, 2, 16, True), Bucket(2, 2, 32, True), Bucket(2, 2, 64)
    buckets = {16: short, 32: middle, 64: replace(every, decode=True)}

    def bucket(rows: int, logit_rows: int, context: int, **_: bool) -> Bucket:
        return replace(buckets[max(16, power_of_two(context))], rows=rows, logit_rows=logit_rows)

    def compile_slowly(*arguments: Any) -> Program:
        held.held = (arguments[3],) if arguments[3] == middle else ()
        held(arguments[3])
        return original(*arguments)

    monkeypatch.setattr(runner.programs, "bucket", bucket)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    monkeypatch.setattr(model_programs, "compile_bucket", compile_slowly)
    others = [Bucket(2, 1, 64), Bucket(2, 2, 64, sampled=True), Bucket(4, 4, 64)]
    runner.programs.program(short)
    for ready in (every, *others):  # compiled, but not loaded
        runner.programs.compiled.get(ready, runner.programs.compiler())
    runner.programs.compile_ahead()
    used = note_programs(runner, monkeypatch)

    def decode(position: int, wants_logits: bool = False) -> Step:
        rows = np.arange(2, dtype=np.int32)
        places = np.full(2, position, np.int32)
        return Step(rows, places, rows, position + 1, distinct=True, wants_logits=wants_logits)

    for wanted in (False, True):
        for position in (3, 20, 40):
            runner.start(decode(position, wanted))
    assert used == [short, every, every] * 2
    assert held.began.wait(SECONDS), "it is compiled meanwhile"
    assert held.compiled.count(middle) == 1
    held.go_on.set()
    wait_until(lambda: middle in set(runner.programs.compiled))
    runner.start(decode(20))
    assert used[-1] == middle


def test_parts_run_by_programs_that_can_stand_in(
    llm: LLM, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled, but no step has loaded them yet."""
    runner = llm.runner
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    every = runner.programs.bucket(4, 4, runner.max_model_len)
    runner.programs.compiled.get(every, runner.programs.compiler())
    runner.programs.compile_ahead()
    seven = replace(step(7), wants_logits=False)
    parts = runner.programs.parts(seven, 1)
    assert [(bucket, part.num_rows) for bucket, part in parts] == [(every, 4), (every, 3)]
    runner.start(seven)
    assert (every, False) in runner.programs.loaded
    assert slow.began.wait(SECONDS), "its own program is compiled meanwhile"
    slow.go_on.set()


def test_a_program_of_more_rows_stands_in_until_there_is_one_of_as_many(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs steps of any fewer rows, and larger ones in parts."""
    runner, prompt = llm.runner, np.array([5, 6, 7, 8, 9, 10, 11, 12], np.int32)
    with LLM(
        "stories", machine="cpu", workers=1, max_num_seqs=4, max_num_batched_tokens=4
    ) as fours:
        expected = fours.engine.logits(prompt)
    runner.programs.compiled, runner.programs.loaded = Programs(), {}
    every = runner.programs.bucket(4, 4, runner.max_model_len)
    runner.programs.compiled.get(every, runner.programs.compiler())
    monkeypatch.setattr(runner.programs.compiled, "prepare", lambda *_, **__: None)
    runner.programs.compile_ahead()
    used = note_programs(runner, monkeypatch)
    for rows in (1, 2, 3, 4, 8):
        runner.write_tokens(0, prompt)  # a step writes what it chooses
        runner.start(replace(step(rows), logit_row=np.arange(rows, dtype=np.int32)))
        np.testing.assert_allclose(runner.logits[:rows], expected[:rows], atol=1e-4)
    assert used == [every] * 6
    two = runner.programs.bucket(2, 2, runner.max_model_len)
    runner.programs.compiled.get(two, runner.programs.compiler())
    runner.start(step(2))
    assert used[-1] == every, "it is loaded, and the smaller one is not"
    runner.programs.program(two)
    runner.start(step(2))
    assert used[-1] == two


def test_what_stands_in_has_room_for_the_step() -> None:
    assert can_stand_in(Bucket(64, 64, 512), Bucket(1, 1, 64))
    assert not can_stand_in(Bucket(2048, 64, 512), Bucket(1, 1, 64)), "it takes too long"
    assert can_stand_in(Bucket(2048, 64, 512), Bucket(2048, 1, 64))
    assert can_stand_in(Bucket(2048, 64, 512), Bucket(512, 1, 64))
    assert not can_stand_in(Bucket(2048, 64, 512), Bucket(256, 1, 64)), "parts take as long"
    for other in (Bucket(64, 1, 512), Bucket(64, 64, 32), Bucket(64, 64, 512, True)):
        assert not can_stand_in(other, Bucket(2, 2, 64))
    # The rows of a program for decoding belong to different sequences: so does one row.
    assert can_stand_in(Bucket(16, 16, 512, True), Bucket(1, 1, 64))
    assert can_stand_in(Bucket(16, 16, 512, True), Bucket(8, 8, 64, True))


def test_what_samples_stands_in_for_greedy_programs_and_never_the_other_way_round() -> None:
    greedy, sampled = Bucket(64, 64, 512), Bucket(64, 64, 512, sampled=True)
    assert can_stand_in(sampled, Bucket(2, 2, 64))
    assert can_stand_in(sampled, Bucket(2, 2, 64, sampled=True))
    assert not can_stand_in(greedy, Bucket(2, 2, 64, sampled=True))
    assert not can_stand_in(greedy, sampled)


def test_of_as_many_rows_a_program_of_the_same_kind_stands_in() -> None:
    own = Bucket(2, 2, 64, decode=True)
    sampled, greedy = Bucket(4, 4, 64, sampled=True), Bucket(4, 4, 512)
    fewer, more = Bucket(2, 2, 64, sampled=True), Bucket(8, 8, 64)
    for ready, best in (
        ([sampled, greedy], greedy),
        ([sampled, greedy, fewer], fewer),
        ([sampled, more], sampled),
    ):
        assert best_stand_in(own, ready, lambda bucket: True) == best
    assert best_stand_in(own, [sampled, greedy], lambda bucket: bucket.sampled) == sampled
    sampling = replace(own, sampled=True)
    assert best_stand_in(sampling, [sampled, greedy], lambda bucket: True) == sampled
    assert best_stand_in(sampling, [greedy, more], lambda bucket: True) is None


def test_a_greedy_step_runs_by_a_program_that_samples_until_its_own_is_ready(
    llm: LLM, slow: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that samples waits for its own in the same place."""
    runner = llm.runner
    eight = step(8)
    runner.programs.compiled, runner.programs.loaded = Programs(), {}
    sampled = runner.programs.bucket(8, 1, runner.max_model_len, sampled=True)
    greedy = replace(sampled, sampled=False)
    compiler = runner.programs.compiler()
    slow.go_on.set()
    runner.programs.compiled.get(sampled, compiler)
    slow.go_on.clear()
    slow.began.clear()
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    runner.programs.compile_ahead()
    used = note_programs(runner, monkeypatch)
    runner.write_tokens(0, np.arange(5, 13, dtype=np.int32))
    runner.start(eight)
    assert used == [sampled]
    first = runner.logits[:1].copy()
    assert slow.began.wait(SECONDS), "its own program is compiled meanwhile"
    slow.go_on.set()
    wait_until(lambda: greedy in set(runner.programs.compiled))
    runner.start(eight)
    runner.start(replace(eight, sampled=True))
    assert used == [sampled, greedy, sampled]
    np.testing.assert_allclose(runner.logits[:1], first, atol=1e-5)
    runner.programs.compiled, runner.programs.loaded = Programs(), {}
    runner.programs.compiled.get(greedy, compiler)
    monkeypatch.setattr(runner.programs.compiled, "prepare", lambda *_, **__: None)
    assert runner.programs.choose(replace(eight, sampled=True), 1) is None
    assert runner.programs.parts(replace(eight, sampled=True), 1) == []
    assert runner.programs.choose(eight, 1) == greedy


def test_what_follows_a_step_is_of_its_kind(llm: LLM) -> None:
    runner = llm.runner
    for sampled in (False, True):
        following = runner.programs.likely_next(runner.programs.bucket(2, 2, 10, sampled=sampled))
        assert {bucket.sampled for bucket in following} == {sampled}


def test_in_a_fixed_order_nothing_stands_in() -> None:
    """Steps of the same rows have the same bits, whenever they run."""
    with LLM(
        "stories", machine="cpu", workers=1, max_num_seqs=4, max_num_batched_tokens=8,
        fixed_order=True,
    ) as llm:  # fmt: skip
        runner = llm.runner
        runner.programs.program(runner.programs.bucket(4, 4, runner.max_model_len))
        runner.programs.ahead = True
        runner.programs.compiled.prepare = lambda *_, **__: None  # type: ignore[method-assign]
        assert runner.programs.choose(step(2), 1) is None
        assert runner.programs.parts(step(8), 1) == []
        runner.start(step(2))
        assert (runner.programs.bucket(2, 1, 2), False) in runner.programs.loaded


@pytest.mark.parametrize("sampled", [False, True])
def test_a_ready_server_runs_every_step_with_the_programs_that_it_has(
    on_gpu: runner_module.Runner, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:
    """Whatever its rows, context and logits, and greedy ones also by programs that sample."""
    small, draw = on_gpu, np.random.default_rng(4)
    most = 4 * max(target.max_num_batched_tokens for target in TARGETS.values())
    limits = Limits(64, most, most, 64, 64 * most // 64, 64)
    runner = runner_module.Runner(
        small.config, small.machine.memory(), limits, BF16, small.machine, small.programs.options
    )
    first = _first_programs(runner, sampled)
    assert len(set(first)) <= 17, "a server starts soon"
    for bucket in first:
        runner.programs.compiled.add(bucket, cast(Program, None))
    runner.programs.ahead = True
    monkeypatch.setattr(runner.programs.compiled, "prepare", lambda *_, **__: None)
    for number in range(300):
        decode = number > 0 and bool(draw.integers(2))
        rows = round((64 if decode else most) ** draw.uniform()) if number else most
        context = max(rows, round(most ** draw.uniform()))
        places = np.arange(rows, dtype=np.int32)
        wanted = places if decode else np.sort(draw.permutation(places)[: draw.integers(1, 65)])
        sequences = places if decode else np.zeros(rows, np.int32)
        samples = sampled and bool(draw.integers(2))
        whole = Step(sequences, places, wanted.astype(np.int32), context, samples, distinct=decode)
        chosen = runner.programs.choose(whole, 1)
        parts = [(chosen, whole)] if chosen is not None else runner.programs.parts(whole, 1)
        assert sum(part.num_rows for _, part in parts) == rows, (rows, context, decode)
        for bucket, part in parts:
            assert bucket in first
            assert bucket.sampled == sampled
            assert bucket.rows >= part.num_rows
            assert bucket.context >= part.context
            assert bucket.logit_rows >= len(part.logit_row)
            assert not bucket.decode or len(set(part.row_sequence.tolist())) == part.num_rows


@pytest.mark.parametrize(
    ("llm", "given"),
    [
        (1, {"temperature": 1.0}),
        (1, {"allowed_token_ids": [5, 6, 7]}),
        (2, {"logprobs": 2}),  # several ranks gather logits only in programs that sample
        (2, {"prompt_logprobs": 2}),
    ],
    indirect=["llm"],
)
@pytest.mark.parametrize("fails", [False, True])
def test_requests_that_sample_wait_for_their_program_and_others_go_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: bool, given: dict[str, Any]
) -> None:
    """If it cannot be compiled ahead, a step compiles it."""
    runner, engine, original, held = llm.runner, llm.engine, compile_bucket, Slow()
    every = runner.programs.stand_in(sampled=True)
    if fails:
        held.fails = {"megavm-programs"}

    def compile_slowly(*arguments: Any) -> Program:
        held.held = (every,) if arguments[3] == every else ()
        if arguments[3].sampled:
            held(arguments[3])
        return original(*arguments)

    monkeypatch.setattr(model_programs, "compile_bucket", compile_slowly)
    monkeypatch.setattr(runner.programs, "likely_next", lambda bucket: [])
    runner.programs.compile_ahead(first=[every])
    assert held.began.wait(SECONDS)
    assert runner.is_coming(sampled=True)
    assert runner.is_coming(sampled=False, wants_logits=True) == (runner.parallel.ranks > 1)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 4, "ignore_eos": True} | given)
    sampled = engine.add([3, 4], params, restriction=llm.restrictions.compile(params))
    for _ in range(2):
        plain = engine.add([5, 6], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
        while plain.sequences[0].state is not State.FINISHED:
            engine.step()
    assert not sampled.sequences[0].output
    held.go_on.set()
    while engine.has_work:
        engine.step()
    output = sampled.sequences[0].output
    assert len(output) == 4
    assert set(output) <= set(params.allowed_token_ids or output)
    assert not runner.is_coming(sampled=True)


@pytest.mark.parametrize("llm", [1, 2], indirect=True)
def test_the_parts_of_a_step_that_wants_logits_keep_theirs(llm: LLM, slow: Slow) -> None:
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1, prompt_logprobs=1)
    with LLM(
        "stories", machine="cpu", workers=1, max_num_seqs=4, max_num_batched_tokens=4
    ) as fours:
        expected = fours.generate(prompt, params)[0]
    runner = llm.runner
    runner.programs.compile_ahead()
    assert slow.began.wait(SECONDS)
    for rows in (1, 2, 4):
        runner.run(replace(step(rows), logit_row=np.arange(rows, dtype=np.int32)))
    found = llm.generate(prompt, params)[0]
    assert found.prompt_logprobs == expected.prompt_logprobs
    assert found.outputs[0].logprobs == expected.outputs[0].logprobs
    order, made = [6, 1, 3, 7, 0, 4], []
    for logit_rows in (list(range(8)), order):
        runner.write_tokens(0, np.array(prompt, np.int32))  # a step writes what it chooses
        runner.start(replace(step(8), logit_row=np.array(logit_rows, np.int32)))
        made.append(runner.logits[: len(logit_rows)].copy())
    assert np.array_equal(made[1], made[0][order])
    assert not slow.go_on.is_set()
    slow.go_on.set()


def test_recording_begins_and_ends_while_a_program_is_compiled(llm: LLM, slow: Slow) -> None:
    runner, recorder = llm.runner, Recorder()
    runner.programs.compile_ahead()
    assert slow.began.wait(SECONDS)
    runner.record(recorder)
    runner.run(step(2))
    runner.record(None)
    runner.run(step(2))
    slow.go_on.set()
    assert recorder.trace().num_steps == 1


def test_an_llm_closes_while_a_program_is_compiled(llm: LLM, slow: Slow) -> None:
    kept = weakref.ref(llm.runner)
    llm.runner.programs.compile_ahead()
    assert slow.began.wait(SECONDS)
    llm.close()
    gc.collect()
    assert kept() is None, "the thread keeps the model's memory"
    slow.go_on.set()


def test_the_growth_of_a_batch_is_prepared(llm: LLM) -> None:
    runner = llm.runner

    def ready(bucket: Bucket) -> bool:
        return bucket in set(runner.programs.compiled)

    runner.programs.compile_ahead()
    for sequences in (1, 2, 4):
        bucket = runner.programs.bucket(sequences, sequences, 10, decode=True)
        wait_until(partial(ready, bucket))
        slots = np.arange(sequences, dtype=np.int32)
        runner.run(Step(slots, np.full(sequences, 9, np.int32), slots, 10))
        for rows in (sequences, 8):
            assert runner.programs.bucket(rows, sequences, 10) in runner.programs.likely_next(
                bucket
            )
    wait_until(partial(ready, runner.programs.bucket(8, 4, 10)))
