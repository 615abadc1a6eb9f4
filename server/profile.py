"""POST /v1/profile: record a trace of the next steps."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from megavm.profiler.environment import measure_ceilings
from megavm.profiler.recorder import Recorder
from megavm.profiler.trace import SUFFIX, TraceError
from megavm.profiler.trace_file import encode
from megavm.server.errors import ApiError, too_late
from megavm.server.protocol import ProfileRequest, read_body
from megavm.server.service import Service
from megavm.server.sse import until_disconnect


class Profiler:
    """Records one trace at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running = False
        self._ceilings: dict[str, Any] | None = None  # what the machine can give, measured once

    async def profile(self, request: Request) -> Response:
        """The trace of the next steps; of fewer steps if the timeout passes first.

        Raises:
            ApiError: another trace is being recorded, the machine cannot trace, or no step ran.
        """
        service = self._service
        llm, engine_loop = service.llm, service.engine_loop
        body = await read_body(request, ProfileRequest)
        if self._running:
            raise ApiError(409, "A trace is being recorded already.", code="profile_running")
        recorder = Recorder(body.steps)
        self._running = True

        counters, first = llm.engine.counters, 0

        def begin() -> None:
            nonlocal first
            first = counters.steps
            try:
                llm.record(recorder)
            except ValueError as error:
                raise ApiError(400, str(error), code="profile_impossible") from error

        def done() -> bool:
            # len(recorder) takes time between two steps: call it only when enough steps have run.
            return counters.steps - first >= body.steps <= len(recorder)

        def measure() -> dict[str, Any]:
            llm.record(None)  # steps after the measurement do not replace those before it
            return measure_ceilings(llm.runner.machine)

        async def record() -> None:
            with suppress(TimeoutError):
                await engine_loop.until(begin, done, body.timeout)
            if self._ceilings is None:
                # Between two steps nothing else uses the machine. Requests wait, once. Not before
                # the steps of the trace: the multiplications lower a GPU's clock for a while.
                self._ceilings = await engine_loop.call(measure)
            recorder.machine |= self._ceilings

        try:
            await until_disconnect(request.receive, record())
        finally:
            self._running = False
            await engine_loop.call(lambda: llm.record(None))
        try:
            content = await asyncio.to_thread(lambda: encode(recorder.trace()))
        except TraceError as error:
            message = (
                f"No step ran within {body.timeout:g} s: send requests while a trace is recorded."
            )
            raise too_late(message, "profile_empty") from error
        name = f"{service.settings.model_names[0].replace('/', '-')}{SUFFIX}"
        disposition = f'attachment; filename="{_plain(name)}"'
        return Response(
            content,
            headers={"content-disposition": disposition},
            media_type="application/octet-stream",
        )


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
