"""An interrupt such as Ctrl-C at any line of the engine: nothing hangs, only what ran is lost."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import toy_runner as toy
from engine_runs import EOS, alone, assert_idle, greedy, run_all

from megavm import SamplingParams
from megavm.scheduler.engine.engine import Engine
from megavm.scheduler.engine.restriction import Restriction

VOCABULARY = 40


class Interrupt:
    """Raises KeyboardInterrupt at one of the lines of the engine that the caller's thread runs."""

    def __init__(self, line: int) -> None:
        self.left = line  # lines until then

    def __enter__(self) -> None:
        sys.settrace(self.trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if "/scheduler/engine/" not in frame.f_code.co_filename:
            return None
        if event == "line" and self.left > 0:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
        return self.trace


def add_requests(engine: Engine, draw: random.Random, longest: int) -> None:
    for _ in range(6):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]
        params = SamplingParams(
            max_tokens=draw.choice([1, 3, 8, 17]),
            n=draw.choice([1, 1, 2]),
            temperature=draw.choice([0.0, 0.7]),
            stop=draw.choice([None, "ab"]),
            prompt_logprobs=draw.choice([None, None, 2]),
        )
        words = draw.choice([(), (), ((3, 9),)])
        engine.add(prompt, params, restriction=Restriction(bad_words=words))


@pytest.mark.parametrize("machine", ["plain", "thread", "queue"])
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_the_next_request_runs_whatever_line_was_interrupted(machine: str, first: int) -> None:
    interrupted = 0
    for seed in range(first, first + 30):
        draw = random.Random(f"{machine} {seed}")
        runner = toy.ToyRunner(
            vocab_size=VOCABULARY,
            max_num_seqs=draw.choice([2, 4]),
            max_logit_rows=4,
            max_model_len=48,
            max_num_batched_tokens=draw.choice([6, 16]),
            num_blocks=draw.choice([8, 16, 32]),
            block_size=draw.choice([2, 4]),
            queues=machine == "queue",
        )
        engine = Engine(
            runner,
            eos_token_ids=EOS,
            new_decoder=toy.ToyDecoder,
            overlap=machine != "plain",
            steps_per_launch=draw.choice([1, 3]),
        )
        room = min(runner.max_model_len - 18, runner.num_blocks * runner.block_size // 2)
        try:
            with Interrupt(draw.randint(1, 3000)):
                add_requests(engine, draw, room)
                run_all(engine)
        except KeyboardInterrupt:
            interrupted += 1
        run_all(engine)  # requests that had not begun
        assert_idle(engine)
        prompt = list(range(1, 6))
        request = engine.add(prompt, greedy(max_tokens=4))
        assert run_all(engine)[request.id, 0].outcome() == alone(
            prompt, greedy(max_tokens=4), 0, runner
        )
        assert_idle(engine)
        engine.close()
    assert interrupted > 20
