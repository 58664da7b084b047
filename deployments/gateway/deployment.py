"""The gateway as a Serve deployment: builds the ports from handles, and the app from the ports. No routes here."""

import time
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.registry.client import RegistryHandle
from actors.registry.serving import ServingReport
from cluster.models import served_name
from deployments.config import ServeConfig
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.handles import CollectionsHandle, EmbedderHandle, EngineHandle
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Served
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
        engines: dict[str, DeploymentHandle],
        embedding: DeploymentHandle | None,
        search: DeploymentHandle | None,
    ) -> None:
        join_serve(own_access_lines=True)
        self._config = config.gateway
        feed = SnapshotFeed(RegistryHandle(patience_s=REGISTRY_PATIENCE_S), poll_s=config.gateway.snapshot_poll_s)
        self._parts = Parts(
            served=Served(
                bases=tuple(
                    Base(base.served_as, part=part, version=base.version, max_model_len=base.max_model_len)
                    for part, base in config.engines.items()
                ),
                embedder=served_name(config.embedding.model) if config.embedding else None,
                started=int(time.time()),
            ),
            feed=feed,
            metrics=GatewayMetrics(),
            backends={
                base.served_as: Backend(EngineHandle(engines[part]), Admission.of(config.gateway))
                for part, base in config.engines.items()
            },
            embedder=EmbedderHandle(embedding) if embedding else None,
            collections=CollectionsHandle(search) if search else None,
        )
        await feed.start(wait_s=FIRST_SNAPSHOT_WAIT_S)
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
