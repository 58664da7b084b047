"""How an answer gets from a replica to the gateway: HTTP between the two, so that no token passes through Ray.

A Ray call per piece of a stream costs more than all that the gateway does with it. So Serve chooses the replica
and keeps count of what it has in hand, as for every call, and the bytes then come straight from the replica's
own socket. `Outlet` is the replica's end, `answers` the gateway's.

    POST /generate   a `Generation` as JSON → 200 with the whole answer or its events, or an error as JSON

Whoever knows the `Address` may ask: it holds a secret made for this life of the replica, and only Serve tells it,
to the handles of this cluster. It knows no Ray and no vLLM.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from cluster.errors import CapacityError, DependencyError, FlywheelError, RequestError
from deployments.llm.failures import engine_lost
from deployments.llm.protocol import Adapter, Answer, Generation
from deployments.logs import about

CONNECT_WAIT_S = 2.0
"""A replica is in the same cluster: one that does not take a connection by then is gone."""
STOP_WAIT_S = 5

_BACKLOG = 2048
_PATH = "/generate"
_EVENTS = "text/event-stream"
_PASSED = "x-flywheel-error"
"""Set on an error that is the replica's own word; without it, the status comes from somewhere else."""

logger = logging.getLogger(__name__)

Generate = Callable[[Generation], AsyncIterator[Answer]]


@dataclass(frozen=True)
class Address:
    """Where a replica's outlet is, and the secret that opens it."""

    url: str
    secret: str

    def published(self) -> dict[str, str]:
        """As Serve carries it (`record_replica_metadata`): plain strings."""
        return asdict(self)


class Outlet:
    """The replica's end: an HTTP server in the replica's own event loop, on a port that the kernel chooses."""

    def __init__(self, generate: Generate, *, host: str) -> None:
        self._generate = generate
        self._host = host
        self._secret = secrets.token_urlsafe(32)
        self._serving: asyncio.Task[None] | None = None
        self._server: uvicorn.Server | None = None

    async def start(self) -> Address:
        """Listen; returns where."""
        listening = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        listening.bind((self._host, 0))
        listening.listen(_BACKLOG)  # who is told the address may call at once, also before the server has begun
        port = listening.getsockname()[1]
        config = uvicorn.Config(
            self, lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=STOP_WAIT_S
        )
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listening]), name="outlet")
        host = f"[{self._host}]" if ":" in self._host else self._host
        return Address(f"http://{host}:{port}", self._secret)

    async def stop(self) -> None:
        """Take no more requests, and end."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        offered = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(offered.encode(), self._secret.encode()):
            await JSONResponse({"error": "not for you"}, status_code=401)(scope, receive, send)
            return
        if (request.method, request.url.path) != ("POST", _PATH):
            await JSONResponse({"error": "no such route"}, status_code=404)(scope, receive, send)
            return
        try:
            generation = _read(await request.body())
        except ClientDisconnect:
            return
        with about(generation.request_id):
            await self._until_left(generation, scope, receive, send)

    async def _until_left(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.create_task(self._answer(generation, scope, receive, send), name=generation.request_id)
        leaving = asyncio.create_task(_left(receive), name=f"{generation.request_id}-left")
        # The gateway hangs up when its client does: the engine must not go on for nobody.
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        answering.cancel()
        ended, _ = await asyncio.gather(answering, leaving, return_exceptions=True)
        if isinstance(ended, Exception):
            # The connection breaks with it, so that the gateway does not take it for an end.
            raise ended

    async def _answer(self, generation: Generation, scope: Scope, receive: Receive, send: Send) -> None:
        answers = self._generate(generation)
        try:
            first = await anext(answers, None)
            if first is None:
                raise engine_lost()
        except FlywheelError as error:
            await _refusal(error)(scope, receive, send)
            return
        except Exception:
            # Its text may hold paths or data: it goes to this replica's log, not to a client.
            logger.exception("A generation failed unforeseen.")
            await _refusal(FlywheelError("The engine failed unforeseen."))(scope, receive, send)
            return
        if isinstance(first, dict):
            await Response(json.dumps(first), media_type="application/json")(scope, receive, send)
            return
        headers = [(b"content-type", _EVENTS.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for piece in answers:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except FlywheelError as error:
            # The status is gone. The gateway knows what an event like this means, as it knows the engine's own.
            await send({"type": "http.response.body", "body": _event(error), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def answers(
    http: aiohttp.ClientSession, address: Address, generation: Generation
) -> AsyncGenerator[Answer, None]:
    """The gateway's end: what `generate` of the replica at `address` yields, and the errors that it raises.

    A replica that dies, before or in the middle, is `CapacityError`. Closing the iterator stops the generation.
    """
    headers = {"authorization": f"Bearer {address.secret}"}
    # No limit on the whole or between pieces: the gateway has its own clock, and a long prompt may be silent.
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WAIT_S)
    try:
        async with http.post(
            f"{address.url}{_PATH}", data=_written(generation), headers=headers, timeout=patience
        ) as response:
            if response.status != 200:
                raise _refused(await response.read(), passed=_PASSED in response.headers)
            if response.content_type != _EVENTS:
                yield await response.json()
                return
            async for piece in response.content.iter_any():
                yield piece
    except (aiohttp.ClientError, OSError):
        raise engine_lost() from None


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _written(generation: Generation) -> bytes:
    return json.dumps(asdict(generation), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _read(content: bytes) -> Generation:
    facts = json.loads(content.decode("utf-8", "surrogatepass"))
    adapter = facts.pop("adapter")
    return Generation(**facts, adapter=Adapter(**adapter) if adapter else None)


_CARRIED: dict[str, type[FlywheelError]] = {
    error.__name__: error for error in (RequestError, CapacityError, DependencyError, FlywheelError)
}
"""The errors that a replica raises. A class that is not here arrives as the nearest that is."""


def _refusal(error: FlywheelError) -> JSONResponse:
    kind = next(name for name, known in _CARRIED.items() if isinstance(error, known))
    facts = {name: value for name, value in vars(error).items() if name in ("status", "param", "code", "hint")}
    facts |= {name: value for name, value in vars(error).items() if name in ("retry_after_s", "retryable")}
    body = {"kind": kind, "message": error.message, **facts}
    return JSONResponse(body, status_code=error.status, headers={_PASSED: kind})


def _refused(content: bytes, *, passed: bool) -> FlywheelError:
    if not passed:
        return engine_lost()
    facts: dict[str, Any] = json.loads(content)
    kind = _CARRIED[facts.pop("kind")]
    error = kind(facts.pop("message"))
    for name, value in facts.items():
        setattr(error, name, value)
    return error


def _event(error: FlywheelError) -> bytes:
    report = {"message": error.message, "code": error.status, "param": getattr(error, "param", None)}
    return f"data: {json.dumps({'error': report})}\n\n".encode()
