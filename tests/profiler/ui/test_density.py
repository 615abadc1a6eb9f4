"""Low rows are a picture of densities: a pixel is the mean of its rectangle of time and workers."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from synthetic import synthetic_trace
from ui.page import Viewer

WORKERS = 132
SIZES = [(1600, 950), (1280, 720), (1000, 330)]  # rows of about 4.4, 3 and less than 1 pixel

# The body of the timeline as pixels, and what is drawn there: edges of the consumers' spans.
_READ = """(() => {
  const { body } = pane, canvas = app.stage.picture, width = Math.floor(body.width);
  const height = Math.floor(Math.min(body.height, pane.rows.height));
  const top = Math.round(body.top);
  const data = canvas.getContext('2d').getImageData(body.left, top, width, height).data;
  const lane = pane.trace.lanes[2];
  const text = ({ buffer, byteOffset, byteLength }) => {
    const bytes = new Uint8Array(buffer, byteOffset, byteLength), parts = [];
    for (let i = 0; i < bytes.length; i += 24576)
      parts.push(btoa(String.fromCharCode(...bytes.subarray(i, i + 24576))));
    return parts.join('');
  };
  return {
    width, height, pixels: text(data), rowHeight: pane.rows.rowHeight,
    begin: app.view.begin, span: app.view.span, offset: body.top - top,
    worker: text(pane.trace.worker), edges: lane.edges.map(text),
    colours: pane.painting.tables[2].map((t) => t[0]), background: app.theme.background,
  };
})()"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("dense") / "dense.megatrace"
    synthetic_trace(WORKERS, layers=4, steps=2).save(path)
    return path


def read(viewer: Viewer) -> dict[str, Any]:
    """What _READ finds, with `pixels` [height, width, 3], `worker` and `edges` [6, records]."""
    found: dict[str, Any] = viewer.run(_READ)

    def numbers(text: str, dtype: Any) -> npt.NDArray[Any]:
        return np.frombuffer(base64.b64decode(text), dtype)

    pixels = numbers(found["pixels"], np.uint8).reshape(found["height"], found["width"], 4)
    edges = [numbers(text, np.float64) for text in found["edges"]]
    worker = numbers(found["worker"], np.int32)
    return {**found, "pixels": pixels[..., :3].astype(int), "worker": worker, "edges": edges}


def exact_shares(found: dict[str, Any]) -> npt.NDArray[np.float64]:
    """Share of the five parts of spans in every column of workers: [5, workers, width]."""
    width = found["width"]
    shares = np.zeros((5, WORKERS, width))
    step = found["span"] / width
    edges = (np.asarray(found["edges"], np.float64) - found["begin"]) / step
    for record, worker in enumerate(found["worker"]):
        for part in range(5):
            x0, x1 = np.clip(edges[part : part + 2, record], 0, width)
            if x1 > x0:
                columns = np.arange(int(x0), min(width, int(np.ceil(x1))))
                covered = np.minimum(columns + 1, x1) - np.maximum(columns, x0)
                shares[part, worker, columns] += covered
    return shares


def exact_picture(found: dict[str, Any]) -> npt.NDArray[np.float64]:
    """The mean colour of every pixel: [height, width, 3]."""
    shares = exact_shares(found)
    code = np.asarray(found["colours"], np.int64)
    colours = np.stack([code & 255, code >> 8 & 255, code >> 16 & 255], axis=-1)
    background = np.asarray(found["background"], np.float64)
    rows = background + np.einsum("pwx,pc->wxc", shares, colours - background)
    lines = np.arange(found["height"])
    tops = np.arange(WORKERS) * found["rowHeight"] + found["offset"]
    low = np.maximum(lines[:, None], tops)
    high = np.minimum(lines[:, None] + 1, tops + found["rowHeight"])
    weight = np.maximum(0, high - low)
    rest = (1 - weight.sum(1))[:, None, None]
    return np.asarray(np.einsum("yw,wxc->yxc", weight, rows) + rest * background)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", [1.0, 0.03])
def test_pixels_are_the_exact_shares(
    viewer: Viewer, dense: Path, size: tuple[int, int], part: float
) -> None:
    viewer.page.set_viewport_size({"width": size[0], "height": size[1]})
    viewer.open(dense)
    viewer.page.keyboard.press("4")
    viewer.page.mouse.move(5, 5)
    low, high = viewer.run("app.view.limits")
    viewer.show(
        low + 0.311 * (1 - part) * (high - low), low + (0.311 + 0.689 * part) * (high - low)
    )
    found = read(viewer)
    assert found["rowHeight"] < 6
    pixels = found["pixels"]
    # Lines where steps begin, and the last line, which rows may cover in part.
    marks = viewer.run(
        "[...pane.trace.stepBegin].map((t) => Math.round(pane.xOf(app.view, t)) - pane.body.left)"
    )
    columns = [x for x in range(found["width"]) if x not in marks]
    error = np.abs(pixels - exact_picture(found))[:-1, columns].max(-1)
    # Colours have 8 bits, and so have the means of bins that they are made of.
    assert error.mean() < 1.5
    assert np.quantile(error, 0.999) < 12
    viewer.screenshot(f"density_{size[0]}_{part}")


def test_rows_have_no_lines_between_them(viewer: Viewer, dense: Path) -> None:
    """Where all workers do the same, every line of the picture is alike."""
    viewer.open(dense)
    viewer.page.keyboard.press("4")
    viewer.page.mouse.move(5, 5)
    begin, end = viewer.run("[pane.trace.stepBegin[1], pane.trace.stepEnd[1]]")
    viewer.show(begin, end)
    found = read(viewer)
    pixels = found["pixels"]
    same = np.ptp(exact_shares(found), axis=1).max(0) < 1e-9  # columns in which no worker differs
    assert same.sum() > 20
    assert np.ptp(pixels[:-1, same], axis=0).max() <= 1
