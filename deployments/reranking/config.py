"""Settings of one reranking deployment."""

from deployments.batching.config import EncoderConfig


class RerankingConfig(EncoderConfig):
    """One cross-encoder: it reads a query and a document together, and says how well the one answers the other."""
