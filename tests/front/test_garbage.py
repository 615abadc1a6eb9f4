"""Garbage collections do not look at the whole heap while texts are generated."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from megavm import LLM, SamplingParams
from megavm.garbage import frozen_heap, is_frozen
from megavm.scheduler.engine.sequence import Sequence

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


class Node:
    """Refers to itself, so that only a collection frees it."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", dtype="float32", max_num_seqs=8) as model:
        model.generate(["Once"] * 8, PARAMS)
        yield model


def generate(llm: LLM) -> None:
    llm.generate(["Once upon a time"] * 16, PARAMS)


def test_the_heap_is_frozen_while_texts_are_generated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    step = llm._step

    def noted(has_enough: Callable[[], bool]) -> None:
        frozen.append(gc.get_freeze_count())
        step(has_enough)

    monkeypatch.setattr(llm, "_step", noted)
    generate(llm)
    assert len(frozen) > 40
    # With torch loaded there are some 200,000 objects.
    assert min(frozen) > 50_000
    assert not is_frozen()


def test_an_error_thaws_the_heap(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "_step", lambda has_enough: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(llm)
    assert not is_frozen()


def test_the_last_call_thaws_the_heap() -> None:
    go_on, entered = threading.Event(), threading.Event()

    def other() -> None:
        with frozen_heap():
            entered.set()
            go_on.wait(30)

    thread = threading.Thread(target=other)
    with frozen_heap():
        thread.start()
        assert entered.wait(30)
    assert is_frozen()
    go_on.set()
    thread.join()
    assert not is_frozen()


def test_what_the_interpreter_freezes_when_it_starts_is_no_frozen_heap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python 3.12 does so with 375 objects, where the heap was never frozen for that reason."""
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 375)
    calls: list[str] = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.setattr(gc, "unfreeze", lambda: calls.append("unfreeze"))
    with frozen_heap():
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]


def test_what_the_caller_has_frozen_stays_frozen(llm: LLM) -> None:
    gc.freeze()
    try:
        generate(llm)
        assert is_frozen()
    finally:
        gc.unfreeze()


def test_what_comes_later_is_collected_meanwhile() -> None:
    """However long calls overlap: only what was there at first waits."""
    with frozen_heap():
        node = Node()
        alive = weakref.ref(node)
        del node
        gc.collect()
        assert alive() is None


def test_sequences_are_freed_without_a_collection(llm: LLM) -> None:
    """Those of requests that end, and of a stream that is closed."""

    def count() -> int:
        return sum(type(found) is Sequence for found in gc.get_objects())

    gc.collect()
    before = count()
    gc.disable()
    try:
        generate(llm)
        llm.generate("Once", SamplingParams(n=3, temperature=1.0, max_tokens=5, logprobs=1))
        stream = llm.stream("Once upon a time", PARAMS)
        next(stream)
        stream.close()
        llm.generate("Once", PARAMS)  # the engine has forgotten the stream after a step
        assert count() == before
    finally:
        gc.enable()
