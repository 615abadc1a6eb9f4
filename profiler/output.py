"""Files that are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any


@contextmanager
def open_output(path: str | os.PathLike[str], mode: str, **options: Any) -> Iterator[IO[Any]]:
    """Open a file that takes its name when it is complete; `mode` and `options` as for `open`.

    After an error, a full disk for instance, there is no new file, and an older one is as it was. A
    path that is no regular file, such as /dev/stdout, is written directly.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    direct = os.path.exists(path) and not os.path.isfile(path)
    target = os.path.realpath(path)
    partial = os.fspath(path) if direct else f"{target}.{os.getpid()}.part"
    try:
        with open(partial, mode, **options) as file:
            yield file
        if not direct:
            os.replace(partial, target)
    except BaseException as error:
        if not direct:
            with suppress(OSError):
                os.unlink(partial)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise
