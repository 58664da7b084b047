"""What both rerankers keep: the shipped fake, and the real server around a small untrained cross-encoder."""

from collections.abc import Iterator

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.storage import Home
from deployments.reranking.config import RerankingConfig
from deployments.reranking.overlap import WordOverlap
from deployments.reranking.port import Reranker
from deployments.reranking.server import RerankingServer
from tests.embedders import write_cross_encoder

MAX_TOKENS = 32
DOCUMENTS = ["sort the list", "read a file and return", "", "value " * 20]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, home: Home) -> Iterator[RerankingServer]:
    folder = write_cross_encoder(tmp_path_factory.mktemp("models") / "tiny-reranker")
    server = RerankingServer(RerankingConfig(model=str(folder), max_tokens=MAX_TOKENS), home)
    yield server
    server.close()


@pytest.fixture(params=["overlap", pytest.param("tiny", marks=pytest.mark.integration)])
def reranker(request: pytest.FixtureRequest) -> Reranker:
    if request.param == "overlap":
        return WordOverlap(max_tokens=MAX_TOKENS)
    server: RerankingServer = request.getfixturevalue("tiny")
    return server


async def test_every_document_has_a_score_whatever_stands_beside_it(reranker: Reranker) -> None:
    made = await reranker.rerank("read the file", DOCUMENTS)
    assert (made.scores.shape, made.scores.dtype) == ((4,), np.float32)
    for place, document in enumerate(DOCUMENTS):
        alone = await reranker.rerank("read the file", [document])
        assert alone.scores[0] == pytest.approx(made.scores[place], abs=1e-5)
        assert alone.tokens == [made.tokens[place]]


async def test_the_query_counts_with_each_document(reranker: Reranker) -> None:
    assert (await reranker.rerank("read", ["sort", "sort the list"])).tokens == [5, 7]


async def test_what_is_too_long_is_named_or_cut(reranker: Reranker) -> None:
    for query, documents, param in (
        ("read", ["sort", "value " * 29], "documents[1]"),
        ("read " * 29, ["sort"], "query"),
    ):
        with pytest.raises(RequestError) as caught:
            await reranker.rerank(query, documents)
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", param)
        cut = await reranker.rerank(query, documents, truncate=True)
        assert max(cut.tokens) == MAX_TOKENS
    assert (await reranker.rerank("read", ["value " * 28])).tokens == [MAX_TOKENS]


async def test_nothing_cannot_be_ranked(reranker: Reranker) -> None:
    with pytest.raises(RequestError, match="nothing to rank") as caught:
        await reranker.rerank("read", [])
    assert caught.value.param == "documents"


async def test_it_says_what_it_is(reranker: Reranker) -> None:
    facts = await reranker.describe()
    assert facts["max_tokens"] == MAX_TOKENS
    assert facts["model"]
