"""Settings of collections: documents in, search out."""

from typing import Literal

from pydantic import Field

from cluster.config import Config


class SearchConfig(Config):
    """Which vector store, and the bounds of one write."""

    uri: str | None = None
    """Milvus address. Unset: Milvus Lite in its server form, owned by an actor, under FLYWHEEL_HOME."""
    long_documents: Literal["refuse", "truncate"] = "refuse"
    """A document longer than the embedder reads: an error, or found by its beginning only (its text stays whole)."""
    consistency: Literal["Strong", "Bounded"] = "Strong"
    """Strong: a search sees every write acknowledged before it. Bounded: faster on a cluster, may miss the newest."""
    max_documents_per_request: int = Field(default=1000, ge=1)
    max_insert_bytes: int = Field(default=3 << 20, ge=1 << 16)
    """Bytes per insert call: Milvus Lite takes 4 MiB in one gRPC message."""
