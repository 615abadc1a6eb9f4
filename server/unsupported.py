"""Fields of other servers' requests that this one does not support, and what to use instead."""

from __future__ import annotations

from typing import Final

# Fields of OpenAI, vLLM, SGLang and llama.cpp that would change the answer and are not supported,
# each with the values that ask for nothing, beside those of _NOTHING.
UNSUPPORTED_OF_PROMPTS: Final[dict[str, tuple[object, ...]]] = {
    "chat_template": (),
    "documents": (),
    "input_ids": (),
    "truncation_side": ("left",),
}
UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    **UNSUPPORTED_OF_PROMPTS,
    "cache_salt": (),
    "echo": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "prompt_embeds": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),  # in completions
    "tools": (),
    # Tokens that may be chosen.
    "custom_logit_processor": (),
    "ebnf": (),
    "grammar": (),
    "json_schema": (),
    "logits_processors": (),
    "n_indent": (0,),
    "regex": (),
    "structural_tag": (),
    # How one of them is chosen.
    "adaptive_target": (-1,),
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "lora": (),
    "lora_path": (),
    "min_keep": (0,),
    "mirostat": (0,),
    "no_repeat_ngram_size": (0,),
    "penalize_nl": (),
    "repeat_last_n": (-1,),
    "repeat_penalty": (1,),
    "samplers": (),
    "sampling_seed": (),
    "session_params": (),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (-1,),
    "typical_p": (1,),
    "use_beam_search": (),
    "vllm_xargs": (),
    "watermarking": (),
    "xtc_probability": (0,),
    # How many there are.
    "max_completion_tokens": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "n_cmpl": (1,),
    "n_predict": (),
    "repetition_detection": (),
    "stop_regex": (),
    "t_max_predict_ms": (0, -1),
    "thinking_token_budget": (-1,),
    # Contents of the answer.
    "audio": (),
    "logprob_token_ids": (),
    "modalities": (["text"],),
    "n_probs": (0,),
    "no_stop_trim": (),
    "post_sampling_probs": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "return_hidden_states": (),
    "return_routed_experts": (),
    "return_tokens": (),
    "return_tokens_as_token_ids": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
# This server's name for what an unsupported field asks for.
OUR_NAMES: Final = {
    "ebnf": "structured_outputs",
    "grammar": "structured_outputs",
    "json_schema": "response_format",
    "max_completion_tokens": "max_tokens",  # in completions
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "n_cmpl": "n",
    "n_predict": "max_tokens",
    "n_probs": "logprobs",
    "no_stop_trim": "include_stop_str_in_output",
    "regex": "structured_outputs",
    "repeat_penalty": "repetition_penalty",
    "return_tokens": "return_token_ids",
    "sampling_seed": "seed",
    "structural_tag": "structured_outputs",
}
# Fields that may be ignored without changing an answer.
HARMLESS: Final = {
    "guided_decoding_backend",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
_NOTHING: Final[tuple[object, ...]] = (None, False, "", [], {})
_ANY_JSON: Final = {"json_schema"}  # {} asks these for any JSON


def whole(value: object) -> object:
    """A float without a fraction as an int: to JSON, 5.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def asks_for_nothing(name: str, value: object, nothing: tuple[object, ...]) -> bool:
    """Whether a field changes nothing with this value: one of `nothing` or of _NOTHING."""
    if value == {} and name in _ANY_JSON:
        return False
    value = whole(value)
    return any(type(value) is type(one) and value == one for one in (*_NOTHING, *nothing))
