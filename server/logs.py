"""Structured logs: one line for each event, `time LEVEL event key=value ...`, on stderr."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from collections.abc import MutableMapping
from typing import Any, Final

logger: Final = logging.getLogger("megavm.server")

NOTICE: Final = 25  # what is said even where requests are not logged
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
    """Add fields to the line that is written when the request of an ASGI scope has ended."""
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
    """A value on one line; quoted like a JSON string where it must be."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    if _PLAIN.fullmatch(text.replace(" ", "") if spaces else text):
        return text
    return json.dumps(text)
