"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from synthetic import synthetic_trace

from megavm import cli
from megavm.profiler.chrome import save_chrome
from megavm.profiler.output import open_output
from megavm.profiler.perfetto import save_perfetto
from megavm.profiler.trace import Trace
from megavm.profiler.viewer import save_html


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can be longer than 100 bytes, which fails as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("save", [Trace.save, save_chrome, save_perfetto])
def test_a_trace_that_does_not_fit_names_the_file_and_leaves_none(
    tmp_path: Path, save: Callable[[Trace, Path], None]
) -> None:
    path = tmp_path / "run.megatrace"
    with full_disk(), pytest.raises(OSError, match="File too large") as failure:
        save(synthetic_trace(), path)
    assert failure.value.filename == str(path)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_does_not_fit_names_the_file_and_leaves_none(tmp_path: Path) -> None:
    trace, page = tmp_path / "run.megatrace", tmp_path / "run.html"
    synthetic_trace().save(trace)
    with full_disk(), pytest.raises(ValueError, match=f"cannot write {page}: File too large"):
        save_html(trace, page)
    assert list(tmp_path.iterdir()) == [trace]


def test_an_older_file_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, output = tmp_path / "run.megatrace", tmp_path / "run.json"
    synthetic_trace().save(trace)
    output.write_text("older")
    arguments = ["trace", "export", str(trace), "--format", "chrome", "-o", str(output)]
    with full_disk():
        assert cli.main(arguments) == 2
    assert capsys.readouterr().err == f"megavm: error: File too large: {output}\n"
    assert output.read_text() == "older"
    assert cli.main(arguments) == 0
    assert output.read_text().startswith("{")


def test_a_link_stays_a_link_and_a_pipe_is_written_directly(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    with open_output(link, "w") as file:
        file.write("text")
    assert link.is_symlink()
    assert target.read_text() == "text"
    reader, writer = os.pipe()
    with open_output(f"/dev/fd/{writer}", "wb") as file:
        file.write(b"bytes")
    os.close(writer)
    assert os.read(reader, 10) == b"bytes"
    os.close(reader)


def test_a_directory_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none" / "run.megatrace"
    with pytest.raises(FileNotFoundError) as failure, open_output(path, "wb"):
        pass
    assert failure.value.filename == str(path)
