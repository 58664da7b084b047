"""What a vector store must do, the values that go in and out, and the checks that all stores share.

It knows no store, no Ray and no model.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from cluster.errors import RequestError

Vectors = npt.NDArray[np.float32]
Scalar = str | int | float | bool

COLLECTION_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
FILTER_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

# Milvus' own limits on one VARCHAR and on one JSON value, in bytes of UTF-8 (milvus.io/docs/limitations.md).
MAX_TEXT_BYTES = 65_535
MAX_METADATA_BYTES = 65_536
MAX_ID_BYTES = 512
MAX_K = 1000


@dataclass(frozen=True)
class Fingerprint:
    """Which model made a collection's vectors. Vectors of different fingerprints must never be compared."""

    model: str
    digest: str
    """SHA-256 of the model's folder."""
    dimension: int
    normalized: bool
    prompt: str = ""
    """Text that stands before every document; empty for most models. Not that of queries: it makes no row."""

    @property
    def id(self) -> str:
        """Twelve hex digits for people to compare."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    def __str__(self) -> str:
        return f"{self.model} ({self.dimension} dimensions, fingerprint {self.id})"


@dataclass(frozen=True)
class CollectionSpec:
    """What a collection is; kept in the store with it, so that every process sees the same."""

    name: str
    fingerprint: Fingerprint
    metric: Literal["cosine"] = "cosine"

    def __post_init__(self) -> None:
        require_collection_name(self.name)
        if self.fingerprint.dimension < 1:
            raise RequestError(f"A collection cannot have {self.fingerprint.dimension} dimensions.", param="dimension")

    @property
    def dimension(self) -> int:
        return self.fingerprint.dimension

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "CollectionSpec":
        facts = json.loads(text)
        return cls(name=facts["name"], metric=facts["metric"], fingerprint=Fingerprint(**facts["fingerprint"]))


@dataclass(frozen=True)
class Record:
    """One row: `vector` is [D] float32."""

    id: str
    vector: Vectors
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Match:
    """One row that was found. `score` is the cosine: 1 is the same direction."""

    id: str
    score: float
    text: str
    metadata: dict[str, Any]


Matches = list[list[Match]]
"""Per query, its rows, best first."""


class VectorStore(Protocol):
    """Every method blocks until done; a write that has returned is visible to later searches and counts.

    Raises `RequestError` for what the caller must change (404 `collection_not_found`, 409
    `fingerprint_mismatch`, 400 otherwise) and `DependencyError` when the store cannot be reached in time.
    All methods may be called again after a failure: each leaves the same state when it is done twice.
    """

    def create(self, spec: CollectionSpec) -> None:
        """Make the collection; nothing happens if it exists with the same spec, 409 if with another."""

    def describe(self, name: str) -> CollectionSpec:
        """The spec it was made with; 404 if there is none of that name."""

    def list(self) -> list[str]:
        """Names of all collections, sorted."""

    def drop(self, name: str) -> None:
        """Remove the collection and its rows; nothing happens if there is none."""

    def upsert(self, name: str, records: Sequence[Record]) -> int:
        """Write rows by id: a row of that id is replaced. Returns the number of rows written."""

    def delete(self, name: str, ids: Sequence[str]) -> None:
        """Remove the rows of these ids; ids that are not there do not matter."""

    def count(self, name: str) -> int:
        """Exact number of rows."""

    def search(self, name: str, queries: Vectors, k: int, *, where: Mapping[str, Scalar] | None = None) -> Matches:
        """For each row of `queries` [Q, D] the `k` nearest rows whose metadata equal `where`, best first.

        Whether `true` equals 1 is the store's own business: Milvus says no, Milvus Lite says yes.
        """


def require_collection_name(name: str) -> str:
    """`name`, if a collection may be called so; `RequestError` otherwise."""
    if not COLLECTION_NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} cannot be a collection's name.",
            param="collection",
            hint="Use 1 to 63 lower-case letters, digits, '.', '_' or '-', starting with a letter or digit.",
        )
    return name


def require_same(existing: CollectionSpec, wanted: CollectionSpec) -> None:
    """`RequestError` 409 if a collection's rows were made by another model than `wanted` says."""
    if existing != wanted:
        raise mismatch(existing, wanted)


def mismatch(existing: CollectionSpec, wanted: CollectionSpec) -> RequestError:
    """The 409 that says how the two differ, and what to do."""
    was = existing.fingerprint
    only_prompt = replace(was, prompt=wanted.fingerprint.prompt) == wanted.fingerprint
    back = f"Set serve.embedding.prompts.document to {was.prompt!r}" if only_prompt else "Serve the model that made it"
    return RequestError(
        f"Collection {existing.name!r} holds vectors of {was}; "
        f"this embedder is {wanted.fingerprint}. They cannot be compared.",
        status=409,
        param="collection",
        code="fingerprint_mismatch",
        hint=f"{back}, or index the documents again into a new collection.",
    )


def unknown_collection(name: str, known: Sequence[str]) -> RequestError:
    """The 404 that names what there is."""
    listed = ", ".join(known) if known else "none yet"
    return RequestError(
        f"There is no collection {name!r}.",
        status=404,
        param="collection",
        code="collection_not_found",
        hint=f"Known collections: {listed}. Writing documents to a new name makes it.",
    )


def require_records(spec: CollectionSpec, records: Sequence[Record]) -> None:
    """`RequestError` naming the first row that cannot be stored, before any row is written."""
    for index, record in enumerate(records):
        row = f"documents[{index}]"
        require_bytes(record.id, f"{row}.id", most=MAX_ID_BYTES, least=1)
        require_bytes(record.text, f"{row}.text", most=MAX_TEXT_BYTES)
        require_metadata(record.metadata, f"{row}.metadata")
        _require_vectors(spec, record.vector.reshape(1, -1), f"{row}.vector")


def require_queries(spec: CollectionSpec, queries: Vectors, k: int) -> None:
    """`RequestError` if these queries cannot be asked of that collection."""
    if not 1 <= k <= MAX_K:
        raise RequestError(f"k is {k}; it must be from 1 to {MAX_K}.", param="k")
    _require_vectors(spec, queries, "query")


def require_where(where: Mapping[str, Scalar] | None) -> dict[str, Scalar]:
    """The filter, checked: simple keys, and values that JSON equality can compare."""
    checked = dict(where or {})
    for key, value in checked.items():
        if not FILTER_KEY.fullmatch(key):
            raise RequestError(
                f"{key!r} cannot be a key of a filter.",
                param="filter",
                hint="Use letters, digits, '_' and '-', starting with a letter or '_'.",
            )
        if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not math.isfinite(value)):
            raise RequestError(
                f"The filter's value for {key!r} is {value!r}.",
                param="filter",
                hint="Give a string, a number or a boolean.",
            )
    return checked


def require_bytes(text: str, what: str, *, most: int, least: int = 0) -> None:
    """`RequestError` if `text` is not of `least` to `most` bytes in UTF-8."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{what} is not valid Unicode: it holds half a surrogate pair.", param=what) from None
    if not least <= size <= most:
        raise RequestError(
            f"{what} has {size} bytes; it may have from {least} to {most}.",
            param=what,
            code="text_too_long" if size > most else None,
            hint="Split the document into smaller ones." if size > most else "Leave it out, or give a value.",
        )


def require_metadata(metadata: Mapping[str, Any], what: str) -> None:
    """`RequestError` if `metadata` is not a JSON object of a size that can be stored."""
    try:
        text = json.dumps(dict(metadata), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"{what} is not a JSON object: {error}.", param=what) from None
    require_bytes(text, what, most=MAX_METADATA_BYTES)


def record_bytes(record: Record) -> int:
    """Upper bound of what one row adds to a message: vector, texts, and some room for the framing."""
    metadata = json.dumps(dict(record.metadata), ensure_ascii=False)
    return record.vector.nbytes + len(record.id.encode()) + len(record.text.encode()) + len(metadata.encode()) + 64


def batches(records: Sequence[Record], max_bytes: int) -> Iterator[list[Record]]:
    """`records` in order, cut so that no batch is over `max_bytes`; a single bigger row is its own batch."""
    batch: list[Record] = []
    size = 0
    for record in records:
        added = record_bytes(record)
        if batch and size + added > max_bytes:
            yield batch
            batch, size = [], 0
        batch.append(record)
        size += added
    if batch:
        yield batch


def _require_vectors(spec: CollectionSpec, vectors: Vectors, what: str) -> None:
    if vectors.ndim != 2 or vectors.shape[1] != spec.dimension:
        raise RequestError(
            f"{what} has the shape {list(vectors.shape)}; collection {spec.name!r} has {spec.dimension} dimensions.",
            param=what,
        )
    if not np.isfinite(vectors).all():
        raise RequestError(f"{what} holds values that are not finite.", param=what)
