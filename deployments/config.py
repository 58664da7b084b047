"""Settings of the whole Serve application: it only composes its parts'."""

from cluster.config import Config
from deployments.embedding.config import EmbeddingConfig
from deployments.gateway.config import GatewayConfig
from deployments.llm.config import LLMConfig
from deployments.search.config import SearchConfig


class ServeConfig(Config):
    """gateway → LLM engine with adapters; gateway → embedder; gateway → collections."""

    name: str = "flywheel"
    gateway: GatewayConfig = GatewayConfig()
    llm: LLMConfig | None = None
    embedding: EmbeddingConfig | None = None
    search: SearchConfig = SearchConfig()
