"""The page names the workers of several ranks by rank, and says which rank came last."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from test_ranks import gather, recorded
from ui.page import HEAR, Viewer, table_rows

from megavm.profiler.report import report


def test_workers_of_ranks_are_named_by_rank_and_the_summary_says_who_came_last(
    viewer: Viewer, tmp_path: Path
) -> None:
    path = tmp_path / "two.megatrace"
    recorded(gather(True), [1, 0, 1, 1]).save(path)
    opened = viewer.open(path)
    names = opened.run("[0, 1, 2, 3].map((w) => pane.trace.workerName(w))")
    assert names == ["0:0", "0:1", "1:0", "1:1"]
    assert "rank 1 came last in 75% of 8 waits" in opened.panel()
    body = opened.page.locator(".page:visible tbody", has_text="rank 1")
    rank, part, waits = table_rows(body)["gather"][1:4]
    assert (rank, part.replace("\u202f", "").replace(" ", ""), waits) == ("rank 1", "75.0%", "8")
    # Of the waits for a peer, those while rank 0, and rank 1, came last.
    assert [cell.replace("\u202f", "") for cell in table_rows(body)["gather"][6:]] == [
        "25 %",
        "75 %",
    ]
    body.locator("tr").first.click()
    assert opened.run("app.query") == "phase:gather"
    assert opened.run("app.matches.records.length") > 0
    opened.page.keyboard.press("Escape")
    opened.screenshot("ranks")


@pytest.mark.parametrize(
    ("query", "workers"),
    [
        ("worker:1:1", [3]),
        ("worker:1:0-1", [2, 3]),
        ("worker:0:1,1:0", [1, 2]),
        ("worker:2", [2]),
        ("rank:1", [2, 3]),
        ("sm:1:3", [2, 3]),
        ("sm:3", [0, 1, 2, 3]),
    ],
)
def test_search_knows_ranks(viewer: Viewer, tmp_path: Path, query: str, workers: list[int]) -> None:
    path = tmp_path / "two.megatrace"
    trace = recorded(gather(True), [1, 0, 1, 1])
    own = dataclasses.replace(trace, record_sm=np.full(trace.num_records, 3, np.int32))
    own.save(path)
    opened = viewer.open(path)
    opened.run(f"app.search({query!r})")
    opened.settle()
    found = opened.run("[...new Set(Array.from(app.matches.records, (r) => pane.trace.worker[r]))]")
    assert sorted(found) == workers


def test_statistics_have_a_row_for_each_rank_that_leads_to_it(
    viewer: Viewer, tmp_path: Path, traces: dict[str, Path]
) -> None:
    path = tmp_path / "two.megatrace"
    recorded(gather(True), [1, 0, 1, 1]).save(path)
    opened = viewer.open(path)
    opened.page.get_by_role("tab", name="Statistics").click()
    for grouping, name, query in (
        ("rank", "rank 1", "rank:1"),
        ("worker", "worker 1:0", "worker:1:0"),
    ):
        opened.page.locator(".choices select").nth(1).select_option(grouping)
        opened.settle()
        opened.page.locator(".page:visible tbody tr", has_text=name).first.click()
        opened.settle()
        assert opened.run("app.query") == query
        assert opened.run("app.matches.records.length") > 0
    opened.screenshot("ranks-statistics")


def test_the_page_says_how_far_the_clocks_of_ranks_were_apart(
    viewer: Viewer, tmp_path: Path
) -> None:
    path = tmp_path / "two.megatrace"
    recorded(gather(True), [1, 0]).save(path)
    opened = viewer.open(path)
    assert "that of rank 1 was -340 ns off, give or take 25" in opened.panel()
    opened.page.get_by_role("tab", name="Trace").click()
    opened.settle()
    text = " ".join(opened.panel().replace("\u202f", " ").split())
    assert "clock of rank 1 \u2212340 ns, give or take 25 ns" in text
    assert "bandwidth unknown" in text


def test_a_trace_of_one_rank_has_no_rows_of_ranks(opened: Viewer) -> None:
    opened.page.get_by_role("tab", name="Statistics").click()
    opened.settle()
    options = opened.page.locator(".choices select").nth(1).locator("option")
    hidden = options.evaluate_all("(all) => all.filter((o) => o.hidden).map((o) => o.value)")
    assert hidden == ["sm", "rank"]


def test_the_name_of_a_rank_leaves_the_names_of_roles(viewer: Viewer, tmp_path: Path) -> None:
    path = tmp_path / "two.megatrace"
    trace = recorded(gather(True), [1, 0])
    noted = [event.name for event in trace.events]
    trace.times[noted.index("fetched")] = trace.event("begin")
    trace.save(path)
    opened = viewer.open(path)
    opened.run("(pane.rows.toggle(2, true), app.changed('rows'))")
    opened.settle()
    opened.page.evaluate(HEAR)
    opened.run("(app.changed('view'), app.flush())")
    seen = opened.page.evaluate("seenTexts")
    top, bottom = opened.run("[pane.yOf(2), pane.yOf(3)]")
    inside = [(text, y) for text, x, y in seen if x < 104 and top < y < bottom]
    names = [text for text, _ in sorted(inside, key=lambda name: name[1])]
    assert "rank 1" in names
    assert "\u25be 1:0" in names
    assert "controller" in names
    assert "consumer" in names
    # The longest name of a role has its line for itself.
    at = dict(inside)
    assert abs(at["rank 1"] - at["controller"]) >= 11
    assert abs(at["rank 1"] - at["\u25be 1:0"]) >= 11
    opened.screenshot("rank-roles")


def test_a_bandwidth_that_seems_to_be_that_of_one_gpu_is_said(
    viewer: Viewer, tmp_path: Path
) -> None:
    trace = recorded(gather(True), [1, 0])
    program = dataclasses.replace(trace.programs[0], load_bytes=trace.programs[0].bytes)
    trace = dataclasses.replace(trace, programs=(program,))
    rate = report(trace, 0)["bandwidth"]["streamed"] / 1.9
    machine = {**trace.machine, "name": "cuda", "bandwidth": rate}
    dataclasses.replace(trace, machine=machine).save(tmp_path / "one.megatrace")
    viewer.open(tmp_path / "one.megatrace")
    viewer.run("app.setStep(0, true)")
    text = viewer.tab("Statistics")
    assert "190.0 % of ceiling, which seems to be that of one GPU" in text
    assert "caches" not in text
