"""Runs of the engine on the toy runner, and what came out of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import toy_runner as toy

from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Delta, Sequence, derived_seed

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


class OneByOne:
    """An Appender that leaves all tokens to ``Sequence.append``."""

    def append_inside(
        self, sequences: tuple[Sequence, ...], *_: object
    ) -> tuple[list[Delta], list[int]]:
        return [], list(range(len(sequences)))


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
    """Nothing is held any more, and without a fault every step had its masks."""
    assert not engine.has_work
    assert engine.blocks.num_held == 0
    assert engine.num_running == engine.num_waiting == 0
    assert sorted(engine.planner._free_slots) == list(range(engine.runner.max_num_seqs))
    assert not engine.planner._computing
    assert not engine._requests
    assert engine.counters.faults or not getattr(engine.runner, "unmasked", 0)
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


def greedy(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **values})
