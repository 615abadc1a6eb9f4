"""The page names the workers of several ranks by rank, and says which rank came last."""

from __future__ import annotations

from pathlib import Path

from test_ranks import gather, recorded
from ui.page import Viewer, table_rows


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
    body.locator("tr").first.click()
    assert opened.run("app.query") == "phase:gather"
    assert opened.run("app.matches.records.length") > 0
    opened.page.keyboard.press("Escape")
    opened.screenshot("ranks")
