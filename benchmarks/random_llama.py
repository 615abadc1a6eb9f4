"""Random Llamas: a directory without weights, and weights made where they are needed.

They have the shapes of Llama-3.2-1B and Llama-3.1-8B, and a tokenizer with as many tokens.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from llama_cuda import MODELS as LLAMAS
from llama_cuda import fill_random
from megavm.scheduler.llama.config import LlamaConfig

if TYPE_CHECKING:
    import torch

VOCABULARY: Final = LLAMAS["1b"].vocab_size
MODELS: Final = {
    "1b": LLAMAS["1b"],
    "8b": LLAMAS["8b"],
    "tiny": LlamaConfig(VOCABULARY, 64, 128, 2, 4, 2, 16, tie_word_embeddings=True),
}
GENERATION: Final = "generation_config.json"
FIRST_TOKEN: Final = 256  # ids below are single bytes, which are rare in a prompt


def write_model(
    directory: Path, config: LlamaConfig, sampling: Mapping[str, float] | None = None
) -> None:
    """The configuration, with these default parameters or greedy, and a tokenizer.

    It has all bytes, then words, and a token that ends a text.
    """
    from structured_outputs import write_tokenizer

    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "eos_token_id": VOCABULARY - 1,
    }
    (directory / "config.json").write_text(json.dumps(content))
    # A server has programs of the kind of the default parameters when it is ready, greedy ones or
    # those that sample.
    generation = {"do_sample": sampling is not None, **(sampling or {})}
    (directory / GENERATION).write_text(json.dumps(generation))
    # Llama 3's tokens have 4 to 5 letters on average in English text.
    letters, words = random.Random(0), dict[bytes, None]()
    while len(words) < VOCABULARY - 257:
        word = "".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(3, 7)))
        words[b" " * (letters.random() < 0.6) + word.encode()] = None
    tokens = [bytes([i]) for i in range(256)]
    write_tokenizer(directory, [*tokens, *words, b"<|end|>"])


def multiply_last_norm(gain: float) -> None:
    """Let the last norm's gains of checkpoints of this process be so many times as large.

    Logits are then, and a few tokens have most of the probability, as with a trained model.
    """
    from megavm.scheduler.llama.checkpoint import Checkpoint

    tensor = Checkpoint.tensor

    def scaled(
        self: Checkpoint, name: str, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> torch.Tensor:
        value = tensor(self, name, dtype, copy=copy)
        return value * gain if name == "model.norm.weight" else value

    Checkpoint.tensor = scaled  # type: ignore[method-assign]


def make_random(machine: str) -> None:
    """Let checkpoints of this process have random weights, on the machine's own device."""
    import torch

    from megavm.scheduler.llama.checkpoint import Checkpoint
    from megavm.scheduler.llama.config import expected_tensors

    device = "cuda" if machine == "cuda" else "cpu"

    def tensor(
        self: Checkpoint, name: str, dtype: torch.dtype | None = None, *, copy: bool = False
    ) -> torch.Tensor:
        shape = expected_tensors(self.config)[name]
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        value = torch.empty(shape, dtype=dtype or torch.bfloat16, device=device)
        return fill_random(value, generator)

    patches: dict[str, Any] = {
        "tensor": tensor,
        "check": lambda self: None,
        "release": lambda self, name: None,
    }
    for name, function in patches.items():
        setattr(Checkpoint, name, function)


def compile_everything(models: Sequence[str], sampled: Sequence[bool] = (False,)) -> int:
    """Compile the kernels of the models into the cache, side by side; the number of new ones.

    ``sampled``: of programs that can sample, or of those for greedy steps.
    """
    from megavm.scheduler.run.kernels import kernel_headers
    from megavm.vm.cuda.compiler import compile_ahead
    from megavm.vm.tensors import BF16

    headers = [
        header
        for model in models
        for kind in sampled
        for header in kernel_headers(MODELS[model], BF16, sampled=kind)
    ]
    return len(compile_ahead(headers))


def samples(directory: str) -> bool:
    """Whether the default parameters of a model of `write_model` sample."""
    return bool(json.loads((Path(directory) / GENERATION).read_text())["do_sample"])
