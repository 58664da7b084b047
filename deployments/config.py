"""Settings of the whole Serve application: it only composes its parts'."""

from typing import Self

from pydantic import model_validator

from cluster.config import Config
from deployments.embedding.config import EmbeddingConfig
from deployments.gateway.config import GatewayConfig
from deployments.llm.config import LLMConfig, ReplicaRange
from deployments.search.config import SearchConfig


class ServeConfig(Config):
    """gateway → LLM engine with adapters; gateway → embedder; gateway → collections."""

    name: str = "flywheel"
    gateway: GatewayConfig = GatewayConfig()
    llm: LLMConfig | None = None
    embedding: EmbeddingConfig | None = None
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _scale_is_reached(self) -> Self:
        scale = self.llm.replicas if self.llm else None
        if isinstance(scale, ReplicaRange) and scale.target_requests > self.gateway.max_running:
            raise ValueError(
                f"llm.replicas.target_requests {scale.target_requests} is more than gateway.max_running "
                f"{self.gateway.max_running}: requests would wait beside replicas that are not full enough for "
                "another to start; lower the one or raise the other"
            )
        return self
