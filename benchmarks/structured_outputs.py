"""The time of a mask of allowed tokens: what a sequence with a grammar adds between two launches.

    python benchmarks/structured_outputs.py [--rounds 5] [--save]

The vocabulary has as many tokens as Llama 3's, 128,256: bytes and the commonest words of Python's
own library. A text of each form is followed token by token through the two calls that the engine
makes per token (restriction.Follower). ``first`` is the first request with a grammar, in which the
library makes automata, ``later`` is the best of those after it, token by token. The other backend
that was considered, xgrammar, is measured without the engine's part if it is installed. ``engine``:
time per token of the shipped model on the CPU with and without a grammar, for as many tokens.
"""

from __future__ import annotations

import argparse
import collections
import functools
import importlib
import json
import os
import re
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from environment import save
from megavm import LLM, SamplingParams
from megavm.grammars import GrammarCompiler
from megavm.scheduler.engine.restriction import Follower, Restriction, mask_words
from megavm.structured_outputs import StructuredOutputsParams
from megavm.tokenizer import Tokenizer

VOCABULARY = 128_256
EOS = VOCABULARY - 1
LIMIT_US = 50.0
ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string"},
        "paid": {"type": "boolean"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "maxLength": 60},
                    "count": {"type": "integer", "minimum": 1},
                    "size": {"enum": ["small", "medium", "large"]},
                },
                "required": ["name", "count", "size"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["customer", "paid", "items"],
    "additionalProperties": False,
}
TEXT = json.dumps(
    {
        "customer": 'a person with a rather long name, and "quotes" in it',
        "paid": True,
        "items": [
            {"name": f"thing number {i} of the list", "count": 3 * i + 1, "size": "medium"}
            for i in range(6)
        ],
    }
)
FORMS: dict[str, tuple[StructuredOutputsParams, str]] = {
    "json schema": (StructuredOutputsParams(json=ORDER), TEXT),
    "json object": (StructuredOutputsParams(json_object=True), TEXT),
    "regex": (
        StructuredOutputsParams(regex=r"(\w+ )*\w+@[a-z]+\.(com|org)"),
        "write to me@home.org",
    ),
    "choice": (
        StructuredOutputsParams(choice=[f"the answer {i}" for i in range(1000)]),
        "the answer 837",
    ),
}


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    moved = {byte: chr(256 + i) for i, byte in enumerate(others)}
    return {byte: chr(byte) for byte in printable} | moved


def common_words(count: int) -> list[bytes]:
    """The commonest words and runs of other characters in Python's own library."""
    counts: collections.Counter[str] = collections.Counter()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))[:6000]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        counts.update(re.findall(r" ?\w{1,24}| ?[^\w\s]{1,3}|\s{2,12}", text))
    words = [word.encode() for word, _ in counts.most_common() if len(word.encode()) > 1]
    if len(words) < count:  # a small installation: numbers fill the rest
        words += [str(i).encode() for i in range(10**7, 10**7 + count - len(words))]
    return words[:count]


def write_tokenizer(directory: Path, tokens: list[bytes]) -> None:
    """A byte-level tokenizer with these tokens."""
    characters = byte_characters()
    vocabulary = {"".join(characters[byte] for byte in token): i for i, token in enumerate(tokens)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": EOS, "content": "<|end|>", "special": True, "normalized": False,
             "lstrip": False, "rstrip": False, "single_word": False}
        ],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }  # fmt: skip
    (directory / "tokenizer.json").write_text(json.dumps(content))


def follow(
    ids: list[int], fill: Callable[[], None], accept: Callable[[int], None]
) -> tuple[list[float], list[float]]:
    """Microseconds of the mask before each token, and of accepting it."""
    masks, accepts = [], []
    for token in ids:
        begin = time.perf_counter()
        fill()
        filled = time.perf_counter()
        accept(token)
        accepts.append(1e6 * (time.perf_counter() - filled))
        masks.append(1e6 * (filled - begin))
    return masks, accepts


def summary(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        "median": round(statistics.median(values), 1),
        "mean": round(statistics.fmean(values), 1),
        "p99": round(values[int(0.99 * (len(values) - 1))], 1),
        "max": round(values[-1], 1),
    }


Start = Callable[[], tuple[Callable[[], None], Callable[[int], None]]]


def measure(compile_now: Callable[[], Start], ids: list[int], rounds: int) -> dict[str, Any]:
    """Times of one form with one backend."""
    begin = time.perf_counter()
    start = compile_now()
    compile_ms = 1e3 * (time.perf_counter() - begin)
    first, _ = follow(ids, *start())
    # Of each token the best of the rounds: other processes disturb some.
    times = np.array([follow(ids, *start()) for _ in range(rounds)]).min(axis=0)
    later, accepted = times.tolist()
    return {
        "tokens": len(ids),
        "compile_ms": round(compile_ms, 2),
        "first_mask_us": summary(first),
        "later_mask_us": summary(later),
        "accept_us": summary(accepted),
    }


def llguidance_start(
    compiler: GrammarCompiler, form: StructuredOutputsParams, ids: list[int]
) -> Start:
    restriction = Restriction(compiler.compile(form))
    mask = np.zeros(mask_words(VOCABULARY), dtype=np.int32)
    output = np.array(ids, dtype=np.int32)

    def start() -> tuple[Callable[[], None], Callable[[int], None]]:
        follower = Follower(restriction)
        count = 0

        def accept(_: int) -> None:
            nonlocal count
            count += 1
            check(follower.follow(output[:count]))

        return lambda: check(follower.fill(output[:count], mask)), accept

    return start


def check(failure: str) -> None:
    if failure:
        raise RuntimeError(failure)


def xgrammar_start(xgrammar: Any, compiler: Any, form: StructuredOutputsParams) -> Start:
    match form.form:
        case "json":
            grammar = compiler.compile_json_schema(form.json)
        case "json_object":
            grammar = compiler.compile_builtin_json_grammar()
        case "regex":
            grammar = compiler.compile_regex(form.regex)
        case _:
            rule = " | ".join(json.dumps(text) for text in form.choice or ())
            grammar = compiler.compile_grammar(f"root ::= {rule}")
    mask = xgrammar.allocate_token_bitmask(1, VOCABULARY)

    def start() -> tuple[Callable[[], None], Callable[[int], None]]:
        matcher = xgrammar.GrammarMatcher(grammar)

        def accept(token: int) -> None:
            if not matcher.accept_token(token):
                raise RuntimeError(f"xgrammar refuses token {token}")

        return lambda: matcher.fill_next_token_bitmask(mask), accept

    return start


def measure_backends(rounds: int) -> Iterator[dict[str, Any]]:
    tokens = [bytes([i]) for i in range(256)] + common_words(VOCABULARY - 257)
    with tempfile.TemporaryDirectory(prefix="megavm-") as folder:
        write_tokenizer(Path(folder), tokens)
        compiler = GrammarCompiler(Tokenizer(folder), VOCABULARY, [EOS])
        begin = time.perf_counter()
        library = compiler._library_tokenizer()
        prepare_ms = 1e3 * (time.perf_counter() - begin)
        for name, (form, text) in FORMS.items():
            ids = library.greedy_tokenize(text)
            found = measure(functools.partial(llguidance_start, compiler, form, ids), ids, rounds)
            yield {"backend": "llguidance", "form": name, "prepare_ms": round(prepare_ms), **found}
        try:
            xgrammar: Any = importlib.import_module("xgrammar")
        except ImportError:
            return
        begin = time.perf_counter()
        info = xgrammar.TokenizerInfo(
            [*tokens, b"<|end|>"],
            xgrammar.VocabType.RAW,
            vocab_size=VOCABULARY,
            stop_token_ids=[EOS],
        )
        other = xgrammar.GrammarCompiler(info, max_threads=os.cpu_count() or 1)
        prepare_ms = 1e3 * (time.perf_counter() - begin)
        for name, (form, text) in FORMS.items():
            ids = library.greedy_tokenize(text)
            found = measure(functools.partial(xgrammar_start, xgrammar, other, form), ids, rounds)
            yield {"backend": "xgrammar", "form": name, "prepare_ms": round(prepare_ms), **found}


def measure_engine(tokens: int, rounds: int) -> dict[str, float]:
    """Milliseconds per token of one sequence of the shipped model, with and without a grammar."""
    form = {"regex": "[a-z ]*"}
    options = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    best: dict[str, float] = {}
    with LLM("stories") as llm:
        for _ in range(rounds + 1):
            for name, extra in (("plain", {}), ("grammar", {"structured_outputs": form})):
                params = SamplingParams(**options, **extra)  # type: ignore[arg-type]
                begin = time.perf_counter()
                (result,) = llm.generate("Once upon a time", params)
                spent = 1e3 * (time.perf_counter() - begin) / len(result.outputs[0].token_ids)
                best[name] = min(best.get(name, spent), spent)
    return {name: round(value, 4) for name, value in best.items()}


def main() -> int:
    """Measure and print a table; returns 1 if a mask of a later request takes too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="of a completion of the engine")
    parser.add_argument("--save", action="store_true", help="write results/structured_outputs.json")
    arguments = parser.parse_args()
    heads = "".join(f"{name:>18}" for name in ("first us", "later us", "accept us"))
    print(f"{'backend':12}{'form':14}{'compile ms':>11}{heads}   (median, p99)")
    results, late = [], []
    for result in measure_backends(arguments.rounds):
        results.append(result)
        times = "".join(
            f"{result[name]['median']:10.1f}{result[name]['p99']:8.1f}"
            for name in ("first_mask_us", "later_mask_us", "accept_us")
        )
        print(f"{result['backend']:12}{result['form']:14}{result['compile_ms']:11.2f}{times}")
        step = result["later_mask_us"]["median"] + result["accept_us"]["median"]
        if result["backend"] == "llguidance" and step > LIMIT_US:
            late.append(result["form"])
    engine = measure_engine(arguments.tokens, arguments.rounds)
    print(
        f"engine, ms per token: {engine['plain']} without a grammar, {engine['grammar']} with one"
    )
    for form in late:
        print(f"accepting a token and the mask of {form} take more than {LIMIT_US} us")
    if arguments.save:
        report = {
            "limit_us": LIMIT_US,
            "within_limit": not late,
            "vocabulary": VOCABULARY,
            "results": results,
            "engine_ms_per_token": engine,
        }
        load = {"load_average": os.getloadavg()[0]}
        print(f"saved {save('structured_outputs', {**load, **report})}")
    return 1 if late else 0


if __name__ == "__main__":
    raise SystemExit(main())
