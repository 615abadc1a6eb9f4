"""LLM with several threads and interrupts, and what it refuses."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from megavm import LLM, SamplingParams
from megavm.chat_template import Message
from megavm.outputs import GenerationError


def test_a_thread_that_waits_comes_between_two_steps_of_another_one() -> None:
    """Not after hundreds of them: the thread that steps would take the lock again at once."""
    with LLM("stories", workers=1, overlap=True, max_num_seqs=2) as llm:
        params = SamplingParams(max_tokens=300, temperature=0.0, ignore_eos=True)
        run = llm.runner._step.run

        def slow(*arguments: Any, **options: Any) -> None:
            time.sleep(0.01)  # without the interpreter, as a larger model takes it
            run(*arguments, **options)

        llm.runner._step.run = slow  # type: ignore[method-assign]
        thread = threading.Thread(target=llm.generate, args=("Once upon a time", params))
        thread.start()
        waited: list[int] = []
        while thread.is_alive() and len(waited) < 20:
            before = llm.engine.counters.steps
            llm.logits([1, 2, 3])
            waited.append(llm.engine.counters.steps - before)
        thread.join()
    assert len(waited) == 20
    assert max(waited) <= 3


def test_deltas_that_an_interrupt_leaves_reach_the_threads_that_wait_for_them() -> None:
    """Or their request ends; none of them waits for ever."""
    with LLM("stories", machine="cpu", workers=1, max_num_seqs=4) as llm:
        params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        right = llm.generate("Once", params)[0].outputs[0].token_ids
        interrupted, main = threading.Event(), threading.main_thread()

        class Sinks(dict[Any, Any]):
            """Finds what a request's deltas go to, but once in the main thread."""

            def get(self, key: Any, default: Any = None) -> Any:
                mine = threading.current_thread() is main
                if mine and key in foreign and not interrupted.is_set():
                    interrupted.set()
                    raise KeyboardInterrupt
                return super().get(key, default)

        foreign: set[Any] = set()
        llm._sinks = Sinks()
        found: list[Any] = []

        def other() -> None:
            chunks = llm.stream("Once", params)
            found.append(next(chunks))
            foreign.update(llm._sinks)
            with contextlib.suppress(GenerationError):
                found.extend(chunks)

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        while not foreign:
            time.sleep(0.001)
        with contextlib.suppress(KeyboardInterrupt):
            while not interrupted.is_set():
                llm.generate("The", params)
        thread.join(20)
        assert not thread.is_alive()
        tokens = [chunk.token_id for chunk in found if chunk.token_id is not None]
        assert tokens == right[: len(tokens)]
        assert llm.generate("Once", params)[0].outputs[0].token_ids == right


def test_a_closed_llm_says_so() -> None:
    llm = LLM("stories", machine="cpu", workers=1, max_num_seqs=1)
    llm.close()
    messages: list[Message] = [{"role": "user", "content": "Hello"}]
    calls: list[Callable[[], object]] = [
        lambda: llm.generate("Once"),
        lambda: llm.chat(messages),
        lambda: llm.stream("Once"),
        lambda: llm.stream_chat(messages),
        lambda: llm.logits([1]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="this LLM is closed"):
            call()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 10_000}, "max_num_batched_tokens is 512, less than max_num_seqs, 10000"),
        (
            {"max_num_seqs": 10**9, "max_num_batched_tokens": 10**9},
            "what the host writes for max_num_seqs sequences",
        ),
        ({"num_blocks": 10**10}, "the KV cache takes .* GiB and what the host writes"),
        ({"kv_cache_bytes": 10**15}, "the KV cache takes .* GiB and what the host writes"),
    ],
)
def test_sizes_beyond_the_memory_are_refused_before_anything_is_allocated(
    sizes: dict[str, int], message: str
) -> None:
    phases: list[str] = []
    with pytest.raises(ValueError, match=message):
        LLM("stories", machine="cpu", progress=lambda phase, *_: phases.append(phase), **sizes)  # type: ignore[arg-type]
    assert "reading weights" not in phases


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": "x"}, "seed must be an integer, not 'x'"),
        ({"prefix_caching": "no"}, "prefix_caching must be True or False, not 'no'"),
        ({"overlap": 1}, "overlap must be True or False, not 1"),
        ({"tpot_limit_ms": "a"}, "tpot_limit_ms must be a positive number, not 'a'"),
        ({"tpot_limit_ms": 0}, "tpot_limit_ms must be a positive number, not 0"),
    ],
)
def test_options_of_a_wrong_type_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        LLM("stories", **options)


def test_a_recorder_must_be_one() -> None:
    message = "record takes a Recorder or None, not a int"
    with (
        LLM("stories", machine="cpu", workers=1, max_num_seqs=1) as llm,
        pytest.raises(ValueError, match=message),
    ):
        llm.record(5)  # type: ignore[arg-type]
