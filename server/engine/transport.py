"""Where an engine runs: in a thread of the server's process, or in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

from megavm.garbage import freeze_heap
from megavm.server.engine.core import EngineCore, LoadModel
from megavm.server.engine.messages import Broken, Command, Event, Loaded, Stop
from megavm.server.logs import logger, logging_to_stderr

# The interpreter's thread switch interval. 0.05 ms costs the threads a fifth more time of a core
# where there are few cores, and the GPU waits as long (benchmarks/host_waves.py).
SWITCH_SECONDS: Final = 0.0005
_LAST_WORDS_SECONDS: Final = 5.0
_LOG_SECONDS: Final = 0.2
_POLL_SECONDS: Final = 0.005
_UNKNOWN: Final = 256  # no exit code is as large
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)  # the server decides when its engine ends


class EngineThread:
    """An engine in a thread of this process, for tests and for hosts of many servers.

    Attributes:
        core: the engine's end.
    """

    core: EngineCore

    def __init__(self, load_model: LoadModel) -> None:
        self._load_model = load_model

    def start(self, emit: Callable[[Event], None]) -> None:
        """See client.Transport."""
        self.core = EngineCore(self._load_model, emit)

        def run() -> None:
            try:
                self.core.run()
            finally:
                emit(Broken("the engine's thread has ended", gone=True))

        self._thread = threading.Thread(target=run, name="megavm-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command) -> None:
        """See client.Transport."""
        self.core.handle(command)

    def give_up(self) -> None:
        """See client.Transport. Loading ends with its next report of progress."""
        self.core.handle(Stop())

    def join(self, seconds: float) -> None:
        """See client.Transport. A thread that does not end in time is left alone."""
        self._thread.join(seconds)


class EngineProcess:
    """An engine in a process of its own.

    Construct it before this process has other threads, sockets or a GPU in use, because it forks.
    The process ignores SIGINT and SIGTERM, and ends with this one, however that ends.

    `log_level`: of the lines that it writes to stderr.
    """

    def __init__(self, load_model: LoadModel, log_level: int) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _Child(partial(_run, load_model, log_level, theirs, self._connection))
        theirs.close()
        self._outgoing = _Sender(self._connection, self._process.kill)

    def start(self, emit: Callable[[Event], None]) -> None:
        """See client.Transport."""
        self._outgoing.start()
        receive = partial(self._receive, emit)
        threading.Thread(target=receive, name="megavm-receiver", daemon=True).start()

    def send(self, command: Command) -> None:
        """See client.Transport."""
        self._outgoing.put(command)

    def give_up(self) -> None:
        """See client.Transport. Nothing of a process that loads is worth waiting for."""
        self._process.kill()

    def join(self, seconds: float) -> None:
        """See client.Transport. A process that does not end in time is killed."""
        if self._process.wait(seconds) is None:
            self._process.kill()
            self._process.wait(_LAST_WORDS_SECONDS)
        self._outgoing.stop()

    def _receive(self, emit: Callable[[Event], None]) -> None:
        try:
            while (data := _read(self._connection)) is not None:
                for event in pickle.loads(data):
                    emit(event)
            cause = f"the engine's process has ended: {self._ending()}"
        except Exception as error:
            logger.exception("an event of the engine's process could not be taken")
            self._process.kill()
            cause = f"the server failed: {type(error).__name__}: {error}"
        emit(Broken(cause, gone=True))

    def _ending(self) -> str:
        code = self._process.wait(_LAST_WORDS_SECONDS)
        if code is None:
            return "it has closed its connection"
        if code == _UNKNOWN:
            return "its exit code is not known"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class _Child:
    """A child process that calls a function, and ignores SIGINT and SIGTERM.

    Unlike one of multiprocessing, it keeps nobody from ending who has not waited for it.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._code: int | None = None
        self._lock = threading.Lock()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # else both would write what waits there
        # Until the child ignores them: it would say KeyboardInterrupt, or end.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        self._pid = os.fork()
        if self._pid == 0:
            try:
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                function()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self, seconds: float) -> int | None:
        """The exit code as subprocess has it; None if it has not ended in time."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                if self._code is None:
                    self._code = self._poll()
            if self._code is not None or time.monotonic() > end:
                return self._code
            time.sleep(_POLL_SECONDS)

    def _poll(self) -> int | None:
        try:
            ended, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # whoever started this process ignores SIGCHLD
            with suppress(ProcessLookupError):
                os.kill(self._pid, 0)
                return None
            return _UNKNOWN
        return os.waitstatus_to_exitcode(status) if ended else None

    def kill(self) -> None:
        """End it now, unless it has ended."""
        with self._lock, suppress(ProcessLookupError):
            if self._code is None:
                os.kill(self._pid, signal.SIGKILL)


def _run(load_model: LoadModel, log_level: int, connection: Connection, theirs: Connection) -> None:
    """Main function of the engine's process."""
    theirs.close()  # a copy: while it is open, the end of the server would not be seen
    sys.setswitchinterval(SWITCH_SECONDS)

    def fail() -> None:
        time.sleep(_LOG_SECONDS)  # for the lines of the log
        os._exit(1)

    outgoing = _Sender(connection, fail)

    def emit(event: Event) -> None:
        if isinstance(event, Loaded):
            freeze_heap()
        outgoing.put(_portable(event))

    core = EngineCore(load_model, emit, os.getpid())

    def obey() -> None:
        try:
            while (data := _read(connection)) is not None:
                for command in pickle.loads(data):
                    core.handle(command)
            os._exit(1)  # the server is gone, and nobody waits for anything
        except Exception:
            logger.exception("a command of the server could not be obeyed")
            fail()

    with logging_to_stderr(log_level):
        outgoing.start()
        threading.Thread(target=obey, name="megavm-commands", daemon=True).start()
        core.run()
        outgoing.stop()


class _Sender:
    """A thread that sends messages, as many at once as there are. Nobody waits for the reader.

    It calls `fail` if that is not possible, unless the other process is gone.
    """

    def __init__(self, connection: Connection, fail: Callable[[], None]) -> None:
        self._connection = connection
        self._fail = fail
        self._messages: queue.SimpleQueue[Command | Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, name="megavm-sender", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, message: Command | Event) -> None:
        """Send a message after those before it."""
        self._messages.put(message)

    def stop(self) -> None:
        """Send what is queued, and end."""
        self._messages.put(None)
        self._thread.join(_LAST_WORDS_SECONDS)

    def _send(self) -> None:
        last = False
        try:
            while not last:
                batch = [self._messages.get()]
                while not self._messages.empty():
                    batch.append(self._messages.get())
                last = None in batch
                messages = [message for message in batch if message is not None]
                self._connection.send_bytes(pickle.dumps(messages, pickle.HIGHEST_PROTOCOL))
        except ConnectionError:
            return  # the other process is gone
        except Exception:
            logger.exception("messages could not be sent")
            self._fail()


def _read(connection: Connection) -> bytes | None:
    """The next messages; None if the other process is gone, also in the middle of one."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


class _Traveller:
    """An error on its way, remade without its __init__, which may want other arguments."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[Any, ...]]:
        return _remake, (type(self._error), self._error.args, vars(self._error))


def _remake(kind: type[Exception], arguments: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = kind.__new__(kind)
    error.args = arguments
    vars(error).update(state)
    return error


def _portable(event: Event) -> Event:
    """An event whose error, if it has one, can be sent, and says where it was raised."""
    error = getattr(event, "error", None)
    if not isinstance(error, Exception):
        return event
    note = "In the engine's process:\n" + "".join(traceback.format_exception(error)).rstrip()
    try:
        pickle.loads(pickle.dumps(_Traveller(error)))
    except Exception:
        kinds = (kind for kind in (ValueError, OSError) if isinstance(error, kind))
        error = next(kinds, RuntimeError)(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return replace(event, error=_Traveller(error))  # type: ignore[arg-type]
