"""Around every request: its id, its clock, its size limit, and the last catch for errors. ASGI, no routes.

A plain ASGI middleware, not Starlette's `BaseHTTPMiddleware`: that one hides a client's hang-up from the route.
"""

import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import RequestError
from deployments.gateway.errors import problem
from deployments.gateway.limits import Reservation
from deployments.gateway.metrics import UNMATCHED, GatewayMetrics

REQUEST_ID_HEADER = "x-request-id"
VERSION_HEADER = "x-flywheel-version"
_CLIENTS_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_KEY = "flywheel.trace"


@dataclass
class Trace:
    """What is known of one request while it runs."""

    request_id: str
    started: float = field(default_factory=time.monotonic)
    model: str = UNMATCHED
    """A name that exists, once it is resolved."""
    version: str | None = None
    """The version that answers, once it is resolved."""
    key: str | None = None
    """Id of the API key that was let in; never its secret."""
    reservation: Reservation | None = None
    """What the request has taken of its key's limits."""


def trace_of(request: Request) -> Trace:
    """The trace of the request that a route handles."""
    found: Trace = request.scope[_KEY]
    return found


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The body; `RequestError` 413 as soon as it is known to be larger than `limit_bytes`."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > limit_bytes:
            raise _too_large(limit_bytes)
    return bytes(content)


class RequestScope:
    """Gives each request its id and counts it; an exception that no route has turned into a response ends here."""

    def __init__(self, app: ASGIApp, *, metrics: GatewayMetrics, send_id: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._send_id = send_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        trace = Trace(request_id=asked if _CLIENTS_ID.fullmatch(asked) else f"req-{uuid.uuid4().hex}")
        scope[_KEY] = trace
        status = 499  # nginx's number for a client that hung up before a status was sent

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._send_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = trace.request_id
                if trace.reservation is not None:
                    MutableHeaders(scope=message).update(trace.reservation.headers)
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception as error:
            if status != 499:
                raise  # the response has begun; the server closes the connection, which a client does notice
            await problem(error).response()(scope, receive, sending)
        finally:
            if trace.reservation is not None:
                # A client that hangs up is not given back what it has had worked for; one that was failed is.
                (trace.reservation.keep if status == 499 else trace.reservation.refund)()
            route = getattr(scope.get("route"), "path", UNMATCHED)
            self._metrics.answered(
                route=route,
                model=trace.model,
                status=status,
                seconds=time.monotonic() - trace.started,
                version=trace.version,
            )


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"The body is larger than {limit_bytes} bytes.",
        status=413,
        code="request_too_large",
        hint="Send less at once, or raise gateway.max_request_bytes.",
    )
