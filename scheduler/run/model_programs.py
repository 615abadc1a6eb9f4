"""ModelPrograms: the programs of a model on a machine, ready when steps need them or before."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Collection, Hashable
from dataclasses import replace
from functools import partial
from typing import cast

from megavm.scheduler.engine.step import Step, bucket_rows, bucket_sizes, power_of_two
from megavm.scheduler.engine.step_memory import AsynchronousExecutable
from megavm.scheduler.llama.config import LlamaConfig
from megavm.scheduler.llama.graph import Bucket, Limits
from megavm.scheduler.llama.parallel import ONE_RANK, Parallel
from megavm.scheduler.run.buckets import OptionsFor, choose_bucket, compile_bucket
from megavm.scheduler.run.load_gate import LoadGate
from megavm.scheduler.run.program_cache import cached
from megavm.scheduler.run.programs import Compile, Programs
from megavm.scheduler.run.stand_ins import STAND_IN_ROWS, Part, best_stand_in, in_parts
from megavm.vm.cuda.machine import CudaMachine
from megavm.vm.machine import Executable, Machine, MachineLost
from megavm.vm.memory import Memory
from megavm.vm.program import Program
from megavm.vm.tensors import DType

logger = logging.getLogger("megavm")


class ModelPrograms:
    """The programs of a model, one for each bucket of steps, and what of them is ready.

    Attributes:

    - ``compiled``: what has been compiled.
    - ``loaded``: executables by bucket and whether they trace.
    - ``loading``: held while a program is loaded.
    - ``gate``: launches that wait for the host hold it, so that none is loaded beside them.
    - ``traces``: whether programs are loaded for tracing; change it with ``loading`` held.

    ``options``: compile options by number of rows. ``parallel``: how ranks divide the model.
    ``queues``: whether launches run behind each other, so that programs are loaded ahead as well.
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
        *,
        queues: bool = False,
    ) -> None:
        self.config = config
        self.memory = memory
        self.limits = limits
        self.dtype = dtype
        self.machine = machine
        self.options = options
        self.parallel = parallel
        self.queues = queues
        self.compiled = Programs()
        self.loaded: dict[tuple[Bucket, bool], Executable] = {}
        self.loading = threading.Lock()
        self.gate = LoadGate()
        self.traces = False
        self.ahead = False  # whether likely programs are compiled before they are needed
        self._followed: set[Bucket] = set()  # used since: those likely next have been prepared
        self._buckets: dict[Hashable, Bucket] = {}  # by rounded sizes
        # Whether only programs that sample gather the logits; others leave them on their ranks.
        self._divides_logits = parallel.divides_vocabulary(config.vocab_size)
        self._unloadable: set[Bucket] = set()  # those that could not be loaded ahead

    # Which program runs a step.

    def bucket(
        self,
        rows: int,
        logit_rows: int,
        context: int,
        *,
        decode: bool = False,
        sampled: bool = False,
    ) -> Bucket:
        """The smallest bucket for a step of this size.

        Rows and logit rows are those of ``bucket_rows``, contexts powers of two, all up to the
        limits. Contexts for which attention is split in the same way share a bucket. Few rows of a
        prompt after many tokens have that of more rows, which attend together. ``decode``: the rows
        belong to different sequences. ``sampled``: see Step.
        """
        # Steps of these sizes have the same bucket (choose_bucket).
        rows = min(bucket_rows(rows), self.limits.max_num_batched_tokens)
        logit_rows, context = bucket_rows(logit_rows), power_of_two(context)
        key = self.options, rows, logit_rows, context, decode, sampled
        if key not in self._buckets:
            bucket = choose_bucket(
                self.config,
                self.limits,
                self.options,
                rows,
                logit_rows,
                context,
                decode=decode,
                parallel=self.parallel,
            )
            self._buckets[key] = replace(bucket, sampled=sampled)
        return self._buckets[key]

    def own(self, step: Step, steps: int) -> Bucket:
        """The bucket of a step."""
        rows = step.num_rows
        decode = step.distinct
        if decode is None:
            decode = len(set(step.row_sequence.tolist())) == rows
        context = step.context + steps - 1
        sampled = self._needs_sampling(step.sampled, step.wants_logits)
        return self.bucket(rows, len(step.logit_row), context, decode=decode, sampled=sampled)

    def _needs_sampling(self, sampled: bool, wants_logits: bool) -> bool:
        """Whether a program that samples must run such a step (``Bucket.sampled``)."""
        return sampled or (wants_logits and self._divides_logits)

    def usable(self, own: Bucket, ready: set[Bucket]) -> Bucket | None:
        """The bucket of a program that can run the steps of ``own`` now; ``ready``: all that is.

        In a fixed order only its own: others would add up in other orders.
        """
        ready = ready - self._unloadable
        if (own, False) in self.loaded or own in ready:
            return own
        if self.options(own.rows).fixed_order:
            return None
        return best_stand_in(own, ready, lambda bucket: (bucket, False) in self.loaded)

    def is_loaded(self, step: Step, steps: int) -> bool:
        """Whether a program that can run a step is loaded, and not for tracing."""
        own = self.own(step, steps)
        if (own, False) in self.loaded:
            return True
        bucket = self.usable(own, set(self.compiled)) if self.ahead else own
        return (bucket, False) in self.loaded

    def choose(self, step: Step, steps: int) -> Bucket | None:
        """The bucket whose program a step runs; None: no program that can do it is ready.

        That is its own, or while this is compiled ahead, one that can stand in. (A program that
        cannot be compiled ahead never takes its place: the error is logged.)
        """
        own = self.own(step, steps)
        if not self.ahead or self.traces:
            return own
        if own not in self._followed:
            self._followed.add(own)
            self._prepare_following(own)
        if (own, False) in self.loaded:
            return own
        bucket = self.usable(own, set(self.compiled))
        if bucket != own:
            self.prepare([own])
        return bucket

    def parts(self, step: Step, steps: int) -> list[Part]:
        """Parts that can run now in place of ``step``, and the buckets of their programs; or []."""
        if self.options(step.num_rows).fixed_order:
            return []
        ready = set(self.compiled)
        return in_parts(step, lambda part: self.usable(self.own(part, steps), ready))

    # Which are ready.

    def use(self, machine: Machine) -> None:
        """Load programs on another machine from now on."""
        self.machine = machine
        self.loaded.clear()

    def compile_ahead(self, first: Collection[Bucket] = (), *, sampled: bool = False) -> None:
        """From now on, compile ``first`` in the background, then what steps are likely to need.

        ``sampled``: the kind of the first steps.

        The thread plans programs and, for a GPU, compiles their kernels. Steps of other sizes run
        meanwhile. A step whose program is not ready runs by another one that can do it, or in
        parts, or else waits. Recording and the end of ``close`` do not wait for the
        thread. For a GPU it also loads what it has compiled.
        """
        self.ahead = True
        self._prepare_following(self.bucket(1, 1, 1, sampled=sampled))
        self.prepare(first)

    def prepare(self, buckets: Collection[Bucket], *, last: bool = False) -> None:
        """Compile these in the background next, and load them for a GPU (see ``compile_ahead``).

        ``last``: when nothing else is left to compile there.
        """
        self.compiled.prepare(buckets, self.compiler(ahead=True), last=last)

    def is_coming(self, *, sampled: bool, wants_logits: bool = False) -> bool:
        """See ``StepRunner.is_coming``: whether a program for all such steps is compiled ahead."""
        if not self._needs_sampling(sampled, wants_logits):
            return False  # programs of either kind run them, and one is ready
        return self.compiled.is_coming(self.stand_in(sampled=True))

    def stand_in(self, rows: int = STAND_IN_ROWS, *, sampled: bool = False) -> Bucket:
        """The bucket whose program runs all steps of up to so many rows, and others in parts.

        Without ``sampled``, only greedy ones.
        """
        return self.bucket(rows, rows, self.limits.max_model_len, sampled=sampled)

    def close(self) -> None:
        """Compile nothing ahead any more."""
        self.ahead = False
        self.compiled.close()

    def likely_next(self, bucket: Bucket) -> list[Bucket]:
        """Buckets of steps that may follow one of ``bucket``, the most likely first.

        The batch goes on decoding, also with a longer context, and sequences end or join; prompts
        of any length run beside the batch. One program can do all steps of so many rows, and comes
        early.
        """
        sequences = min(bucket.logit_rows, self.limits.max_num_seqs)
        more, many = (min(n * sequences, self.limits.max_num_seqs) for n in (2, 4))
        context, longer = bucket.context, min(2 * bucket.context, self.limits.max_model_len)
        sized = partial(self.bucket, sampled=bucket.sampled)
        found = [
            sized(sequences, sequences, context, decode=True),
            sized(sequences, sequences, self.limits.max_model_len),
            sized(more, more, context, decode=True),
        ]
        # A prompt joins the batch, or begins beside it.
        prompts = bucket_sizes(self.limits.max_num_batched_tokens)
        for rows in prompts:
            found += [sized(rows, count, context) for count in (more, sequences) if rows >= count]
        fewer = max(sequences // 2, 1)
        found.append(sized(fewer, fewer, context, decode=True))
        found.append(sized(sequences, sequences, longer, decode=True))
        # Many join at once.
        found.append(sized(many, many, context, decode=True))
        found += [sized(rows, many, context) for rows in prompts if rows >= many]
        return list(dict.fromkeys(found))

    def _prepare_following(self, bucket: Bucket) -> None:
        """Have the programs that are likely after ``bucket`` compiled, if they are not yet."""
        ready = set(self.compiled)
        self.prepare([b for b in self.likely_next(bucket) if b not in ready])

    def compiler(self, ahead: bool = False) -> Compile:
        """Compiles programs as this object does now, without keeping it alive.

        ``ahead``: compile a GPU's kernel as well, and load the program if this object still exists
        (``_load_beside``).
        """
        machine = self.machine if isinstance(self.machine, CudaMachine) and ahead else None
        compile = partial(
            _compile, self.config, self.limits, self.dtype, self.options, self.parallel, machine
        )
        return partial(_compile_and_load, compile, weakref.ref(self)) if ahead else compile

    def program(self, bucket: Bucket) -> Program:
        """The program of a bucket, compiled and loaded on first use."""
        return self.executable(bucket).program

    def executable(self, bucket: Bucket) -> Executable:
        """The executable of a bucket, likewise."""
        key = bucket, self.traces
        known = self.loaded.get(key)
        if known is None:
            program = self.compiled.get(bucket, self.compiler())
            with self.loading:
                known = self.loaded.get(key)
                if known is None:
                    self.memory.allocate(program.tensors)
                    known = self.machine.load(program, self.memory, verify=False)
                    self.loaded[key] = known
                    self._unloadable.discard(bucket)
        return known

    def _load_beside(self, bucket: Bucket, program: Program) -> None:
        """Load a program in the background, so that no launch waits for that.

        Does nothing if launches cannot wait for each other, if a tensor would move, and with
        several ranks: while one waits for the launch of another, a thread that waits for the first
        and keeps the driver from launching would stop both. If the GPU has no memory left, others
        run the program's steps; where none can, a launch tries to load it again.
        """
        if not self.queues or self.parallel.ranks > 1:
            return
        with self.loading:
            if self.traces or (bucket, False) in self.loaded:
                return
            try:
                with self.gate.load():
                    self.memory.allocate(program.tensors)
                    if isinstance(self.machine, CudaMachine) and self.machine.moves(
                        program, self.memory
                    ):
                        return
                    executable = self.machine.load(program, self.memory, verify=False)
                # Launches may be on another stream than the copies of this thread.
                cast(AsynchronousExecutable, executable).mark()()
            except MachineLost:
                return  # the launches say so
            except (RuntimeError, ValueError) as error:
                # The driver and torch raise RuntimeError where the GPU has no memory left.
                if not self._unloadable:
                    logger.warning("the program of %s is not loaded ahead: %s", bucket, error)
                self._unloadable.add(bucket)
                return
            self.loaded[bucket, False] = executable


def _compile(
    config: LlamaConfig,
    limits: Limits,
    dtype: DType,
    options: OptionsFor,
    parallel: Parallel,
    machine: CudaMachine | None,
    bucket: Bucket,
) -> Program:
    """The program of a bucket; with a machine, all that loading it takes time for is done."""
    facts = config, limits, dtype, bucket, options(bucket.rows), parallel
    program = cached(
        facts, lambda: compile_bucket(config, limits, dtype, bucket, options, parallel)
    )
    if machine is not None:
        machine.prepare(program)
    return program


def _compile_and_load(
    compile: Compile, kept: weakref.ref[ModelPrograms], bucket: Bucket
) -> Program:
    """The program of a bucket, loaded if the object that has the programs still exists."""
    program = compile(bucket)
    if (programs := kept()) is not None:
        programs._load_beside(bucket, program)
    return program
