"""What the vector stores share without a server: batches, names, filters, and an address where nobody is."""

import json
import time
from dataclasses import replace

import numpy as np
import pytest

from cluster.errors import DependencyError, RequestError
from cluster.vectors import CollectionSpec, Fingerprint, MilvusVectors, Record
from cluster.vectors.port import batches, record_bytes, require_same

MODEL = Fingerprint("tiny", "a" * 64, 4, normalized=True)


def rows(*text_bytes: int) -> list[Record]:
    return [Record(str(i), np.zeros(4, dtype=np.float32), "x" * size) for i, size in enumerate(text_bytes)]


def test_batches_keep_the_order_and_the_budget() -> None:
    given = rows(*[100] * 50)
    cut = list(batches(given, 1000))
    assert [row.id for batch in cut for row in batch] == [row.id for row in given]
    assert all(sum(map(record_bytes, batch)) <= 1000 for batch in cut)
    assert len(cut) == 10


def test_a_row_over_the_budget_goes_alone() -> None:
    assert [[row.id for row in batch] for batch in batches(rows(10, 5000, 10), 1000)] == [["0"], ["1"], ["2"]]


def test_the_size_of_a_row_counts_bytes_not_letters() -> None:
    plain, snow = rows(0)[0], Record("0", np.zeros(4, dtype=np.float32), "☃" * 10)
    assert record_bytes(snow) - record_bytes(plain) == 30


def test_a_spec_survives_json_and_a_fingerprint_sees_every_fact() -> None:
    spec = CollectionSpec("functions", MODEL)
    assert CollectionSpec.from_json(spec.to_json()) == spec
    assert json.loads(spec.to_json())["fingerprint"]["dimension"] == 4
    others = [
        Fingerprint("other", MODEL.digest, 4, normalized=True),
        Fingerprint("tiny", "b" * 64, 4, normalized=True),
        Fingerprint("tiny", MODEL.digest, 5, normalized=True),
        Fingerprint("tiny", MODEL.digest, 4, normalized=False),
        Fingerprint("tiny", MODEL.digest, 4, normalized=True, prompt="query: "),
    ]
    assert len({MODEL.id, *(other.id for other in others)}) == 6


def test_a_fingerprint_is_what_it_has_always_been() -> None:
    # Another value, or a fact more, and every collection that exists is refused.
    assert MODEL.id == "3e5ef52a3e56"
    assert set(json.loads(CollectionSpec("functions", MODEL).to_json())["fingerprint"]) == {
        "model",
        "digest",
        "dimension",
        "normalized",
        "prompt",
    }


def test_another_prompt_alone_can_be_set_back() -> None:
    made_with = CollectionSpec("functions", MODEL)
    wanted = CollectionSpec("functions", replace(MODEL, prompt="passage: "))
    with pytest.raises(RequestError, match="cannot be compared") as caught:
        require_same(made_with, wanted)
    assert "serve.embedding.prompts.document to ''" in (caught.value.hint or "")


def test_a_collection_without_dimensions_is_refused() -> None:
    with pytest.raises(RequestError, match="0 dimensions"):
        CollectionSpec("functions", Fingerprint("tiny", "a", 0, normalized=True))


def test_a_server_that_is_not_there_is_given_up_in_time() -> None:
    store = MilvusVectors("http://127.0.0.1:9", retry_s=0.5)
    began = time.monotonic()
    with pytest.raises(DependencyError, match=r"did not answer within 0\.5 s") as caught:
        store.list()
    assert time.monotonic() - began < 8
    assert caught.value.retryable
    assert "serve.search.uri" in (caught.value.hint or "")


def test_whoever_cannot_start_the_server_is_not_asked_again() -> None:
    asked = []

    def locate() -> str:
        asked.append(1)
        raise DependencyError("the folder is in use", retryable=False)

    with pytest.raises(DependencyError, match="the folder is in use"):
        MilvusVectors(locate, retry_s=5).list()
    assert asked == [1]
