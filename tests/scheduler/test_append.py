"""Tokens in the middle of sequences, appended at once, are as if appended one by one."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import toy_runner as toy
from engine_runs import EOS, OneByOne, greedy, make_engine

from megavm.sampling_params import SamplingParams
from megavm.scheduler.engine import engine as engine_module
from megavm.scheduler.engine._append import Appender
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.sequence import Delta, Request, Sequence, State
from megavm.scheduler.engine.text import NoText, TextStream


def random_requests(seed: int) -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(seed)
    found = []
    for _ in range(12):
        more: dict[str, Any] = draw.choice(
            [
                {},
                {"n": 2, "temperature": 1.0, "seed": draw.randrange(99)},
                {"stop": ["ab", "c"]},
                {"stop_token_ids": [draw.randrange(40)], "include_stop_str_in_output": True},
                {"ignore_eos": True, "min_tokens": 3},
                {"logprobs": 2},
            ]
        )
        prompt = [draw.randrange(40) for _ in range(draw.randint(1, 20))]
        found.append(
            (
                prompt,
                SamplingParams(**{"temperature": 0.0, "max_tokens": draw.randint(3, 30), **more}),
            )
        )
    return found


def deltas_of(engine: Engine, seed: int) -> list[list[Any]]:
    """All deltas, by step."""
    for prompt, params in random_requests(seed):
        engine.add(prompt, params)
    steps = []
    while engine.has_work:
        steps.append(
            sorted(
                (d.request.id, d.index, d.token_ids, d.pieces, d.logprobs, d.finish_reason,
                 d.stop_reason, d.error)
                for d in engine.step()
            )
        )  # fmt: skip
    return steps


@pytest.mark.parametrize("launch", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_a_batch_is_appended_as_its_sequences_are(seed: int, launch: int, overlap: bool) -> None:
    def engine() -> Engine:
        runner = toy.ToyRunner(max_num_seqs=5, num_blocks=60)
        return make_engine(runner, overlap=overlap, steps_per_launch=launch)

    at_once = engine()
    found = deltas_of(at_once, seed)
    with mock.patch.object(engine_module, "_APPENDER", OneByOne()):
        one_by_one = engine()
        expected = deltas_of(one_by_one, seed)
    assert found == expected
    assert at_once.counters.output_tokens == one_by_one.counters.output_tokens > 0


def running(decoder: object, output: list[int], max_output: int = 9) -> Sequence:
    request = Request(0, np.array([1], dtype=np.int32), greedy(max_tokens=max_output))
    text = None if decoder is None else TextStream(decoder)  # type: ignore[arg-type]
    sequence = Sequence(request, 0, 0, max_output, EOS, text, [])
    sequence.output = output
    sequence.state = State.DECODING
    return sequence


class Table(NoText):
    """A decoder that has texts of two tokens, and counts how often it is asked for others."""

    def __init__(self) -> None:
        self.plain = {5: "five", 6: "six"}
        self.asked: list[int] = []

    def step(self, token_id: int) -> str:
        self.asked.append(token_id)
        self.plain = {} if token_id == 7 else {5: "FIVE"}
        return f"<{token_id}>"


def test_texts_come_from_the_decoder_as_it_is_at_each_token() -> None:
    appender, decoder = Appender(Sequence, Delta, State.FINISHED), Table()
    sequence = running(decoder, [1])
    tokens = np.array([[5, 7, 5, 8, 5]], dtype=np.int32)
    (delta,), rest = appender.append_inside((sequence,), tokens, np.array([False]))
    assert (delta.token_ids, delta.pieces) == (
        [5, 7, 5, 8, 5],
        ["five", "<7>", "<5>", "<8>", "FIVE"],
    )
    assert decoder.asked == [7, 5, 8]
    assert sequence.output == [1, 5, 7, 5, 8, 5]
    assert rest == []
    assert delta == Delta(sequence.request, 0, delta.token_ids, delta.pieces, [])


def test_what_else_must_be_looked_at_is_left_as_it_is() -> None:
    appender = Appender(Sequence, Delta, State.FINISHED)
    first, last, ended, stops = (running(None, output) for output in ([], [1] * 7, [1], [1]))
    ended.state = State.FINISHED
    searched = running(Table(), [1])
    searched.decoder = None
    inside = running(None, [1] * 6)
    sequences = (first, last, ended, stops, searched, inside)
    before = [list(sequence.output) for sequence in sequences]
    tokens = np.full((6, 2), 5, dtype=np.int32)
    deltas, rest = appender.append_inside(sequences, tokens, np.arange(6) == 3)
    assert rest == [0, 1, 2, 3, 4]
    assert [delta.pieces for delta in deltas] == [["", ""]]
    assert [sequence.output for sequence in sequences] == [*before[:5], [1] * 6 + [5, 5]]


def test_what_does_not_fit_is_refused() -> None:
    appender = Appender(Sequence, Delta, State.FINISHED)
    with pytest.raises(ValueError, match="a row for each sequence"):
        appender.append_inside((), np.zeros((1, 1), np.int32), np.zeros(1, bool))
    with pytest.raises(TypeError, match="must be Sequence objects"):
        appender.append_inside((object(),), np.zeros((1, 1), np.int32), np.zeros(1, bool))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state is not one of the class's __slots__"):
        Appender(type("Other", (), {"state": 1}), Delta, State.FINISHED)
