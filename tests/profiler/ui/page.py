"""The page in a tab of a browser, and what a user does with it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megavm.profiler.viewer import PAGE, make_server

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

# The step of median duration in the traces of conftest.py, which the page shows first.
STEP = 1


@contextmanager
def served(*paths: Path) -> Iterator[int]:
    """The port of a server of the page with these traces."""
    with make_server(paths) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


# A frame of the browser's own clock, which no test sets: sizes that changed are told in it, to the
# page's observer first, as that was made before this one.
FRAME = """new Promise(done => {
  const observer = new ResizeObserver(() => { observer.disconnect(); done(); });
  observer.observe(document.body);
})"""


# Notes the texts that are drawn, and where, in `seenTexts`.
HEAR = """() => { const seen = window.seenTexts = [];
  const before = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    seen.push([text, x, y]); return before.call(this, text, x, y); }; }"""


class Viewer:
    """A tab that shows the page. What goes wrong in it (`problems`) fails the test."""

    def __init__(self, page: Page, screenshots: Path) -> None:
        self.page = page
        self.problems: list[str] = []
        self._screenshots = screenshots
        page.on("pageerror", lambda error: self.problems.append(f"exception: {error}"))
        page.on("console", self._hear)
        page.on("dialog", lambda dialog: self._say(f"dialog: {dialog.message}", dialog))
        page.on("request", self._ask)

    def _hear(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"{message.type}: {message.text}")

    def _say(self, text: str, dialog: Any) -> None:
        self.problems.append(text)
        dialog.dismiss()

    def _ask(self, request: Any) -> None:
        allowed = ("file:", "data:", "blob:", "http://127.0.0.1:")
        if not request.url.startswith(allowed):
            self.problems.append(f"request of {request.url}")

    def goto(self, where: Path | str = PAGE) -> Viewer:
        self.page.goto(where.as_uri() if isinstance(where, Path) else where)
        return self

    def wait(self, condition: str, seconds: float = 20) -> None:
        """Until a condition in the page holds; the page's policy forbids Playwright's own way."""
        end = time.monotonic() + seconds
        while not self.page.evaluate(condition):
            assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Until glides, delays of the panel and of the address are over, frames included."""
        self.page.clock.run_for(500)
        self.page.evaluate(FRAME)
        self.page.clock.run_for(50)

    def open(self, *traces: Path) -> Viewer:
        """Open traces as a user does, the second one beside the first."""
        for number, trace in enumerate(traces, int(self.run("app.panes.length"))):
            name = "Compare" if number else "Open a trace"
            with self.page.expect_file_chooser() as chooser:
                self.page.get_by_role("button", name=name, exact=True).first.click()
            chooser.value.set_files(trace)
            self.wait(f"profiler.panes.length === {number + 1}")
        self.settle()
        return self

    def run(self, expression: str) -> Any:
        """Evaluate an expression in which `app` is the application and `pane` its first pane."""
        return self.page.evaluate(
            f"(() => {{ const app = profiler, pane = app.panes[0]; return {expression}; }})()"
        )

    def show(self, begin: float, end: float) -> None:
        self.page.evaluate(
            "([a, b]) => { profiler.motion.stop(); profiler.view.show(a, b);"
            " profiler.changed('view'); }",
            [begin, end],
        )
        self.settle()

    def view(self) -> tuple[float, float]:
        begin, end = self.run("[app.view.begin, app.view.end]")
        return begin, end

    def point(self, record: int) -> tuple[float, float]:
        """Where the middle of a record's span is in the window."""
        x, y = self.run(
            f"(() => {{ const [a, b] = pane.trace.span({record});"
            " const box = app.stage.overlay.getBoundingClientRect();"
            " return [box.left + pane.xOf(app.view, (a + b) / 2),"
            f" box.top + pane.middleOf({record})]; }})()"
        )
        return x, y

    def record(self, worker: int, slot: int, step: int = 1) -> int:
        """Number of a record in the page."""
        return int(
            self.run(
                f"pane.trace.slot.findIndex((s, r) => s === {slot} &&"
                f" pane.trace.worker[r] === {worker} && pane.trace.step[r] === {step})"
            )
        )

    def tab(self, name: str) -> str:
        """Open a tab of the panel and return its text."""
        self.page.get_by_role("tab", name=name).click()
        self.settle()
        return self.panel()

    def panel(self) -> str:
        """The text of the tab that is open; it is drawn when the page has time for it."""
        end = time.monotonic() + 20
        while not (text := self.page.locator(".page:visible").inner_text()):
            assert time.monotonic() < end, "the panel is empty"
            time.sleep(0.02)
        return text

    def message(self) -> str:
        """The sentence on the page, empty when there is none."""
        message = self.page.locator("#message")
        return message.inner_text() if message.is_visible() else ""

    def screenshot(self, name: str) -> None:
        self.page.screenshot(path=self._screenshots / f"{name}.png")


def table_rows(body: Locator) -> dict[str, list[str]]:
    """The cells of a table's rows, by the first cell."""
    rows = body.locator("tr")
    texts = [rows.nth(i).locator("td").all_inner_texts() for i in range(rows.count())]
    return {cells[0]: cells for cells in texts}


def nanoseconds(text: str) -> float:
    """A time as the page writes it, such as "3.2 µs"."""
    value, unit = text.split()
    return float(value) * {"ns": 1, "µs": 1e3, "ms": 1e6}[unit]


def bytes_per_second(text: str) -> float:
    """A rate as the page writes it, such as "3.2 TB/s"."""
    value, unit = text.split()
    return float(value) * {"B/s": 1, "KB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}[unit]
