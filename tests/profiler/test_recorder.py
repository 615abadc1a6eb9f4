"""Recording on the CPU machine: every instruction once, times in order, the last steps kept."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from recording import POSITIONS, record, record_ring, ring

from megavm import LLM, SamplingParams
from megavm.instructions.copy import Copy
from megavm.profiler.recorder import Recorder, _ring
from megavm.profiler.report import report
from megavm.profiler.ring import EARLY_PAGES
from megavm.profiler.trace import Trace, TraceError
from megavm.scheduler.compiler.options import default_options
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.run.buckets import compile_bucket
from megavm.vm.config import MIN_PAGES, NUM_PAGES
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.executable import EVENTS
from megavm.vm.cuda.launch import TRACE_COLUMNS, WORKER_COLUMN
from megavm.vm.events import SM_SHIFT
from megavm.vm.isa import Instruction, Wait
from megavm.vm.machine import Notes
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import BF16, F32, TensorKind, TensorSpec


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_every_instruction_of_every_step_is_recorded_once(
    tagged: bool, dynamic: bool, tmp_path: Path
) -> None:
    trace = record_ring(tagged, dynamic)
    assert (trace.num_steps, trace.num_records) == (6, 36)
    pairs = set(zip(trace.record_step.tolist(), trace.record_instruction.tolist(), strict=True))
    assert pairs == {(s, i) for s in range(6) for i in range(6)}
    assert ((trace.record_worker >= 0) & (trace.record_worker < 3)).all()
    if not dynamic:
        assert (trace.record_worker == trace.record_instruction % 3).all()
    assert trace.step_number.tolist() == list(range(6))
    trace.save(tmp_path / "a")
    assert Trace.load(tmp_path / "a").num_records == 36


@pytest.mark.parametrize("tagged", [False, True])
def test_times_are_in_order_and_what_was_not_noted_is_absent(tagged: bool) -> None:
    trace = record_ring(tagged)
    names = ("fetched", "ready", "inputs", "computed", "end")
    times = np.stack([trace.event(name) for name in names])
    assert (times >= 0).all()
    assert (np.diff(times, axis=0) >= 0).all()
    assert times.min() == 0
    signalled = trace.event("signalled")
    signals = trace.programs[0].words[trace.record_instruction, 1] != 0xFFFFFFFF
    assert ((signalled >= trace.event("end")) == signals).all()
    assert ((signalled == -1) == ~signals).all()
    for name in ("load_begin", "load_issued", "load_arrived"):
        assert (trace.event(name) == -1).all()


@pytest.mark.parametrize("tagged", [False, True])
def test_the_time_that_an_instruction_waits_ends_when_its_producer_has_ended(tagged: bool) -> None:
    trace = record(ring(2, 20, tagged), launches=3, steps=5).trace()
    spans = trace.spans
    waited = (spans.inputs - spans.begin) > 0
    through = trace.record_cause_channel >= 0
    assert (waited & through).sum() > 20
    own = np.flatnonzero(waited & through)
    # Waiting is for words in a tagged program and for barriers in the other.
    words = spans.inputs - spans.waited
    assert bool((words[own] > 0).any()) == tagged
    # A producer computes before the one who waits for it; words are waited for here and there, and
    # what else happened between is not in the sum.
    until = spans.end if tagged else spans.inputs
    assert (spans.begin[trace.record_cause[own]] <= until[own]).all()


@pytest.mark.parametrize(("keep", "numbers"), [(None, 6), (4, 4), (3, 3), (1, 1), (9, 6)])
def test_the_last_steps_are_kept_and_keep_their_numbers(keep: int | None, numbers: int) -> None:
    recorder = record(ring(2, 1), launches=2, steps=3, keep=keep)
    assert len(recorder) == numbers
    trace = recorder.trace()
    assert trace.step_number.tolist() == list(range(6))[6 - numbers :]
    assert trace.num_records == 2 * numbers
    assert trace.times[trace.times >= 0].min() == 0
    assert len(recorder._launches) <= 2 if keep is None or keep > 3 else 1


def test_a_recorder_without_steps_has_no_trace() -> None:
    recorder = Recorder()
    with pytest.raises(TraceError, match="nothing was recorded"):
        recorder.trace()
    with pytest.raises(ValueError, match="keeps at least one step"):
        Recorder(0)
    used = record(ring(2, 1))
    used.clear()
    assert len(used) == 0
    with pytest.raises(TraceError, match="nothing was recorded"):
        used.trace()


def test_a_machine_that_does_not_trace_has_nothing_to_hand_out() -> None:
    program = ring(2, 1)
    memory = Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine().load(program, memory)
    executable.run()
    with pytest.raises(ValueError, match="nothing is noted"):
        executable.trace()


def test_notes_are_kept_until_they_are_asked_for() -> None:
    program = ring(2, 1)
    memory = Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    assert executable.trace() == []
    executable.run(1)
    executable.run(3)
    assert [notes.steps for notes in executable.trace()] == [1, 3]
    assert executable.trace() == []


def test_a_launch_that_has_not_been_added_yet_waits_for_it() -> None:
    program = ring(2, 1)
    memory = Memory()
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    recorder = Recorder()
    executable.run(1)
    executable.run(2)
    recorder.add(executable, POSITIONS, rows=1)
    assert len(recorder) == 1
    recorder.add(executable, POSITIONS, rows=1)
    assert len(recorder) == 3
    assert recorder.trace().num_steps == 3


def test_threads_may_add_and_read_at_the_same_time() -> None:
    recorder = Recorder(8)
    program = ring(1, 3)

    def run() -> None:
        memory = Memory()
        memory.allocate(program.tensors)
        executable = CpuMachine(trace=True).load(program, memory)
        for _ in range(30):
            executable.run(2)
            recorder.add(executable, POSITIONS, rows=1)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if len(recorder):
            assert recorder.trace().num_steps <= 8
    assert len(recorder) == 8


class FakeGpu:
    """What a program on the CudaMachine hands out: its events, 0 for what did not happen."""

    def __init__(self, program: Program, steps: int) -> None:
        self.program = program
        self.steps = steps

    def trace(self) -> list[Notes]:
        rows = len(self.program) * self.steps
        columns = TRACE_COLUMNS
        times = 1_000_000 + 320 * torch.arange(rows * columns).view(rows, columns)
        times[:, EVENTS["load_begin"]] = 0
        times[:, EVENTS["load_issued"]] = 0
        return [Notes(self.steps, times, EVENTS)]


def test_the_notes_of_a_gpu_become_the_same_columns(tmp_path: Path) -> None:
    recorder = Recorder()
    program = ring(2, 2)
    recorder.add(FakeGpu(program, 3), POSITIONS, rows=1)
    trace = recorder.trace()
    assert trace.num_steps == 3
    assert (trace.record_worker == trace.record_instruction % 2).all()
    # Rows stand worker by worker, step by step: the second of worker 1 in step 2 is the last.
    last = 11 * TRACE_COLUMNS + EVENTS["end"]
    assert int(trace.event("end")[-1]) == 320 * last
    for name in ("load_begin", "load_issued"):
        assert (trace.event(name) == -1).all()
    for before, after in itertools.pairwise(("fetched", "ready", "begin", "inputs", "computed")):
        assert (trace.event(before) < trace.event(after)).all()
    assert trace.machine["clock_step"] == 320
    trace.save(tmp_path / "a")
    assert Trace.load(tmp_path / "a").num_records == 12


def test_the_sm_above_the_number_of_a_worker_is_taken_apart(tmp_path: Path) -> None:
    class Noted(FakeGpu):
        def trace(self) -> list[Notes]:
            (notes,) = super().trace()
            workers = torch.arange(2).repeat_interleave(len(notes.times) // 2)
            notes.times[:, WORKER_COLUMN] = workers + ((10 * workers + 4 + 1) << SM_SHIFT)
            notes.times[0, WORKER_COLUMN] = 0
            return [dataclasses.replace(notes, worker_column=WORKER_COLUMN)]

    recorder = Recorder()
    recorder.add(Noted(ring(2, 2), 3), POSITIONS, rows=1)
    trace = recorder.trace()
    assert (trace.record_worker == trace.record_instruction % 2).all()
    assert trace.record_sm is not None
    assert trace.record_sm[0] == -1  # 0 above it: it is not known
    assert (trace.record_sm[1:] == 10 * trace.record_worker[1:] + 4).all()
    assert trace.sms == ((0, 4), (0, 14))
    assert trace.record_place[0] == -1
    assert (trace.record_place[1:] == trace.record_worker[1:]).all()
    trace.save(tmp_path / "a")
    again = Trace.load(tmp_path / "a").record_sm
    assert again is not None
    assert (again == trace.record_sm).all()


def test_a_machine_without_sms_has_no_column_of_them(tmp_path: Path) -> None:
    trace = record_ring()
    assert trace.record_sm is None
    assert trace.sms == ()
    trace.save(tmp_path / "a")
    assert Trace.load(tmp_path / "a").record_sm is None


def test_a_dynamic_queue_whose_workers_were_not_noted_has_none(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.add(FakeGpu(ring(2, 2, dynamic=True), 2), POSITIONS, rows=1)
    trace = recorder.trace()
    assert (trace.record_worker == -1).all()
    # Without a worker the only causes are channels.
    assert ((trace.record_cause >= 0) == (trace.record_cause_channel >= 0)).all()
    trace.save(tmp_path / "a")
    assert report(Trace.load(tmp_path / "a"))["workers_unknown"]


# Through the front door.

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def test_an_llm_records_prompts_and_tokens_and_says_the_same(tmp_path: Path) -> None:
    recorder = Recorder()
    with LLM("stories", machine="cpu", workers=2, prefix_caching=False) as llm:
        before = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
        llm.record(recorder)
        during = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
        llm.record(None)
        after = llm.generate("Once upon a time", GREEDY)[0].outputs[0].token_ids
    assert before == during == after
    trace = recorder.trace()
    assert len(trace.programs) == 2
    assert trace.num_steps == 12
    assert trace.step_tokens[0] > 1
    assert (trace.step_tokens[1:] == 1).all()
    assert trace.machine["name"] == "cpu"
    assert trace.machine["workers"] == 2
    assert trace.model["name"] == "stories"
    trace.save(tmp_path / "a")
    assert Trace.load(tmp_path / "a").kinds == trace.kinds


def test_a_trace_of_a_gpu_has_the_pages_of_its_rings() -> None:
    recorder = Recorder()
    with LLM("stories", machine="cpu", workers=2, prefix_caching=False) as llm:
        llm.record(recorder)
        llm.generate("Once upon a time", GREEDY)
    assert not any("pages" in program.facts for program in recorder.trace().programs)
    recorder.machine["name"] = "cuda"
    prompt, token = (program.facts for program in recorder.trace().programs)
    # The scratch of several rows takes pages from the ring.
    assert MIN_PAGES <= prompt["pages"] < token["pages"] <= NUM_PAGES
    assert prompt["early_pages"] == token["early_pages"] == EARLY_PAGES


@pytest.mark.parametrize(("rows", "early"), [(8, EARLY_PAGES), (16, 0), (64, 0)])
def test_consumers_of_more_than_8_rows_take_no_pages_early(rows: int, early: int) -> None:
    config = Checkpoint.open(resolve("stories")).config
    bucket = Bucket(rows=rows, logit_rows=rows, context=64, decode=True)
    limits = Limits(64, 64, 64, 64, 64, 64)
    options_for = functools.partial(default_options, "cuda", 132)
    ring = _ring(compile_bucket(config, limits, BF16, bucket, options_for))
    assert ring["early_pages"] == early
    assert MIN_PAGES <= ring["pages"] <= NUM_PAGES


def test_early_pages_are_those_of_the_kernel() -> None:
    text = (Path(__file__).parents[2] / "cuda" / "config.cuh").read_text()
    assert f"constexpr uint32_t kPreload = {EARLY_PAGES};" in text


def test_one_recorder_after_the_other_gets_its_own_steps() -> None:
    first, second = Recorder(), Recorder(5)
    with LLM("stories", machine="cpu", workers=2, prefix_caching=False) as llm:
        llm.record(first)
        llm.generate("Once upon a time", GREEDY)
        llm.record(second)
        llm.generate("Once upon a time", GREEDY)
        llm.record(None)
        llm.generate("Once upon a time", GREEDY)
    assert (len(first), len(second)) == (12, 5)
    assert first.trace().step_number.tolist() == list(range(12))
    assert second.trace().step_number.tolist() == list(range(7, 12))


def test_bytes_are_those_of_the_context_that_was_seen() -> None:
    recorder = Recorder()
    with LLM("stories", machine="cpu", workers=2, prefix_caching=False) as llm:
        llm.record(recorder)
        prompt = list(range(5, 105))
        llm.generate(prompt, GREEDY)
        config, itemsize = llm.checkpoint.config, llm.runner.dtype.size
    trace = recorder.trace()
    program = trace.programs[int(trace.step_program[-1])]
    attention = np.array(program.kinds)[program.kind] == "attention"
    # Tokens 101 to 111 are computed one by one.
    seen = np.mean(range(101, 112)) * config.kv_elements_per_token * itemsize
    assert program.load_bytes[attention].sum() == pytest.approx(seen, rel=0.01)


def test_bytes_are_of_the_steps_that_a_ring_kept_of_a_launch() -> None:
    recorder = Recorder(3)
    with LLM("stories", machine="cpu", workers=2, steps_per_launch=11) as llm:
        llm.record(recorder)
        llm.generate(list(range(5, 105)), GREEDY)
        config, itemsize = llm.checkpoint.config, llm.runner.dtype.size
    trace = recorder.trace()
    assert trace.num_steps == 3
    program = trace.programs[0]
    attention = np.array(program.kinds)[program.kind] == "attention"
    # Of tokens 101 to 111, which are computed in one launch, the last three.
    seen = np.mean(range(109, 112)) * config.kv_elements_per_token * itemsize
    assert program.load_bytes[attention].sum() == pytest.approx(seen, rel=0.001)


def test_the_reference_machine_does_not_trace() -> None:
    with (
        LLM("stories", machine="reference") as llm,
        pytest.raises(ValueError, match="machine 'reference' does not trace"),
    ):
        llm.record(Recorder())


def test_a_closed_llm_records_nothing() -> None:
    llm = LLM("stories", machine="cpu")
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.record(Recorder())


def gathers(rounds: int) -> Program:
    """Two ranks of one worker gather a row again and again, each time what they took before."""
    tensors = [TensorSpec("row0", (1, 8), F32, TensorKind.STATE)]
    instructions: list[Instruction] = []
    for i in range(rounds):
        tensors += [
            TensorSpec(f"all{i}", (1, 16), F32, TensorKind.ACTIVATION, shares=2),
            TensorSpec(f"row{i + 1}", (1, 8), F32, TensorKind.STATE),
        ]
        before = [Wait(rounds - 1, 0)] if i == 0 else []
        for x, out, waits, signal in (
            (2 * i, 2 * i + 1, before, i),
            (2 * i + 1, 2 * i + 2, [Wait(i, 2)], None),
        ):
            instructions.append(
                Copy(
                    x=x,
                    out=out,
                    x_row=0,
                    x_column=0,
                    row_begin=0,
                    row_end=1,
                    column_begin=0,
                    column_end=8,
                    waits=waits,
                    signal=signal,
                )
            )
    return Program.build(
        tensors,
        instructions,
        [list(range(2 * rounds))],
        barriers=[f"gathered{i}" for i in range(rounds)],
        labels=[f"rounds.{i // 2}.{'send' if i % 2 == 0 else 'take'}" for i in range(2 * rounds)],
        ranks=2,
        shared_barriers=rounds,
    )


def test_a_wait_for_another_rank_names_the_rank_that_came_last() -> None:
    program = gathers(3)
    memory = Memory(ranks=2)
    memory.allocate(program.tensors)
    executable = CpuMachine(trace=True).load(program, memory)
    recorder = Recorder()
    for _ in range(4):
        executable.run(5)
        recorder.add(executable, POSITIONS, rows=1)
    trace = recorder.trace()
    assert (trace.workers, len(trace.programs[0])) == (2, 12)
    assert trace.programs[0].facts["barriers"][3:] == [f"gathered{i} of rank 1" for i in range(3)]
    signalled = trace.event("signalled")
    rank, instruction = trace.record_instruction // 6, trace.record_instruction % 6
    assert (rank == trace.record_worker).all()
    waits = 0
    for taken in np.flatnonzero(instruction % 2 == 1).tolist():
        step = trace.record_step[taken]
        sent = [
            int(np.flatnonzero((trace.record_step == step) & (trace.record_instruction == send))[0])
            for send in (instruction[taken] - 1, 6 + instruction[taken] - 1)
        ]
        last = max(sent, key=lambda r: (signalled[r], r))
        if trace.record_cause_channel[taken] >= 0 and signalled[sent[0]] != signalled[sent[1]]:
            assert trace.record_cause[taken] == last
            waits += int(trace.record_worker[last] != trace.record_worker[taken])
    assert waits > 0, "no rank ever waited for the other"


def test_a_step_says_how_many_sequences_and_rows_of_prompts_it_has(tmp_path: Path) -> None:
    recorder = Recorder()
    prompts = [list(range(5, 15)), list(range(5, 45)), [7, 8, 9]]
    with LLM("stories", machine="cpu", workers=2, prefix_caching=False) as llm:
        llm.record(recorder)
        llm.generate(prompts, GREEDY)
    trace = recorder.trace()
    trace.save(tmp_path / "a")
    read = Trace.load(tmp_path / "a")
    assert read.step_sequences is not None
    assert read.step_prompt_rows is not None
    # Every token of a prompt is a row, and every sequence ends with the same number of tokens.
    assert read.step_prompt_rows.sum() == sum(map(len, prompts))
    assert read.step_sequences.tolist() == [3] * read.num_steps
    decoded = read.step_tokens - read.step_prompt_rows
    assert decoded.tolist() == [0] + [3] * (read.num_steps - 1)


def test_a_program_that_is_not_a_models_has_no_sequences(tmp_path: Path) -> None:
    record_ring().save(tmp_path / "a")
    assert Trace.load(tmp_path / "a").step_sequences is None
