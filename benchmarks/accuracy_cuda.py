"""Accuracy of single rows: teacher-forced logits against transformers in float32 and bfloat16.

    python benchmarks/accuracy_cuda.py --model 1b 8b stories --context 1 64 1000 4096 --save

Weights are random with the models' shapes (or those of the shipped model "stories"), rounded to
bfloat16. The reference is transformers in float32 with the same weights. Both contenders, megavm
and transformers in bfloat16, decode the same tokens after the same context. The keys and values of
the context are either given to both, rounded from the float32 run ("given"), or computed by each
contender itself ("own").

benchmarks/accuracy_rows_cuda.py does the same for batches, long prompts and mixed steps.

Also checks whether sequences choose the same tokens in a batch as alone, and runs a long greedy
decode at batch 1 twice.
"""

from __future__ import annotations

import argparse
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers

from environment import save
from llama_cuda import MODELS
from megavm.instructions.sample import INTEGER_COLUMNS, REAL_COLUMNS, Integer, Real
from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.engine.step import Step
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits, default_logit_rows, rope_table
from megavm.scheduler.llama.hub import resolve
from megavm.scheduler.run.buckets import weight_specs
from megavm.scheduler.run.machines import make_machine
from megavm.scheduler.run.runner import Runner
from megavm.vm.memory import Memory
from megavm.vm.tensors import BF16

BLOCK = 64
SEQUENCES = 8
CHUNKS = (8, 64, 33, 16, 300, 130)  # rows of the steps of megavm's prefill, in turn
LONGEST_OWN = 1000  # longer contexts are only given, not computed
PREFILL = 1024  # tokens of one forward pass of transformers' prefill
LAUNCH = 32  # tokens per launch of the long run
LENGTHS = (1, 7, 33, 64, 100, 129, 200, 250)  # prompts of the sequences of a batch
BATCH_STEPS = 16
SHORT = max(LENGTHS) + BATCH_STEPS + 1  # tokens of a sequence of a batch

Tokens = npt.NDArray[np.int32]


class ForcedRunner(Runner):
    """A Runner that runs all steps with one program while ``forced`` is set."""

    forced: Bucket | None = None

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        own = self.programs.bucket
        self.programs.bucket = (  # type: ignore[method-assign]
            lambda *sizes, **kinds: self.forced or own(*sizes, **kinds)
        )


@dataclass
class Contenders:
    """One model in three implementations."""

    config: LlamaConfig
    exact: Any  # transformers, float32
    native: Any  # transformers, bfloat16
    runner: ForcedRunner
    device: str

    @property
    def blocks(self) -> Tokens:
        """The KV blocks of slot 0, in random order."""
        blocks: Tokens = self.runner.block_table[0]
        return blocks


def make(
    model: str,
    layers: int | None,
    max_len: int,
    machine: str,
    lengths: Sequence[int] = (SHORT,) * SEQUENCES,
    rows: int = max(CHUNKS),
) -> Contenders:
    """Make the three models; megavm gets a copy of the weights, because it may relayout them.

    Slot i has KV blocks for ``lengths[i]`` tokens, slot 0 for ``max_len``, in random order.
    ``rows``: of the largest step.
    """
    torch.manual_seed(0)
    virtual, workers = make_machine(machine)
    device = virtual.memory_device
    config, exact, native = load_models(model, layers, max_len, device)
    max_len = min(max_len, config.max_position_embeddings)
    held = [-(-length // BLOCK) for length in (max_len, *(min(n, max_len) for n in lengths[1:]))]
    logit_rows = default_logit_rows(len(held), rows)
    limits = Limits(len(held), max_len, rows, logit_rows, sum(held), BLOCK)
    memory = Memory(device)
    weights = native.state_dict()
    for spec in weight_specs(config, limits, BF16):
        if spec.name == "rope":
            memory.bind(spec, rope_table(config, max_len).to(memory.device))
        else:
            parts = [weights[name].to(torch.bfloat16).clone() for name in spec.part_names]
            memory.bind(spec, *parts)

    def options(rows: int) -> CompileOptions:
        return default_options(machine, workers, rows)

    runner = ForcedRunner(config, memory, limits, BF16, virtual, options)
    order = np.random.default_rng(0).permutation(sum(held)).astype(np.int32)
    for slot, blocks in enumerate(np.split(order, np.cumsum(held)[:-1])):
        runner.write_blocks(slot, 0, blocks)
    return Contenders(config, exact, native, runner, device)


def load_models(
    model: str, layers: int | None, max_len: int, device: str
) -> tuple[LlamaConfig, Any, Any]:
    """A model in transformers, in float32 and in bfloat16: the shipped one, or random weights.

    ``layers`` and ``max_len``: of a model with random weights.
    """
    config = MODELS[model]
    if model == "stories":
        load: Any = transformers.LlamaForCausalLM.from_pretrained
        exact, native = (
            load(resolve(model), dtype=dtype).eval().to(device)
            for dtype in (torch.float32, torch.bfloat16)
        )
        return config, exact, native
    layers = layers or config.num_layers
    config = replace(config, max_position_embeddings=max_len, num_layers=layers)
    return config, *random_models(config, device)


def random_models(config: LlamaConfig, device: str) -> tuple[Any, Any]:
    """Transformers in float32 and in bfloat16 with the same weights, made on ``device``."""
    shape = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        tie_word_embeddings=config.tie_word_embeddings,
    )
    with torch.device(device):
        new_model: Any = transformers.LlamaForCausalLM
        exact, native = (new_model(shape).eval() for _ in range(2))
    # Cast parameters only: rotary frequencies stay float32, as in a loaded model.
    for wide, narrow in zip(exact.parameters(), native.parameters(), strict=True):
        if wide.dim() == 1:
            wide.data.uniform_(0.8, 1.2)
        else:
            wide.data.normal_(0.0, wide.shape[1] ** -0.5)
        narrow.data = wide.data.to(torch.bfloat16)
        wide.data.copy_(narrow.data)
    return exact, native


def settle(runner: Runner, choose: bool) -> None:
    """Set sampling of all slots to greedy, or turn it off."""
    real = np.zeros(REAL_COLUMNS, np.float32)
    real[Real.TOP_P] = real[Real.REPETITION_PENALTY] = 1.0
    integer = np.zeros(INTEGER_COLUMNS, np.int32)
    integer[Integer.ENABLED] = choose
    runner.sampling_real[:] = real
    runner.sampling_integer[:] = integer


def rows_of(slot: int, begin: int, end: int) -> Step:
    """A step of the positions [begin, end) of a slot, without logits."""
    positions = np.arange(begin, end, dtype=np.int32)
    return Step(np.full(end - begin, slot, np.int32), positions, np.empty(0, np.int32), end)


def read_context(runner: Runner, slot: int, length: int) -> None:
    """Prefill a slot's first tokens with megavm, in steps of several sizes."""
    settle(runner, False)
    done, sizes = 0, itertools.cycle(CHUNKS)
    while done < length:
        end = min(done + next(sizes), length)
        runner.run(rows_of(slot, done, end))
        done = end


@torch.no_grad()
def prefill(model: Any, tokens: torch.Tensor) -> Any:
    """The KV cache of transformers for tokens [1, n]."""
    cache = transformers.DynamicCache()
    for part in torch.split(tokens, PREFILL, dim=1):
        model(part, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.no_grad()
def forced(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [n, vocabulary], float32, of tokens [1, n] that follow the contents of the cache."""
    logits = [
        model(token, past_key_values=cache, use_cache=True).logits[0, -1].float()
        for token in torch.split(tokens, 1, dim=1)
    ]
    return torch.stack(logits)


@torch.no_grad()
def rounded(cache: Any) -> Any:
    """A copy of a cache in bfloat16."""
    twin = transformers.DynamicCache()
    for index, layer in enumerate(cache.layers):
        twin.update(layer.keys.to(torch.bfloat16), layer.values.to(torch.bfloat16), index)
    return twin


@torch.no_grad()
def give_context(contenders: Contenders, cache: Any, length: int) -> None:
    """Copy keys and values from transformers' cache into megavm's KV blocks of slot 0."""
    runner = contenders.runner
    runner.programs.program(runner.programs.bucket(1, 1, length + 1))  # allocates the caches
    blocks = -(-length // BLOCK)
    places = torch.from_numpy(contenders.blocks[:blocks].astype(np.int64))
    places = places.to(contenders.device)
    for index, layer in enumerate(cache.layers):
        for part, source in (("k", layer.keys), ("v", layer.values)):
            name = f"layers.{index}.{part}_cache"
            value = runner.memory[name].clone()
            padded = F.pad(source[0], (0, 0, 0, blocks * BLOCK - length))
            heads, _, d = padded.shape
            pieces = padded.view(heads, blocks, BLOCK, d).transpose(0, 1)
            value[places] = pieces.to(value.dtype)
            runner.memory.write(name, value)


def decode(runner: Runner, context: int, steps: int) -> torch.Tensor:
    """megavm's logits [steps, vocabulary] of the tokens of slot 0 from ``context`` on."""
    settle(runner, False)
    logits = []
    zero = np.zeros(1, np.int32)
    for position in range(context, context + steps):
        runner.run(Step(zero, np.array([position], np.int32), zero, position + 1))
        logits.append(torch.from_numpy(np.array(runner.logits[0])))
    return torch.stack(logits)


def compare(got: torch.Tensor, want: torch.Tensor, following: torch.Tensor) -> dict[str, float]:
    """Errors of logits [n, vocabulary] against the reference and the following tokens [n]."""
    got, want, following = (value.to(want.device) for value in (got, want, following))
    got, want = got.double(), want.double()
    mine, true = got.log_softmax(-1), want.log_softmax(-1)
    loss, true_loss = (-p.gather(1, following[:, None]).mean() for p in (mine, true))
    return {
        "max_relative_error": float((got - want).abs().max() / want.abs().max()),
        "rms_relative_error": float(((got - want).square().mean() / want.square().mean()).sqrt()),
        "kl": float((true.exp() * (true - mine)).sum(-1).mean()),
        "nll_difference": float(loss - true_loss),
        "greedy_agreement": float((got.argmax(-1) == want.argmax(-1)).double().mean()),
    }


HEAD = f"{'max error':>12}{'KL':>11}{'NLL diff':>12}{'greedy':>9}"


def figures(found: dict[str, Any]) -> str:
    """What ``compare`` found, below ``HEAD``."""
    return (
        f"{found['max_relative_error']:12.2e}{found['kl']:11.2e}"
        f"{found['nll_difference']:12.2e}{found['greedy_agreement']:9.1%}"
    )


def check_context(contenders: Contenders, context: int, steps: int) -> list[dict[str, Any]]:
    """Decode after ``context`` random tokens, with given and with own keys and values."""
    runner, config = contenders.runner, contenders.config
    rng = np.random.default_rng(context)
    tokens = rng.integers(0, config.vocab_size, context + steps + 1).astype(np.int32)
    runner.write_tokens(0, tokens[: context + steps])
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    prompt, asked = (part.to(contenders.device) for part in (ids[:, :context], ids[:, context:-1]))
    following = ids[0, context + 1 :]
    cache = prefill(contenders.exact, prompt)
    # Copy the cache for both contenders before ``forced`` appends to it.
    given = rounded(cache)
    give_context(contenders, cache, context)
    want = forced(contenders.exact, cache, asked)
    del cache
    results = {
        ("megavm", "given"): decode(runner, context, steps),
        ("bfloat16", "given"): forced(contenders.native, given, asked),
    }
    if context <= LONGEST_OWN:
        read_context(runner, 0, context)
        results["megavm", "own"] = decode(runner, context, steps)
        own = prefill(contenders.native, prompt)
        results["bfloat16", "own"] = forced(contenders.native, own, asked)
    return [
        {"context": context, "cache": cache, "who": who, **compare(logits, want, following)}
        for (who, cache), logits in results.items()
    ]


def greedy(
    runner: ForcedRunner, slots: list[int], prompts: list[Tokens], bucket: Bucket
) -> tuple[Tokens, npt.NDArray[np.float32]]:
    """Greedy decode of slots whose contexts are computed; begins with their last prompt token.

    Returns tokens [sequences, steps] and logits [sequences, steps, vocabulary].
    """
    settle(runner, True)
    for slot in slots:
        runner.write_tokens(slot, prompts[slot])
    rows = np.arange(len(slots), dtype=np.int32)
    sequences = np.array(slots, np.int32)
    last = np.array([len(prompts[slot]) - 1 for slot in slots], np.int32)
    tokens, logits = [], []
    runner.forced = bucket
    try:
        for step in range(BATCH_STEPS):
            positions = last + step
            runner.run(Step(sequences, positions, rows, int(positions.max()) + 1))
            tokens.append(
                [int(runner.tokens[s, p + 1]) for s, p in zip(slots, positions, strict=True)]
            )
            logits.append(np.array(runner.logits[: len(slots)]))
    finally:
        runner.forced = None
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


def check_batch(contenders: Contenders) -> dict[str, Any]:
    """Compare sequences in a batch and alone, with the same program and with that of one row."""
    runner = contenders.runner
    rng = np.random.default_rng(7)
    vocabulary = contenders.config.vocab_size
    prompts = [rng.integers(0, vocabulary, length).astype(np.int32) for length in LENGTHS]
    for slot, prompt in enumerate(prompts):
        runner.write_tokens(slot, prompt)
        read_context(runner, slot, len(prompt))
    longest = max(LENGTHS) + BATCH_STEPS
    many, one = (
        runner.programs.bucket(rows, rows, longest, decode=True) for rows in (SEQUENCES, 1)
    )
    slots = list(range(SEQUENCES))
    together, logits = greedy(runner, slots, prompts, many)
    result: dict[str, Any] = {"tokens": together.size}
    for name, bucket in (("same_program", many), ("single_row", one)):
        equal, gaps, error = 0, [], 0.0
        for slot in slots:
            (alone,), (lone,) = greedy(runner, [slot], prompts, bucket)
            same = alone == together[slot]
            equal += int(same.sum())
            first = int(np.argmin(same)) if not same.all() else BATCH_STEPS - 1
            # Logits are comparable up to the first different token.
            asked = slice(0, first + 1)
            scale = float(np.abs(lone[asked]).max())
            difference = float(np.abs(lone[asked] - logits[slot, asked]).max())
            error = max(error, difference / scale)
            if not same.all():
                gap = lone[first, alone[first]] - lone[first, together[slot, first]]
                gaps.append({"slot": slot, "step": first, "gap": float(gap), "scale": scale})
        result[name] = {"equal": equal, "max_relative_difference": error, "differences": gaps}
    return result


def long_run(runner: Runner, count: int) -> Tokens:
    """Greedy tokens at batch 1 in launches of ``LAUNCH``; restarts at position 0 when full.

    Raises ValueError for a token outside the vocabulary, MachineFault when the machine fails.
    """
    settle(runner, True)
    zero = np.zeros(1, np.int32)
    tokens = np.empty(count, np.int32)
    token, position, done = np.array([1], np.int32), 0, 0
    runner.write_tokens(0, token)
    while done < count:
        if position == runner.max_model_len:
            position = 0
            runner.write_tokens(0, tokens[done - 1 : done])
        steps = min(LAUNCH, count - done, runner.max_model_len - position)
        runner.run(Step(zero, np.array([position], np.int32), zero, position + 1), steps)
        chosen = runner.tokens[0, position + 1 : position + steps + 1]
        if chosen.min() < 0 or chosen.max() >= runner.vocab_size:
            raise ValueError(f"token {chosen} at position {position} is outside the vocabulary")
        tokens[done : done + steps] = chosen
        done += steps
        position += steps
    return tokens


def check_endurance(runner: Runner, count: int) -> dict[str, Any]:
    """Compare the tokens of two long runs."""
    first, second = long_run(runner, count), long_run(runner, count)
    return {
        "tokens": count,
        "max_model_len": runner.max_model_len,
        "different_tokens": len(np.unique(first)),
        "equal": int((first == second).sum()),
    }


def check_model(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run all checks of one model and print each result."""
    contexts = [c for c in args.context if c <= args.max_context]
    longest = max([*contexts, max(LENGTHS) + BATCH_STEPS]) + args.steps
    contenders = make(model, args.layers, -(-longest // BLOCK) * BLOCK, args.machine)
    runner = contenders.runner
    contexts = [c for c in contexts if c + args.steps <= runner.max_model_len]
    result: dict[str, Any] = {"layers": contenders.config.num_layers, "logits": []}
    for context in contexts:
        for found in check_context(contenders, context, args.steps):
            result["logits"].append(found)
            print(
                f"{model:10}{context:8}{found['cache']:>7}{found['who']:>10}{figures(found)}",
                flush=True,
            )
    # The other checks do not need transformers: free its memory.
    contenders.exact = contenders.native = None
    give_back()
    if not args.no_batch:
        result["batch"] = batch = check_batch(contenders)
        for name in ("same_program", "single_row"):
            found = batch[name]
            print(
                f"{model:10}batch of {SEQUENCES} and alone, {name}: {found['equal']} of "
                f"{batch['tokens']} tokens equal, logits differ by "
                f"{found['max_relative_difference']:.1e}"
            )
            for gap in found["differences"]:
                print(
                    f"{'':10}slot {gap['slot']} step {gap['step']}: logits {gap['gap']:.1e} apart, "
                    f"the largest {gap['scale']:.1f}"
                )
    if args.endurance:
        result["endurance"] = run = check_endurance(runner, args.endurance)
        print(
            f"{model:10}{run['tokens']} tokens in a row, {run['different_tokens']} different; "
            f"{run['equal']} the same in a second run",
            flush=True,
        )
    return result


def give_back() -> None:
    """Free the memory of what is no longer used."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the arguments that all benchmarks of accuracy have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=["1b"])
    parser.add_argument("--layers", type=int, help="fewer layers than the models have")
    parser.add_argument("--machine", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--save", action="store_true")
    return parser


def check_models(
    args: argparse.Namespace, check: Callable[[argparse.Namespace, str], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The results of each model, one after the other in memory."""
    torch.set_float32_matmul_precision("highest")
    results = {}
    for model in args.model:
        results[model] = check(args, model)
        give_back()
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[1, 64, 1000, 4096, 16384])
    parser.add_argument("--max-context", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=8, help="tokens decoded after each context")
    parser.add_argument("--endurance", type=int, default=10000, help="tokens in a row; 0: none")
    parser.add_argument("--no-batch", action="store_true")
    args = parser.parse_args()
    print(f"{'model':10}{'context':>8}{'cache':>7}{'':>10}{HEAD}")
    results = check_models(args, check_model)
    if args.save:
        print(f"saved {save('accuracy_cuda', {'steps': args.steps, 'models': results})}")


if __name__ == "__main__":
    main()
