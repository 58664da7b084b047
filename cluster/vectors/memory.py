"""A vector store in this process: exact search over arrays. It keeps the port's contract, nothing on disk.

It serves tests and small trials; it knows neither Milvus nor Ray.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.vectors.port import (
    CollectionSpec,
    Match,
    Matches,
    Record,
    Scalar,
    Vectors,
    require_collection_name,
    require_queries,
    require_records,
    require_same,
    require_where,
    unknown_collection,
)


@dataclass
class _Collection:
    spec: CollectionSpec
    rows: dict[str, Record] = field(default_factory=dict)


class MemoryVectors:
    """`VectorStore` over dictionaries; safe to use from several threads."""

    def __init__(self) -> None:
        self._collections: dict[str, _Collection] = {}
        self._lock = threading.Lock()

    def create(self, spec: CollectionSpec) -> None:
        with self._lock:
            existing = self._collections.setdefault(spec.name, _Collection(spec))
        require_same(existing.spec, spec)

    def describe(self, name: str) -> CollectionSpec:
        return self._collection(name).spec

    def list(self) -> list[str]:
        return sorted(self._collections)

    def drop(self, name: str) -> None:
        require_collection_name(name)
        with self._lock:
            self._collections.pop(name, None)

    def upsert(self, name: str, records: Sequence[Record]) -> int:
        collection = self._collection(name)
        require_records(collection.spec, records)
        with self._lock:
            collection.rows.update({record.id: record for record in records})
        return len(records)

    def delete(self, name: str, ids: Sequence[str]) -> None:
        collection = self._collection(name)
        with self._lock:
            for row in ids:
                collection.rows.pop(row, None)

    def count(self, name: str) -> int:
        return len(self._collection(name).rows)

    def search(self, name: str, queries: Vectors, k: int, *, where: Mapping[str, Scalar] | None = None) -> Matches:
        collection = self._collection(name)
        require_queries(collection.spec, queries, k)
        wanted = require_where(where)
        with self._lock:
            rows = [row for row in collection.rows.values() if _fits(row, wanted)]
        if not rows:
            return [[] for _ in queries]
        scores = _unit(queries) @ _unit(np.stack([row.vector for row in rows])).T
        return [
            [
                Match(rows[i].id, float(line[i]), rows[i].text, dict(rows[i].metadata))
                for i in np.argsort(-line, kind="stable")[:k]
            ]
            for line in scores
        ]

    def _collection(self, name: str) -> _Collection:
        require_collection_name(name)
        try:
            return self._collections[name]
        except KeyError:
            raise unknown_collection(name, self.list()) from None


def _fits(row: Record, wanted: Mapping[str, Scalar]) -> bool:
    return all(key in row.metadata and row.metadata[key] == value for key, value in wanted.items())


def _unit(vectors: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(norms, np.finfo(np.float32).tiny), dtype=np.float32)
