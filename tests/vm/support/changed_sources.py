"""Kernels whose sources differ in one place, for tests of what finds that."""

from __future__ import annotations

import shutil
from pathlib import Path

from megavm.vm.cuda.compiler import ROOT


def changed_sources(folder: Path, file: str, text: str, other: str) -> Path:
    """The sources of all kernels in ``folder``, with a text that a file has once changed; returns ``folder``."""
    for name in ("cuda", "instructions"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.py*", "__*"))
    source = (folder / file).read_text()
    assert source.count(text) == 1
    (folder / file).write_text(source.replace(text, other))
    return folder
