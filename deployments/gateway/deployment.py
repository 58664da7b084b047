"""The gateway as a Serve deployment: builds the ports from handles, and the app from the ports. No routes here."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.registry.client import RegistryHandle
from actors.registry.serving import BudgetUse, ServingReport
from deployments.config import ServeConfig
from deployments.embedding.handle import HandleEmbedder
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.budgets import EVERY_S, BudgetFeed
from deployments.gateway.config import GatewayConfig
from deployments.gateway.handles import CollectionsHandle, EngineHandle
from deployments.gateway.limits import Limiter
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served
from deployments.gateway.placement import Dispatcher
from deployments.gateway.usage import KeyUsage
from deployments.llm.config import LLMConfig
from deployments.logs import join_serve
from deployments.reporting import Reporter, siblings, whoami
from deployments.reranking.handle import HandleReranker
from deployments.snapshot import SnapshotFeed

FIRST_SNAPSHOT_WAIT_S = 5.0
REGISTRY_PATIENCE_S = 4.0
"""Short: the feed asks again by itself, and health should soon say that the registry is away."""


class Gateway:
    """One gateway replica. It comes up without a registry, and without a version in it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits an async constructor
        self,
        config: ServeConfig,
        engines: dict[str, DeploymentHandle],
        embedders: dict[str, DeploymentHandle],
        search: DeploymentHandle | None,
        reranking: DeploymentHandle | None = None,
    ) -> None:
        join_serve(own_access_lines=True)
        self._config = config.gateway
        registry = RegistryHandle(patience_s=REGISTRY_PATIENCE_S)
        feed = SnapshotFeed(registry, poll_s=config.gateway.snapshot_poll_s)
        self._keys = KeyUsage()
        self._limiter = Limiter(replicas=siblings(), charged=self._keys.charged, hear_first=True)
        behind = {base.served_as: _engine(engines[part], base, config.gateway) for part, base in config.engines.items()}
        self._parts = Parts(
            served=Served(
                bases=tuple(
                    Base(base.served_as, part=part, version=base.version, max_model_len=base.max_model_len)
                    for part, base in config.engines.items()
                ),
                embedders=tuple(
                    Encoder(embedder.served_as, part=part, registered=embedder.version)
                    for part, embedder in config.embedders.items()
                ),
                reranker=Encoder(config.reranking.served_as, part="reranking") if config.reranking else None,
                started=int(time.time()),
            ),
            feed=feed,
            metrics=GatewayMetrics(),
            backends={name: Backend(engine, admission) for name, (engine, admission) in behind.items()},
            embedders={
                embedder.served_as: HandleEmbedder(embedders[part]) for part, embedder in config.embedders.items()
            },
            reranker=HandleReranker(reranking) if reranking else None,
            collections=CollectionsHandle(search) if search else None,
            limiter=self._limiter,
        )
        await feed.start(wait_s=FIRST_SNAPSHOT_WAIT_S)
        await asyncio.gather(*(engine.wait_for_ours() for engine, _ in behind.values()))
        self._source, self._node = whoami()
        self._reporter = Reporter(self._used, self._reported, every_s=EVERY_S)
        self._reporter.start()
        self._budgets = BudgetFeed(lambda: registry.budget_use(self._source), self._learn)
        await self._budgets.start(wait_s=FIRST_SNAPSHOT_WAIT_S)

    def _used(self) -> ServingReport | None:
        traffic, keys = self._parts.metrics.usage.changed(), self._keys.changed()
        if not traffic and not keys:
            return None
        return ServingReport(source=self._source, node=self._node, traffic=traffic, keys=keys)

    def _reported(self, report: ServingReport) -> None:
        self._parts.metrics.usage.reported(report.traffic)
        self._keys.reported(report.keys)

    def _learn(self, elsewhere: Mapping[str, BudgetUse]) -> None:
        self._limiter.learn(elsewhere)
        self._limiter.share(siblings())

    async def __serve_build_asgi_app__(self) -> Any:
        """Ray's hook for an ingress whose app needs the replica's handles."""
        # Serve's proxy gives every request an id, and sends it back itself.
        return create_app(self._parts, self._config, send_id=False)


def _engine(handle: DeploymentHandle, base: LLMConfig, config: GatewayConfig) -> tuple[EngineHandle, Admission]:
    """A base's engine and the queue before it, each of which has to know of the other."""
    dispatcher = Dispatcher(build=base.build)
    admission = Admission.of(config, replicas=lambda: dispatcher.live)
    return EngineHandle(handle, dispatcher, base=base.served_as, waiting=lambda: admission.waiting), admission
