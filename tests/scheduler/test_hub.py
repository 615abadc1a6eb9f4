"""Where a model is found: a directory, a shipped model, the cache of the hub, the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from model_directories import PLAIN, sentence, write_model

from megavm.scheduler.llama import hub as hub_module
from megavm.scheduler.llama.hub import resolve


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Replaces the hub: `hub(error=...)` fails, `hub(directory=...)` downloads a copy of it."""
    calls: list[str] = []

    def install(
        error: Exception | None = None, directory: Path | None = None, cached: Path | None = None
    ) -> list[str]:
        def snapshot_download(model: str, **keywords: Any) -> str:
            calls.append(model)
            if error is not None:
                raise error
            return str(directory)

        def try_to_load_from_cache(model: str, name: str) -> str | None:
            return None if cached is None else str(cached / name)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", try_to_load_from_cache)
        return calls

    monkeypatch.chdir(tmp_path)
    return install


def hub_error(name: str, status: int) -> Exception:
    """An error of huggingface_hub, made without a request."""
    kind = getattr(huggingface_hub.errors, name)
    error = kind.__new__(kind)
    error.args = (f"{status} for url: ...\nAccess to this model is restricted.",)
    error.response = type("Response", (), {"status_code": status})()
    return error  # type: ignore[no-any-return]


def test_an_existing_directory_never_touches_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    write_model(tmp_path / "org" / "name")
    assert resolve("org/name") == tmp_path / "org" / "name"
    assert resolve(str(tmp_path / "org/name")) == tmp_path / "org" / "name"
    assert calls == []


def test_a_local_directory_is_resolved_without_importing_the_hub(tmp_path: Path) -> None:
    code = (
        "import sys; from megavm.scheduler.llama.hub import resolve; resolve(sys.argv[1]);"
        "sys.exit('huggingface_hub' in sys.modules or 'torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_shipped_name_resolves_before_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    monkeypatch.setattr(hub_module, "SHIPPED_MODELS", tmp_path / "shipped")
    write_model(tmp_path / "shipped" / "stories")
    assert resolve("stories") == tmp_path / "shipped" / "stories"
    assert calls == []
    (tmp_path / "stories").mkdir()
    assert resolve("stories") == tmp_path / "stories"


def test_a_complete_cache_is_used_without_asking_the_hub(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    cached = write_model(tmp_path / "snapshots" / "abc", shards=2)
    (cached / "tokenizer.json").write_text("{}")
    calls = hub(error=AssertionError("the hub was asked"), cached=cached)
    assert resolve("org/name") == cached
    assert calls == []


def test_an_incomplete_cache_is_completed_and_used_as_it_is_when_offline(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    cached = write_model(tmp_path / "snapshots" / "abc", shards=2)
    calls = hub(error=huggingface_hub.errors.OfflineModeIsEnabled("offline"), cached=cached)
    assert resolve("org/name") == cached
    assert calls == ["org/name"]
    (cached / "model-00002-of-00002.safetensors").unlink()
    assert "offline" in sentence(lambda: resolve("org/name"))


def test_a_model_of_the_hub_is_downloaded_in_two_steps(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    calls = hub(directory=downloaded)
    assert resolve("org/name") == downloaded
    assert len(calls) == 2


def test_an_unsupported_model_of_the_hub_is_refused_before_its_weights(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    raw = {**PLAIN, "architectures": ["MambaForCausalLM"]}
    (downloaded / "config.json").write_text(json.dumps(raw))
    calls = hub(directory=downloaded)
    assert "MambaForCausalLM" in sentence(lambda: resolve("org/name"))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("GatedRepoError", 403, "accept the licence at https://huggingface.co/org/name"),
        ("HfHubHTTPError", 401, "hf auth login"),
        ("RepositoryNotFoundError", 401, "no model org/name"),
        ("HfHubHTTPError", 500, "cannot download org/name"),
        ("LocalEntryNotFoundError", 0, "offline"),
    ],
)
def test_a_failed_download_says_what_to_do(
    hub: Callable[..., list[str]], name: str, status: int, said: str
) -> None:
    hub(error=hub_error(name, status))
    assert said in sentence(lambda: resolve("org/name"))


def test_a_repository_without_safetensors_is_refused(
    hub: Callable[..., list[str]], tmp_path: Path
) -> None:
    downloaded = write_model(tmp_path / "snapshots" / "abc")
    (downloaded / "model.safetensors").unlink()
    hub(directory=downloaded)
    assert "has no model.safetensors" in sentence(lambda: resolve("org/name"))


@pytest.mark.parametrize("model", ["", " ", "./nothing", "/nothing", "a/b/c", "../up", "x" * 5000])
def test_what_cannot_be_a_model_id_is_not_looked_for_on_the_hub(
    hub: Callable[..., list[str]], model: str
) -> None:
    calls = hub(error=AssertionError("the hub was asked"))
    assert sentence(lambda: resolve(model))
    assert calls == []


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "is a file" in sentence(lambda: resolve(str(tmp_path / "model.gguf")))


def test_offline_mode_is_respected(tmp_path: Path) -> None:
    code = (
        "from megavm.scheduler.llama.hub import resolve\n"
        "try: resolve('org/name-that-is-not-cached')\n"
        "except ValueError as error: print(error)"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=tmp_path,
    )
    assert "offline" in done.stdout
