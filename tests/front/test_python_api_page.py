"""The examples of docs/python-api.md run, one after the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


def test_the_examples_run() -> None:
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for example in examples:
        exec(compile(example, str(PAGE), "exec"), names)
    assert all(output.outputs[0].text for output in names["outputs"])
    assert names["answer"].outputs[0].text
    assert names["params"].temperature == 0.8  # that of the model
    names["llm"].close()
