"""Documents as they come in, checked whole before anything is done with them."""

from typing import Any

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.vectors.port import Fingerprint, Match
from deployments.search.collections import Document, document_id, documents, hits, records, spec


def test_a_document_without_an_id_gets_one_from_its_text() -> None:
    first, second = documents([{"text": "same"}, {"text": "other"}], most=10)
    assert first.id == document_id("same")
    assert first.id != second.id
    assert len(first.id) == 32


def test_given_ids_and_metadata_stay() -> None:
    (document,) = documents([{"id": "a", "text": "t", "metadata": {"line": 3}}], most=10)
    assert document == Document("a", "t", {"line": 3})
    assert documents([document], most=10) == [document]


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ([], "no documents", "documents"),
        ([{"text": "x"}] * 4, "4 documents in one request; at most 3", "documents"),
        ([{"text": "a"}, {"text": ""}], r"documents\[1\].text is empty", "documents[1].text"),
        ([{"text": " \n"}], r"documents\[0\].text is empty", "documents[0].text"),
        ([{"id": "a"}], r"documents\[0\].text is None", "documents[0].text"),
        ([{"text": 7}], r"documents\[0\].text is 7", "documents[0].text"),
        ([{"text": "a", "id": 7}], r"documents\[0\].id is 7", "documents[0].id"),
        ([{"text": "a", "id": ""}], r"documents\[0\].id has 0 bytes", "documents[0].id"),
        ([{"text": "a", "metadata": []}], r"documents\[0\].metadata is \[\]", "documents[0].metadata"),
        ([{"text": "a", "title": "b"}], "unknown key 'title'", "documents[0].title"),
        ([{"text": "a", "id": "x"}, {"text": "b", "id": "x"}], r"has the id 'x' of documents\[0\]", "documents[1].id"),
        ([{"text": "a"}, {"text": "a"}], r"documents\[1\] has the id", "documents[1].id"),
        (["text"], r"documents\[0\] is str", "documents[0]"),
        ([{"text": "x" * 70_000}], r"documents\[0\].text has 70000 bytes", "documents[0].text"),
        ([{"text": "half \ud800"}], "not valid Unicode", "documents[0].text"),
        ([{"text": "a", "metadata": {"x": float("nan")}}], "not a JSON object", "documents[0].metadata"),
    ],
)
def test_the_document_at_fault_is_named(given: list[Any], message: str, param: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        documents(given, most=3)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_documents_become_rows_and_matches_become_hits() -> None:
    rows = records([Document("a", "t", {"x": 1})], np.array([[1, 2]], dtype=np.float32))
    assert (rows[0].id, rows[0].text, rows[0].metadata) == ("a", "t", {"x": 1})
    assert rows[0].vector.tolist() == [1, 2]
    assert hits([Match("a", 0.5, "t", {"x": 1})]) == [{"id": "a", "score": 0.5, "text": "t", "metadata": {"x": 1}}]


@pytest.mark.parametrize("name", ["", "Upper", "a/b", "../x", "x" * 64, "-a"])
def test_a_collection_needs_a_plain_name(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be a collection's name"):
        spec(name, Fingerprint("m", "d", 2, normalized=True))
