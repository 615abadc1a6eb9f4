"""docs/adding-an-instruction.md is true to the letter: following it adds an instruction."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = re.compile(
    r"^`(instructions/[a-z_/.]+)`:\n\n```[a-z]+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)

# An editable install puts a finder of its own before the search path.
RUN_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, sys.argv[1])
import megavm, pytest
assert megavm.__file__.startswith(sys.argv[1]), megavm.__file__
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "scale", sys.argv[2]]))
"""


@pytest.mark.timeout(600)
def test_the_page_on_adding_an_instruction_works_as_written(tmp_path: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    tree = tmp_path / "tree"
    for name in listed.stdout.splitlines():
        if name.startswith("models/") or not (ROOT / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / "models").mkdir(exist_ok=True)
    blocks = FILE.findall((ROOT / "docs/adding-an-instruction.md").read_text())
    assert [Path(name).name for name, _ in blocks] == [
        "__init__.py", "reference.py", "cpu.hpp", "cuda.cuh", "examples.py",
    ]  # fmt: skip
    for name, text in blocks:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)

    site = tmp_path / "site"
    build = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    build += ["--no-index", "--target", str(site), "-C", "cmake.define.MEGAVM_LEVELS=", "."]
    subprocess.run(build, cwd=tree, check=True)
    run = subprocess.run(
        [sys.executable, "-c", RUN_INSTALLED, str(site), str(tree / "tests/instructions/test_registry.py")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) >= 10, run.stdout
