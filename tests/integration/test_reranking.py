"""The reranking server around a small cross-encoder: its scores, its bounds, and what it refuses to load."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder

from cluster.errors import ConfigError, RateLimitError
from cluster.storage import Home
from deployments.reranking.config import RerankingConfig
from deployments.reranking.port import Scored
from deployments.reranking.server import RerankingServer
from tests.embedders import some_texts, write_cross_encoder, write_embedder

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("models") / "tiny-reranker")


async def test_scores_are_those_of_predict_whatever_the_batch(folder: Path, home: Home) -> None:
    server = RerankingServer(RerankingConfig(model=str(folder), batch_tokens=128, batch_wait_s=0.001), home)
    reference = CrossEncoder(str(folder), device="cpu")
    calls = [(query, some_texts(12, longest=80, seed=seed)) for seed, query in enumerate(some_texts(6, longest=20))]
    made = await asyncio.gather(*(server.rerank(query, documents, truncate=True) for query, documents in calls))
    for (query, documents), scored in zip(calls, made, strict=True):
        expected = reference.predict([(query, document) for document in documents])
        np.testing.assert_allclose(scored.scores, expected, atol=1e-5)
    assert max(max(scored.tokens) for scored in made) == 64
    server.close()


async def test_a_huge_document_is_read_no_further_than_needed_and_a_full_queue_is_429(folder: Path, home: Home) -> None:
    server = RerankingServer(RerankingConfig(model=str(folder), max_queued=40), home)
    huge = "parse the file \ud800 " * 300_000
    cut = await asyncio.wait_for(server.rerank("read", [huge, "sort"], truncate=True), 5)
    assert cut.tokens == [64, 5]
    calls = [server.rerank("read", ["parse the file"] * 30) for _ in range(10)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(answer) for answer in answers} == {Scored, RateLimitError}
    assert (await server.describe())["waiting"] == {"texts": 0, "tokens": 0, "unread_bytes": 0}
    await server.check_health()
    server.close()


def test_what_is_no_reranker_is_refused(tmp_path: Path, folder: Path, home: Home) -> None:
    embedder = write_embedder(tmp_path / "embedder")
    with pytest.raises(ConfigError, match="a sentence-embedder"):
        RerankingServer(RerankingConfig(model=str(embedder)), home)
    classes = write_cross_encoder(tmp_path / "classes", labels=3)
    with pytest.raises(ConfigError, match="of 3 classes"):
        RerankingServer(RerankingConfig(model=str(classes)), home)
    with pytest.raises(ConfigError, match="max_tokens is 65") as caught:
        RerankingServer(RerankingConfig(model=str(folder), max_tokens=65), home)
    assert "serve.reranking.max_tokens to 64" in (caught.value.hint or "")


@pytest.mark.parametrize("place", ["config_sentence_transformers.json", "config.json"])
def test_an_activation_that_is_none_is_never_called(tmp_path: Path, home: Home, place: str) -> None:
    """The library calls whatever the model names, if it begins with `torch.`."""
    folder = write_cross_encoder(tmp_path / "tiny-reranker")
    path = folder / place
    said = json.loads(path.read_text(encoding="utf-8"))
    named = {"activation_fn": "torch.hub.list"}
    said |= named if place.startswith("config_") else {"sentence_transformers": named}
    path.write_text(json.dumps(said), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"torch\.hub\.list"):
        RerankingServer(RerankingConfig(model=str(folder)), home)
