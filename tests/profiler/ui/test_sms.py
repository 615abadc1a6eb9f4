"""Imbalance by SM: the summary, statistics by SM, and the search."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from synthetic import synthetic_trace
from ui.page import Viewer, nanoseconds, table_rows

from megavm.profiler.summary import summary
from megavm.profiler.trace import Trace


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in which workers are on other SMs in each step, and both SMs of a TPC are slow."""
    path = tmp_path_factory.mktemp("sms") / "moving.megatrace"
    synthetic_trace(132, layers=4, steps=8, sms=True, slow_sms=(56, 57)).save(path)
    return path


def test_the_summary_says_of_sms_what_the_report_says(viewer: Viewer, moving: Path) -> None:
    facts = summary(Trace.load(moving))
    viewer.open(moving)
    text = viewer.panel()
    assert facts["slow_sms"].startswith("Both SMs of a TPC (SM 56 and 57) took ")
    assert facts["slow_sms"] in text
    page = viewer.page.locator(".page:visible")
    assert page.locator(".strip").nth(2).locator("button").count() == 132
    rows = table_rows(page.locator("table", has_text="equal work").locator("tbody"))
    by_time = sorted(facts["sms"], key=lambda row: -row["ns"])[:8]
    assert list(rows) == [str(row["sm"]) for row in by_time]
    assert {"56", "57"} == set(list(rows)[:2])
    for row in by_time:
        _, time, of_mean, equal, last = rows[str(row["sm"])]
        assert nanoseconds(time) == pytest.approx(row["ns"], rel=0.01)
        assert of_mean.split()[0] == f"{row['of_mean']:.2f}"
        assert equal.split()[0] == f"{row['equal_work']:.2f}"
        assert float(last.rstrip("%")) == pytest.approx(100 * row["count"] / row["of"], abs=0.6)
    page.locator("table", has_text="equal work").locator("tbody tr").first.click()
    assert viewer.run("app.query") == f"sm:{by_time[0]['sm']}"


def test_statistics_and_search_know_sms(viewer: Viewer, moving: Path) -> None:
    trace = Trace.load(moving)
    assert trace.record_sm is not None
    viewer.open(moving).tab("Statistics")
    choices = viewer.page.locator(".page:visible select")
    choices.nth(0).select_option("trace")
    choices.nth(1).select_option("sm")
    viewer.settle()
    rows = table_rows(viewer.page.locator(".page:visible tbody").first)
    assert len(rows) == 132
    assert rows["SM 7"][1] == f"{int((trace.record_sm == 7).sum()):,}"
    viewer.page.locator(".page:visible tbody").first.locator("tr", has_text="SM 57").click()
    assert viewer.run("app.query") == "sm:57"
    assert viewer.run("app.matches.records.length") == int((trace.record_sm == 57).sum())
    viewer.run("app.search('sm:4-5 step:2')")
    wanted = np.isin(trace.record_sm, (4, 5)) & (trace.record_step == 2)
    assert viewer.run("app.matches.records.length") == int(wanted.sum())
    viewer.run("app.select(pane, pane.trace.byFile[100], true)")
    assert f"SM\n{trace.record_sm[100]}\n" in viewer.tab("Instruction")


def test_a_trace_without_sms_shows_none(opened: Viewer) -> None:
    assert "SM" not in opened.panel()
    opened.tab("Statistics")
    assert opened.page.locator(".page:visible option[value=sm]").get_attribute("hidden") is not None
    opened.run("app.search('sm:4')")
    opened.settle()
    assert "does not say on which SM" in opened.page.locator("body").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_sms_are_pictured(make_viewer: Callable[..., Viewer], moving: Path, scheme: str) -> None:
    viewer = make_viewer(color_scheme=scheme).goto().open(moving)
    heading = viewer.page.get_by_role("heading", name="Workers, from the first to the last")
    heading.evaluate("element => element.scrollIntoView()")
    viewer.screenshot(f"sms_{scheme}")
