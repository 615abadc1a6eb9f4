"""Type checkers find the package in typings/, which has a link for everything that is installed."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("vm", "instructions", "scheduler", "models", "profiler", "server")


def test_typings_link_to_every_module_of_the_package() -> None:
    source = ROOT / "src" / "megavm"
    wanted = {path.name: path for path in source.iterdir() if not path.name.startswith("__pyc")}
    wanted |= {name: ROOT / name for name in FOLDERS}
    links = {path.name: path for path in (ROOT / "typings" / "megavm").iterdir()}
    wanted.pop("py.typed")
    assert set(links) == set(wanted)
    assert all(links[name].resolve() == path for name, path in wanted.items())
