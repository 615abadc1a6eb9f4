"""Runner: a model in memory, on a machine, with a program for every size of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megavm.scheduler.checkpoint import Checkpoint
from megavm.scheduler.compile import compile_graph
from megavm.scheduler.llama import Bucket, Limits, llama_graph, rope_table, step_tensors
from megavm.scheduler.llama_config import LlamaConfig
from megavm.scheduler.lower import attention_tiling
from megavm.scheduler.options import CompileOptions
from megavm.scheduler.step import Step
from megavm.vm.isa import BF16, F32, DType, TensorKind, TensorSpec
from megavm.vm.machine import Executable, Machine
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program

Progress = Callable[[str, int, int], None]  # (phase, done, total)

MIN_CONTEXT_BUCKET = 256


def make_machine(name: str, workers: int | None = None) -> tuple[Machine, int]:
    """A machine by name ("auto", "cpu", "reference", "cuda") and the number of its workers.

    ``workers`` defaults to the cores of this machine for "cpu", to 1 for "reference".

    Raises ValueError when the machine is unknown or not to be had here.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}, expected at least 1")
    if name in ("auto", "cpu"):
        from megavm.vm.cores import physical_cores
        from megavm.vm.cpu_machine import CpuMachine

        return CpuMachine(), workers or physical_cores()
    if name == "reference":
        from megavm.vm.reference import ReferenceMachine

        return ReferenceMachine(), workers or 1
    if name == "cuda":
        raise ValueError(
            "machine 'cuda' is not part of this version of megavm; use 'cpu' or 'auto'"
        )
    raise ValueError(f"machine {name!r} is unknown: expected auto, cpu, cuda or reference")


class Runner:
    """Runs steps of a Llama. The host describes a step in arrays that are views of the memory.

    Attributes: ``tokens`` int32 [max_num_seqs, max_model_len + 1], ``block_table`` int32
    [max_num_seqs, blocks per sequence], ``sampling_real`` float32 and ``sampling_integer`` int32
    (columns in instructions/sample), ``logits`` float32 [max_logit_rows, vocabulary]: row i is
    valid after a step with more than i logit rows.
    """

    def __init__(
        self,
        config: LlamaConfig,
        memory: Memory,
        limits: Limits,
        dtype: DType,
        machine: Machine,
        options: CompileOptions,
    ) -> None:
        self.config = config
        self.memory = memory
        self.limits = limits
        self.dtype = dtype
        self.machine = machine
        self.options = options
        self._executables: dict[Bucket, Executable] = {}
        steps = step_tensors(limits)
        memory.allocate(steps.values())
        logits_shape = (limits.max_logit_rows, config.vocab_size)
        memory.allocate([TensorSpec("logits", logits_shape, F32, TensorKind.ACTIVATION)])
        self._steps = {name: memory[spec.name].numpy() for name, spec in steps.items()}
        self.tokens: npt.NDArray[np.int32] = self._steps["tokens"]
        self.block_table: npt.NDArray[np.int32] = self._steps["block_table"]
        self.sampling_real: npt.NDArray[np.float32] = self._steps["sampling_real"]
        self.sampling_integer: npt.NDArray[np.int32] = self._steps["sampling_integer"]
        self.logits: npt.NDArray[np.float32] = memory["logits"].numpy()

    @classmethod
    def for_checkpoint(
        cls,
        checkpoint: Checkpoint,
        limits: Limits,
        *,
        machine: str = "auto",
        dtype: str = "auto",
        workers: int | None = None,
        options: CompileOptions | None = None,
        progress: Progress | None = None,
    ) -> Runner:
        """Bind a checkpoint's weights and make the machine.

        ``dtype`` "auto" is float32 for a float32 checkpoint and bfloat16 for others. ``options``
        replaces the compile options; its ``workers`` is the machine's all the same.

        Raises ValueError when a tensor is missing or has another shape, or the machine is not
        there.
        """
        device, count = make_machine(machine, workers)
        element = choose_dtype(checkpoint.config, dtype)
        memory = Memory()
        weights = weight_specs(checkpoint.config, limits, element)
        for done, spec in enumerate(weights):
            if spec.name == "rope":
                memory.bind(spec, rope_table(checkpoint.config, limits.max_model_len))
            else:
                memory.bind(spec, checkpoint.tensor(spec.name, TORCH_DTYPE[element]))
            if progress is not None:
                progress("reading weights", done + 1, len(weights))
        chosen = replace(options or CompileOptions(count), workers=count)
        return cls(checkpoint.config, memory, limits, element, device, chosen)

    # The sizes that the engine plans with.

    @property
    def max_num_seqs(self) -> int:
        return self.limits.max_num_seqs

    @property
    def max_model_len(self) -> int:
        return self.limits.max_model_len

    @property
    def max_num_batched_tokens(self) -> int:
        return self.limits.max_num_batched_tokens

    @property
    def max_logit_rows(self) -> int:
        return self.limits.max_logit_rows

    @property
    def num_blocks(self) -> int:
        return self.limits.num_blocks

    @property
    def block_size(self) -> int:
        return self.limits.block_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    # Steps.

    def bucket(self, rows: int, logit_rows: int, context: int) -> Bucket:
        """The smallest program that runs a step of this size: powers of two, up to the limits.

        Contexts whose attention is cut alike share a program.
        """
        limits = self.limits
        rows = min(_power_of_two(rows), limits.max_num_batched_tokens)
        logit_rows = min(_power_of_two(max(logit_rows, 1)), limits.max_logit_rows)

        def splits(tokens: int) -> int:
            heads = self.config.num_kv_heads
            return attention_tiling(rows, heads, limits.block_size, tokens, self.options)[2]

        longest = limits.max_model_len
        wanted = min(_power_of_two(max(context, MIN_CONTEXT_BUCKET)), longest)
        return Bucket(rows, logit_rows, longest if splits(wanted) == splits(longest) else wanted)

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket, compiled when it is first asked for."""
        return self._executable(bucket).program

    def run(self, step: Step, steps: int = 1) -> None:
        """Run a step, or with ``steps`` > 1 that many decode steps of the same rows.

        Raises ValueError for a step beyond the limits, MachineFault when the machine fails.
        """
        rows, logit_rows = len(step.row_sequence), len(step.logit_row)
        limits = self.limits
        if not 0 < rows <= limits.max_num_batched_tokens or logit_rows > limits.max_logit_rows:
            raise ValueError(
                f"a step of {rows} rows and {logit_rows} logit rows is outside the limits "
                f"{limits.max_num_batched_tokens} and {limits.max_logit_rows}"
            )
        arrays = self._steps
        arrays["row_sequence"][:rows] = step.row_sequence
        arrays["row_position"][:rows] = step.row_position
        arrays["row_count"][0] = rows
        arrays["logit_row"][:logit_rows] = step.logit_row
        arrays["logit_count"][0] = logit_rows
        self._executable(self.bucket(rows, logit_rows, step.context + steps - 1)).run(steps)

    def _executable(self, bucket: Bucket) -> Executable:
        known = self._executables.get(bucket)
        if known is None:
            graph = llama_graph(self.config, self.limits, bucket, self.dtype)
            metadata = {"model": "llama", "bucket": vars(bucket)}
            program = compile_graph(graph, self.options, metadata)
            self.memory.allocate(program.tensors)
            known = self.machine.load(program, self.memory, verify=False)
            self._executables[bucket] = known
        return known


def choose_dtype(config: LlamaConfig, name: str) -> DType:
    """The element type of weights and KV cache for ``auto``, ``bfloat16`` or ``float32``.

    Raises ValueError for another name.
    """
    if name == "auto":
        name = "float32" if config.dtype == "float32" else "bfloat16"
    types = {"float32": F32, "bfloat16": BF16}
    if name not in types:
        raise ValueError(f"dtype {name!r} is not supported: expected auto, bfloat16 or float32")
    return types[name]


def weight_specs(config: LlamaConfig, limits: Limits, dtype: DType) -> list[TensorSpec]:
    """The weights that a Llama's programs name, the rotary table among them."""
    graph = llama_graph(config, limits, Bucket(1, 1, limits.max_model_len), dtype)
    specs: dict[str, TensorSpec] = {}
    for operation in graph.operations:
        for value in operation.inputs.values():
            if value.spec is not None and value.spec.kind is TensorKind.WEIGHT:
                specs[value.spec.name] = value.spec
    return list(specs.values())


def _power_of_two(value: int) -> int:
    return 1 << max(value - 1, 0).bit_length()
