"""The built page is that of its sources, and stands alone."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from megavm.profiler.viewer import PAGE

ROOT = Path(__file__).resolve().parents[3]
UI = ROOT / "profiler" / "ui"


def test_page_is_built_from_its_sources() -> None:
    names = ["build.mjs", "package.json", "tsconfig.json"]
    names += [f"source/{path.name}" for path in (UI / "source").iterdir()]
    digest = hashlib.sha256()
    for name in sorted(names):
        digest.update(f"{name}\n".encode() + (UI / name).read_bytes() + b"\n")
    found = re.search(r'<meta name="sources" content="([0-9a-f]+)">', PAGE.read_text("utf-8"))
    assert found is not None
    assert found[1] == digest.hexdigest(), "run `npm install && npm run build` in profiler/ui"


def test_page_allows_its_own_script_and_style_alone() -> None:
    page = PAGE.read_text("utf-8")
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert found is not None
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    assert policy["default-src"] == "'none'"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        elements = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(elements) == 1
        digest = base64.b64encode(hashlib.sha256(elements[0].encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"


def test_page_names_no_other_place() -> None:
    page = PAGE.read_text("utf-8")
    assert not re.search(r"(?:https?:)?//[a-z0-9-]+\.[a-z]", page)
    assert "innerHTML" not in page.replace("outerHTML", "")
    assert not re.search(r"\beval\(|new Function\b", page)


def test_sources_are_of_readable_size() -> None:
    sizes = {p.name: len(p.read_text("utf-8").splitlines()) for p in (UI / "source").iterdir()}
    assert max(sizes.values()) <= 600, sizes
