"""Garbage collections: full ones wait while texts are generated, and requests leave none behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megavm import LLM, SamplingParams
from megavm.garbage import no_full_collections
from megavm.scheduler.engine.sequence import Sequence

PARAMS = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("stories", dtype="float32", max_num_seqs=8) as model:
        model.generate(["Once"] * 8, PARAMS)
        yield model


@pytest.fixture
def eager() -> Iterator[None]:
    """Full collections as soon as something has become old."""
    before = gc.get_threshold()
    gc.freeze()
    gc.collect()  # so that few objects count as old
    gc.set_threshold(20, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


def full_collections(work: Callable[[], object]) -> list[bool]:
    """Whether they are held off, at each full collection in `work`."""
    found: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            found.append(gc.get_threshold()[2] > 1_000_000)

    gc.callbacks.append(note)
    try:
        work()
    finally:
        gc.callbacks.remove(note)
    return found


def generate(llm: LLM) -> None:
    llm.generate(["Once upon a time"] * 16, PARAMS)


@pytest.mark.usefixtures("eager")
def test_there_are_no_full_collections_while_texts_are_generated(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[bool] = []
    step = llm._step
    monkeypatch.setattr(llm, "_step", lambda: steps.append(bool(full_collections(step))))
    assert not any(full_collections(lambda: generate(llm)))
    assert len(steps) > 40
    assert not any(steps)
    # They come again afterwards, and would have come without that.
    kept: list[Any] = []
    assert full_collections(lambda: kept.extend([] for _ in range(1000)))


def test_the_threshold_comes_back_when_the_last_one_is_over() -> None:
    before = gc.get_threshold()
    first, second = no_full_collections(), no_full_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold()[:2] == before[:2]
    assert gc.get_threshold()[2] > 1_000_000
    second.__exit__(None, None, None)
    assert gc.get_threshold() == before


def test_an_error_brings_the_threshold_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    monkeypatch.setattr(llm, "_step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        generate(llm)
    assert gc.get_threshold() == before


def test_sequences_are_freed_without_a_collection(llm: LLM) -> None:
    gc.collect()
    gc.disable()
    try:
        generate(llm)
        assert not [found for found in gc.get_objects() if type(found) is Sequence]
    finally:
        gc.enable()
