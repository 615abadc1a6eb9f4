"""Accuracy of steps of many rows: logits against transformers in float32 and bfloat16.

    python benchmarks/accuracy_rows_cuda.py --model 1b 8b --save

As in accuracy_cuda.py, weights are random with the models' shapes, transformers in float32 is the
reference, and megavm and transformers in bfloat16 compute the same texts. One text is long, the
others have prompts of 1 to 200 tokens; keys and values are megavm's own. In turn:

- chunk: the long text in chunks of these sizes; the last row of each is compared
- prompts: the prompts of all other texts, as many in a step as there is room for; their last rows
- batch: the four tokens after each prompt, for each batch size; the long text is always in it
- mixed: rows of one token, a chunk from the middle of the long text and a whole prompt in one step

A batch runs twice, and its logits must be the same bit for bit. Exits with 1 if they are not, or if
in a line megavm's logits are further from the reference than those of transformers in bfloat16, in
the mean of all or at worst.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from accuracy_cuda import (
    BLOCK,
    HEAD,
    Contenders,
    Tokens,
    check_models,
    compare,
    figures,
    give_back,
    make,
    make_parser,
    settle,
)
from environment import save
from megavm.scheduler.engine.step import Step

ROWS = 8192  # rows of the largest step
# The long text is read in chunks of so many tokens, in turn.
CHUNKS = (8192, 300, 64, 33, 1, 16, 130, 2048, 512, 7, 1000, 4096)
LONGEST_PROMPT = 200  # the other texts have prompts of up to so many tokens
STEPS = 4  # tokens after each prompt
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MIXED = (16, 64, 256, 1024, 4096)  # rows
SIDE_BY_SIDE = 16  # short texts in one forward pass of transformers
PASS = 4096  # tokens of the long text in one


@dataclass
class Text:
    """The tokens of a slot: a prompt of ``length`` tokens, and those that follow it.

    ``asked``: positions whose logits are compared -> row of the reference.
    """

    slot: int
    tokens: Tokens
    length: int
    asked: dict[int, int] = field(default_factory=dict)


@dataclass
class Part:
    """Rows of a step: positions [begin, end) of a text. The last one's logits are compared."""

    text: Text
    begin: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.begin


Line = tuple[str, int]  # a line of the table, by its kind and size


def make_texts(vocabulary: int, longest: int, count: int) -> list[Text]:
    """Random texts; the first prompt has ``longest`` tokens."""
    rng = np.random.default_rng(11)
    shorts = rng.integers(1, min(LONGEST_PROMPT, longest) + 1, count - 1).tolist()
    return [
        Text(slot, rng.integers(0, vocabulary, length + STEPS + 1).astype(np.int32), length)
        for slot, length in enumerate([longest, *shorts])
    ]


def all_steps(texts: Sequence[Text], batches: Sequence[int]) -> Iterator[tuple[Line, list[Part]]]:
    """Every step, in an order in which the keys and values that it reads have been written."""
    long, *others = texts
    done, sizes = 0, itertools.cycle(CHUNKS)
    while done < long.length:
        end = min(done + next(sizes), long.length)
        yield ("chunk", end - done), [Part(long, done, end)]
        done = end
    parts: list[Part] = []
    for text in others:
        if sum(part.rows for part in parts) + text.length > ROWS:
            yield ("prompts", ROWS), parts
            parts = []
        parts.append(Part(text, 0, text.length))
    if parts:
        yield ("prompts", ROWS), parts
    for size, step in itertools.product(batches, range(STEPS)):
        yield ("batch", size), [Part(t, t.length + step, t.length + step + 1) for t in texts[:size]]
    for rows in MIXED if others else ():
        whole = min(others, key=lambda text: abs(text.length - rows // 4))
        single = [Part(t, t.length, t.length + 1) for t in others if t is not whole][: rows // 4]
        begin, room = long.length // 3, rows - len(single) - whole.length
        if 0 < room <= long.length - begin:
            yield ("mixed", rows), [
                *single, Part(long, begin, begin + room), Part(whole, 0, whole.length)
            ]  # fmt: skip
        else:
            print(f"no mixed step of {rows} rows: the long text has {long.length} tokens")


def forget(contenders: Contenders, parts: Sequence[Part]) -> None:
    """Let nothing be known of the keys and values that a step is to write: NaN."""
    runner = contenders.runner
    for name in [name for name in runner.memory if name.endswith("_cache")]:
        value = runner.memory[name].clone()
        for part in parts:
            positions = np.arange(part.begin, part.end)
            blocks = runner.block_table[part.text.slot, positions // BLOCK].astype(np.int64)
            places = torch.from_numpy(positions % BLOCK).to(value.device)
            value[torch.from_numpy(blocks).to(value.device), :, places] = float("nan")
        runner.memory.write(name, value)


@torch.no_grad()
def reference(model: Any, texts: Sequence[Text], device: str) -> torch.Tensor:
    """Logits [asked positions, vocabulary] of transformers, float32."""
    found: dict[int, torch.Tensor] = {}  # the last layer's output of each asked position

    def keep(text: Text, begin: int, states: torch.Tensor) -> None:
        for position, row in text.asked.items():
            if begin <= position < begin + len(states):
                found[row] = states[position - begin]

    def ids(text: Text, length: int) -> torch.Tensor:
        padded = torch.zeros(length, dtype=torch.int64, device=device)
        padded[: len(text.tokens)] = torch.from_numpy(text.tokens.astype(np.int64))
        return padded

    long, *others = texts
    cache, done = transformers.DynamicCache(), 0
    for part in torch.split(ids(long, len(long.tokens)), PASS):
        output = model.model(part[None], past_key_values=cache, use_cache=True)
        keep(long, done, output.last_hidden_state[0])
        done += len(part)
    # What is after the end of a shorter text is not looked at.
    others.sort(key=lambda text: len(text.tokens))
    for begin in range(0, len(others), SIDE_BY_SIDE):
        several = others[begin : begin + SIDE_BY_SIDE]
        padded = torch.stack([ids(text, len(several[-1].tokens)) for text in several])
        states = model.model(padded, use_cache=False).last_hidden_state
        for text, own in zip(several, states, strict=True):
            keep(text, 0, own)
    rows = torch.stack([found[row] for row in range(len(found))])
    return torch.cat([model.lm_head(some).float() for some in torch.split(rows, 256)])


def run(contenders: Contenders, parts: Sequence[Part]) -> torch.Tensor:
    """Run a step; the logits [parts, vocabulary] of the last row of each part."""
    slots = np.concatenate([np.full(part.rows, part.text.slot, np.int32) for part in parts])
    positions = np.concatenate([np.arange(p.begin, p.end, dtype=np.int32) for p in parts])
    last = np.cumsum([part.rows for part in parts], dtype=np.int32) - 1
    contenders.runner.run(Step(slots, positions, last, int(positions.max()) + 1))
    return torch.from_numpy(np.array(contenders.runner.logits[: len(parts)]))


def check_model(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all steps of one model, and print a line of the table for each kind and size."""
    count = max(args.batch)
    max_len = -(-(args.longest + STEPS + 1) // BLOCK) * BLOCK
    room = [LONGEST_PROMPT + STEPS + 1] * count
    contenders = make(model, args.layers, max_len, args.machine, room, ROWS)
    runner, device = contenders.runner, contenders.device
    longest = min(args.longest, runner.max_model_len - STEPS - 1)
    texts = make_texts(contenders.config.vocab_size, longest, count)
    steps = list(all_steps(texts, args.batch))
    number = itertools.count()
    for part in (part for _, parts in steps for part in parts):
        if part.end - 1 not in part.text.asked:
            part.text.asked[part.end - 1] = next(number)
    following = torch.empty(next(number), dtype=torch.int64)
    for text in texts:
        for position, row in text.asked.items():
            following[row] = int(text.tokens[position + 1])
    exact = reference(contenders.exact, texts, device)
    native = reference(contenders.native, texts, device)
    # megavm does not need transformers: free its memory.
    contenders.exact = contenders.native = None
    give_back()

    settle(runner, False)
    for text in texts:
        runner.write_tokens(text.slot, text.tokens)
    got: dict[Line, list[torch.Tensor]] = {}
    asked: dict[Line, list[int]] = {}
    unequal = []
    for line, parts in steps:
        if line[0] == "mixed":
            forget(contenders, parts)  # they have been computed before
        logits = run(contenders, parts)
        got.setdefault(line, []).append(logits)
        asked.setdefault(line, []).extend(part.text.asked[part.end - 1] for part in parts)
        if line[0] == "batch" and not torch.equal(logits, run(contenders, parts)):
            unequal.append(line[1])
    lines, further = [], []
    for (kind, size), some in got.items():
        rows = torch.tensor(asked[kind, size])
        errors: list[tuple[float, float]] = []
        for who, logits in (("megavm", torch.cat(some).to(device)), ("bfloat16", native[rows])):
            found = compare(logits, exact[rows], following[rows])
            errors.append((found["rms_relative_error"], found["max_relative_error"]))
            lines.append({"kind": kind, "size": size, "logit_rows": len(rows), "who": who, **found})
            print(
                f"{model:10}{kind:>8}{size:6}{len(rows):6}{who:>10}{figures(found)}",
                flush=True,
            )
        # A comparison with NaN is false.
        if not all(mine <= other for mine, other in zip(*errors, strict=True)):
            further.append((kind, size))
    print(
        f"{model:10}second runs that differ: {unequal or 'none'}; further away: {further or 'none'}"
    )
    return {
        "layers": contenders.config.num_layers,
        "longest": longest,
        "lines": lines,
        "unequal_second_runs": unequal,
        "further_than_bfloat16": further,
    }


def main() -> int:
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--longest", type=int, default=16384, help="tokens of the long text")
    parser.add_argument("--batch", type=int, nargs="+", default=list(BATCHES))
    args = parser.parse_args()
    print(f"{'model':10}{'kind':>8}{'size':>6}{'rows':>6}{'':>10}{HEAD}")
    results = check_models(args, check_model)
    if args.save:
        for model, found in results.items():
            print(f"saved {save(f'accuracy_rows_cuda_{model}', {'models': {model: found}})}")
    wrong = any(
        found["unequal_second_runs"] or found["further_than_bfloat16"] for found in results.values()
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
