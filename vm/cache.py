"""Files of compiled kernels and programs on disk, which any process may read, write or delete."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """$MEGAVM_CACHE_DIR, else megavm in $XDG_CACHE_HOME, else in ~/.cache. No other code reads these."""
    own, shared = os.environ.get("MEGAVM_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    if shared and os.path.isabs(shared):
        return Path(shared) / "megavm"
    return Path(os.path.expanduser("~")) / ".cache" / "megavm"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file; another process sees all of it or nothing. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
