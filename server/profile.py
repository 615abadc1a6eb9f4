"""POST /v1/profile: record a trace of the next steps."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from megavm.profiler.trace import SUFFIX
from megavm.server.engine.client import EngineEnded
from megavm.server.engine.messages import ShortRunning
from megavm.server.errors import ApiError, failed, too_late
from megavm.server.protocol import ProfileRequest, read_body
from megavm.server.service import Service
from megavm.server.sse import until_disconnect


class Profiler:
    """Records one trace at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._running = False

    async def profile(self, request: Request) -> Response:
        """The trace of the next steps; of fewer steps if the timeout passes first.

        Raises:
            ApiError: another trace is being recorded, the machine cannot trace, or no step ran.
        """
        service = self._service
        engine = service.engine
        body = await read_body(request, ProfileRequest)
        if self._running:
            raise ApiError(409, "A trace is being recorded already.", code="profile_running")
        self._running = True
        try:
            content = await until_disconnect(
                request.receive, engine.record(body.steps, body.timeout)
            )
        except ValueError as error:
            raise ApiError(400, str(error), code="profile_impossible") from error
        except ShortRunning as error:
            message = (
                f"No step ran within {body.timeout:g} s: send requests while a trace is recorded."
            )
            raise too_late(message, "profile_empty") from error
        except TimeoutError as error:
            raise too_late("The engine does not answer.", "profile_late") from error
        except EngineEnded as error:
            raise failed(str(error)) from error
        finally:
            self._running = False
        name = f"{service.settings.model_names[0].replace('/', '-')}{SUFFIX}"
        disposition = f'attachment; filename="{_plain(name)}"'
        return Response(
            content,
            headers={"content-disposition": disposition},
            media_type="application/octet-stream",
        )


def _plain(name: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_.") else "_" for c in name)
