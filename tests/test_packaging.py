"""The archives that are published: what the wheel installs, and that the sdist builds the same one.

Wheels are built without their extension module, which takes seconds instead of minutes.
"""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core", reason="the build backend is not installed")

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("cuda", "instructions", "models", "profiler", "scheduler", "server", "vm")


def build(kind: str, source: Path, target: Path) -> Path:
    """The archive that the build backend makes of `source`, as pip calls it."""
    code = (
        "import sys; from scikit_build_core.build import build_sdist, build_wheel;"
        "settings = {'wheel.cmake': 'false'};"
        f"print(build_{kind}(sys.argv[1], settings))"
    )
    command = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=source)
    return target / done.stdout.split()[-1]


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of the files in a wheel of this checkout."""
    return names_in_wheel(build("wheel", ROOT, tmp_path_factory.mktemp("wheel")))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist of this checkout."""
    directory = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, directory)) as archive:
        assert all(member.isfile() for member in archive), "links are not the same everywhere"
        archive.extractall(directory, filter="data")
    return next(path for path in directory.iterdir() if path.is_dir())


def test_wheel_has_every_module_but_the_training_code(wheel: set[str]) -> None:
    roots = {"megavm": ROOT / "src" / "megavm"}
    roots |= {f"megavm/{name}": ROOT / name for name in FOLDERS}
    modules = {
        f"{prefix}/{path.relative_to(root).as_posix()}"
        for prefix, root in roots.items()
        for path in root.rglob("*.py")
        if "node_modules" not in path.parts
    }
    training = {f"megavm/models/{path.name}" for path in (ROOT / "models").glob("*.py")}
    assert "megavm/models/train.py" in training
    assert {name for name in wheel if name.endswith(".py")} == modules - training


def test_wheel_has_the_files_that_megavm_reads(wheel: set[str]) -> None:
    models = {name for name in wheel if name.startswith("megavm/models/")}
    shipped = {path for path in (ROOT / "models" / "stories").iterdir() if path.is_file()}
    assert models == {f"megavm/models/stories/{path.name}" for path in shipped}
    sources = [path for path in (ROOT / "cuda").rglob("*.cu*") if path.is_file()]
    assert {f"megavm/{path.relative_to(ROOT).as_posix()}" for path in sources} <= wheel
    page = {name for name in wheel if name.startswith("megavm/profiler/ui/")}
    assert page == {"megavm/profiler/ui/dist/index.html"}
    assert {"megavm/py.typed", "megavm/server/pages/playground.html"} <= wheel


def test_metadata_says_what_the_package_is(sdist: Path) -> None:
    metadata = email.message_from_string((sdist / "PKG-INFO").read_text(encoding="utf-8"))
    classifiers = metadata.get_all("Classifier", [])
    assert "Environment :: GPU :: NVIDIA CUDA" in classifiers
    assert "Programming Language :: Python :: 3.11" in classifiers
    assert "Typing :: Typed" in classifiers
    assert metadata["License-Expression"] == "Apache-2.0"  # PyPI refuses a classifier beside it
    assert not any(classifier.startswith("License ::") for classifier in classifiers)
    assert metadata["Keywords"]


def test_sdist_has_every_file_once(sdist: Path) -> None:
    assert not (sdist / "typings").exists()
    assert [path.parent.name for path in sdist.rglob("model.safetensors")] == ["stories"]
    assert (sdist / "models" / "train.py").is_file()


def test_sdist_builds_the_wheel_of_the_checkout(
    sdist: Path, wheel: set[str], tmp_path: Path
) -> None:
    assert names_in_wheel(build("wheel", sdist, tmp_path)) == wheel
