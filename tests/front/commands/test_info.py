"""`megavm info`: the sizes of a model, and files that are broken."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command_line import Run


def test_info_gives_the_sizes_of_a_model(run: Run, model_directory: Path) -> None:
    value = json.loads(run("info", str(model_directory), "--json").out)
    parameters = 50 * 16 + 2 * (16 * 16 * 2 + 16 * 8 * 2 + 16 * 24 * 3 + 32) + 16
    assert value["parameters"] == parameters
    assert value["weight_bytes"] == 2 * parameters
    assert value["kv_bytes_per_token"] == 2 * 2 * 2 * 2 * 4
    assert value["config"]["num_layers"] == 2
    assert not value["tokenizer"]["available"]
    wide = json.loads(run("info", str(model_directory), "--json", "--dtype", "float32").out)
    assert wide["kv_bytes_per_token"] == 2 * value["kv_bytes_per_token"]
    text = run("info", str(model_directory)).out
    assert re.search(rf"parameters +{parameters:,}", text)
    assert re.search(r"tokenizer +none", text)


def test_info_refuses_a_broken_model(run: Run, model_directory: Path) -> None:
    path = model_directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in run("info", str(model_directory)).error
    assert "no such directory" in run("info", str(model_directory / "nothing")).error
