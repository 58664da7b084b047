"""The search deployment: collections of documents, found again by meaning.

It puts the embedder and the vector store together. It knows no HTTP, no model and no Milvus.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from cluster import environment
from cluster.storage import Home
from cluster.vectors import VectorStore, open_store
from cluster.vectors.port import Scalar
from deployments.embedding.handle import HandleEmbedder
from deployments.embedding.port import Embedder
from deployments.search import collections
from deployments.search.collections import Document, Hit
from deployments.search.config import SearchConfig
from deployments.search.embedders import Embedders
from deployments.search.writer import Writer

NAME = "search"
ONGOING_REQUESTS = 64
"""Calls that the replica has in hand; they wait for the embedder and the store."""


def build(config: SearchConfig, embedders: Sequence[Application]) -> Application:
    """The deployment of all collections, over the embedding deployments; new collections are the first's."""
    return (
        serve.deployment(SearchServer)
        .options(
            name=NAME,
            max_ongoing_requests=ONGOING_REQUESTS,
            max_surge_percent=100,  # an update leaves no gap
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": environment.for_workers()}},
        )
        .bind(config, embedders)
    )


class SearchServer:
    """Documents in, hits out. Every method raises `cluster.errors` only.

    `embedders` are Serve handles or anything that keeps the port: a collection is of the one that made it, a new one
    of the first. Without a `store`, the one that `config` names is opened at the first call that needs it.
    """

    def __init__(
        self,
        config: SearchConfig,
        embedders: Sequence[Embedder | DeploymentHandle],
        store: VectorStore | None = None,
        home: Home | None = None,
    ) -> None:
        self._config = config
        self._embedders = Embedders(
            [HandleEmbedder(one) if isinstance(one, DeploymentHandle) else one for one in embedders]
        )
        self._store: VectorStore = store or open_store(
            config.uri,
            home or Home.current(),
            max_batch_bytes=config.max_insert_bytes,
            consistency_level=config.consistency,
        )
        self._writer = Writer(self._embedders, self._store)

    async def write(
        self,
        collection: str,
        documents: Sequence[Document | Mapping[str, Any]],
        *,
        truncate: bool | None = None,
    ) -> int:
        """Upsert documents by id into a collection, which is made if there is none.

        A document is `{"text", "id"?, "metadata"?}`; without an id, it gets one from its text. `truncate`
        overrides `long_documents`. Returns how many were written, once all of them can be found. Raises
        `RequestError` 400 naming the document at fault, 409 if another model made the collection.
        """
        checked = collections.documents(documents, most=self._config.max_documents_per_request)
        cut = self._config.long_documents == "truncate" if truncate is None else truncate
        return await self._writer.write(collection, checked, truncate=cut)

    async def search(
        self, collection: str, query: str, k: int = 10, filter: Mapping[str, Scalar] | None = None
    ) -> list[Hit]:
        """The `k` documents nearest to `query`, best first, among those whose metadata equal `filter`."""
        return (await self.search_many(collection, [query], k, filter))[0]

    async def search_many(
        self, collection: str, queries: list[str], k: int = 10, filter: Mapping[str, Scalar] | None = None
    ) -> list[list[Hit]]:
        """Hits for each query, in their order; one pass through embedder and store for all of them.

        Raises `RequestError` 404 for an unknown collection, 409 if another model made it, 400 for a query
        that is empty or too long.
        """
        existing = await asyncio.to_thread(self._store.describe, collection)
        embedder = await self._embedders.of(existing)
        embedded = await embedder.embed(queries, input_type="query")
        self._embedders.require_same(existing, embedded.fingerprint)
        found = await asyncio.to_thread(self._store.search, collection, embedded.vectors, k, where=filter)
        return [collections.hits(matches) for matches in found]

    async def delete(self, collection: str, ids: list[str]) -> None:
        """Remove documents by id; ids that are not there do not matter."""
        await asyncio.to_thread(self._store.delete, collection, ids)

    async def drop(self, collection: str) -> None:
        """Remove a collection with all its documents, if it exists."""
        await asyncio.to_thread(self._store.drop, collection)

    async def list(self) -> Sequence[str]:
        """Names of all collections."""
        return await asyncio.to_thread(self._store.list)

    async def describe(self, collection: str | None = None) -> dict[str, Any]:
        """Facts of one collection; without a name, of all of them together."""
        if collection is None:
            return {"collections": list(await asyncio.to_thread(self._store.list))}
        spec = await asyncio.to_thread(self._store.describe, collection)
        return {
            "name": spec.name,
            "documents": await asyncio.to_thread(self._store.count, collection),
            "dimensions": spec.dimension,
            "metric": spec.metric,
            "model": spec.fingerprint.model,
            "fingerprint": spec.fingerprint.id,
        }
