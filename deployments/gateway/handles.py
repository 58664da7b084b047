"""The gateway's ports over Ray Serve handles. Ray's errors stop here (`deployments.calls`).

It knows which deployment method answers which port; it decides no status and no name.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
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
from deployments.gateway.placement import Dispatcher, Placement
from deployments.gateway.ports import Vectors
from deployments.llm import wire
from deployments.llm.protocol import Answer, Generation

_PREFIX_LENGTH = 1024
_PREFIX_MESSAGES = 4
REPLICA_WAIT_S = 5.0
"""A start takes ten times as long: who waits for one should do so at home."""


class EngineHandle:
    """`ports.Engine` over the LLM deployment: Serve says which replica, and the answer comes from there by HTTP."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._http: aiohttp.ClientSession | None = None
        self._dispatcher = Dispatcher()
        self._census = census.of_handle(handle, part="the language model")

    async def generate(self, generation: Generation) -> AsyncIterator[Answer]:
        if self._http is None:  # made in the event loop that uses it
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)
        try:
            async with AsyncExitStack() as held:
                # Held to the end: Serve counts the answer as one that the replica has in hand, for routing, for
                # scaling and for letting it end before the replica goes.
                address = await self._replica(held, asked_of(generation))
                answers = await held.enter_async_context(aclosing(wire.answers(self._http, address, generation)))
                async for answer in answers:
                    yield answer
        except (RayError, RayServeException) as error:
            raise translated(error, "the language model") from None

    async def describe(self) -> dict[str, Any]:
        return await self._census.look()

    async def _replica(self, held: AsyncExitStack, ask: Ask) -> wire.Address:
        """A replica with room, until `held` ends; Serve would wait for ever if there is none."""
        try:
            async with asyncio.timeout(REPLICA_WAIT_S):
                chosen = await held.enter_async_context(self._handle.choose_replica(Placement(self._dispatcher, ask)))
        except TimeoutError:
            raise CapacityError(
                "No replica of the language model is there to answer. One is being started.",
                retry_after_s=RESTART_RETRY_AFTER_S,
            ) from None
        held.enter_context(self._dispatcher.sent(chosen.replica_id, ask))
        return wire.Address(**chosen.replica_metadata)


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


class EmbedderHandle:
    """`ports.Embedder` over the embedding deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def embed(self, texts: list[str] | list[list[int]]) -> Vectors:
        made: Vectors = await call(self._handle.embed, texts, part="the embedder")
        return made

    async def describe(self) -> dict[str, Any]:
        return dict(await call(self._handle.describe, part="the embedder"))


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
