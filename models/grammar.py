"""A small template language that turns story outlines into English text.

A template is ordinary text with three kinds of marks:

``[a|b|c]``
    one of the alternatives, chosen at random; alternatives nest, and an empty one is allowed.
``<rule>``
    one of the alternatives of a named rule, expanded in the same scene.
``{h.name}`` / ``{food}``
    a slot: an attribute of an entity of the scene, or a plain string of it (which may itself
    be a template). A slot whose last part starts with a capital letter is capitalised, so
    ``{h.He}`` starts a sentence with the pronoun of ``h``.

Templates are parsed once and cached, because the corpus expands each of them many thousand times.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

Node: TypeAlias = "str | Choice | Reference | Slot"
Sequence: TypeAlias = tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Alternatives of which one is taken."""

    options: tuple[Sequence, ...]


@dataclass(frozen=True)
class Reference:
    """A reference to a named rule."""

    rule: str


@dataclass(frozen=True)
class Slot:
    """A reference to a value of the scene: ``entity.attribute`` or a plain string."""

    entity: str
    attribute: str | None
    capital: bool


TOKEN = re.compile(r"[\[\]|]|<\w+>|\{[\w.]+\}|[^\[\]|<{]+")


@cache
def parse(template: str) -> Sequence:
    """Parse a template; raise ValueError where its marks do not balance."""
    flat = re.sub(r"[ \t]*\n[ \t]*\n\s*", "\n\n", template.strip())
    flat = re.sub(r"(?<!\n)\n[ \t]*(?!\n)", " ", flat)
    flat = re.sub(r"(?<=[\[|]) +| +(?=[|\]])", "", flat)
    tokens = TOKEN.findall(flat)
    if "".join(tokens) != flat:
        raise ValueError(f"stray mark in template: {template!r}")
    sequence, position = _parse_sequence(tokens, 0, nested=False)
    if position != len(tokens):
        raise ValueError(f"unbalanced bracket in template: {template!r}")
    return sequence


def _parse_sequence(tokens: list[str], position: int, nested: bool) -> tuple[Sequence, int]:
    """Parse nodes from ``position`` up to the end, or up to ``|`` or ``]`` when nested."""
    nodes: list[Node] = []
    while position < len(tokens):
        token = tokens[position]
        if token in "|]":
            if not nested:
                break
            return tuple(nodes), position
        position += 1
        if token == "[":
            options: list[Sequence] = []
            while True:
                option, position = _parse_sequence(tokens, position, nested=True)
                options.append(option)
                position += 1
                if tokens[position - 1] == "]":
                    break
            nodes.append(Choice(tuple(options)))
        elif token[0] == "<":
            nodes.append(Reference(token[1:-1]))
        elif token[0] == "{":
            entity, _, attribute = token[1:-1].partition(".")
            last = attribute or entity
            capital = last[0].isupper()
            nodes.append(Slot(entity.lower(), attribute.lower() or None, capital))
        else:
            nodes.append(token)
    if nested:
        raise ValueError("unbalanced bracket in template")
    return tuple(nodes), position


def expand(
    template: str,
    scene: Mapping[str, object],
    rules: Mapping[str, str],
    rng: random.Random,
) -> str:
    """Expand a template into text with the entities of ``scene``."""
    parts: list[str] = []
    pending: list[Node] = list(reversed(parse(template)))
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            parts.append(node)
        elif isinstance(node, Choice):
            pending.extend(reversed(rng.choice(node.options)))
        elif isinstance(node, Reference):
            pending.extend(reversed(parse(rules[node.rule])))
        else:
            value = scene[node.entity]
            if node.attribute is not None:
                value = getattr(value, node.attribute)
            text = str(value)
            if node.attribute is None:
                text = expand(text, scene, rules, rng)
            parts.append(text[:1].upper() + text[1:] if node.capital else text)
    text = re.sub(r" +", " ", "".join(parts))
    return re.sub(r" ?\n ?", "\n", text).strip()
