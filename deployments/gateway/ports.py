"""What the gateway needs from the rest, as protocols. It knows no Ray: `handles.py` fills them with Serve handles.

Of an embedder it needs `embedding.port.Embedder`, of a reranker `reranking.port.Reranker`. Every method raises
`cluster.errors` only.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from cluster.vectors.port import Scalar
from deployments.llm.protocol import Answer, Generation


class Engine(Protocol):
    """Generations of one base model and of adapters on it."""

    def generate(self, generation: Generation) -> AsyncIterator[Answer]:
        """One whole response, or batches of server-sent events. Closing the iterator stops the generation."""
        ...

    async def describe(self) -> dict[str, Any]:
        """Facts for health. `status`: `ok`, `degraded` or `unavailable`; left out, it is `ok`."""
        ...


class Collections(Protocol):
    """Documents in, search out."""

    async def write(self, collection: str, documents: list[dict[str, Any]]) -> int:
        """Upsert `{"text", "id"?, "metadata"?}` documents by id; returns how many, once all can be found."""
        ...

    async def search(
        self, collection: str, query: str, k: int, filter: dict[str, Scalar] | None = None
    ) -> list[dict[str, Any]]:
        """The `k` documents nearest to `query`, best first, among those whose metadata equal `filter`.

        Each is `{"id", "score", "text", "metadata"}`.
        """
        ...
