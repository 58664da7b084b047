"""What a collection takes and gives: documents with ids, hits, and which embedder it belongs to. Pure."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from cluster.errors import RequestError
from cluster.vectors.port import (
    MAX_ID_BYTES,
    MAX_TEXT_BYTES,
    CollectionSpec,
    Fingerprint,
    Match,
    Record,
    Vectors,
    require_bytes,
    require_collection_name,
    require_metadata,
)

_KEYS = {"id", "text", "metadata"}


@dataclass(frozen=True)
class Document:
    """One text to find again. `metadata` is a JSON object; searches can ask for equal values."""

    id: str
    text: str
    metadata: dict[str, Any] = field(default_factory=dict)


class Hit(TypedDict):
    """One document that was found; `score` is the cosine between it and the query."""

    id: str
    score: float
    text: str
    metadata: dict[str, Any]


def document_id(text: str) -> str:
    """Id of a document that came without one: the same text is the same document."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def documents(given: Sequence[Document | Mapping[str, Any]], *, most: int) -> list[Document]:
    """`given` as documents, checked whole before anything is embedded or written.

    Raises `RequestError` 400 that names the first one at fault: no text, an id twice, a key we do not know,
    something too long to be stored, or more than `most` of them.
    """
    if not given:
        raise RequestError("There are no documents in the request.", param="documents")
    if len(given) > most:
        raise RequestError(
            f"{len(given)} documents in one request; at most {most} are taken.",
            param="documents",
            hint="Send them in several requests.",
        )
    found: dict[str, int] = {}
    checked = []
    for index, one in enumerate(given):
        document = one if isinstance(one, Document) else _read(one, f"documents[{index}]")
        _require(document, f"documents[{index}]")
        if (first := found.setdefault(document.id, index)) != index:
            raise RequestError(
                f"documents[{index}] has the id {document.id!r} of documents[{first}].",
                param=f"documents[{index}].id",
                hint="Give every document of a request its own id.",
            )
        checked.append(document)
    return checked


def spec(collection: str, fingerprint: Fingerprint) -> CollectionSpec:
    """What the collection is when this embedder makes it."""
    return CollectionSpec(require_collection_name(collection), fingerprint)


def records(given: Sequence[Document], vectors: Vectors) -> list[Record]:
    """Rows for the store: document i with row i of `vectors` [N, D]."""
    return [
        Record(document.id, vector, document.text, document.metadata)
        for document, vector in zip(given, vectors, strict=True)
    ]


def hits(matches: Sequence[Match]) -> list[Hit]:
    """What the store found, as plain data."""
    return [Hit(id=match.id, score=match.score, text=match.text, metadata=match.metadata) for match in matches]


def _read(one: Mapping[str, Any], where: str) -> Document:
    if not isinstance(one, Mapping):
        raise RequestError(f"{where} is {type(one).__name__}, not an object with `text`.", param=where)
    if unknown := sorted(set(one) - _KEYS):
        raise RequestError(
            f"{where} has the unknown key {unknown[0]!r}.",
            param=f"{where}.{unknown[0]}",
            hint="A document has `id`, `text` and `metadata`; put other facts into `metadata`.",
        )
    text = one.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text is {text!r}, not a string.", param=f"{where}.text")
    given_id, metadata = one.get("id"), one.get("metadata")
    if not (given_id is None or isinstance(given_id, str)):
        raise RequestError(f"{where}.id is {given_id!r}, not a string.", param=f"{where}.id")
    if not (metadata is None or isinstance(metadata, Mapping)):
        raise RequestError(f"{where}.metadata is {metadata!r}, not an object.", param=f"{where}.metadata")
    return Document(document_id(text) if given_id is None else given_id, text, dict(metadata or {}))


def _require(document: Document, where: str) -> None:
    if not document.text.strip():
        raise RequestError(f"{where}.text is empty.", param=f"{where}.text", hint="Leave the document out.")
    require_bytes(document.id, f"{where}.id", least=1, most=MAX_ID_BYTES)
    require_bytes(document.text, f"{where}.text", most=MAX_TEXT_BYTES)
    require_metadata(document.metadata, f"{where}.metadata")
