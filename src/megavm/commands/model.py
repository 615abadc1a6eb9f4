"""Load the model of a command, and merge sampling parameters with the model's defaults."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megavm.commands.terminal import Progress

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.sampling_params import SamplingParams


def load(arguments: argparse.Namespace, **options: Any) -> LLM:
    """Load the model with progress on stderr; `options` are further arguments of `LLM`."""
    progress = Progress(arguments.quiet)
    if not progress.enabled:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        progress("starting")
        from megavm.llm import LLM

        names = (
            *("max_model_len", "max_num_seqs", "workers", "tensor_parallel_size"),
            "fixed_order",
        )
        optional = {
            name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None
        }
        llm = LLM(
            arguments.model,
            machine=arguments.machine,
            dtype=arguments.dtype,
            progress=progress if progress.enabled else None,
            **optional,
            **options,
        )
    except BaseException:
        progress.clear()
        raise
    progress.finish(f"loaded {arguments.model}")
    return llm


def with_model_defaults(llm: LLM, given: Mapping[str, Any]) -> SamplingParams:
    """The given parameters, else those of the model's generation_config.json."""
    from megavm.sampling_params import SamplingParams

    return SamplingParams.from_generation_config(llm.checkpoint.generation, **given)
