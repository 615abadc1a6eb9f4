"""`megavm info`: the sizes of a model, from its configuration and the headers of its files."""

from __future__ import annotations

import argparse
from typing import Any, Final

from megavm.commands.options import Parser, add_machine, add_model
from megavm.commands.terminal import join_ids, print_json

_EXAMPLES: Final = """\
examples:
  megavm info stories
  megavm info path/to/model --json
"""


def declare(megavm: Parser) -> None:
    """Declare `megavm info`."""
    info = megavm.command("info", "[MODEL]", "show the sizes of a model", run, _EXAMPLES)
    add_model(info)
    info.option(info, "--json", action="store_true", help="print one JSON object")
    add_machine(info, "dtype")


def run(arguments: argparse.Namespace) -> int:
    """Print the model's sizes and return the exit code."""
    facts = _model_facts(arguments.model, arguments.dtype)
    if arguments.json:
        print_json(facts)
        return 0
    config, tokenizer = facts["config"], facts["tokenizer"]
    rope = config["rope_scaling"]
    lines = {
        "directory": facts["directory"],
        "parameters": f"{facts['parameters']:,}",
        "weights": f"{_bytes(facts['weight_bytes'])}, stored as {config['dtype']}",
        "KV cache": f"{_bytes(facts['kv_bytes_per_token'])} per token in {facts['dtype']}",
        "layers": config["num_layers"],
        "hidden size": config["hidden_size"],
        "intermediate size": config["intermediate_size"],
        "attention heads": f"{config['num_heads']} of {config['head_dim']},"
        f" {config['num_kv_heads']} for keys and values",
        "vocabulary": f"{config['vocab_size']:,}, embeddings "
        + ("tied" if config["tie_word_embeddings"] else "not tied"),
        "context": f"{config['max_position_embeddings']:,} tokens",
        "rotary embedding": f"theta {config['rope_theta']:g}, {rope['kind']} scaling",
        "biases": ", ".join(key for key in ("attention_bias", "mlp_bias") if config[key]) or "none",
        "ends at token": join_ids(config["eos_token_ids"]) or "none",
        "tokenizer": f"{tokenizer['vocab_size']:,} tokens" if tokenizer["available"] else "none",
        "chat template": "yes" if tokenizer["chat_template"] else "none",
    }
    for name, value in lines.items():
        print(f"{name:18} {value}")
    return 0


def _model_facts(model: str, dtype: str) -> dict[str, Any]:
    """The facts about a model from its JSON files and file headers; reads no weights."""
    import dataclasses

    from megavm.scheduler.llama.checkpoint import Checkpoint
    from megavm.scheduler.llama.hub import resolve
    from megavm.tokenizer import Tokenizer

    checkpoint = Checkpoint.open(resolve(model))
    checkpoint.check()
    tokenizer = Tokenizer(checkpoint.directory)
    config = checkpoint.config
    if dtype == "auto":
        dtype = "float32" if config.dtype == "float32" else "bfloat16"
    return {
        "model": model,
        "directory": str(checkpoint.directory),
        "architecture": "LlamaForCausalLM",
        "config": dataclasses.asdict(
            dataclasses.replace(config, eos_token_ids=checkpoint.eos_token_ids)
        ),
        "parameters": config.num_parameters,
        "weight_bytes": checkpoint.stored_bytes(),
        "dtype": dtype,
        "kv_bytes_per_token": config.kv_elements_per_token * (4 if dtype == "float32" else 2),
        "generation": checkpoint.generation,
        "unused_tensors": list(checkpoint.extra_tensors()),
        "tokenizer": {
            "available": tokenizer.available,
            "vocab_size": tokenizer.vocab_size,
            "chat_template": tokenizer.chat_template is not None,
        },
    }


def _bytes(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1000 and unit < 4:
        value, unit = value / 1000, unit + 1
    return f"{value:.4g} {('bytes', 'KB', 'MB', 'GB', 'TB')[unit]}"
