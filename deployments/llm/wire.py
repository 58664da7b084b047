"""How an answer gets from a replica to the gateway: HTTP between the two, so that no token passes through Ray.

A Ray call per piece of a stream costs more than all that the gateway does with it. So Serve chooses the replica
and keeps count of what it has in hand, as for every call, and the bytes then come straight from the replica's
own socket. `Outlet` is the replica's end, `answers` the gateway's.

    POST /generate   a `Generation` as JSON → 200 with the whole answer or its events, or an error as JSON
    GET  /alive      204, at once

A replica that hangs breaks no connection. So silence is asked about: after `QUIET_S` without a byte the gateway asks
`/alive` beside it, and who does not answer that either is given up. A long prompt keeps an engine silent, but not this.

Whoever knows the `Address` may ask: it holds a secret made for this life of the replica, and only Serve tells it,
to the handles of this cluster. It knows no Ray and no vLLM.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

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
QUIET_S = 5.0
ALIVE_WAIT_S = 5.0
STOP_WAIT_S = 5

_BACKLOG = 2048
_PATH = "/generate"
_ALIVE_PATH = "/alive"
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

    @classmethod
    def of(cls, metadata: Mapping[str, str]) -> Self:
        """Out of all that a replica has published."""
        return cls(metadata["url"], metadata["secret"])


class SilentReplica(Exception):
    """The replica takes connections, and says nothing: it hangs, and whoever asks it next would hang with it."""

    @property
    def told(self) -> FlywheelError:
        """What the client is told. Others go on, so it need not wait for the replacement."""
        return CapacityError("The replica that had this request does not answer any more.", retry_after_s=5.0)


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
        if (request.method, request.url.path) == ("GET", _ALIVE_PATH):
            await Response(status_code=204)(scope, receive, send)
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
    http: aiohttp.ClientSession,
    address: Address,
    generation: Generation,
    *,
    quiet_s: float = QUIET_S,
    alive_wait_s: float = ALIVE_WAIT_S,
) -> AsyncGenerator[Answer, None]:
    """The gateway's end: what `generate` of the replica at `address` yields, and the errors that it raises.

    A replica that dies, before or in the middle, is `CapacityError`; one that hangs, `SilentReplica`. Closing the
    iterator stops the generation.
    """
    # No limit on the whole or between pieces: the gateway has its own clock, and a long prompt may be silent.
    patience = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_WAIT_S)
    posted = http.post(f"{address.url}{_PATH}", data=_written(generation), headers=_opening(address), timeout=patience)
    try:
        async with (
            _watch(http, address, quiet_s, alive_wait_s) as watch,
            # Its headers come with the first piece.
            await watch.until(asyncio.ensure_future(posted)) as response,
        ):
            if response.status != 200:
                raise _refused(await response.read(), passed=_PASSED in response.headers)
            watch.closes = response
            if response.content_type != _EVENTS:
                yield await response.json()
                return
            async for piece in response.content.iter_any():
                watch.heard = time.monotonic()
                yield piece
    except (aiohttp.ClientError, OSError):
        if watch.hangs:
            raise SilentReplica from None
        raise engine_lost() from None


@dataclass
class _Watch:
    """Asks a replica whether it lives when it has said nothing for a while, and breaks the connection if it does not.

    One task for a whole answer: a timer for each piece would cost more than passing it on does.
    """

    quiet_s: float
    alive_wait_s: float
    heard: float = field(default_factory=time.monotonic)
    hangs: bool = False
    closes: aiohttp.ClientResponse | None = None
    _waits: "asyncio.Future[aiohttp.ClientResponse] | None" = None

    async def until(self, answer: "asyncio.Future[aiohttp.ClientResponse]") -> aiohttp.ClientResponse:
        """The response, once it begins. Raises `ClientConnectionError` if the replica is found to hang."""
        self._waits = answer
        try:
            return await answer
        except asyncio.CancelledError:
            if self.hangs:
                raise aiohttp.ClientConnectionError from None
            raise
        finally:
            self._waits = None

    def give_up(self) -> None:
        self.hangs = True
        if self._waits is not None:
            self._waits.cancel()
        if self.closes is not None:
            self.closes.close()

    async def run(self, http: aiohttp.ClientSession, address: Address) -> None:
        while True:
            await asyncio.sleep(max(0.05, self.heard + self.quiet_s - time.monotonic()))
            if time.monotonic() - self.heard < self.quiet_s:
                continue
            asked = time.monotonic()
            if not await _is_alive(http, address, self.alive_wait_s) and self.heard < asked:
                self.give_up()
                return
            self.heard = max(self.heard, asked)


@asynccontextmanager
async def _watch(
    http: aiohttp.ClientSession, address: Address, quiet_s: float, alive_wait_s: float
) -> AsyncIterator[_Watch]:
    watch = _Watch(quiet_s, alive_wait_s)
    watching = asyncio.create_task(watch.run(http, address), name="wire-watch")
    try:
        yield watch
    finally:
        watching.cancel()


async def _is_alive(http: aiohttp.ClientSession, address: Address, wait_s: float) -> bool:
    """Whether it answers. One that refuses the connection has died, which is a broken connection all by itself."""
    try:
        async with http.get(
            f"{address.url}{_ALIVE_PATH}",
            headers=_opening(address),
            timeout=aiohttp.ClientTimeout(total=wait_s),
        ) as response:
            return response.status == 204
    except (aiohttp.ClientError, OSError):
        return False


def _opening(address: Address) -> dict[str, str]:
    return {"authorization": f"Bearer {address.secret}"}


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
