"""The contract of `Embedder`: the same tests on the hashing fake and on the server with a real model."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.storage import Home
from deployments.embedding.config import EmbeddingConfig
from deployments.embedding.hashing import HashEmbedder
from deployments.embedding.port import Embedder, InputType
from deployments.embedding.server import EmbeddingServer

MAX_TOKENS = 32


@pytest.fixture(scope="module")
def minilm(home: Home) -> Iterator[EmbeddingServer]:
    server = EmbeddingServer(EmbeddingConfig(model="all-minilm-l6-v2", max_tokens=MAX_TOKENS, dimensions=(64,)), home)
    yield server
    server.close()


@pytest.fixture(params=["hashing", pytest.param("minilm", marks=pytest.mark.integration)])
def embedder(request: pytest.FixtureRequest) -> Embedder:
    if request.param == "hashing":
        return HashEmbedder(max_tokens=MAX_TOKENS, shorter=[16])
    server: EmbeddingServer = request.getfixturevalue("minilm")
    return server


async def test_each_text_gets_its_vector_in_its_place(embedder: Embedder) -> None:
    texts = ["read a file", "sort the numbers in the list", "", "read a file"]
    embedded = await embedder.embed(texts)
    info = await embedder.info()
    assert embedded.vectors.shape == (4, info.dimension)
    assert embedded.vectors.dtype == np.float32
    assert embedded.fingerprint == info.fingerprint
    assert len(embedded.tokens) == 4
    assert embedded.tokens[1] > embedded.tokens[0] > embedded.tokens[2]
    assert embedded.vectors[0] == pytest.approx(embedded.vectors[3], abs=1e-6)
    assert not np.allclose(embedded.vectors[0], embedded.vectors[1], atol=1e-2)


async def test_vectors_have_length_one_when_the_fingerprint_says_so(embedder: Embedder) -> None:
    embedded = await embedder.embed(["read a file", ""])
    assert embedded.fingerprint.normalized
    assert np.linalg.norm(embedded.vectors, axis=1) == pytest.approx([1, 1], abs=1e-5)


async def test_calls_at_once_get_their_own_vectors(embedder: Embedder) -> None:
    texts = [f"function number {i} " + "word " * (i % 20) for i in range(40)]
    together = await asyncio.gather(*(embedder.embed([text]) for text in texts))
    alone = await embedder.embed(texts)
    for index, one in enumerate(together):
        assert one.vectors[0] == pytest.approx(alone.vectors[index], abs=1e-5)


async def test_too_long_is_refused_naming_which_and_how_long(embedder: Embedder) -> None:
    with pytest.raises(RequestError, match=r"Input 1 has \d+ tokens; .* at most 32") as caught:
        await embedder.embed(["short", "word " * 40])
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert caught.value.param == "input[1]"


async def test_with_leave_to_truncate_the_beginning_is_read(embedder: Embedder) -> None:
    embedded = await embedder.embed(["word " * 40, "word " * 500], truncate=True)
    assert embedded.tokens == [MAX_TOKENS, MAX_TOKENS]
    assert embedded.vectors[0] == pytest.approx(embedded.vectors[1], abs=1e-5)


async def test_token_ids_are_taken_as_they_are(embedder: Embedder) -> None:
    embedded = await embedder.embed([[101, 3191, 102], [101, 102]])
    assert embedded.tokens == [3, 2]
    with pytest.raises(RequestError) as caught:
        await embedder.embed([[101] * 40])
    assert caught.value.code == "context_length_exceeded"


async def test_nothing_is_not_an_input(embedder: Embedder) -> None:
    with pytest.raises(RequestError, match="nothing to embed"):
        await embedder.embed([])


async def test_only_the_lengths_that_are_offered_can_be_asked_for(embedder: Embedder) -> None:
    info, whole = await embedder.info(), await embedder.embed(["read a file", "sort"])
    for asked in info.dimensions:
        made = await embedder.embed(["read a file", "sort"], dimensions=asked)
        head = whole.vectors[:, :asked]
        assert made.vectors == pytest.approx(head / np.linalg.norm(head, axis=1, keepdims=True), abs=1e-5)
        assert made.fingerprint.dimension == asked
        assert (made.fingerprint == info.fingerprint) == (asked == info.dimension)
    assert info.dimensions[0] == info.dimension
    with pytest.raises(RequestError) as caught:
        await embedder.embed(["read"], dimensions=info.dimension - 1)
    assert caught.value.param == "dimensions"


async def test_a_model_without_prompts_reads_queries_as_documents(embedder: Embedder) -> None:
    plain = await embedder.embed(["read a file"])
    input_types: tuple[InputType, ...] = ("query", "document")
    for input_type in input_types:
        made = await embedder.embed(["read a file"], input_type=input_type)
        assert made.vectors == pytest.approx(plain.vectors, abs=1e-6)
        assert made.fingerprint == plain.fingerprint


async def test_it_says_what_it_is(embedder: Embedder) -> None:
    info, facts = await embedder.info(), await embedder.describe()
    assert (facts["model"], facts["dimensions"]) == (info.name, info.dimension)
