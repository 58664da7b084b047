"""The embedding server against sentence-transformers' own `encode`: the same vectors, in whatever company."""

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer

from cluster import models
from cluster.errors import ConfigError, RateLimitError, RequestError
from cluster.storage import Home
from cluster.vectors.port import Vectors
from deployments.embedding.config import EmbeddingConfig
from deployments.embedding.port import Embedded
from deployments.embedding.server import EmbeddingServer
from tests.embedders import WORDS as TINY_WORDS
from tests.embedders import some_texts as tiny_texts
from tests.embedders import write_embedder

pytestmark = pytest.mark.integration

MODEL = "all-minilm-l6-v2"
WORDS = ["read", "sort", "parse", "the file", "a list of numbers", "and return None", "if value is not set", "raise"]


def some_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(0, longest))) for _ in range(count)]


@pytest.fixture(scope="module")
def server(home: Home) -> Iterator[EmbeddingServer]:
    made = EmbeddingServer(EmbeddingConfig(model=MODEL, batch_tokens=512), home)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference(home: Home) -> SentenceTransformer:
    return SentenceTransformer(str(models.obtain(MODEL, home).path), device="cpu")


def cosine_loss(ours: Vectors, theirs: Vectors) -> float:
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float(1 - ((ours * theirs).sum(axis=1) / norms).min())


async def test_vectors_are_those_of_encode_whatever_the_batch(
    server: EmbeddingServer, reference: SentenceTransformer
) -> None:
    texts = some_texts(60, longest=60)
    expected = reference.encode(texts, batch_size=7)
    together = await server.embed(texts)
    assert cosine_loss(together.vectors, expected) < 1e-5
    alone = await asyncio.gather(*(server.embed([text]) for text in texts))
    assert cosine_loss(np.concatenate([one.vectors for one in alone]), expected) < 1e-5
    assert together.tokens == [len(ids) for ids in reference.tokenizer(texts)["input_ids"]]


POOL = [
    "",
    "a",
    "def read(path):\n    return path.read_text()\n",
    "Zürich, 東京 and 🚀",
    *some_texts(8, longest=40, seed=5),
    "word " * 254,  # exactly as long as the model reads
    "word " * 255,
    "a longer one, cut in the middle of a word " * 40,
]


@pytest.fixture(scope="module")
def pool_vectors(reference: SentenceTransformer) -> Vectors:
    """[N, 384] of the whole pool in one `encode`."""
    return np.asarray(reference.encode(POOL, batch_size=len(POOL)), dtype=np.float32)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.lists(st.sampled_from(range(len(POOL))), min_size=1, max_size=5), min_size=1, max_size=5))
def test_online_vectors_are_those_of_one_batch_for_any_composition(
    server: EmbeddingServer, pool_vectors: Vectors, calls: list[list[int]]
) -> None:
    async def all_at_once() -> list[Embedded]:
        return await asyncio.gather(*(server.embed([POOL[at] for at in call], truncate=True) for call in calls))

    for call, made in zip(calls, asyncio.run(all_at_once()), strict=True):
        assert cosine_loss(made.vectors, pool_vectors[call]) < 1e-5


async def test_token_ids_give_the_vectors_of_their_texts(
    server: EmbeddingServer, reference: SentenceTransformer
) -> None:
    texts = some_texts(5, longest=40, seed=1)
    by_ids = await server.embed([list(ids) for ids in reference.tokenizer(texts)["input_ids"]])
    assert cosine_loss(by_ids.vectors, reference.encode(texts)) < 1e-5


async def test_truncating_is_what_encode_does_to_a_long_text(
    server: EmbeddingServer, reference: SentenceTransformer
) -> None:
    long = " ".join(some_texts(30, longest=120, seed=2))
    with pytest.raises(RequestError, match="at most 256"):
        await server.embed([long])
    embedded = await server.embed([long], truncate=True)
    assert embedded.tokens == [256]
    assert cosine_loss(embedded.vectors, reference.encode([long])) < 1e-5


async def test_a_short_text_is_not_kept_waiting_by_long_ones(server: EmbeddingServer) -> None:
    long = asyncio.create_task(server.embed(["word " * 200] * 60))
    await asyncio.sleep(0.1)
    short = await server.embed(["quick"])
    assert short.tokens == [3]
    assert not long.done()
    assert (await long).vectors.shape == (60, 384)


async def test_bfloat16_stays_close(home: Home, reference: SentenceTransformer) -> None:
    server = EmbeddingServer(EmbeddingConfig(model=MODEL, dtype="bfloat16"), home)
    texts = some_texts(40, longest=60, seed=3)
    embedded = await server.embed(texts)
    assert embedded.vectors.dtype == np.float32
    assert cosine_loss(embedded.vectors, reference.encode(texts)) < 5e-3
    assert np.linalg.norm(embedded.vectors, axis=1) == pytest.approx(np.ones(40), abs=1e-5)
    server.close()


async def test_the_model_says_who_it_is(server: EmbeddingServer, home: Home) -> None:
    info, facts = await server.info(), await server.describe()
    assert info.digest == models.obtain(MODEL, home).digest
    assert (info.dimension, info.max_tokens) == (384, 256)
    assert facts["dimensions"] == 384
    assert facts["fingerprint"]["id"] == info.fingerprint.id
    await server.check_health()


async def test_token_ids_of_another_vocabulary_are_refused(server: EmbeddingServer) -> None:
    for ids in ([30_522], [-1], []):
        with pytest.raises(RequestError, match="0 to 30521") as caught:
            await server.embed([[101, 102], ids])
        assert caught.value.param == "input[1]"


async def test_more_texts_than_may_ever_wait_are_refused(server: EmbeddingServer) -> None:
    with pytest.raises(RequestError, match="4097 inputs in one call; at most 4096"):
        await server.embed(["x"] * 4097)


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a prompt for queries and one for documents, and shorter vectors."""
    return write_embedder(
        tmp_path_factory.mktemp("models") / "prompted",
        prompts={"query": "query : ", "document": "passage : "},
        default_prompt="document",
        matryoshka=[8],
    )


async def test_prompts_and_shorter_vectors_are_sentence_transformers_own(prompted: Path, home: Home) -> None:
    server, reference = EmbeddingServer(EmbeddingConfig(model=str(prompted)), home), SentenceTransformer(str(prompted))
    texts = tiny_texts(20, longest=30)
    for kind, encode in (
        ("query", reference.encode_query),
        ("document", reference.encode_document),
        (None, reference.encode),
    ):
        made = await server.embed(texts, input_type=kind)  # type: ignore[arg-type]
        assert cosine_loss(made.vectors, encode(texts)) < 1e-5
    short = await server.embed(texts, input_type="query", dimensions=8)
    assert cosine_loss(short.vectors, reference.encode_query(texts, truncate_dim=8)) < 1e-5
    assert np.linalg.norm(short.vectors, axis=1) == pytest.approx(np.ones(20), abs=1e-5)
    assert (await server.info()).fingerprint.prompt == "passage : "
    with pytest.raises(RequestError) as caught:
        await server.embed([[2, 3]], input_type="query")
    assert caught.value.param == "input_type"
    bare = await server.embed([[2, 3]])
    assert bare.fingerprint.prompt == ""
    server.close()


@pytest.fixture(scope="module")
def tiny(prompted: Path, home: Home) -> Iterator[EmbeddingServer]:
    """Small bounds, so that mixes reach them."""
    config = EmbeddingConfig(model=str(prompted), batch_tokens=96, batch_wait_s=0.001, max_queued=64)
    made = EmbeddingServer(config, home)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tiny_reference(prompted: Path) -> SentenceTransformer:
    return SentenceTransformer(str(prompted), device="cpu")


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["query", "document", None]),
        st.lists(st.lists(st.sampled_from([*TINY_WORDS, "xylophone", "é", ""]), max_size=70), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS)
def test_online_vectors_are_those_of_the_batch_for_any_mix_of_calls(
    tiny: EmbeddingServer, tiny_reference: SentenceTransformer, calls: list[tuple[Any, list[list[str]]]]
) -> None:
    texts = [(kind, [" ".join(words) for words in several]) for kind, several in calls]

    async def all_at_once() -> list[Embedded]:
        return await asyncio.gather(*(tiny.embed(several, input_type=kind, truncate=True) for kind, several in texts))

    for (kind, several), made in zip(texts, asyncio.run(all_at_once()), strict=True):
        encode = {"query": tiny_reference.encode_query, "document": tiny_reference.encode_document}.get(
            kind, tiny_reference.encode
        )
        assert cosine_loss(made.vectors, encode(several)) < 1e-5


async def test_a_huge_document_is_refused_or_cut_at_once_and_keeps_nobody_waiting(tiny: EmbeddingServer) -> None:
    huge = "parse the file " * 300_000
    began = time.monotonic()
    cut = asyncio.create_task(tiny.embed([huge], truncate=True))
    small = await tiny.embed(["read"])
    assert (await cut).tokens == [64]
    assert small.tokens == [5]  # with its prompt and the special ones
    with pytest.raises(RequestError, match="Input 1 has more than") as caught:
        await tiny.embed(["read", huge])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    assert time.monotonic() - began < 2
    whole = await tiny.embed(["parse the file " * 40], truncate=True)
    assert cosine_loss(whole.vectors, (await cut).vectors) < 1e-5


async def test_what_waits_is_bounded_in_texts_and_all_of_it_is_answered_or_told_when_to_ask_again(
    tiny: EmbeddingServer,
) -> None:
    calls = [tiny.embed(["parse the file"] * 30) for _ in range(20)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RateLimitError)]
    assert refused
    assert all(answer.retry_after_s >= 1 for answer in refused)
    assert all(isinstance(answer, Embedded | RateLimitError) for answer in answers)
    assert any(isinstance(answer, Embedded) for answer in answers)
    assert (await tiny.describe())["waiting"] == {"texts": 0, "tokens": 0, "unread_bytes": 0}


async def test_half_a_surrogate_pair_is_read_as_some_character(tiny: EmbeddingServer) -> None:
    assert (await tiny.embed(["read \ud800 file"])).tokens[0] >= 4


def test_a_limit_that_the_model_does_not_have_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 512") as caught:
        EmbeddingServer(EmbeddingConfig(model=MODEL, max_tokens=512), home)
    assert "256" in (caught.value.hint or "")
