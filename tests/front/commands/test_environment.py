"""Options set by environment variables."""

from __future__ import annotations

import pytest
from command_line import Run
from fake_llm import FakeLLM, last_params


def test_every_option_can_be_set_in_the_environment_and_the_flag_wins(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {
        "MEGAVM_MACHINE": "reference",
        "MEGAVM_MAX_TOKENS": "2",
        "MEGAVM_TEMPERATURE": "0.5",
        "MEGAVM_STOP": "x, y",
        "MEGAVM_IGNORE_EOS": "1",
        "MEGAVM_MAX_MODEL_LEN": "1K",
        "MEGAVM_N": "2",
        "MEGAVM_STREAM": "false",
    }.items():
        monkeypatch.setenv(variable, value)
    run("generate", "m", "hello", "--temperature", "0.75", "--machine", "cpu")
    params = last_params()
    assert (params.max_tokens, params.temperature, params.n) == (2, 0.75, 2)
    assert params.stop == ("x, y",)
    assert params.ignore_eos
    assert FakeLLM.made[-1].keywords["machine"] == "cpu"
    assert FakeLLM.made[-1].keywords["max_model_len"] == 1024
    run("generate", "m", "hello", "--stop", "z")
    assert last_params().stop == ("z",)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEGAVM_MAX_TOKENS", "many"),
        ("MEGAVM_MACHINE", "tpu"),
        ("MEGAVM_JSON", "maybe"),
        ("MEGAVM_MAX_MODEL_LEN", "-1"),
    ],
)
def test_a_bad_variable_is_named(
    run: Run, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    error = run("generate", "m", "hello").error
    assert variable in error
    assert value in error
