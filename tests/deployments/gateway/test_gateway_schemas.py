import base64
import json
import struct
from typing import Any

import numpy as np
import pytest

from cluster.errors import RequestError
from deployments.gateway.schemas import (
    ChatBody,
    CompletionBody,
    EmbeddingsBody,
    RerankBody,
    embeddings_content,
    encode,
    parse,
    rerank_response,
)


def body(body_class: Any, **fields: Any) -> Any:
    return parse(body_class, json.dumps(fields).encode())[0]


@pytest.mark.parametrize("content", [b"", b'{"model": "x", ', b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_what_is_not_a_json_object_is_refused(content: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(ChatBody, content)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{}]},
        {"model": 3, "messages": [{}]},
        {"model": "m", "messages": "hi"},
        {"model": "m", "messages": []},
        {"model": "m", "messages": [{}], "stream": "yes"},
        {"model": "m", "messages": [{}], "stream": True, "stream_options": {"include_usage": 1}},
    ],
)
def test_types_are_strict(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        body(ChatBody, **fields)
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")


def test_the_engine_always_counts_but_keeps_the_clients_other_wishes() -> None:
    raw = {"model": "m", "prompt": "x", "stream": True, "stream_options": {"continuous": True}, "top_k": 3}
    parsed, kept = parse(CompletionBody, json.dumps(raw).encode())
    assert not parsed.wants_usage
    assert parsed.for_engine(kept) == {**raw, "stream_options": {"continuous": True, "include_usage": True}}
    assert kept == raw


@pytest.mark.parametrize(
    ("given", "taken"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_an_input_comes_in_four_shapes(given: Any, taken: Any) -> None:
    assert body(EmbeddingsBody, model="m", input=given).input == taken


@pytest.mark.parametrize("given", ["", [], [""], ["a", 1], [["a"]], [[]], [-1], [True], None, {}, ["a"] * 2049])
def test_other_inputs_are_refused(given: Any) -> None:
    with pytest.raises(RequestError) as caught:
        body(EmbeddingsBody, model="m", input=given)
    assert caught.value.param == "input"


def test_base64_is_little_endian_float32_also_of_a_big_endian_or_strided_vector() -> None:
    expected = [1.0, -2.5, 3.25]
    for vector in (
        np.array(expected, dtype=np.float32),
        np.array(expected, dtype=">f4"),
        np.array([[1.0, 0], [-2.5, 0], [3.25, 0]], dtype=np.float64)[:, 0],
    ):
        assert list(struct.unpack("<3f", base64.b64decode(encode(vector)))) == expected


@pytest.mark.parametrize("text", ['"\\ud83d"', '"\\ud83d\\ude00 é"', "[1, 30521]"])
def test_json_is_read_as_ever(text: str) -> None:
    read, raw = parse(EmbeddingsBody, b'{"model": "m", "input": %s}' % text.encode())
    assert raw["input"] == json.loads(text)
    assert read.input == [raw["input"]]


def test_vectors_keep_the_order_of_their_inputs() -> None:
    vectors = np.arange(6, dtype=np.float32).reshape(3, 2)
    response = json.loads(embeddings_content("m", vectors, [2, 3, 4], "float"))
    assert [(one["index"], one["embedding"]) for one in response["data"]] == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]
    assert response["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


@pytest.mark.parametrize(
    "fields",
    [{"documents": []}, {"documents": "a"}, {"documents": [""]}, {"documents": [{"txt": "a"}]}, {"query": ""},
     {"top_n": 0}, {"top_n": "1"}, {"documents": ["a"] * 2049}],
)  # fmt: skip
def test_what_cannot_be_ranked_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        body(RerankBody, **{"model": "m", "query": "q", "documents": ["a"], **fields})
    assert (caught.value.status, caught.value.code) == (400, "invalid_value")
    assert str(caught.value.param).startswith(next(iter(fields)))


def test_documents_to_rank_are_texts_or_hold_one() -> None:
    assert body(RerankBody, model="m", query="q", documents=["a", {"text": "b", "id": 7}]).texts == ["a", "b"]


def test_the_best_come_first_and_equal_ones_in_their_order() -> None:
    scores = np.array([0.25, 0.5, 0.125, 0.5], dtype=np.float32)
    ranked = rerank_response("m", scores, 9, request_id="r", documents=list("abcd"))
    assert [(one["index"], one["relevance_score"], one["document"]["text"]) for one in ranked["results"]] == [
        (1, 0.5, "b"),
        (3, 0.5, "d"),
        (0, 0.25, "a"),
        (2, 0.125, "c"),
    ]
    assert ranked["usage"] == {"prompt_tokens": 9, "total_tokens": 9}
    assert rerank_response("m", scores, 9, request_id="r", top_n=1)["results"] == [{"index": 1, "relevance_score": 0.5}]
