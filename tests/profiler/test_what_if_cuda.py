"""benchmarks/what_if_cuda.py: predictions for other exchanges and splits against a simulation."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from simulator import Machine, Task, layered, simulate, step_time
from test_replay import PRODUCTS, STREAMING

from megavm.profiler.replay import Change, Replay

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "what_if_cuda.py"
WORDS = tuple((name, work, pages, True) for name, work, pages, _ in STREAMING)


def with_attention(
    splits: int,
    merge: bool,
    pages: int = 12,
    share: float = 2000.0,
    down_pages: int = 4,
    burst: float = 0.0,
) -> Machine:
    """Layers of 12 workers whose two heads are cut into ``splits``, with a merge of each head.

    A head has ``pages``, and a twelfth of it takes ``share`` ns. ``down_pages``: of an instruction
    of the last product. ``burst``: see Machine.
    """
    workers = 12
    queues: list[list[Task]] = [[] for _ in range(workers)]
    tagged: list[bool] = []
    # Twelve parts of two heads take unequal times: splits are as slow as their parts together.
    parts = np.random.default_rng(5).uniform(0.5 * share, 1.5 * share, 24)

    def phase(name: str, tasks: dict[int, tuple[float, int]]) -> None:
        group = len(tagged)
        tagged.append(True)
        for worker, (work, pages) in tasks.items():
            waits = (group - 1,) if group else ()
            queues[worker].append(Task(name, work, group, waits, pages))

    for layer in range(4):
        own = f"layers.{layer}"
        phase(f"{own}.qkv", dict.fromkeys(range(workers), (1500.0, 2)))
        works = parts.reshape(2 * splits, -1).sum(axis=1).tolist()
        split = {worker: (work, pages // splits) for worker, work in enumerate(works)}
        phase(f"{own}.attention", split)
        if merge:
            phase(f"{own}.attention.merge", dict.fromkeys((10, 11), (600.0, 0)))
        phase(f"{own}.down_proj", dict.fromkeys(range(workers), (4000.0, down_pages)))
    return Machine(tuple(map(tuple, queues)), tuple(tagged), store=800.0, burst=burst)


def run(
    folder: Path, technique: str, name: str, base: Machine, changed: Machine, back: bool = False
) -> list[str]:
    """What the script says of a variant: the cells of its row, or of that of the way back."""
    files = {"base": "base.megatrace", "trace": "changed.megatrace"}
    for machine, file in zip((base, changed), files.values(), strict=True):
        simulate(machine).save(folder / file)
    row = {"technique": technique, "name": name, "context": 1, **files}
    (folder / "traces.json").write_text(json.dumps([row]))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *["--back"] * back],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines()[2:] if line.startswith("|")]
    return [cell.strip() for cell in rows[-1].split("|")[1:-1]]


def effects(cells: list[str]) -> tuple[float, float]:
    """The measured and the predicted effect, in percent."""
    return float(cells[4].rstrip("%")), float(cells[5].rstrip("%"))


@pytest.mark.parametrize(
    "phases", [PRODUCTS, STREAMING, WORDS], ids=["products", "streaming", "words"]
)
def test_slower_exchanges_are_predicted(
    tmp_path: Path, phases: tuple[tuple[str, float, int, bool], ...]
) -> None:
    base = layered(8, 4, phases, seed=3, hop=700.0)
    barriers = dataclasses.replace(base, tagged=(False,) * len(base.tagged), hop=2200.0)
    measured, predicted = effects(run(tmp_path, "exchange", "barriers", base, barriers))
    assert measured > 10
    assert predicted == pytest.approx(measured, rel=0.15)


def test_exchanges_with_another_spread_are_predicted(tmp_path: Path) -> None:
    base = layered(24, 4, WORDS, seed=3, hop=300.0, stray=1500.0)
    tagged = (False,) * len(base.tagged)
    barriers = dataclasses.replace(base, tagged=tagged, hop=2600.0, stray=300.0)
    measured, predicted = effects(run(tmp_path, "exchange", "barriers", base, barriers))
    assert measured > 10
    assert predicted == pytest.approx(measured, rel=0.15)


def with_late_loads() -> tuple[Machine, Machine]:
    """With words and with barriers; attention has much to load, once its barriers are complete."""
    words = layered(8, 4, WORDS, seed=3, hop=700.0)
    queues = tuple(
        tuple(
            dataclasses.replace(task, pages=8, late=True) if "attention" in task.label else task
            for task in queue
        )
        for queue in words.queues
    )
    base = dataclasses.replace(words, queues=queues)
    return base, dataclasses.replace(base, tagged=(False,) * len(base.tagged), hop=2200.0)


def test_loads_that_wait_for_barriers_are_predicted(tmp_path: Path) -> None:
    measured, predicted = effects(run(tmp_path, "exchange", "barriers", *with_late_loads()))
    assert measured > 20
    assert predicted == pytest.approx(measured, rel=0.03)


def test_loads_that_no_longer_wait_for_barriers_are_predicted(tmp_path: Path) -> None:
    cells = run(tmp_path, "exchange", "barriers", *with_late_loads(), back=True)
    assert cells[1] == "barriers, back"
    measured, predicted = effects(cells)
    assert measured < -20
    assert predicted == pytest.approx(measured, rel=0.03)


def test_attention_in_one_piece_is_predicted(tmp_path: Path) -> None:
    base, whole = with_attention(4, merge=True), with_attention(1, merge=False)
    measured, predicted = effects(run(tmp_path, "splits of attention", "none", base, whole))
    assert measured > 30
    assert predicted == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize(
    ("pages", "burst", "unchanged", "error"),
    [(24, 1.4, 1.14, 0.07), (32, 3.0, 1.3, 0.15), (48, 1.4, 1.15, 0.03), (60, 2.0, 1.2, 0.04)],
)
def test_few_loaders_share_the_memory(
    pages: int, burst: float, unchanged: float, error: float
) -> None:
    """Two workers that load much more than a ring get more than their even share.

    With even shares all of the time, these steps are replayed as 1.16 to 1.51 times as long, and
    with half of the bytes 0.04 to 0.21 too short. What the two still lack for the next product
    comes at an even share, so a part of that is left.
    """
    whole = with_attention(1, merge=False, pages=pages, share=200.0, down_pages=24, burst=burst)
    replay = Replay(simulate(whole), 0)
    recorded, half = replay.recorded, Change("bytes", "layers.*.attention", 0.5)
    assert 0.99 < replay._replay([()], replay._way).step[0] / recorded < unchanged
    queues = tuple(
        tuple(
            dataclasses.replace(task, pages=pages // 2) if "attention" in task.label else task
            for task in queue
        )
        for queue in whole.queues
    )
    truth = step_time(dataclasses.replace(whole, queues=queues)) / recorded
    assert replay.run([(half,)]).step[0] / recorded == pytest.approx(truth, abs=error)


def test_attention_in_splits_is_predicted(tmp_path: Path) -> None:
    whole, splits = with_attention(1, merge=False), with_attention(4, merge=False)
    measured, predicted = effects(run(tmp_path, "splits of attention", "4", whole, splits))
    assert measured < -30
    assert predicted == pytest.approx(measured, rel=0.03)


def test_a_shorter_ring_is_predicted(tmp_path: Path) -> None:
    base = layered(8, 4, STREAMING, seed=3, ring=13)
    short = dataclasses.replace(base, ring=4)
    measured, predicted = effects(run(tmp_path, "ring of pages", "4 pages", base, short))
    assert measured > 3
    assert predicted == pytest.approx(measured, rel=0.03)
