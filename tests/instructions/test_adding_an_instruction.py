"""docs/adding-an-instruction.md is true to the letter: following it adds two instructions."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/adding-an-instruction.md"
NAMES = ("scale", "squared_relu")
FILE = re.compile(
    r"^`(instructions/[a-z_/.]+)`:\n\n```[a-z]+\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
USE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# An editable install puts a finder of its own before the search path.
FIND_INSTALLED = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, sys.argv[1])
import megavm, pytest
assert megavm.__file__.startswith(sys.argv[1]), megavm.__file__
"""
RUN_TESTS = """
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-k", sys.argv[2], sys.argv[3]]))
"""
COMPILE_EXAMPLES = """
import importlib, numpy
from megavm.vm.specialisation import program_header
from megavm.vm.cuda.compiler import compile_kernel
examples = importlib.import_module(f"megavm.instructions.{sys.argv[2]}.examples")
headers = {program_header(e.program()): e.name for e in examples.examples(numpy.random.default_rng(0))}
for header, name in headers.items():
    kernel = compile_kernel(header)
    assert (kernel.warnings, kernel.spill_stores, kernel.spill_loads) == ([], 0, 0), name
"""


@dataclass(frozen=True)
class Installed:
    """The tree with the folders of the page, and megavm as it was built from there."""

    tree: Path
    site: Path

    def run(self, code: str, *arguments: str) -> str:
        """What code prints in a process that finds this megavm."""
        command = [sys.executable, "-c", FIND_INSTALLED + code, str(self.site), *arguments]
        run = subprocess.run(
            command, cwd=self.site.parent, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def run_tests(self, file: str, name: str) -> int:
        """The number of tests of an instruction in a file that passed; none may fail."""
        printed = self.run(RUN_TESTS, name, str(self.tree / file))
        passed = re.search(r"(\d+) passed", printed)
        assert passed is not None, printed
        return int(passed[1])


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """megavm with the folders that the page adds, and nothing else."""
    folder = tmp_path_factory.mktemp("page")
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    tree = folder / "tree"
    for name in listed.stdout.splitlines():
        if name.startswith("models/") or not (ROOT / name).is_file():
            continue
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name, follow_symlinks=False)
    (tree / "models").mkdir(exist_ok=True)
    for name, text in FILE.findall(PAGE.read_text()):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
    site = folder / "site"
    build = [sys.executable, "-m", "pip", "install", "-q", "--no-build-isolation", "--no-deps"]
    build += ["--no-compile", "--no-index", "--target", str(site)]
    # Without optimisation: these programs are small, and compiling all of the C++ takes minutes.
    build += ["-C", "cmake.build-type=None", "-C", "cmake.define.MEGAVM_LEVELS=", "."]
    subprocess.run(build, cwd=tree, check=True)
    return Installed(tree, site)


def uses() -> list[str]:
    """The code of the page that uses the instructions."""
    found: list[str] = USE.findall(FILE.sub("", PAGE.read_text()))
    return found


def test_the_page_adds_two_folders_and_uses_them() -> None:
    files = [name for name, _ in FILE.findall(PAGE.read_text())]
    expected = ("__init__.py", "reference.py", "cpu.hpp", "cuda.cuh", "examples.py", "lower.py")
    assert files == [f"instructions/{name}/{file}" for name in NAMES for file in expected]
    assert len(uses()) == 6


@pytest.mark.parametrize("name", NAMES)
def test_its_instructions_pass_the_tests_of_every_instruction(
    installed: Installed, name: str
) -> None:
    assert installed.run_tests("tests/instructions/test_registry.py", name) >= 10


@pytest.mark.parametrize("number", range(5))
def test_its_programs_run_on_every_machine_that_there_is(installed: Installed, number: int) -> None:
    installed.run(uses()[number])


@pytest.mark.usefixtures("compiler")
def test_its_graph_has_kernels_without_spills(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path))
    # The programs run in the test above; here their graph suffices.
    graph, programs, _ = uses()[4].partition("gpu = ")
    assert programs
    installed.run(graph + uses()[5])


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("name", NAMES)
def test_its_kernels_compile_for_every_example(
    installed: Installed, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAVM_CACHE_DIR", str(tmp_path))
    installed.run(COMPILE_EXAMPLES, name)


@pytest.mark.usefixtures("cuda_machine")
@pytest.mark.parametrize("name", NAMES)
def test_its_kernels_mean_what_the_reference_says(installed: Installed, name: str) -> None:
    assert installed.run_tests("tests/vm/test_cuda_machine.py", name) >= 3


def test_a_build_notices_that_folders_are_gone(installed: Installed, tmp_path: Path) -> None:
    # As by a change of branches. It comes last: the other tests need the folders.
    kept = [installed.tree / "instructions" / name for name in NAMES]
    generated = next(installed.tree.glob("build/*/generated/megavm/kernel_table.hpp"))
    assert all(name in generated.read_text() for name in NAMES)
    for folder in kept:
        shutil.move(folder, tmp_path / folder.name)
    try:
        again = [cmake(), "--build", str(generated.parents[2]), "--target", "megavm_isa"]
        subprocess.run(again, check=True, capture_output=True)
        assert not any(name in generated.read_text() for name in NAMES)
    finally:
        for folder in kept:
            shutil.move(tmp_path / folder.name, folder)


def cmake() -> str:
    """The cmake beside this Python, else the system's."""
    beside = Path(sys.executable).with_name("cmake")
    return str(beside) if beside.is_file() else "cmake"
