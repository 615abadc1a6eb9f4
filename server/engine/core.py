"""The engine's end: loads a model, drives its engine, and answers what a server asks about it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from megavm.server.engine.loop import EngineLoop
from megavm.server.engine.messages import (
    Abort,
    Answer,
    AskMetrics,
    Command,
    Event,
    Loaded,
    Loading,
    ModelFacts,
    NotLoaded,
    Record,
    Refused,
    ShortRunning,
    Stop,
    StopRecording,
    Submit,
)
from megavm.server.engine.metrics import EngineMetrics
from megavm.server.logs import logger

if TYPE_CHECKING:
    from megavm.llm import LLM
    from megavm.scheduler.engine.engine import Engine
    from megavm.scheduler.run.runner import Progress

LoadModel = Callable[["Progress"], "LLM"]


class _Unwanted(Exception):
    """Raised while loading when the server must end before the model is loaded."""


class EngineCore:
    """Loads a model in the thread that calls `run`, and drives its engine there.

    A server obeys it and is told by it in messages only, through `handle` and `emit`. Any thread
    may call `handle`; several call `emit`. `process`: the id of its process, if that is its own.

    Attributes:
        llm: the model, when it is loaded.
        loop: what drives its engine.
        metrics: counts of its steps.
    """

    llm: LLM
    loop: EngineLoop

    def __init__(
        self, load_model: LoadModel, emit: Callable[[Event], None], process: int | None = None
    ) -> None:
        self.metrics = EngineMetrics()
        self._load_model = load_model
        self._process = process
        self._emit = emit
        self._stopped = threading.Event()
        self._ready = False  # whether llm and loop are there
        self._engine: Engine | None = None  # while it may be asked
        # One thread only, so that a long grammar delays only other grammars.
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="megavm-grammars")
        self._lock = threading.Lock()
        self._compiling: set[int] = set()  # keys whose grammar is being compiled and is wanted
        self._one_recording = threading.Lock()
        self._recording = threading.Event()  # set: the last recording is to end
        self._ceilings: dict[str, Any] | None = None  # bandwidth and more, measured once

    def run(self) -> None:
        """Load the model, drive its engine until `Stop`, and release the model.

        A lost machine is not released: that may fail or block for ever.
        """
        try:
            llm = self._load()
        except _Unwanted:
            self._emit(NotLoaded(None))
            return
        except Exception as error:
            self._emit(NotLoaded(error))
            return
        self.llm = llm
        self._engine = llm.engine
        self.loop = EngineLoop(llm.engine, self.metrics, self._emit)
        self._ready = True
        self._emit(Loaded(_facts(llm, self._process)))
        if self._stopped.is_set():  # `handle` has not seen the loop
            self.loop.stop()
        self.loop.run()
        self._recording.set()
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._engine = None
        if not llm.engine.lost:
            llm.close()

    def _load(self) -> LLM:
        from megavm.server.engine.warm_up import warm_up

        llm = self._load_model(self._report)
        warm_up(llm, self._report)
        return llm

    def _report(self, phase: str, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise _Unwanted
        self._emit(Loading(phase, done, total))

    def handle(self, command: Command) -> None:
        """Obey a command; returns at once."""
        match command:
            case Submit() if command.params.restricts:
                with self._lock:
                    self._compiling.add(command.key)
                self._compiler.submit(self._compile, command)
            case Submit():
                self.loop.submit(command)
            case Abort():
                with self._lock:
                    self._compiling.discard(command.key)
                self.loop.abort(command.key)
            case AskMetrics():
                self._emit(self._answer_metrics(command.key))
            case Record():
                # Here, not in the thread: the next command may be StopRecording.
                ended = self._recording = threading.Event()
                arguments = command, ended
                threading.Thread(target=self._record, args=arguments, daemon=True).start()
            case StopRecording():
                self._recording.set()
            case Stop():
                self._stopped.set()
                if self._ready:
                    self.loop.stop()

    def _answer_metrics(self, key: int) -> Answer:
        engine = self._engine
        if engine is None:
            return Answer(key, None, RuntimeError("the engine has ended"))
        return Answer(key, self.metrics.snapshot(engine))

    def _record(self, record: Record, ended: threading.Event) -> None:
        try:
            with self._one_recording:  # the one before may have to end yet
                trace = self._trace(record.steps, record.timeout, ended)
            self._emit(Answer(record.key, trace))
        except BaseException as error:
            self._emit(Answer(record.key, None, _exception(error)))

    def _compile(self, submit: Submit) -> None:
        """Compile the restriction of requests, and queue them."""
        sequences = len(submit.prompts) * submit.params.n
        try:
            with self._lock:
                wanted = submit.key in self._compiling
            restriction = self.llm.restrictions.compile(submit.params) if wanted else None
        except BaseException as error:  # a library's panic is no Exception
            if not isinstance(error, ValueError):
                logger.exception("a grammar could not be compiled")
            with self._lock:
                self._compiling.discard(submit.key)
            self._emit(Refused(submit.key, sequences, _exception(error)))
            return
        # `Abort` may come until here; behind `submit` the loop obeys it.
        with self._lock:
            wanted = submit.key in self._compiling
            self._compiling.discard(submit.key)
            if wanted:
                self.loop.submit(submit, restriction)
        if not wanted:
            self._emit(Refused(submit.key, sequences, None))

    def _trace(self, steps: int, timeout: float, ended: threading.Event) -> bytes:
        """See messages.Record. Also ends when `ended` is set, with ShortRunning."""
        from megavm.profiler.environment import measure_ceilings
        from megavm.profiler.recorder import Recorder
        from megavm.profiler.trace import TraceError
        from megavm.profiler.trace_file import encode

        llm, loop, recorder = self.llm, self.loop, Recorder(steps)
        counters, first, complete = llm.engine.counters, 0, False

        def begin() -> None:
            nonlocal first
            first = counters.steps
            llm.record(recorder)

        def done() -> bool:
            nonlocal complete
            # len(recorder) takes time between two steps: call it only when enough steps have run.
            complete = counters.steps - first >= steps <= len(recorder)
            return complete

        def measure() -> dict[str, Any]:
            llm.record(None)  # steps after the measurement do not replace those before it
            return measure_ceilings(llm.runner.machine)

        try:
            loop.until(begin, done, ended, timeout)
            if ended.is_set() and not complete:
                raise ShortRunning
            if self._ceilings is None and len(recorder):
                # Between two steps nothing else uses the machine. Requests wait, once. Not before
                # the steps of the trace: the multiplications lower a GPU's clock for a while.
                self._ceilings = loop.call(measure).result()
            recorder.machine |= self._ceilings or {}
        finally:
            loop.call(lambda: llm.record(None)).result()
        try:
            return encode(recorder.trace())
        except TraceError as error:
            raise ShortRunning from error


def _exception(error: BaseException) -> Exception:
    """The error itself, or words for one that would end a thread that meets it."""
    if isinstance(error, Exception):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def _facts(llm: LLM, process: int | None) -> ModelFacts:
    return ModelFacts(
        directory=str(llm.tokenizer.directory),
        chat_template=llm.tokenizer.template_file,
        generation=dict(llm.checkpoint.generation),
        limits=llm.engine.limits,
        max_num_seqs=llm.runner.max_num_seqs,
        machine=llm.runner.machine.name,
        dtype=llm.runner.dtype.name,
        process=process,
    )
