"""Find a model: a directory, a model that ships with megavm, or the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from megavm.scheduler.llama.checkpoint import (
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    read_index,
)
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.json_files import one_line, read_json

SHIPPED_MODELS: Final = Path(__file__).resolve().parents[2] / "models"

# Small files, fetched first: they suffice to refuse a model before its weights are downloaded.
_DESCRIPTION_FILES: Final = [
    CONFIG_FILE,
    GENERATION_FILE,
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
]


def resolve(model: str) -> Path:
    """The local directory of `model`; downloads it only if this machine has no copy.

    Tries, in order: an existing directory; a model shipped with megavm ("stories"); the Hugging
    Face cache; the Hugging Face hub (huggingface_hub respects `HF_HUB_OFFLINE`, `HF_HOME` and
    `HF_TOKEN`). A model that megavm cannot run is refused by its config.json, before its weights
    are fetched.

    Raises:
        ValueError: not a directory and not a model id, no such repository, access not granted,
            offline, or a configuration that is not supported.
    """
    if not isinstance(model, str) or not model.strip() or "\0" in model:
        raise ValueError(f"model must be a directory or a Hugging Face model id, not {model!r}")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return path.resolve()
        if path.exists():
            raise ValueError(f"{path} is a file: give the directory that holds it")
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no home for "~user"
        raise ValueError(f"cannot look for the model {model!r}: {error}") from error
    if re.fullmatch(r"[a-z0-9_-]+", model) and (SHIPPED_MODELS / model / CONFIG_FILE).is_file():
        return SHIPPED_MODELS / model
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", model, re.ASCII):
        raise ValueError(f"no such directory: {model}")
    return _resolve_on_hub(model)


def _resolve_on_hub(model: str) -> Path:
    """The snapshot directory of a hub id; downloads it unless the cache has all of it."""
    try:
        import huggingface_hub
    except ModuleNotFoundError as error:
        raise ValueError(
            f"no directory {model!r} here, and huggingface_hub, which might fetch it, is missing"
        ) from error
    cached = _cached_snapshot(model)
    if cached is not None and (cached / "tokenizer.json").is_file():
        return cached
    try:
        first = Path(huggingface_hub.snapshot_download(model, allow_patterns=_DESCRIPTION_FILES))
        LlamaConfig.from_dict(read_json(first / CONFIG_FILE))
        weights = (
            sorted(set(read_index(first / INDEX_FILE).values()))
            if (first / INDEX_FILE).is_file()
            else [SINGLE_FILE]
        )
        huggingface_hub.snapshot_download(
            model, revision=first.name, allow_patterns=[*_DESCRIPTION_FILES, *weights]
        )
    except Exception as error:
        if cached is not None and _is_offline(error):
            return cached
        raise _hub_error(model, error) from error
    if not all((first / name).is_file() for name in weights):
        raise ValueError(f"the repository {model} on the Hugging Face hub has no {weights[0]}")
    return first


def _cached_snapshot(model: str) -> Path | None:
    """The snapshot of `model` in the local cache; None if configuration or weights are missing."""
    import huggingface_hub

    try:
        found = huggingface_hub.try_to_load_from_cache(model, CONFIG_FILE)
    except ValueError:  # not a valid id: the download raises the full error
        return None
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    if (directory / SINGLE_FILE).is_file():
        return directory
    if not (directory / INDEX_FILE).is_file():
        return None
    shards = set(read_index(directory / INDEX_FILE).values())
    return directory if all((directory / name).is_file() for name in shards) else None


def _is_offline(error: Exception) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(
        names
        & {"OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectionError",
           "TimeoutException", "ProxyError"}
    )  # fmt: skip


def _hub_error(model: str, error: Exception) -> ValueError:
    """The cause of a failed download and what to do about it, in one sentence."""
    names = {cls.__name__ for cls in type(error).__mro__}
    status = getattr(getattr(error, "response", None), "status_code", None)
    url = f"https://huggingface.co/{model}"
    if "GatedRepoError" in names or (
        status in (401, 403) and "RepositoryNotFoundError" not in names
    ):
        reason = f"{model} is gated: accept the licence at {url}, then run `hf auth login`"
    elif "RepositoryNotFoundError" in names:
        reason = (
            f"no directory {model!r} here and no model {model} on the Hugging Face hub"
            " (if it is private, run `hf auth login`)"
        )
    elif _is_offline(error):
        reason = (
            f"no directory {model!r} here, no such model in the Hugging Face cache, and the hub"
            " cannot be reached (offline)"
        )
    elif isinstance(error, ValueError) and "HFValidationError" not in names:
        return error  # raised by megavm: it refuses the configuration or the index
    else:
        reason = f"cannot download {model} from the Hugging Face hub: {one_line(error)}"
    return ValueError(reason)
