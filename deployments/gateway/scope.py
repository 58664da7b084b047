"""Around every request: its id, its clock, the limits of its body, its line in the log, and the last catch for errors.

ASGI, no routes. A plain middleware, not Starlette's `BaseHTTPMiddleware`: that one hides a client's hang-up from the
route.
"""

import asyncio
import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.errors import RequestError
from deployments.gateway.errors import problem
from deployments.gateway.holding import Held, Holding
from deployments.gateway.limits import Reservation
from deployments.gateway.metrics import UNMATCHED, GatewayMetrics
from deployments.logs import about

REQUEST_ID_HEADER = "x-request-id"
VERSION_HEADER = "x-flywheel-version"
_LONGEST_ID = 128
_UNFIT_FOR_IDS = re.compile(r"[^A-Za-z0-9._:-]")
_KEY = "flywheel.trace"
_HUNG_UP = 499
"""nginx's number for a client that hung up before a status was sent."""
logger = logging.getLogger(__name__)


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
    prompt_tokens: int = 0
    completion_tokens: int = 0
    broke: bool = False
    """Whether its stream ended with an error event, after a status of 200."""
    reservation: Reservation | None = None
    """What the request has taken of its key's limits."""


def trace_of(request: Request) -> Trace:
    """The trace of the request that a route handles."""
    found: Trace = request.scope[_KEY]
    return found


def request_id(asked: str) -> str:
    """The client's own id as far as it is fit for logs and for the engine, or a new one."""
    return _UNFIT_FOR_IDS.sub("_", asked)[:_LONGEST_ID] or f"req-{uuid.uuid4().hex}"


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

    def __init__(
        self, app: ASGIApp, *, metrics: GatewayMetrics, send_id: bool, body_timeout_s: float, max_held_bytes: int
    ) -> None:
        self._app = app
        self._holding = Holding(max_held_bytes)
        self._metrics = metrics
        self._send_id = send_id
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        trace = Trace(request_id=request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, "")))
        scope[_KEY] = trace
        with about(trace.request_id), self._holding.request() as held:
            await self._traced(trace, scope, _held(_in_time(receive, self._body_timeout_s), held), send, held)

    async def _traced(self, trace: Trace, scope: Scope, receive: Receive, send: Send, held: Held) -> None:
        status = _HUNG_UP

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if self._send_id:
                    MutableHeaders(scope=message)[REQUEST_ID_HEADER] = trace.request_id
                if trace.reservation is not None:
                    MutableHeaders(scope=message).update(trace.reservation.headers)
            # A server's `send` waits while its client does not read.
            with held.leaving(len(message.get("body", b""))):
                await send(message)

        try:
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            pass  # in the middle of its body: nobody is there to be answered
        except Exception as error:
            if status != _HUNG_UP:
                raise  # the response has begun; the server closes the connection, which a client does notice
            await problem(error).response()(scope, receive, sending)
        finally:
            if trace.reservation is not None:
                # A client that hangs up is not given back what it has had worked for; one that was failed is.
                (trace.reservation.keep if status == _HUNG_UP else trace.reservation.refund)()
            route, seconds = getattr(scope.get("route"), "path", UNMATCHED), time.monotonic() - trace.started
            self._metrics.answered(
                route=route,
                model=trace.model,
                status=status,
                seconds=seconds,
                version=trace.version,
                broke=trace.broke,
            )
            _log(trace, method=scope["method"], route=route, status=status, seconds=seconds)


def _in_time(receive: Receive, timeout_s: float) -> Receive:
    """`receive`, which raises `RequestError` 408 once the body has had `timeout_s` to come and has not."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    arriving = True

    async def receiving() -> Message:
        nonlocal arriving
        if not arriving:
            return await receive()  # waits for the client to hang up
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise RequestError(
                f"The body did not come within {timeout_s:g} s.",
                status=408,
                code="body_timeout",
                hint="Send it faster, or raise gateway.body_timeout_s.",
                headers={"Connection": "close"},  # whoever is that slow should not keep the connection either
            ) from None
        arriving = message.get("more_body", False)
        return message

    return receiving


def _held(receive: Receive, held: Held) -> Receive:
    """`receive`, which raises `RateLimitError` 429 when all requests' bodies together are too large."""

    async def receiving() -> Message:
        message = await receive()
        held.take(len(message.get("body", b"")))
        return message

    return receiving


def _log(trace: Trace, *, method: str, route: str, status: int, seconds: float) -> None:
    """The one line of a request: for people as text, and as an object of its own where logs are JSON."""
    facts = {
        "method": method,
        "route": route,
        "status": status,
        "broke": trace.broke,
        "seconds": round(seconds, 3),
        "model": trace.model,
        "version": trace.version or "-",
        "prompt_tokens": trace.prompt_tokens,
        "completion_tokens": trace.completion_tokens,
        "key": trace.key or "-",
        "request_id": trace.request_id,
    }
    logger.info("request %s", " ".join(f"{name}={value}" for name, value in facts.items()), extra={"request": facts})


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"The body is larger than {limit_bytes} bytes.",
        status=413,
        code="request_too_large",
        hint="Send less at once, or raise gateway.max_request_bytes.",
    )
