"""The built page in a browser, and traces to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from synthetic import synthetic_trace
from ui.page import Viewer

if TYPE_CHECKING:
    from playwright.sync_api import Browser

WIDTH, HEIGHT = 1600, 950


@pytest.fixture
def make_viewer(browser: Browser, screenshots: Path) -> Iterator[Callable[..., Viewer]]:
    """make_viewer(color_scheme="dark", ...) -> a viewer in a browser of its own."""
    made: list[tuple[Any, Viewer]] = []

    def make(**options: Any) -> Viewer:
        context = browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT}, accept_downloads=True, **options
        )
        context.clock.install()  # so that tests need not wait for delays of the page
        viewer = Viewer(context.new_page(), screenshots)
        made.append((context, viewer))
        return viewer

    yield make
    problems = [problem for _, viewer in made for problem in viewer.problems]
    for context, _ in made:
        context.close()
    assert not problems, problems


@pytest.fixture
def viewer(make_viewer: Callable[..., Viewer]) -> Viewer:
    return make_viewer().goto()


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`a`, and `b` of the same program with a slow phase and a slow worker."""
    directory = tmp_path_factory.mktemp("traces")
    synthetic_trace(132, layers=4, steps=3).save(directory / "a.megatrace")
    slower = synthetic_trace(132, layers=4, steps=3, slower={"o_proj": 2.5}, slow_worker=40)
    slower.save(directory / "b.megatrace")
    return {name: directory / f"{name}.megatrace" for name in ("a", "b")}


@pytest.fixture
def opened(viewer: Viewer, traces: dict[str, Path]) -> Viewer:
    """A viewer that shows trace `a`."""
    return viewer.open(traces["a"])
