"""What a prompt must be so that its request can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megavm.scheduler.engine.sequence import TokenIds, stop_token_ids
from megavm.scheduler.engine.step import Ints
from megavm.vm.config import MAX_STOP_TOKENS

if TYPE_CHECKING:
    from megavm.sampling_params import SamplingParams


@dataclass(frozen=True)
class PromptLimits:
    """The limits of one engine. They need neither the engine nor its process.

    Attributes:
        max_model_len: tokens of the longest sequence, prompt included.
        num_blocks, block_size: blocks of the KV cache, and tokens of one.
        vocab_size: tokens of the model.
        eos_token_ids: tokens that end every sequence.
        has_text: whether the engine makes text of tokens, which stop strings need.
    """

    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_text: bool

    @property
    def max_prompt_len(self) -> int:
        """Length in tokens of the longest prompt that leaves room for one more token."""
        return min(self.max_model_len - 1, self.num_blocks * self.block_size)

    def truncate(self, prompt: TokenIds, params: SamplingParams) -> TokenIds:
        """The last ``params.truncate_prompt_tokens`` tokens of the prompt, or the whole prompt.

        Raises ValueError when ``params.max_tokens`` leaves no room for a prompt.
        """
        most = params.truncate_prompt_tokens
        if most is None:
            return prompt
        if most == -1:
            longest = self.max_prompt_len + 1
            most = longest - (params.max_tokens or 1)
            if most < 1:
                raise ValueError(
                    f"truncate_prompt_tokens is -1, and max_tokens={params.max_tokens} leaves no"
                    f" room for a prompt in the context of {longest} tokens"
                )
        return prompt[-most:]

    def validate(self, prompt: TokenIds, params: SamplingParams) -> Ints:
        """The prompt as int32 array, truncated as ``params`` ask.

        Raises ValueError when a request with this prompt and these parameters can never run.
        """
        prompt = self.truncate(prompt, params)
        length = len(prompt)
        if length >= self.max_model_len:
            raise ValueError(
                f"the prompt has {length} tokens; the context of {self.max_model_len} must hold"
                " it and at least one token more"
            )
        if length > self.max_prompt_len:
            raise ValueError(
                f"the prompt has {length} tokens; the KV cache has room for {self.max_prompt_len} "
                f"({self.num_blocks} blocks of {self.block_size})"
            )
        stops = stop_token_ids(params, self.eos_token_ids)
        if len(stops) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_token_ids and the model's end-of-sequence ids are {len(stops)} tokens, "
                f"at most {MAX_STOP_TOKENS} are possible"
            )
        if params.stop_strings and not self.has_text:
            raise ValueError("stop strings need a tokenizer, and there is none: use stop_token_ids")
        return self.check_tokens(prompt)

    def check_tokens(self, prompt: TokenIds) -> Ints:
        """The prompt as int32 array.

        Raises ValueError when it is empty, or not a list of ids of the vocabulary.
        """
        if len(prompt) == 0:
            raise ValueError("the prompt is empty: it must hold at least one token")
        try:
            wide = np.asarray(prompt)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"the prompt is not a list of token ids: {error}") from error
        if wide.ndim != 1 or wide.dtype.kind not in "iu":
            raise ValueError(
                "the prompt is not a list of token ids: it holds"
                f" {wide.dtype} of shape {wide.shape}"
            )
        bad = (wide < 0) | (wide >= self.vocab_size)
        if np.count_nonzero(bad):
            first = int(bad.argmax())
            raise ValueError(
                f"token id {int(wide[first])} at position {first} is outside the vocabulary "
                f"[0, {self.vocab_size})"
            )
        return wide.astype(np.int32)
