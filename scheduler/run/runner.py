"""Runner: a model in the memory of a machine, whose steps it runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from megavm.scheduler.compiler.options import CompileOptions, default_options
from megavm.scheduler.engine.step import (
    Bools,
    Floats,
    Ints,
    Launch,
    MasksNeeded,
    Step,
)
from megavm.scheduler.engine.step_memory import DeviceStepMemory, Rows, StepMemory
from megavm.scheduler.llama.checkpoint import Checkpoint
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import (
    Bucket,
    Limits,
    logits_spec,
    rope_table,
    step_tensors,
)
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel, shard
from megavm.scheduler.run.buckets import (
    OptionsFor,
    choose_bucket,
    choose_dtype,
    compile_bucket,
    weight_specs,
)
from megavm.scheduler.run.interleave import RowRanges, interleave, is_uneven, row_ranges
from megavm.scheduler.run.machines import make_machine
from megavm.scheduler.run.model_programs import ModelPrograms
from megavm.scheduler.run.stand_ins import Part
from megavm.vm.cpu.machine import CpuMachine
from megavm.vm.cuda.layouts import program_layouts
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.layout import Layout
from megavm.vm.machine import Executable, Machine, MachineLost, TracingExecutable
from megavm.vm.memory import TORCH_DTYPE, Memory
from megavm.vm.program import Program
from megavm.vm.tensors import DType

if TYPE_CHECKING:
    from megavm.profiler.recorder import Recorder

Progress = Callable[[str, int, int], None]  # (phase, done, total)


class Runner:
    """Runs steps of a Llama. The host describes a step in arrays that the machine reads.

    Attributes:

    - ``programs``: the programs that run them.
    - ``tokens``: int32 [max_num_seqs, max_model_len + 1]; write with ``write_tokens``.
    - ``block_table``: int32 [max_num_seqs, blocks per sequence]; write with ``write_blocks``.
    - ``sampling_real`` float32, ``sampling_integer`` int32: [max_num_seqs, columns], columns as in
      instructions/sample.
    - ``allowed`` int32 [max_num_seqs, words] and ``bias`` float32 [max_num_seqs, vocabulary]: tell
      ``publish`` which rows have changed.
    - ``logits``: float32 [max_logit_rows, vocabulary]. Row i is valid after a step with more than i
      logit rows that wants logits. Indexing reads the values at that time.

    ``options``: compile options by number of rows. ``parallel``: how ranks divide the model; memory
    has a part for each of them.
    """

    def __init__(
        self,
        config: LlamaConfig,
        memory: Memory,
        limits: Limits,
        dtype: DType,
        machine: Machine,
        options: OptionsFor,
        parallel: Parallel = ONE_RANK,
    ) -> None:
        self.config = config
        self.parallel = parallel
        self.memory = memory
        self.limits = limits
        self.dtype = dtype
        self._row_ranges: dict[Bucket, RowRanges | None] = {}  # None: the order of rows stays
        self._recorder: Recorder | None = None
        self._running = threading.Lock()  # held by a step: ``record`` waits for its end
        memory.allocate([logits_spec(config, limits, parallel)])
        on_cpu = memory.device.type == "cpu"
        self._step = (StepMemory if on_cpu else DeviceStepMemory)(
            memory, step_tensors(limits, config.vocab_size)
        )
        self.programs = ModelPrograms(
            *(config, memory, limits, dtype, machine, options, parallel), queues=self.runs_behind
        )
        self._arrays = self._step.arrays
        self.tokens: Ints = _read_only(self._arrays["tokens"])
        self.block_table: Ints = _read_only(self._arrays["block_table"])
        self.sampling_real: Floats = self._arrays["sampling_real"]
        self.sampling_integer: Ints = self._arrays["sampling_integer"]
        self.allowed: Ints = self._arrays["allowed"]
        self.bias: Floats = self._arrays["bias"]
        self.logits: Rows = self._step.logits

    def write_tokens(self, slot: int, tokens: Ints) -> None:
        """Set the first tokens of a slot, before the next step."""
        self._step.write_tokens(slot, tokens)

    def write_blocks(self, slot: int, column: int, blocks: Ints) -> None:
        """Set KV blocks of a slot, from a column of the block table on, before the next step."""
        self._step.write_blocks(slot, column, blocks)

    def publish(self, name: str, slot: int) -> None:
        """See ``StepRunner.publish``."""
        self._step.publish(name, slot)

    @property
    def can_await_masks(self) -> bool:
        """Whether a step may be started behind another one before its masks are known."""
        return self._step.can_await_masks

    def give_masks(self) -> None:
        """See ``StepRunner.give_masks``."""
        self._step.give_masks()
        self.programs.gate.release()

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
        parallel: Parallel = ONE_RANK,
        fixed_order: bool = False,
        sampled: bool = False,
        progress: Progress | None = None,
    ) -> Runner:
        """Make the machine and bind a checkpoint's weights. ``workers`` are those of one rank.

        ``dtype`` "auto" is float32 for a float32 checkpoint and bfloat16 for others. ``options``
        replaces the default compile options of every step, except for ``workers`` and ``machine``,
        which are those of the machine. ``fixed_order``: see CompileOptions; it is one of those
        that ``options`` replaces. ``sampled``: the kind of the program of one token, which a GPU
        needs for the layouts of weights.

        Raises ValueError when a tensor is missing or has another shape, the machine is unavailable,
        or it cannot keep a fixed order for these ranks.
        """
        parallel.check(checkpoint.config)
        if fixed_order and parallel.ranks > 1 and not parallel.gathers:
            raise ValueError(
                "fixed_order needs tensor_parallel_exchange all_gather: all_reduce adds a sum of "
                "each rank"
            )
        device, count = make_machine(machine, workers, parallel.ranks)
        config, element = checkpoint.config, choose_dtype(checkpoint.config, dtype)
        memory = device.memory(parallel.ranks)
        layouts: dict[str, tuple[Layout, ...]] = {}
        known: dict[Bucket, Program] = {}

        def options_for(rows: int) -> CompileOptions:
            chosen = options or default_options(device.name, count, rows, fixed_order=fixed_order)
            return replace(chosen, workers=count, machine=device.name)

        if isinstance(device, CudaMachine):
            if progress is not None:
                device.report = lambda line: progress(line, 0, 1)
                progress("compiling the program of one token", 0, 1)
            bucket = choose_bucket(config, limits, options_for, 1, 1, 1, parallel=parallel)
            bucket = replace(bucket, sampled=sampled)
            known[bucket] = compile_bucket(config, limits, element, bucket, options_for, parallel)
            layouts = program_layouts(known[bucket])
        weights = weight_specs(config, limits, element, parallel)
        copies = memory.device.type == "cpu"  # it reads them from there in every step
        for done, spec in enumerate(weights):
            if spec.name == "rope":
                values = [rope_table(config, limits.max_model_len)]
            else:
                values = [
                    checkpoint.tensor(config.stored_name(n), TORCH_DTYPE[element], copy=copies)
                    for n in spec.part_names
                ]
            # Copy, join and relayout one tensor at a time: all others are in GPU memory once.
            for rank, part in enumerate(memory.ranks):
                shapes = [(p.rows, *spec.shape[1:]) for p in spec.parts] or [spec.shape]
                own = (shard(v, shape, rank) for v, shape in zip(values, shapes, strict=True))
                part.bind(spec, *(value.to(part.device) for value in own))
                if spec.name in layouts:
                    part.relayout(spec.name, layouts[spec.name][0])
            if memory.device.type != "cpu" and spec.name != "rope":
                for name in spec.part_names:
                    checkpoint.release(name)
            if progress is not None:
                progress("reading weights", done + 1, len(weights))
        runner = cls(config, memory, limits, element, device, options_for, parallel)
        for bucket, program in known.items():
            runner.programs.compiled.add(bucket, program)
        return runner

    @property
    def machine(self) -> Machine:
        return self.programs.machine

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

    @property
    def runs_behind(self) -> bool:
        """Whether ``start`` mostly returns before the step is complete."""
        return isinstance(self._step, DeviceStepMemory)

    @property
    def machine_seconds(self) -> float:
        """For how long the machine has run steps that have ended without a fault."""
        return self._step.machine_seconds

    @property
    def late_launches(self) -> int:
        """Launches that began when the GPU ran nothing; 0 on other machines."""
        return self._step.late_launches

    # Steps.

    def run(
        self,
        step: Step,
        steps: int = 1,
        started: Callable[[], None] | None = None,
        bucket: Bucket | None = None,
    ) -> None:
        """Run a step, or with ``steps`` > 1 that many decode steps of the same rows.

        Calls ``started`` once the machine runs, and before it compiles a program. ``bucket``: of
        the program that runs it, if that is chosen already.

        Raises ValueError for a step beyond the limits. Raises MachineFault when the machine fails:
        the contents of memory are unspecified then, and later steps that do not depend on them can
        run. Raises MachineLost when no step can run any more.
        """
        started = started or _nothing
        bucket = bucket or self.programs.choose(step, steps) or self.programs.own(step, steps)
        self._check(step)
        with self._running, self._step.current():
            executable = self._loaded(bucket, started)
            step = self._describe(step, bucket, executable.program)
            try:
                self._step.run(executable, step, steps, started)
            except MachineLost:
                raise
            except BaseException:
                # After a fault or Ctrl-C the counters hold values from the middle of a step.
                executable.reset()
                raise
            if self._recorder is not None:
                traced = cast(TracingExecutable, executable)
                self._recorder.add(traced, step.row_position, bucket.rows, step.row_sequence)

    def can_queue(self, step: Step, steps: int = 1) -> bool:
        """Whether ``start`` can put a step behind the one in progress without a delay."""
        if not isinstance(self._step, DeviceStepMemory) or self._recorder is not None:
            return False
        return self.programs.is_loaded(step, steps)

    def start(
        self, step: Step, steps: int = 1, started: Callable[[], None] | None = None
    ) -> Launch | None:
        """Start what ``run`` runs, behind the step in progress, if there is one.

        There may be one, but not two. On a machine that the host must wait for, and while a
        recorder is set, the step runs as in ``run``; None is returned then. While its program is
        compiled ahead, it runs in parts, by programs of fewer rows.

        Raises ValueError as ``run`` does, and MasksNeeded (``StepRunner.start``). ``Launch.finish``
        raises errors of the machine.
        """
        memory, started = self._step, started or _nothing
        bucket = self.programs.choose(step, steps)
        if step.awaits_masks and (
            self._recorder is not None or (bucket, False) not in self.programs.loaded
        ):
            raise MasksNeeded("its program is not loaded, or steps are recorded")
        if bucket is None:
            if parts := self.programs.parts(step, steps):
                self._run_parts(step, steps, started, parts)
                return None
            bucket = self.programs.own(step, steps)
        if isinstance(memory, DeviceStepMemory):
            self._check(step)
            with self._running, self._step.current():
                if self._recorder is None:  # nor can another thread set one now
                    executable = self._loaded(bucket, started)
                    if step.awaits_masks and not self.programs.gate.hold():
                        raise MasksNeeded("a program is being loaded")
                    step = self._describe(step, bucket, executable.program)
                    try:
                        finish = memory.start(executable, step, steps)
                    except BaseException as error:
                        # The step in progress must end before the reset.
                        finish = partial(_fail, error)
                    started()
                    return _Launch(executable, finish, self._release)
        self.run(step, steps, started, bucket)
        return None

    def _release(self) -> None:
        """Let a launch that awaits masks go on without them."""
        self._step.release()
        self.programs.gate.release()

    def _run_parts(
        self, step: Step, steps: int, started: Callable[[], None], parts: list[Part]
    ) -> None:
        """Run the parts of a step. All store logits in the same rows, where its own belong."""
        logits, kept = self.memory["logits"], []
        with self._step.current():
            for bucket, part in parts:
                self.run(part, steps, started, bucket)
                if step.wants_logits:
                    kept.append(logits[: len(part.logit_row)].clone())
            if kept:
                part_of_logits = step.logit_row // parts[0][1].num_rows
                rows = torch.from_numpy(np.argsort(part_of_logits, kind="stable"))
                logits[rows.to(logits.device)] = torch.cat(kept)

    def _check(self, step: Step) -> None:
        """Raise ValueError when a step is beyond the limits."""
        rows, logit_rows = step.num_rows, len(step.logit_row)
        limits = self.limits
        if not 0 < rows <= limits.max_num_batched_tokens or logit_rows > limits.max_logit_rows:
            raise ValueError(
                f"a step of {rows} rows and {logit_rows} logit rows is outside the limits "
                f"{limits.max_num_batched_tokens} and {limits.max_logit_rows}"
            )

    def _describe(self, step: Step, bucket: Bucket, program: Program) -> Step:
        """Write a step to the arrays, its rows in the order that suits the program of a bucket.

        Returns it in this order.
        """
        if not step.distinct or is_uneven(step):  # else all rows are alike
            if bucket not in self._row_ranges:
                fixed = self.programs.options(bucket.rows).fixed_order
                self._row_ranges[bucket] = None if fixed else row_ranges(program)
            step = interleave(step, self._row_ranges[bucket])
        rows, logit_rows, arrays = step.num_rows, len(step.logit_row), self._arrays
        arrays["row_sequence"][:rows] = step.row_sequence
        arrays["row_position"][:rows] = step.row_position
        arrays["row_count"][0] = rows
        arrays["logit_row"][:logit_rows] = step.logit_row
        if not logit_rows:
            arrays["logit_row"][0] = 0  # a program of one row computes its logits in any case
        arrays["logit_count"][0] = logit_rows
        return step

    def _loaded(self, bucket: Bucket, started: Callable[[], None]) -> Executable:
        """The executable of a bucket; calls ``started`` if it must be made first."""
        if (bucket, self.programs.traces) not in self.programs.loaded:
            self._release()  # an interrupt may have lost a launch that awaits masks
            started()
        return self.programs.executable(bucket)

    def record(self, recorder: Recorder | None) -> None:
        """Trace the following steps into ``recorder``; None ends the recording.

        Programs are loaded again for tracing, on a GPU with kernels that trace.

        Raises ValueError when the machine cannot trace.
        """
        if not isinstance(self.machine, CpuMachine | CudaMachine):
            raise ValueError(f"machine {self.machine.name!r} does not trace: use cpu or cuda")
        with self._running:
            if self._recorder is not None:
                self._recorder.drain()
            with self.programs.loading:
                self._recorder = recorder
                self.programs.traces = self.machine.trace = recorder is not None

    def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
        """See ``StepRunner.is_coming``: whether a program for all such steps is compiled ahead."""
        return self.programs.is_coming(sampled=sampled, wants_logits=wants_logits)

    def close(self) -> None:
        """Compile nothing ahead any more."""
        self.programs.close()


class _Launch:
    """A step in progress on a GPU."""

    def __init__(
        self,
        executable: Executable,
        finish: Callable[[Bools | None], None],
        release: Callable[[], None],
    ) -> None:
        self._executable = executable
        self._finish = finish
        self._release = release  # the launch behind it, for which a reset waits

    def finish(self, gone: Bools | None = None) -> None:
        """See ``Launch.finish``."""
        try:
            self._finish(gone)
        except MachineLost:
            raise
        except BaseException:
            self._release()
            self._executable.reset()
            raise

    def cancel(self) -> None:
        """See ``Launch.cancel``."""
        self._release()
        with contextlib.suppress(MachineLost):
            self._executable.reset()


def _fail(error: BaseException, gone: Bools | None = None) -> None:
    """Raise the error with which a launch could not start."""
    raise error


def _read_only(array: Ints) -> Ints:
    """The same elements, which cannot be written."""
    view = array.view()
    view.flags.writeable = False
    return view


def _nothing() -> None:
    """For callers that do not ask when the machine runs."""
