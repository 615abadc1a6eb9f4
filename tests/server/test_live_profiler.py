"""The profiler's page of a real server: it records that server's steps and shows them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from serving import RunningServer, serving, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

KEY = "a key"
SHOWN = "window.profiler?.panes.length === 1"


@contextmanager
def working(server: RunningServer, **headers: str) -> Iterator[None]:
    """Prompts of 20 tokens and 50 tokens of output, one request after the other."""
    ended = threading.Event()
    body = {"model": "stories", "prompt": list(range(5, 25)), "max_tokens": 50, "ignore_eos": True}

    def work() -> None:
        while not ended.is_set():
            server.post("/v1/completions", body, **headers)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


def wait(page: Page, condition: str, seconds: float = 30) -> None:
    """Until a condition in the page holds; the page's policy forbids Playwright's own way."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"not true within {seconds} s: {condition}"
        time.sleep(0.02)


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    context = browser.new_context(
        color_scheme=request.param, viewport={"width": 1600, "height": 950}
    )
    page = context.new_page()
    problems: list[Any] = []
    page.on("pageerror", lambda error: problems.append(error))
    yield page
    context.close()
    assert not problems, problems


def record(page: Page, steps: int) -> None:
    page.get_by_label("steps to record").fill(str(steps))
    page.get_by_role("button", name="Record").click()


def test_the_page_records_with_the_key_and_tells_prefill_and_decode_apart(
    page: Page, screenshots: Path
) -> None:
    name = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light'")
    with serving({"api_keys": (KEY,)}) as server, working(server, authorization=f"Bearer {KEY}"):
        page.goto(f"http://127.0.0.1:{server.port}/profiler")
        key = page.get_by_label("API key")
        assert key.is_hidden()
        page.screenshot(path=screenshots / f"live_empty_{name}.png")
        record(page, 120)
        key.wait_for()
        refused = page.get_by_role("alert").get_by_text("API key")
        refused.wait_for()
        # The sentence stands beside the key.
        label, sentence = key.bounding_box(), refused.bounding_box()
        assert label is not None
        assert sentence is not None
        assert abs(label["y"] + label["height"] / 2 - sentence["y"] - sentence["height"] / 2) < 8
        assert 0 < sentence["x"] - label["x"] - label["width"] < 40
        page.screenshot(path=screenshots / f"live_refused_{name}.png")
        key.fill(KEY)
        record(page, 120)
        wait(page, SHOWN)
        assert refused.count() == 0
        assert page.evaluate("profiler.main.trace.steps") == 120
        rows, prompts, sequences = page.evaluate(
            "['stepTokens', 'stepPromptRows', 'stepSequences']"
            ".map((name) => [...profiler.main.trace[name]])"
        )
        # A prompt or the rest of it after the cached prefix, then one row a step.
        assert set(sequences) == {1}
        assert {prompt for row, prompt in zip(rows, prompts, strict=True) if row == 1} == {0}
        assert [row for row in rows if row > 1] == [prompt for prompt in prompts if prompt]
        page.get_by_role("tab", name="Trace").click()
        page.get_by_role("button", name="prefill").wait_for()
        page.screenshot(path=screenshots / f"live_trace_{name}.png")


def test_the_page_refreshes_until_it_is_stopped(page: Page) -> None:
    with serving() as server:
        page.goto(f"http://127.0.0.1:{server.port}/profiler")
        page.get_by_label("steps to record").fill("5")
        with working(server):
            page.get_by_label("refresh").check()  # which begins to record
            wait(page, SHOWN)
            # One looks at the beginning of the step, at taller rows. A hundredth of it: a busy
            # machine may take many times as long for this step as for the next.
            page.evaluate(
                "() => { const app = profiler, { trace, step, rows } = app.main;"
                " window.before = trace; app.motion.stop();"
                " window.part = (trace.stepEnd[step] - trace.stepBegin[step]) / 100;"
                " app.view.show(trace.stepBegin[step], trace.stepBegin[step] + window.part);"
                " app.main.fitRows = false; rows.setRowHeight(30); rows.toggle(0);"
                " app.changed('view'); }"
            )
            wait(page, "profiler.main.trace !== window.before")
            begin, span, height, opened = page.evaluate(
                "() => { const { view, main } = profiler; return [view.begin"
                " - main.trace.stepBegin[main.step], view.span / window.part,"
                " main.rows.rowHeight, [...main.rows.openWorkers]]; }"
            )
            assert begin == pytest.approx(0, abs=1)
            assert span == pytest.approx(1, rel=1e-6)
            assert (height, opened) == (30, [0])
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Record").wait_for()
        # Nobody records any more: the server sees that the page is gone.
        wait_until(lambda: server.engine.runner._recorder is None)  # type: ignore[attr-defined]


def test_a_server_that_is_gone_is_one_sentence(page: Page) -> None:
    with serving() as server:
        page.goto(f"http://127.0.0.1:{server.port}/profiler")
    record(page, 5)
    page.get_by_role("alert").get_by_text("The server does not answer").wait_for()
