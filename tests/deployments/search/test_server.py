"""Documents in and hits out, over the shipped fakes of embedder and store."""

from dataclasses import dataclass
from typing import Any

import pytest

from cluster.errors import CapacityError, RequestError
from cluster.vectors import MemoryVectors
from deployments.embedding.hashing import HashEmbedder
from deployments.embedding.port import Embedded, EmbedderInfo, Inputs
from deployments.embedding.prompts import Prompts
from deployments.search.collections import Document
from deployments.search.config import SearchConfig
from deployments.search.server import SearchServer

DOCUMENTS = [
    Document("read", "open the file and read its lines", {"package": "io"}),
    Document("sort", "sort a list of numbers", {"package": "lists"}),
    Document("sum", "add a list of numbers", {"package": "maths"}),
]


def server(store: MemoryVectors | None = None, embedder: HashEmbedder | None = None, **config: Any) -> SearchServer:
    return SearchServer(SearchConfig(**config), [embedder or HashEmbedder(max_tokens=16)], store or MemoryVectors())


async def test_documents_that_were_written_are_found() -> None:
    search = server()
    assert await search.write("functions", DOCUMENTS) == 3
    found = await search.search("functions", "sort numbers", 2)
    assert [hit["id"] for hit in found] == ["sort", "sum"]
    assert found[0]["text"] == DOCUMENTS[1].text
    assert found[0]["metadata"] == {"package": "lists"}
    assert found[0]["score"] > found[1]["score"]


async def test_plain_dictionaries_do_as_well_and_a_filter_narrows() -> None:
    search = server()
    await search.write("functions", [{"text": "sort numbers", "metadata": {"kind": "a"}}, {"text": "sort words"}])
    found = await search.search("functions", "sort", filter={"kind": "a"})
    assert [hit["text"] for hit in found] == ["sort numbers"]


async def test_many_queries_are_answered_in_their_order() -> None:
    search = server()
    await search.write("functions", DOCUMENTS)
    found = await search.search_many("functions", ["read file lines", "add list numbers"], 1)
    assert [[hit["id"] for hit in hits] for hits in found] == [["read"], ["sum"]]


async def test_writing_again_replaces_and_deleting_removes() -> None:
    search = server()
    await search.write("functions", DOCUMENTS)
    await search.write("functions", [Document("sort", "something else entirely")])
    await search.delete("functions", ["sum"])
    assert (await search.describe("functions"))["documents"] == 2
    assert (await search.search("functions", "something else entirely", 1))[0]["id"] == "sort"


async def test_collections_are_described_listed_and_dropped() -> None:
    search = server()
    await search.write("functions", DOCUMENTS)
    facts = await search.describe("functions")
    assert (facts["name"], facts["documents"], facts["dimensions"]) == ("functions", 3, 64)
    assert facts["model"] == "hashing"
    assert await search.describe() == {"collections": ["functions"]}
    await search.drop("functions")
    assert await search.list() == []


async def test_an_unknown_collection_is_404_with_the_known_ones() -> None:
    search = server()
    await search.write("functions", DOCUMENTS)
    with pytest.raises(RequestError, match="'function'") as caught:
        await search.search("function", "sort")
    assert caught.value.status == 404
    assert "functions" in (caught.value.hint or "")


async def test_another_model_may_neither_write_nor_search() -> None:
    store = MemoryVectors()
    await server(store).write("functions", DOCUMENTS)
    other = server(store, HashEmbedder(name="other"))
    for call in (other.write("functions", DOCUMENTS), other.search("functions", "sort")):
        with pytest.raises(RequestError, match=r"cannot be compared") as caught:
            await call
        assert (caught.value.status, caught.value.code) == (409, "fingerprint_mismatch")
    assert store.count("functions") == 3


class GoneEmbedder(HashEmbedder):
    """Is not there."""

    async def info(self) -> EmbedderInfo:
        raise CapacityError("gone")


async def test_a_collection_is_of_the_embedder_that_made_it_and_a_new_one_of_the_first() -> None:
    store, first, other = MemoryVectors(), HashEmbedder(max_tokens=16), HashEmbedder(name="other", dimension=32)
    await server(store, other).write("theirs", DOCUMENTS)
    both = SearchServer(SearchConfig(), [first, other], store)
    await both.write("ours", DOCUMENTS)
    await both.write("theirs", [Document("more", "open a window")])
    assert [(await both.describe(name))["model"] for name in ("ours", "theirs")] == ["hashing", "other"]
    for name in ("ours", "theirs"):
        assert (await both.search(name, "sort numbers", 1))[0]["id"] == "sort"
    assert (await both.search("theirs", "window", 1))[0]["id"] == "more"

    third = SearchServer(SearchConfig(), [HashEmbedder(name="a"), HashEmbedder(name="b")], store)
    with pytest.raises(RequestError) as caught:
        await third.search("ours", "sort")
    assert caught.value.code == "fingerprint_mismatch"
    silent = SearchServer(SearchConfig(), [HashEmbedder(name="a"), GoneEmbedder()], store)
    with pytest.raises(CapacityError, match="gone"):
        await silent.write("ours", DOCUMENTS)


@dataclass
class Redeployed:
    """A handle: what is behind it changes."""

    now: HashEmbedder

    async def embed(self, texts: Inputs, **options: Any) -> Embedded:
        return await self.now.embed(texts, **options)

    async def info(self) -> EmbedderInfo:
        return await self.now.info()

    async def describe(self) -> dict[str, Any]:
        return await self.now.describe()


async def test_an_embedder_that_serves_another_model_by_now_is_noticed() -> None:
    first, other = Redeployed(HashEmbedder()), Redeployed(HashEmbedder(name="other"))
    both = SearchServer(SearchConfig(), [first, other], MemoryVectors())
    await both.write("ours", DOCUMENTS)
    await both.search("ours", "sort")
    first.now = HashEmbedder(name="new")
    for _ in range(2):
        with pytest.raises(RequestError) as caught:
            await both.search("ours", "sort")
        assert caught.value.code == "fingerprint_mismatch"
    other.now = HashEmbedder()
    assert (await both.search("ours", "sort numbers", 1))[0]["id"] == "sort"


async def test_a_prompt_for_queries_finds_what_was_written_without_one() -> None:
    store = MemoryVectors()
    await server(store).write("functions", DOCUMENTS)
    asking = server(store, HashEmbedder(max_tokens=16, prompts=Prompts(query="sort ")))
    assert (await asking.search("functions", "a list of", 1))[0]["id"] == "sort"
    answering = server(store, HashEmbedder(max_tokens=16, prompts=Prompts(document="sort ")))
    with pytest.raises(RequestError) as caught:
        await answering.search("functions", "a list of")
    assert caught.value.code == "fingerprint_mismatch"


async def test_a_long_document_is_refused_by_name_unless_the_recipe_lets_it_be_cut() -> None:
    long = Document("long", "word " * 17)
    store = MemoryVectors()
    with pytest.raises(RequestError, match="17 tokens") as caught:
        await server(store).write("functions", [DOCUMENTS[0], long])
    assert (caught.value.param, caught.value.code) == ("documents[1].text", "context_length_exceeded")
    assert "long_documents" in (caught.value.hint or "")
    assert store.list() == []
    cutting = server(store, long_documents="truncate")
    assert await cutting.write("functions", [long]) == 1
    assert (await cutting.search("functions", "word", 1))[0]["text"] == long.text
    with pytest.raises(RequestError):
        await cutting.write("functions", [long], truncate=False)


async def test_a_query_that_is_too_long_is_refused() -> None:
    search = server(long_documents="truncate")
    await search.write("functions", DOCUMENTS)
    with pytest.raises(RequestError, match="reads at most 16") as caught:
        await search.search("functions", "word " * 17)
    assert caught.value.status == 400


async def test_more_documents_than_allowed_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 2"):
        await server(max_documents_per_request=2).write("functions", DOCUMENTS)


class FullEmbedder(HashEmbedder):
    """Answers who it is, and has no room."""

    async def embed(self, texts: Inputs, **_: Any) -> Embedded:  # type: ignore[override]
        raise CapacityError("full", retry_after_s=3)


async def test_a_full_embedder_is_said_to_be_full_and_nothing_is_made() -> None:
    store = MemoryVectors()
    with pytest.raises(CapacityError) as caught:
        await server(store, FullEmbedder()).write("functions", DOCUMENTS)
    assert caught.value.retry_after_s == 3
    assert store.list() == []
