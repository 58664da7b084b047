"""The vector store on a Milvus address: Milvus Lite in its server form, standalone or a cluster.

This is the one border to pymilvus: its errors are translated here, and a server that is restarting is waited
for within bounds. It does not know who runs the server.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import grpc  # type: ignore[import-untyped]
from pymilvus import DataType, MilvusClient
from pymilvus.exceptions import MilvusException, ParamError
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from cluster.errors import DependencyError, RequestError
from cluster.vectors.port import (
    MAX_ID_BYTES,
    MAX_TEXT_BYTES,
    CollectionSpec,
    Match,
    Matches,
    Record,
    Scalar,
    Vectors,
    batches,
    require_collection_name,
    require_queries,
    require_records,
    require_same,
    require_where,
    unknown_collection,
)

Locate = Callable[[], str]
Result = TypeVar("Result")

SPEC_PROPERTY = "flywheel.spec"
"""Collection property that holds the spec as JSON; Lite keeps properties on disk, but no descriptions."""

_CONNECT_TIMEOUT_S = 3.0
_CALL_TIMEOUT_S = 30.0
_CODE_CONNECT_FAILED = 2
_CODE_COLLECTION_NOT_FOUND = 100
_CODE_NOT_LOADED = 101
# 4: collection not found, in the numbers of Milvus before 2.3.2. 6 and 1100: the request is at fault.
_CODES_NOT_FOUND = {_CODE_COLLECTION_NOT_FOUND, 4}
_CODES_BAD_REQUEST = {6, 1100}
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED}
_GRPC_OPTIONS = {
    # pymilvus pings every 10 s, also without calls; a gRPC server that follows the defaults, as Lite's does,
    # takes that for abuse and closes the connection (GOAWAY too_many_pings).
    "grpc.keepalive_time_ms": 300_000,
    "grpc.keepalive_permit_without_calls": False,
}
_FIELDS = ["text", "metadata"]
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})

# pymilvus logs each failed call at ERROR with its traceback; what matters of it is in the error we raise.
logging.getLogger("pymilvus.decorators").setLevel(logging.CRITICAL)
logging.getLogger("pymilvus.client.connection_manager").setLevel(logging.CRITICAL)


class _Unreachable(Exception):
    """The server did not answer; the same call may pass once it is back."""


class MilvusVectors:
    """`VectorStore` on Milvus. Safe to use from several threads, processes and nodes at once.

    `uri` is an address, or a function that finds it: a server that comes back elsewhere is found again.
    `max_batch_bytes` bounds one insert message. `retry_s` is how long a server that does not answer is waited
    for before `DependencyError`. `consistency_level` is that of searches and counts: Strong sees every row
    acknowledged before; Bounded is faster on a real cluster and may miss the newest.
    """

    def __init__(
        self,
        uri: str | Locate,
        *,
        max_batch_bytes: int = 3 << 20,
        retry_s: float = 20.0,
        consistency_level: str = "Strong",
    ) -> None:
        self._locate: Locate = uri if callable(uri) else lambda: uri
        self._max_batch_bytes = max_batch_bytes
        self._retry_s = retry_s
        self._consistency_level = consistency_level
        self._client: MilvusClient | None = None
        self._lock = threading.Lock()

    def create(self, spec: CollectionSpec) -> None:
        stored = _stored_name(spec.name)

        def operation(client: MilvusClient) -> CollectionSpec:
            if not client.has_collection(stored, timeout=_CALL_TIMEOUT_S):
                self._make(client, stored, spec)
            return self._spec(client, spec.name)

        require_same(self._call(operation), spec)

    def describe(self, name: str) -> CollectionSpec:
        require_collection_name(name)
        return self._call(lambda client: self._spec(client, name))

    def list(self) -> list[str]:
        stored: list[str] = self._call(lambda client: client.list_collections(timeout=_CALL_TIMEOUT_S))
        return sorted(name for name in map(_public_name, stored) if name is not None)

    def drop(self, name: str) -> None:
        stored = _stored_name(require_collection_name(name))

        def operation(client: MilvusClient) -> None:
            if client.has_collection(stored, timeout=_CALL_TIMEOUT_S):
                client.drop_collection(stored, timeout=_CALL_TIMEOUT_S)

        self._call(operation)

    def upsert(self, name: str, records: Sequence[Record]) -> int:
        require_records(self.describe(name), records)
        stored = _stored_name(name)
        # One message must not hold an id twice; the last one counts, as if they had been written in turn.
        latest = list({record.id: record for record in records}.values())
        for batch in batches(latest, self._max_batch_bytes):
            self._upsert_batch(name, stored, batch)
        return len(records)

    def _upsert_batch(self, name: str, stored: str, batch: Sequence[Record]) -> None:
        rows = [{"id": row.id, "vector": row.vector, "text": row.text, "metadata": dict(row.metadata)} for row in batch]
        self._call_on(name, lambda client: client.upsert(stored, rows, timeout=_CALL_TIMEOUT_S))

    def delete(self, name: str, ids: Sequence[str]) -> None:
        self.describe(name)
        if not ids:
            return
        stored = _stored_name(name)
        condition = f"id in [{', '.join(map(_literal, ids))}]"
        self._call_on(name, lambda client: client.delete(stored, filter=condition, timeout=_CALL_TIMEOUT_S))

    def count(self, name: str) -> int:
        self.describe(name)
        stored = _stored_name(name)
        rows = self._call_on(
            name,
            lambda client: client.query(
                stored,
                filter="",
                output_fields=["count(*)"],
                consistency_level=self._consistency_level,
                timeout=_CALL_TIMEOUT_S,
            ),
        )
        return int(rows[0]["count(*)"])

    def search(self, name: str, queries: Vectors, k: int, *, where: Mapping[str, Scalar] | None = None) -> Matches:
        require_queries(self.describe(name), queries, k)
        stored = _stored_name(name)
        condition = " and ".join(
            f"metadata[{_literal(key)}] == {_literal(value)}" for key, value in require_where(where).items()
        )
        found = self._call_on(
            name,
            lambda client: client.search(
                stored,
                data=list(queries),
                filter=condition,
                limit=k,
                output_fields=_FIELDS,
                consistency_level=self._consistency_level,
                timeout=_CALL_TIMEOUT_S,
            ),
        )
        return [[_match(hit) for hit in hits] for hits in found]

    def close(self) -> None:
        """Give the connection back; the next call makes a new one."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _spec(self, client: MilvusClient, name: str) -> CollectionSpec:
        try:
            facts = client.describe_collection(_stored_name(name), timeout=_CALL_TIMEOUT_S)
        except MilvusException as error:
            if _codes(error) & _CODES_NOT_FOUND:
                raise unknown_collection(name, self.list()) from None
            raise
        text = dict(facts["properties"]).get(SPEC_PROPERTY)
        if text is None:
            raise RequestError(
                f"Milvus holds {_stored_name(name)!r}, but Flywheel did not make it.",
                status=409,
                param="collection",
                code="foreign_collection",
                hint="Choose another name for the collection.",
            )
        return CollectionSpec.from_json(text)

    def _make(self, client: MilvusClient, stored: str, spec: CollectionSpec) -> None:
        schema = MilvusClient.create_schema(auto_id=False, enable_dynamic_field=False)
        schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=MAX_ID_BYTES)
        schema.add_field("vector", DataType.FLOAT_VECTOR, dim=spec.dimension)
        schema.add_field("text", DataType.VARCHAR, max_length=MAX_TEXT_BYTES)
        schema.add_field("metadata", DataType.JSON)
        try:
            client.create_collection(
                stored, schema=schema, properties={SPEC_PROPERTY: spec.to_json()}, timeout=_CALL_TIMEOUT_S
            )
        except MilvusException:
            # Another process may have been faster; whether it made the same is checked by the caller.
            if not client.has_collection(stored, timeout=_CALL_TIMEOUT_S):
                raise
        self._load(client, stored, spec)

    def _load(self, client: MilvusClient, stored: str, spec: CollectionSpec) -> None:
        """Make the collection searchable; its maker may have died before the index was there."""
        if not client.list_indexes(stored, timeout=_CALL_TIMEOUT_S):
            index = client.prepare_index_params()
            index.add_index("vector", index_type="AUTOINDEX", metric_type=spec.metric.upper())
            try:
                client.create_index(stored, index, timeout=_CALL_TIMEOUT_S)
            except MilvusException:
                # As with the collection: a writer beside us found it unloaded too, and was faster.
                if not client.list_indexes(stored, timeout=_CALL_TIMEOUT_S):
                    raise
        client.load_collection(stored, timeout=_CALL_TIMEOUT_S)

    def _call_on(self, name: str, operation: Callable[[MilvusClient], Result]) -> Result:
        """`operation` on a collection, loaded first if the server has released it, as a new Lite has."""

        def loaded(client: MilvusClient) -> Result:
            try:
                return operation(client)
            except MilvusException as error:
                if _CODE_NOT_LOADED not in _codes(error):
                    raise
            self._load(client, _stored_name(name), self._spec(client, name))
            return operation(client)

        return self._call(loaded)

    def _call(self, operation: Callable[[MilvusClient], Result]) -> Result:
        retrying = Retrying(
            stop=stop_after_delay(self._retry_s),
            wait=wait_random_exponential(multiplier=0.1, max=2.0),
            retry=retry_if_exception_type(_Unreachable),
            reraise=True,
        )
        try:
            result: Result = retrying(self._once, operation)
            return result
        except _Unreachable as error:
            raise DependencyError(
                f"Milvus did not answer within {self._retry_s:g} s: {error}",
                hint="See that the server runs and serve.search.uri is right; nothing acknowledged is lost.",
            ) from None

    def _once(self, operation: Callable[[MilvusClient], Result]) -> Result:
        client: MilvusClient | None = None
        try:
            client = self._connected()
            return operation(client)
        except (grpc.RpcError, grpc.FutureTimeoutError) as error:
            self._forget(client)
            raise _Unreachable(_first_line(error)) from None
        except MilvusException as error:
            if _is_unreachable(error):
                self._forget(client)
                raise _Unreachable(_first_line(error)) from None
            raise _translated(error) from None
        except DependencyError as error:
            # From `locate`: whoever runs the server does not answer.
            if not error.retryable:
                raise
            raise _Unreachable(str(error)) from None

    def _connected(self) -> MilvusClient:
        with self._lock:
            if self._client is None:
                # `dedicated`: pymilvus would otherwise share, and for ever keep, one connection per address.
                self._client = MilvusClient(
                    self._locate(), dedicated=True, timeout=_CONNECT_TIMEOUT_S, grpc_options=_GRPC_OPTIONS
                )
            return self._client

    def _forget(self, client: MilvusClient | None) -> None:
        with self._lock:
            if self._client is not client or client is None:
                return
            self._client = None
            client.close()


def _stored_name(name: str) -> str:
    """Name inside Milvus, which takes letters, digits and '_' only; the prefix tells ours from others'."""
    return "flywheel_" + name.replace("_", "_u").replace("-", "_d").replace(".", "_p")


def _public_name(stored: str) -> str | None:
    if not stored.startswith("flywheel_"):
        return None
    parts = stored.removeprefix("flywheel_").split("_")
    signs = {"u": "_", "d": "-", "p": "."}
    if any(not part or part[0] not in signs for part in parts[1:]):
        return None
    return parts[0] + "".join(signs[part[0]] + part[1:] for part in parts[1:])


def _match(hit: Any) -> Match:
    entity = hit["entity"]
    metadata = entity["metadata"]
    return Match(
        id=str(hit["id"]),
        score=float(hit["distance"]),
        text=entity["text"],
        metadata=json.loads(metadata) if isinstance(metadata, str | bytes) else dict(metadata),
    )


def _literal(value: Scalar) -> str:
    """`value` as a literal of Milvus' filter language, whatever signs are in it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value.translate(_ESCAPES)}"'
    return repr(value)


def _codes(error: MilvusException) -> set[Any]:
    return {error.code, error.compatible_code}


def _is_unreachable(error: MilvusException) -> bool:
    if error.code in _UNREACHABLE or error.code == _CODE_CONNECT_FAILED:
        return True
    # Another thread has just replaced the connection that this call was on.
    return isinstance(error.__cause__, ValueError) and "closed channel" in str(error.__cause__)


def _translated(error: MilvusException) -> RequestError | DependencyError:
    if isinstance(error, ParamError) or _codes(error) & _CODES_BAD_REQUEST:
        return RequestError(f"Milvus refuses the request: {_first_line(error)}", param="collection")
    if _codes(error) & _CODES_NOT_FOUND:
        return RequestError(
            "The collection has just been removed.",
            status=404,
            param="collection",
            code="collection_not_found",
        )
    return DependencyError(f"Milvus failed: {_first_line(error)}", hint="Look at Milvus' own log.", retryable=False)


def _first_line(error: Exception) -> str:
    text = error.message if isinstance(error, MilvusException) else str(error)
    return (str(text).splitlines() or [type(error).__name__])[0][:300]
