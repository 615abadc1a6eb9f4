"""Small tokenizers of two kinds, and directories of models that have one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TEXT = (
    "Once upon a time there was a little fox. The fox said: hello, world! "
    "Ünïcödé naïve 你好 世界 🦊🌍 👩‍👩‍👧 ½ ﷽ end.\n\tdef f(x):\n  return x  # ok"
)
SPECIAL = ["<s>", "</s>", "<|user|>"]
CHATML = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def byte_level() -> tokenizers.Tokenizer:
    """Like Llama 3: bytes as letters, merges, and a BOS token from the post-processor."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "t"), ("ð", "Ł"), ("ä", "½")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Like Llama 2: pieces of text with bytes for the rest, spaces as U+2581."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|user|>": 3}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for piece in ["▁", *"abcdefghijklmnopqrstuvwxyz.,!:", "he", "ll", "▁t", "▁th", "ï"]:
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("h", "e"), ("l", "l"), ("▁", "t"), ("▁t", "h")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback}


def write_tokenizer(
    directory: Path, backend: tokenizers.Tokenizer | None = None, **config: Any
) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (backend or byte_level()).save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", **config}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
