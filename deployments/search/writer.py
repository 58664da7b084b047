"""Documents in: embedded, written, and acknowledged only when every later search can find them.

It knows embedders and a store by their ports; neither Ray nor Milvus.
"""

import asyncio
from collections.abc import Sequence

from cluster.errors import RequestError
from cluster.vectors.port import VectorStore, require_collection_name
from deployments.embedding.port import Embedder
from deployments.search import collections
from deployments.search.collections import Document
from deployments.search.embedders import Embedders


class Writer:
    """Writes documents by id. The same write again, after whatever failure, ends in the same state."""

    def __init__(self, embedders: Embedders, store: VectorStore) -> None:
        self._embedders = embedders
        self._store = store

    async def write(self, collection: str, documents: Sequence[Document], *, truncate: bool) -> int:
        """Write `documents`, making the collection if there is none. Returns how many were written.

        Raises `RequestError` 409 if the collection was made by another model, 400 if a text is too long for
        the embedder and `truncate` does not allow to find it by its beginning only.
        """
        embedder = await self._embedder_of(collection)
        texts = [document.text for document in documents]
        try:
            embedded = await embedder.embed(texts, input_type="document", truncate=truncate)
        except RequestError as error:
            if error.param and error.param.startswith("input["):
                # The client sent documents; "input" is the embedder's word for them.
                error.param = error.param.replace("input", "documents", 1) + ".text"
                error.hint = "Split the document, or set serve.search.long_documents: truncate."
            raise
        spec = collections.spec(collection, embedded.fingerprint)
        await asyncio.to_thread(self._store.create, spec)
        rows = collections.records(documents, embedded.vectors)
        return await asyncio.to_thread(self._store.upsert, collection, rows)

    async def _embedder_of(self, collection: str) -> Embedder:
        """Whose the collection is. Refuses before the work, and without making a collection that a failing write would
        leave empty."""
        require_collection_name(collection)
        try:
            existing = await asyncio.to_thread(self._store.describe, collection)
        except RequestError as error:
            if error.code != "collection_not_found":
                raise
            return self._embedders.first
        embedder = await self._embedders.of(existing)
        self._embedders.require_same(existing, (await embedder.info()).fingerprint)
        return embedder
