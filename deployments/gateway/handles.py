"""The gateway's ports over Ray Serve handles. Ray's errors stop here (`deployments.calls`).

It knows which deployment method answers which port; it decides no status and no name.
"""

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from typing import Any

import aiohttp
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.errors import CapacityError
from cluster.vectors.port import Scalar
from deployments.calls import RESTART_RETRY_AFTER_S, call, translated
from deployments.gateway import census
from deployments.gateway.fleet import Ask
from deployments.gateway.placement import Dispatcher, Placement, RollCall
from deployments.llm import wire
from deployments.llm.protocol import Answer, Generation

_PREFIX_LENGTH = 1024
_PREFIX_MESSAGES = 4
_TRIES = 2
ROLL_CALL_WAIT_S = 3.0
ROLL_CALL_PAUSE_S = 0.5
REPLICA_WAIT_S = 5.0
"""A start takes ten times as long: who waits for one should do so at home."""
RELEASE_WAIT_S = 1.0
"""A replica that hangs does not confirm that its place is given back; the client's verdict does not wait for it."""


class EngineHandle:
    """`ports.Engine` over the LLM deployment: Serve says which replica, and the answer comes from there by HTTP."""

    def __init__(
        self, handle: DeploymentHandle, dispatcher: Dispatcher, *, base: str, waiting: Callable[[], int] = lambda: 0
    ) -> None:
        """`base`: whose replicas these are; `waiting`: how many wait at this gateway for their turn."""
        self._handle = handle
        self._http: aiohttp.ClientSession | None = None
        self._dispatcher = dispatcher
        self._part = f"the language model {base}"
        self._waiting = waiting
        self._name = uuid.uuid4().hex[:8]
        self._releases: set[asyncio.Task[None]] = set()
        self._census = census.of_handle(handle, part=self._part)

    async def generate(self, generation: Generation) -> AsyncIterator[Answer]:
        if self._http is None:  # made in the event loop that uses it
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        generation = replace(generation, gateway=self._name, waiting=self._waiting())
        held = AsyncExitStack()
        try:
            # Held to the end: Serve counts the answer as one that the replica has in hand, for routing and for
            # letting it end before the replica goes.
            replica, address = await self._replica(held, asked_of(generation))
            async with aclosing(wire.answers(self._http, address, generation)) as answers:
                async for answer in answers:
                    yield answer
        except wire.SilentReplica as error:
            self._dispatcher.doubt(replica)
            raise error.told from None
        except (RayError, RayServeException) as error:
            raise translated(error, self._part) from None
        finally:
            await self._release(held)

    async def describe(self) -> dict[str, Any]:
        return await self._census.look()

    async def wait_for_ours(self) -> None:
        """In an update: returns once a replica of our own settings is there, and at once if there is none at all.

        Until then the gateway before us serves on with the replicas before ours; if ours never come, it goes on.
        """
        while True:
            present = RollCall(self._dispatcher)
            with suppress(TimeoutError, RayError, RayServeException):
                async with asyncio.timeout(ROLL_CALL_WAIT_S), self._handle.choose_replica(present):
                    pass
            if not present.others or present.ours:
                return
            await asyncio.sleep(ROLL_CALL_PAUSE_S)

    async def _replica(self, held: AsyncExitStack, ask: Ask) -> tuple[str, wire.Address]:
        """A replica with room, until `held` ends; Serve would wait for ever if there is none, or if it hangs."""
        for _ in range(_TRIES):
            placement = Placement(self._dispatcher, ask, wait_s=REPLICA_WAIT_S)
            with placement.counted():
                try:
                    async with asyncio.timeout(REPLICA_WAIT_S):
                        chosen = await held.enter_async_context(self._handle.choose_replica(placement))
                except TimeoutError:
                    if not placement.tried:
                        break
                    self._dispatcher.doubt(placement.tried[-1])
                    continue
                held.enter_context(self._dispatcher.sent(chosen.replica_id, ask))
            return chosen.replica_id, wire.Address.of(chosen.replica_metadata)
        raise CapacityError(
            f"No replica of {self._part} is there to answer. One is being started.",
            retry_after_s=RESTART_RETRY_AFTER_S,
        )

    async def _release(self, held: AsyncExitStack) -> None:
        """Give the replica's place back, and wait for that only as long as a replica needs that is well."""
        release = asyncio.create_task(_close(held), name="release")
        self._releases.add(release)  # else nothing would hold it
        release.add_done_callback(self._releases.discard)
        await asyncio.wait([release], timeout=RELEASE_WAIT_S)


async def _close(held: AsyncExitStack) -> None:
    with suppress(RayError, RayServeException):  # of one that has died meanwhile there is nothing to give back
        await held.aclose()


def asked_of(generation: Generation) -> Ask:
    """A generation as far as its place matters."""
    adapter = generation.adapter.engine_name if generation.adapter else None
    return Ask(adapter=adapter, prefix=_beginning(generation.body), tokens=generation.tokens)


def _beginning(body: dict[str, Any]) -> str:
    """The text that a prompt begins with, as far as it is worth comparing."""
    prompt = body.get("prompt")
    if prompt is not None:
        return str(prompt[:_PREFIX_LENGTH])
    messages = body.get("messages")
    return json.dumps(messages[:_PREFIX_MESSAGES], ensure_ascii=False)[:_PREFIX_LENGTH] if messages else ""


class CollectionsHandle:
    """`ports.Collections` over the search deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def write(self, collection: str, documents: list[dict[str, Any]]) -> int:
        return int(await call(self._handle.write, collection, documents, part="the collections"))

    async def search(
        self, collection: str, query: str, k: int, filter: dict[str, Scalar] | None = None
    ) -> list[dict[str, Any]]:
        hits = await call(self._handle.search, collection, query, k, filter, part="the collections")
        return [dict(hit) for hit in hits]
