"""The parsers by name, and which of them a model's chat template asks for."""

from __future__ import annotations

import re
from typing import Final

from megavm.server.tools.hermes import HermesParser
from megavm.server.tools.llama3_json import Llama3JsonParser
from megavm.server.tools.parser import ToolParser
from megavm.server.tools.pythonic import PythonicParser

PARSERS: Final[dict[str, type[ToolParser]]] = {  # vLLM's names
    "llama3_json": Llama3JsonParser,
    "hermes": HermesParser,
    "pythonic": PythonicParser,
}
# Signs in a template that it teaches or repeats calls in a format.
_SIGNS: Final = (
    ("pythonic", re.compile(r"<\|python_start\|>|\[\w+\(\w+=")),
    ("hermes", re.compile(r"<tool_call>")),
    ("llama3_json", re.compile(r"""<\|python_tag\|>|["']parameters\\?["']: """)),
)
# Calls between <tool_call> and </tool_call> that are no JSON: of Qwen3-Coder and GLM 4.
_OTHER_FORMATS: Final = re.compile(r"<function=|<arg_key>")


def detect_parser(chat_template: str | None) -> str | None:
    """The name of the parser for a chat template, or None if its format is not known."""
    if chat_template is None or _OTHER_FORMATS.search(chat_template):
        return None
    return next((name for name, sign in _SIGNS if sign.search(chat_template)), None)
