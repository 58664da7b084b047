"""The gateway as a Serve deployment: builds the ports from handles, and the app from the ports. No routes here."""

import time
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.registry.client import RegistryHandle
from actors.registry.serving import ServingReport
from cluster.models import served_name
from deployments.config import ServeConfig
from deployments.gateway.admission import Admission
from deployments.gateway.app import Parts, create_app
from deployments.gateway.handles import CollectionsHandle, EmbedderHandle, EngineHandle
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Served
from deployments.gateway.placement import Dispatcher
from deployments.logs import join_serve
from deployments.reporting import Reporter, whoami
from deployments.snapshot import SnapshotFeed

FIRST_SNAPSHOT_WAIT_S = 5.0
REGISTRY_PATIENCE_S = 4.0
"""Short: the feed asks again by itself, and health should soon say that the registry is away."""


class Gateway:
    """One gateway replica. It comes up without a registry, and without a version in it."""

    async def __init__(  # type: ignore[misc]  # Ray awaits an async constructor
        self,
        config: ServeConfig,
        llm: DeploymentHandle | None,
        embedding: DeploymentHandle | None,
        search: DeploymentHandle | None,
    ) -> None:
        join_serve()
        self._config = config.gateway
        feed = SnapshotFeed(RegistryHandle(patience_s=REGISTRY_PATIENCE_S), poll_s=config.gateway.snapshot_poll_s)
        dispatcher = Dispatcher(build=config.llm.build if config.llm else None)
        admission = Admission.of(config.gateway, replicas=lambda: dispatcher.live)
        engine = EngineHandle(llm, dispatcher, waiting=lambda: admission.waiting) if llm else None
        self._parts = Parts(
            served=Served(
                llm=config.llm.served_as if config.llm else None,
                llm_version=config.llm.version if config.llm else None,
                embedder=served_name(config.embedding.model) if config.embedding else None,
                max_model_len=config.llm.max_model_len if config.llm else None,
                started=int(time.time()),
            ),
            feed=feed,
            metrics=GatewayMetrics(),
            admission=admission,
            engine=engine,
            embedder=EmbedderHandle(embedding) if embedding else None,
            collections=CollectionsHandle(search) if search else None,
        )
        await feed.start(wait_s=FIRST_SNAPSHOT_WAIT_S)
        if engine is not None:
            await engine.wait_for_ours()
        self._source, self._node = whoami()
        usage = self._parts.metrics.usage
        self._reporter = Reporter(self._traffic, lambda report: usage.reported(report.traffic))
        self._reporter.start()

    def _traffic(self) -> ServingReport | None:
        rows = self._parts.metrics.usage.changed()
        return ServingReport(source=self._source, node=self._node, traffic=rows) if rows else None

    async def __serve_build_asgi_app__(self) -> Any:
        """Ray's hook for an ingress whose app needs the replica's handles."""
        # Serve's proxy gives every request an id, and sends it back itself.
        return create_app(self._parts, self._config, send_id=False)
