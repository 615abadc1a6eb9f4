"""How smooth the page is with a million spans. The times are printed and kept with the screenshots.

Two shared cores without a GPU draw here; the limits leave room for their bad days. A page that
made an element or a draw call per span would be two orders of magnitude above them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from synthetic import synthetic_trace
from ui.page import Viewer

SPANS = 1_000_000
WORKERS, LAYERS, STEPS = 132, 16, 24

# Move the view with every frame for `n` frames; medians, 95th percentiles and maxima in ms.
_MOVE = """([name, n, action]) => new Promise((done) => {
  const app = profiler, { view } = app, [low, high] = view.limits;
  const moves = {
    still: () => {},
    'zoom in': () => view.zoom(low + 0.37 * (high - low), 0.93),
    'zoom out': () => view.zoom(low + 0.37 * (high - low), 1 / 0.93),
    pan: () => view.pan(0.01 * view.span),
  };
  const frames = [];
  let last = 0;
  app.drawTimes.length = 0;
  const tick = (now) => {
    if (last) frames.push(now - last);
    last = now;
    if (frames.length >= n) {
      const of = (times) => {
        const sorted = [...times].sort((a, b) => a - b);
        const at = (part) => sorted[Math.min(sorted.length - 1, Math.floor(part * sorted.length))];
        return [at(0.5), at(0.95), at(1)].map((t) => Math.round(10 * t) / 10);
      };
      done({ frame: of(frames), draw: of(app.drawTimes) });
      return;
    }
    moves[action]();
    app.changed('view');
    requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
})"""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("million") / "million.megatrace"
    synthetic_trace(workers=WORKERS, layers=LAYERS, steps=STEPS).save(path)
    return path


@pytest.mark.timeout(300)
def test_million_spans_are_smooth(
    make_viewer: Callable[..., Viewer], million: Path, screenshots: Path
) -> None:
    viewer = make_viewer().goto()
    start = time.monotonic()
    viewer.open(million)
    loaded = time.monotonic() - start - 0.45  # what `open` waits in the end
    spans = viewer.run(
        "pane.trace.lanes.reduce((sum, l) => sum + l.edges[0].reduce((n, t) => n + (t >= 0), 0), 0)"
    )
    assert spans >= SPANS
    times: dict[str, dict[str, list[float]]] = {}

    def move(name: str, frames: int, action: str) -> None:
        times[name] = viewer.page.evaluate(_MOVE, [name, frames, action])

    begin, end = viewer.run("app.view.limits")
    move("whole trace", 60, "still")
    move("zooming in", 100, "zoom in")
    move("zooming out", 100, "zoom out")
    viewer.show(begin, begin + (end - begin) / 3)
    move("panning a third", 60, "pan")
    viewer.show(begin, begin + (end - begin) / 20)
    move("panning a step", 60, "pan")
    viewer.show(begin, begin + (end - begin) / 400)
    move("panning 40 us", 60, "pan")
    viewer.show(begin, end)
    viewer.run("app.setCritical(true)")
    move("critical path", 60, "still")
    viewer.run("app.setCritical(false)")
    viewer.run("app.search('wait>100ns')")
    move("many found", 60, "pan")
    viewer.run("app.search('')")
    viewer.show(begin, end)
    viewer.run("(pane.scaleRows(20, 400), app.changed('view'))")
    viewer.settle()
    move("roles of the whole trace", 60, "still")
    viewer.screenshot("million")

    result = {"spans": spans, "records": viewer.run("pane.trace.count"), "load_s": round(loaded, 2)}
    (screenshots / "frames.json").write_text(json.dumps({**result, "ms": times}, indent=1))
    print(
        f"\n{spans:,} spans, loaded in {loaded:.2f} s;"
        " ms per frame and of drawing (median, 95 %, max)"
    )
    for name, found in times.items():
        print(f"{name:26} frame {found['frame']}  draw {found['draw']}")
    for name, found in times.items():
        median, high, _ = found["draw"]
        # 2 to 4 ms on two quiet cores; a fifth of that speed was seen on busy ones.
        assert median < 33, f"{name}: drawing takes {found['draw']} ms"
        assert high < 100, f"{name}: drawing takes {found['draw']} ms"
        assert found["frame"][0] < 70, f"{name}: frames take {found['frame']} ms"
    assert loaded < 15


def test_a_tab_holds_less_than_three_times_the_file(
    make_viewer: Callable[..., Viewer], million: Path
) -> None:
    viewer = make_viewer().goto().open(million)
    viewer.page.keyboard.press("Home")
    for tab in ("Statistics", "Critical path", "Trace", "Layer"):
        viewer.tab(tab)
    session = viewer.page.context.new_cdp_session(viewer.page)
    session.send("HeapProfiler.collectGarbage")
    found = session.send("Runtime.getHeapUsage")
    held = found["usedSize"] + found["backingStorageSize"]
    assert found["backingStorageSize"] > million.stat().st_size
    assert held < 3 * million.stat().st_size
