"""Train the small Llama that ships with the project, and export it as a Hugging Face directory.

The tokenizer and the model are both trained from scratch on the text of ``corpus.py``; nothing is
downloaded. The text is generated while the training runs, without epochs, and validation uses
documents of another seed. An intermediate export replaces the previous one at every
checkpoint. Run it with the defaults to make the shipped model::

    python -m models.train
"""

import argparse
import itertools
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from models.corpus import ASSISTANT, BEGIN, END, END_OF_TEXT, USER, documents, reading_documents
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL_TOKENS = (BEGIN, END_OF_TEXT, USER, ASSISTANT, END)
VALIDATION_SEED_OFFSET = 1_000_000
ROPE_THETA = 10000.0

Forward: TypeAlias = Callable[..., Any]
"""A Llama model as a function, compiled or not."""

CHAT_TEMPLATE = """\
{%- set system = '' -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = (messages[0]['content'] | trim) + '\\n\\n' -%}
    {%- set messages = messages[1:] -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] not in ['user', 'assistant'] -%}
        {{- raise_exception('Unsupported role: ' + message['role']) -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + (system if loop.first else '') -}}
    {{- (message['content'] | trim) + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, whose alphabet of all bytes covers any UTF-8 text."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Special tokens are registered before the training, so that they are cut out of its text.
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A",
        pair=f"{BEGIN} $A {BEGIN} $B:1",
        special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))],
    )
    return tokenizer


def batches(
    tokenizer: Tokenizer, texts: Iterator[str], batch_size: int, length: int
) -> Iterator[torch.Tensor]:
    """Pack the documents into rows of ``length + 1`` tokens: the inputs and the shifted targets."""
    needed = batch_size * (length + 1)
    pending: list[int] = []
    while True:
        while len(pending) < needed:
            chunk = list(itertools.islice(texts, 64))
            for encoding in tokenizer.encode_batch(chunk, add_special_tokens=False):
                pending += encoding.ids
        yield torch.tensor(pending[:needed]).view(batch_size, length + 1)
        del pending[:needed]


def model_config(vocab_size: int) -> LlamaConfig:
    """The shape of the model; every dimension of a weight is a multiple of 64."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        initializer_range=0.05,  # near 1 / sqrt(hidden_size): the usual 0.02 suits wider models
        bos_token_id=SPECIAL_TOKENS.index(BEGIN),
        eos_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )


def loss_of(model: Forward, batch: torch.Tensor, bf16: bool) -> torch.Tensor:
    """The mean cross-entropy of the next token over the batch.

    Each token attends to its own document only, so that the names in the other documents of a
    packed row stay out of sight.
    """
    tokens = batch[:, :-1]
    document = (tokens == SPECIAL_TOKENS.index(BEGIN)).cumsum(1)
    mask = (document[:, :, None] == document[:, None, :]).tril().unsqueeze(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def evaluate(model: Forward, rows: list[torch.Tensor], bf16: bool) -> float:
    """The mean loss over the validation batches."""
    return sum(loss_of(model, batch, bf16).item() for batch in rows) / len(rows)


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up to ``peak``, then a cosine down to a twentieth of it."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """Write the Hugging Face directory; each file replaces its predecessor atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    config = model.config.to_diff_dict()
    # Readers of the older form of the file expect the base of the rotary embedding at the top.
    config.update(architectures=["LlamaForCausalLM"], dtype="bfloat16", rope_theta=ROPE_THETA)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        temporary = Path(name)
        weights = {
            key: value.to(torch.bfloat16).contiguous()
            for key, value in model.state_dict().items()
            if key != "lm_head.weight"  # tied to the embeddings
        }
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save(str(temporary / "tokenizer.json"))
        write_json(temporary / "config.json", config)
        write_json(
            temporary / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BEGIN,
                "eos_token": END_OF_TEXT,
                "pad_token": END_OF_TEXT,
                "model_max_length": model.config.max_position_embeddings,
                "clean_up_tokenization_spaces": False,
                "chat_template": CHAT_TEMPLATE,
            },
        )
        write_json(
            temporary / "generation_config.json",
            {
                "bos_token_id": tokenizer.token_to_id(BEGIN),
                "eos_token_id": [tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(END)],
                "pad_token_id": tokenizer.token_to_id(END_OF_TEXT),
                "do_sample": True,
                "temperature": 0.8,
                "top_p": 0.95,
            },
        )
        for file in temporary.iterdir():
            file.chmod(0o644)
            os.replace(file, directory / file.name)


def write_json(path: Path, value: object) -> None:
    """Write a value as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    """The command line; its defaults make the shipped model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "stories")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=8_000_000, help="training tokens")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--tokenizer-documents", type=int, default=20_000)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument("--reading-documents", type=int, default=12_000, help="before all others")
    parser.add_argument("--short-length", type=int, default=128, help="tokens per row at first")
    parser.add_argument("--short-share", type=float, default=0.35, help="share of the steps so")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="peak, AdamW")
    parser.add_argument("--matrix-learning-rate", type=float, default=5e-3, help="peak, Muon")
    parser.add_argument("--warmup", type=int, default=50, help="warm-up steps")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--validation-batches", type=int, default=16)
    parser.add_argument("--log-every", type=int, default=50, help="steps between progress lines")
    parser.add_argument("--export-every", type=int, default=250, help="steps between exports")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser.parse_args()


def main() -> None:
    """Train and export."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(
        itertools.islice(documents(args.seed), args.tokenizer_documents), args.vocab_size
    )
    print(f"tokenizer: {tokenizer.get_vocab_size()} tokens", flush=True)

    model = LlamaForCausalLM(model_config(args.vocab_size))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"model: {parameters:,} parameters", flush=True)
    forward: Forward = torch.compile(model, dynamic=False) if args.compile else model
    # Muon for the matrices of the layers; AdamW for the embeddings and the norms.
    embeddings = dict(model.named_parameters())["model.embed_tokens.weight"]
    matrices = [p for p in model.parameters() if p.dim() == 2 and p is not embeddings]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizers: tuple[tuple[torch.optim.Optimizer, float], ...] = (
        (
            torch.optim.Muon(
                matrices, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            args.matrix_learning_rate,
        ),
        (
            torch.optim.AdamW(
                [embeddings, *norms], betas=(0.9, 0.99), weight_decay=0.0, fused=True
            ),
            args.learning_rate,
        ),
    )
    validation = list(
        itertools.islice(
            batches(
                tokenizer,
                documents(args.seed + VALIDATION_SEED_OFFSET),
                args.batch_size,
                args.length,
            ),
            args.validation_batches,
        )
    )

    tokens_per_step = args.batch_size * args.length
    steps = args.tokens // tokens_per_step
    curve: list[dict[str, float]] = []
    window: list[float] = []
    started = time.monotonic()
    # Stories alone teach the attention to look names up only slowly, because few of their tokens
    # need it. Tiny texts with questions, in short rows, begin to teach it within a hundred steps.
    texts = itertools.chain(
        itertools.islice(reading_documents(args.seed), args.reading_documents),
        documents(args.seed),
    )
    short_rows = tokens_per_step // args.short_length
    data = itertools.chain(
        itertools.islice(
            batches(tokenizer, texts, short_rows, args.short_length), int(args.short_share * steps)
        ),
        batches(tokenizer, texts, args.batch_size, args.length),
    )
    for step, batch in enumerate(itertools.islice(data, steps)):
        for optimizer, peak in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, args.warmup, peak)
        loss = loss_of(forward, batch, args.bf16)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        window.append(loss.item())
        done = step + 1
        if done % args.log_every == 0 or done == steps:
            seconds = time.monotonic() - started
            point = {
                "step": done,
                "tokens": done * tokens_per_step,
                "seconds": round(seconds, 1),
                "train_loss": round(sum(window) / len(window), 4),
            }
            window.clear()
            if done % args.export_every == 0 or done == steps:
                point["validation_loss"] = round(evaluate(model, validation, args.bf16), 4)
                export(model, tokenizer, args.output)
            curve.append(point)
            rate = point["tokens"] / seconds
            print(f"{done}/{steps} {rate:.0f} tokens/s {json.dumps(point)}", flush=True)

    # The exported weights are rounded to bfloat16: this is the loss of what is shipped.
    seconds = time.monotonic() - started
    exported = LlamaForCausalLM.from_pretrained(args.output, dtype=torch.float32)
    shipped_loss = evaluate(exported, validation, bf16=False)
    record = {
        "command": " ".join(["python", "-m", "models.train", *sys.argv[1:]]),
        "options": {key: value for key, value in vars(args).items() if key != "output"},
        "parameters": parameters,
        "tokens": steps * tokens_per_step,
        "steps": steps,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(steps * tokens_per_step / seconds),
        "train_loss": curve[-1]["train_loss"],
        "validation_loss": round(shipped_loss, 4),
        "validation_perplexity": round(math.exp(shipped_loss), 4),
        "validation_tokens": args.validation_batches * tokens_per_step,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "curve": curve,
    }
    write_json(args.output / "training.json", record)
    print(f"validation loss {shipped_loss:.4f}, perplexity {math.exp(shipped_loss):.4f}")


if __name__ == "__main__":
    main()
