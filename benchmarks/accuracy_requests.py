"""Random requests through the engine: each against itself alone, all against transformers.

    python benchmarks/accuracy_requests.py --model 1b --requests 3000 --save

Requests of random lengths, some with a common beginning, run through ``LLM.generate`` at once: in
batches of many sizes, with prompts cut into chunks beside sequences that decode, and with the
prefix cache. Then each runs alone, without that cache. Weights are random with the model's shapes
(or those of the shipped model "stories"), saved by transformers and read as any other model.

All choose greedily. Where two logits are nearly equal, rounding decides, and a batch may choose
another token than one row does. So every chosen token is held against transformers in float32 with
the same text: its logit may be below the largest by no more than ``limit``, twice the largest error
that transformers' own bfloat16 has in the logits of some of these texts. Exits with 1 if one is.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch

from accuracy_cuda import check_models, give_back, load_models, make_parser
from environment import save
from megavm import LLM, SamplingParams
from megavm.outputs import RequestOutput

MOST_PROMPT = 1000
MOST_OUTPUT = 64
BEGINNINGS = 8  # texts that some prompts share
SIDE_BY_SIDE = 8192  # tokens of a forward pass of transformers


def make_requests(
    number: int, vocabulary: int, most_prompt: int, most_output: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to ``most_prompt`` tokens, by a log-uniform law, and their parameters."""
    draw = random.Random(5)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(count)]

    beginnings = [tokens(draw.randint(1, most_prompt // 2)) for _ in range(BEGINNINGS)]
    prompts, params = [], []
    for _ in range(number):
        prompt = tokens(max(1, round(most_prompt ** draw.random())))
        if draw.random() < 0.3:
            prompt = (draw.choice(beginnings) + prompt)[:most_prompt]
        prompts.append(prompt)
        params.append(
            SamplingParams(
                temperature=0.0, max_tokens=draw.randint(1, most_output), ignore_eos=True
            )
        )
    return prompts, params


class Reference:
    """Transformers' logits at the positions where a text's tokens were chosen."""

    def __init__(self, model: Any, device: str) -> None:
        self.model = model
        self.device = device

    @torch.no_grad()
    def logits(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[torch.Tensor]:
        """For (prompt, output) pairs: float32 [output tokens, vocabulary] each."""
        longest = max(len(prompt) + len(output) for prompt, output in texts)
        ids = torch.zeros(len(texts), longest, dtype=torch.int64)
        for row, (prompt, output) in enumerate(texts):
            ids[row, : len(prompt) + len(output)] = torch.tensor([*prompt, *output])
        states = self.model.model(ids.to(self.device), use_cache=False).last_hidden_state
        return [
            self.model.lm_head(own[len(prompt) - 1 : len(prompt) + len(output) - 1]).float()
            for own, (prompt, output) in zip(states, texts, strict=True)
        ]


def side_by_side(sizes: Sequence[int]) -> list[list[int]]:
    """Indices of texts of about the same length, so that a pass has few padded tokens."""
    groups: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=sizes.__getitem__):
        if not groups or (len(groups[-1]) + 1) * sizes[index] > SIDE_BY_SIDE:
            groups.append([])
        groups[-1].append(index)
    return groups


def generate(llm: LLM, prompts: Any, params: list[SamplingParams]) -> list[list[int]]:
    """The chosen tokens. Raises RuntimeError when a request fails or ends early."""
    outputs: list[RequestOutput] = llm.generate(prompts, params)
    for output, wanted in zip(outputs, params, strict=True):
        if output.error is not None:
            raise RuntimeError(f"a request failed: {output.error}")
        if (count := len(output.outputs[0].token_ids)) != wanted.max_tokens:
            raise RuntimeError(f"a request has {count} tokens, expected {wanted.max_tokens}")
    return [output.outputs[0].token_ids for output in outputs]


def check_model(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all requests of one model, and print what was found."""
    device = "cuda" if args.machine == "cuda" else "cpu"
    torch.manual_seed(0)
    most_output, longest = args.most_output, args.most_prompt + args.most_output
    config, exact, native = load_models(model, args.layers, longest, device)
    most_prompt = min(args.most_prompt, config.max_position_embeddings - most_output)
    prompts, params = make_requests(args.requests, config.vocab_size, most_prompt, most_output)
    sizes: dict[str, Any] = {
        "machine": args.machine, "dtype": "bfloat16", "kv_cache_bytes": args.kv_cache_bytes
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        native.save_pretrained(folder)
        begin = time.perf_counter()
        with LLM(folder, **sizes) as llm:
            together = generate(llm, prompts, params)
            steps, rows = llm.engine.counters.steps, llm.engine.counters.rows
            cached = llm.engine.blocks.counters.hits * llm.engine.blocks.block_size
            if not cached:
                raise RuntimeError("no prompt had a beginning in the prefix cache")
        between = time.perf_counter()
        with LLM(folder, max_num_seqs=1, prefix_caching=False, **sizes) as llm:
            alone = [generate(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    seconds = between - begin, time.perf_counter() - between
    give_back()

    # Every token that was chosen in either way, after the tokens that were chosen before it.
    texts = [(p, o) for p, o in zip(prompts, together, strict=True)]
    different = [i for i, (a, b) in enumerate(zip(together, alone, strict=True)) if a != b]
    texts += [(prompts[i], alone[i]) for i in different]
    exact, native = Reference(exact, device), Reference(native, device)
    error = largest = 0.0
    gaps, others = [], 0
    for number, group in enumerate(side_by_side([len(p) + len(o) for p, o in texts])):
        some = [texts[i] for i in group]
        want = exact.logits(some)
        for logits, (_, output) in zip(want, some, strict=True):
            chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])
            gap = logits.max(dim=1).values - chosen[:, 0]
            gaps.append(gap.max().item())
            others += int((gap > 0).sum())
            largest = max(largest, logits.abs().max().item())
        if number % 8 == 0:
            for logits, rounded in zip(want, native.logits(some), strict=True):
                error = max(error, (logits - rounded).abs().max().item())
    limit = 2 * error
    found = {
        "layers": config.num_layers,
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(map(len, together)),
        "prefix_cache_tokens": cached,
        "steps": steps,
        "rows": rows,
        "seconds_together": round(seconds[0], 1),
        "seconds_alone": round(seconds[1], 1),
        "different_from_alone": len(different),
        "checked_tokens": sum(len(output) for _, output in texts),
        "not_float32_choice": others,
        "largest_logit": largest,
        "largest_gap": max(gaps),
        "limit": limit,
    }
    print(
        f"{model}: {found['requests']} requests in {found['steps']} steps of"
        f" {found['rows'] / found['steps']:.0f} rows on average;"
        f" {found['different_from_alone']} chose another token than alone.\n"
        f"Of {found['checked_tokens']} tokens {found['not_float32_choice']} are not the choice"
        f" of float32, whose logit is larger by {found['largest_gap']:.2g} at most; the limit"
        f" is {found['limit']:.2g}, the largest logit {found['largest_logit']:.2g}",
        flush=True,
    )
    return found


def main() -> int:
    parser = make_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--most-prompt", type=int, default=MOST_PROMPT, help="tokens")
    parser.add_argument("--most-output", type=int, default=MOST_OUTPUT, help="tokens")
    parser.add_argument("--kv-cache-bytes", type=int, default=8 << 30)
    args = parser.parse_args()
    results = check_models(args, check_model)
    if args.save:
        print(f"saved {save('accuracy_requests', {'models': results})}")
    within = all(found["largest_gap"] <= found["limit"] for found in results.values())
    return 0 if within else 1


if __name__ == "__main__":
    raise SystemExit(main())
