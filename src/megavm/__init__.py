"""megavm: a virtual machine for GPUs that runs whole Llama forward passes as one program.

    from megavm import LLM, SamplingParams

    llm = LLM("stories")
    print(llm.generate("Once upon a time", SamplingParams(max_tokens=64))[0].outputs[0].text)

Importing the package is cheap: torch is imported on the first access to `LLM`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megavm.llm import LLM as LLM
    from megavm.outputs import Chunk as Chunk
    from megavm.outputs import CompletionOutput as CompletionOutput
    from megavm.outputs import GenerationError as GenerationError
    from megavm.outputs import RequestOutput as RequestOutput
    from megavm.sampling_params import SamplingParams as SamplingParams
    from megavm.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

    __version__: str

__all__ = [
    "LLM",
    "Chunk",
    "CompletionOutput",
    "GenerationError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "megavm.llm",
    "Chunk": "megavm.outputs",
    "CompletionOutput": "megavm.outputs",
    "GenerationError": "megavm.outputs",
    "RequestOutput": "megavm.outputs",
    "SamplingParams": "megavm.sampling_params",
    "StructuredOutputsParams": "megavm.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Import a public name on its first use.

    Raises:
        AttributeError: megavm has no such name.
    """
    value: Any
    if name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    elif name == "__version__":
        from importlib import metadata

        try:
            value = metadata.version("megavm")
        except metadata.PackageNotFoundError:  # run from a source tree that is not installed
            value = "0+unknown"
    else:
        raise AttributeError(f"module 'megavm' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
