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
FIND_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, sys.argv[1])
import megavm, pytest
assert megavm.__file__.startswith(sys.argv[1]), megavm.__file__
"""
RUN_TESTS = """
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", "scale", sys.argv[2]]))
"""


def run_installed(code: str, site: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process that finds megavm in ``site``."""
    command = [sys.executable, "-c", FIND_INSTALLED + code, str(site), *map(str, arguments)]
    return subprocess.run(command, cwd=site.parent, capture_output=True, text=True, check=False)


def cmake() -> str:
    """The cmake beside this Python, else the system's."""
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.is_file() else "cmake"


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
    page = (ROOT / "docs/adding-an-instruction.md").read_text()
    blocks = FILE.findall(page)
    assert [Path(name).name for name, _ in blocks] == [
        "__init__.py", "reference.py", "cpu.hpp", "cuda.cuh", "examples.py", "lower.py",
    ]  # fmt: skip
    for name, text in blocks:
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)

    site = tmp_path / "site"
    build = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    build += ["--no-index", "--target", str(site), "-C", "cmake.define.MEGAVM_LEVELS=", "."]
    subprocess.run(build, cwd=tree, check=True)
    run = run_installed(RUN_TESTS, site, tree / "tests/instructions/test_registry.py")
    assert run.returncode == 0, run.stdout + run.stderr
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None, run.stdout
    assert int(passed[1]) >= 10, run.stdout
    used = FILE.sub("", page[page.index("## Using it") :])
    uses = re.findall(r"^```python\n(.*?)^```$", used, re.MULTILINE | re.DOTALL)
    assert len(uses) == 2
    for code in uses:
        run = run_installed(code, site)
        assert run.returncode == 0, run.stdout + run.stderr

    # Taken away again, as by a change of branches: the build that is there notices.
    shutil.rmtree(tree / "instructions/scale")
    generated = next(tree.glob("build/*/generated/megavm/kernel_table.hpp"))
    assert "scale" in generated.read_text()
    again = [cmake(), "--build", str(generated.parents[2]), "--target", "megavm_isa"]
    subprocess.run(again, check=True, capture_output=True)
    assert "scale" not in generated.read_text()
