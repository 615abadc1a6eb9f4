"""Structured logs on stderr: one line per event, `time LEVEL event key=value ...`."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

logger: Final = logging.getLogger("megavm.server")

NOTICE: Final = 25  # level of lines that are written even with --quiet
NOTES: Final = "megavm.notes"  # key of an ASGI scope
_PLAIN: Final = re.compile(r"[\w.:/@+,\[\]-]+", re.ASCII)


class LineFormatter(logging.Formatter):
    """A record as one line; the fields of `log` follow the message."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        time = when.isoformat(timespec="milliseconds").removesuffix("+00:00")
        fields: dict[str, Any] = dict(getattr(record, "fields", {}))
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        parts = [f"{time}Z {record.levelname} {_value(record.getMessage(), spaces=True)}"]
        parts += [f"{name}={_value(value)}" for name, value in fields.items() if value is not None]
        return " ".join(parts)


def log(level: int, event: str, **fields: object) -> None:
    """Write one line; a field that is None is left out."""
    logger.log(level, event, extra={"fields": fields})


def note(scope: MutableMapping[str, Any], **fields: object) -> None:
    """Add fields to the log line of a request (its ASGI scope), written when the request ends."""
    scope.setdefault(NOTES, {}).update(fields)


def configure(level: int) -> None:
    """Send megavm's and uvicorn's records to stderr."""
    logging.addLevelName(NOTICE, "NOTICE")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    for name, least in (("megavm", level), ("uvicorn", logging.WARNING)):
        chosen = logging.getLogger(name)
        chosen.handlers = [handler]
        chosen.setLevel(max(level, least))
        chosen.propagate = False


def _value(value: object, spaces: bool = False) -> str:
    """A value on one line, quoted as a JSON string if needed."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if _PLAIN.fullmatch(text.replace(" ", "") if spaces else text):
        return text
    return json.dumps(text)
