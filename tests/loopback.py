"""ASGI applications on real sockets of this machine, for what an in-process transport does not show."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openai
import uvicorn

from actors.registry.apikeys import ApiKey, Role, Secret
from actors.registry.snapshot import Route, Snapshot
from deployments.embedding.hashing import HashEmbedder
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served
from deployments.snapshot import SnapshotFeed

ROUTES = [Route("triage", 1, "adapter", Path("/v"), "0" * 64, "smol")]


@asynccontextmanager
async def on_loopback(app: Any) -> AsyncIterator[str]:
    """`app` on a port that the kernel chooses, in this event loop; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", access_log=False, log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@dataclass
class KeyedGateway:
    """A gateway that wants keys, on the shipped fakes, on a real socket; it serves smol, smol:triage/1 and minilm."""

    url: str
    engine: EchoEngine
    registry: PushedSnapshots
    feed: SnapshotFeed
    http: Any
    """What all clients share; no certificates to load for a socket of this machine."""

    def sdk(self, key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=self.http)

    async def client(self, *roles: Role, models: tuple[str, ...] = ("*",), **limits: Any) -> openai.AsyncOpenAI:
        """The official client, with a new key."""
        secret = Secret.make()
        key = ApiKey(secret.id, "k", secret.sha256, roles or ("infer",), models, **limits)
        now = self.registry.current
        self.registry.push(replace(now, number=now.number + 1, keys={**now.keys, key.id: key}))
        async with asyncio.timeout(0.5):
            while self.feed.current.number != now.number + 1:
                await asyncio.sleep(0.005)
        return self.sdk(secret.text)


@asynccontextmanager
async def keyed_gateway(config: GatewayConfig) -> AsyncIterator[KeyedGateway]:
    """The gateway as `config` says, for as long as the block runs."""
    engine, registry = EchoEngine(), PushedSnapshots(Snapshot.of_routes(ROUTES, {"triage@champion": 1}))
    feed = SnapshotFeed(registry, poll_s=5)
    await feed.start(wait_s=0.5)
    served = Served((Base("smol", max_model_len=128),), (Encoder("minilm"),))
    backends = {"smol": Backend(engine, Admission.of(config))}
    parts = Parts(served, feed, GatewayMetrics(), backends, {"minilm": HashEmbedder(dimension=8, max_tokens=32)})
    async with on_loopback(create_app(parts, config)) as url, openai.DefaultAsyncHttpxClient(verify=False) as http:
        yield KeyedGateway(url, engine, registry, feed, http)
    await feed.stop()
