"""The options of `megavm serve` become settings and options of the model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import megavm.llm
from megavm import cli
from megavm.server import run as server_run
from megavm.server.logs import NOTICE
from megavm.server.settings import Settings


class Served:
    """What `serve` was called with, and with what the model would have been made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings: Settings | None = None
        self.address: tuple[str, int] | None = None
        self.log_level: int | None = None
        self.model: tuple[Any, dict[str, Any]] | None = None
        monkeypatch.setattr(server_run, "serve", self._serve)
        monkeypatch.setattr(megavm.llm, "LLM", self._make)

    def _serve(
        self, load_model: Any, settings: Settings, host: str, port: int, log_level: int
    ) -> int:
        self.settings, self.address, self.log_level = settings, (host, port), log_level
        load_model(None)
        return 7

    def _make(self, model: str, **options: Any) -> None:
        self.model = (model, options)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def test_without_options_everything_is_as_documented(served: Served) -> None:
    assert cli.main(["serve"]) == 7
    assert served.settings == Settings(("stories",))
    assert served.address == ("127.0.0.1", 8000)
    assert served.log_level == logging.INFO
    assert served.model is not None
    name, options = served.model
    assert name == "stories"
    del options["progress"]
    assert options == {"machine": "auto", "dtype": "auto", "prefix_caching": True}


def test_options_arrive(served: Served, tmp_path: Path) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    arguments = f"serve {directory} --host 0.0.0.0 --port 80 --api-key a --api-key b --max-n 4"
    arguments += " --max-queue 9 --max-body-bytes 64K --request-timeout 2.5 --shutdown-timeout 0"
    arguments += " --max-connections 5 --header-timeout 1.5"
    arguments += " --allowed-host a.example --allowed-host *.b.example"
    arguments += " --ssl-certfile cert.pem --ssl-keyfile key.pem"
    arguments += " --chat-template chat.jinja"
    arguments += " --allowed-origin * --log-prompts --no-prefix-caching --max-num-seqs 3"
    arguments += " --max-num-batched-tokens 32 --max-model-len 1K --quiet --machine cpu"
    assert cli.main(arguments.split()) == 7
    assert served.settings == Settings(
        ("my-model",),
        api_keys=("a", "b"),
        allowed_origins=("*",),
        allowed_hosts=("a.example", "*.b.example"),
        ssl_certfile="cert.pem",
        ssl_keyfile="key.pem",
        max_body_bytes=65536,
        max_n=4,
        max_queue=9,
        max_connections=5,
        request_timeout=2.5,
        header_timeout=1.5,
        shutdown_timeout=0.0,
        log_prompts=True,
    )
    assert served.address == ("0.0.0.0", 80)
    assert served.log_level == NOTICE
    assert served.model is not None
    options = served.model[1]
    assert options["prefix_caching"] is False
    assert options["chat_template"] == "chat.jinja"
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == (3, 32)
    assert (options["max_model_len"], options["machine"]) == (1024, "cpu")


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error", "critical"])
def test_the_level_of_the_log_is_an_option(served: Served, level: str) -> None:
    assert cli.main(["serve", "--log-level", level, "--quiet"]) == 7
    assert served.log_level == getattr(logging, level.upper())


def test_the_environment_counts_where_no_option_is_given(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAVM_API_KEY", "secret")
    monkeypatch.setenv("MEGAVM_PORT", "81")
    monkeypatch.setenv("MEGAVM_SERVED_MODEL_NAME", "name")
    monkeypatch.setenv("MEGAVM_LOG_PROMPTS", "1")
    assert cli.main(["serve", "--port", "82"]) == 7
    assert served.settings == Settings(("name",), api_keys=("secret",), log_prompts=True)
    assert served.address == ("127.0.0.1", 82)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--port 70000", "--port must be in [0, 65535], not 70000"),
        ("--max-queue -1", "max_queue must be at least 0"),
    ],
)
def test_a_number_that_makes_no_sense_is_refused_in_one_sentence(
    served: Served, capsys: pytest.CaptureFixture[str], option: str, said: str
) -> None:
    assert cli.main(["serve", "stories", *option.split()]) == 2
    line, nothing = capsys.readouterr().err.split("\n")
    assert line.startswith("megavm: error: ")
    assert said in line
    assert nothing == ""
    assert served.settings is None
