"""JSON files of a model directory, and typed reads of their values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final, NoReturn

_MAX_JSON_BYTES: Final = 256 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model directory.

    Raises:
        ValueError: the file is missing, not a plain file, unreadable, too large, not JSON, or not
        an object.
    """
    if not path.is_file():
        raise ValueError(f"no {path.name} in {path.parent}")
    try:
        too_large = path.stat().st_size > _MAX_JSON_BYTES
        content = b"" if too_large else path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if too_large:
        raise ValueError(f"{path} is larger than {_MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # Python reads integers of up to 4,300 digits
        raise ValueError(f"{path} is not valid JSON: {one_line(error)}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


class Keys:
    """Typed reads of a config object; every error names the key and its value."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self._config = config
        self._prefix = prefix

    def _fail(self, key: str, expected: str) -> NoReturn:
        if self._config.get(key) is None:
            raise ValueError(f"config key {self._prefix}{key} is missing")
        value = short(self._config[key])
        raise ValueError(f"config key {self._prefix}{key}={value} must be {expected}")

    def integer(self, key: str, *, maximum: int, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= maximum:
            self._fail(key, f"an integer in [1, {maximum}]")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        value = self._config.get(key)
        if value is None and default is not None:
            return default
        if not _is_positive_number(value):
            self._fail(key, "a positive number")
        return float(value)  # type: ignore[arg-type]

    def boolean(self, key: str) -> bool:
        value = self._config.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self._fail(key, "true or false")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        value = self._config.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(
            isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in values
        ):
            self._fail(key, "a token id or a list of token ids")
        return tuple(values)


def _is_positive_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value) and float(value) > 0
    except OverflowError:  # an integer beyond the range of a double
        return False


def short(value: object) -> str:
    """A JSON value for an error message, cut to 80 characters."""
    text = json.dumps(value) if isinstance(value, str | list | dict) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def one_line(error: BaseException) -> str:
    """The message of an error in one line, or its class if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__
