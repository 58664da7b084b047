"""The contract of `VectorStore`: the same tests on the fake in memory and on a real Milvus Lite server."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cluster.errors import RequestError
from cluster.vectors import (
    CollectionSpec,
    Fingerprint,
    MemoryVectors,
    MilvusLiteServer,
    MilvusVectors,
    Record,
    VectorStore,
)

MODEL = Fingerprint(model="tiny", digest="a" * 64, dimension=3, normalized=True)
OTHER_MODEL = Fingerprint(model="tiny", digest="b" * 64, dimension=3, normalized=True)
SPEC = CollectionSpec("python-functions_v1.2", MODEL)


@pytest.fixture(scope="module")
def lite_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("vectors")
    server = MilvusLiteServer(str(folder / "data"), str(folder / "lite.log"))
    yield server.uri()
    server.stop()


@pytest.fixture(params=["memory", pytest.param("milvus", marks=pytest.mark.integration)])
def store(request: pytest.FixtureRequest) -> Iterator[VectorStore]:
    if request.param == "memory":
        yield MemoryVectors()
        return
    milvus = MilvusVectors(request.getfixturevalue("lite_uri"))
    yield milvus
    for name in milvus.list():
        milvus.drop(name)
    milvus.close()


def record(id: str, vector: list[float], text: str = "", **metadata: Any) -> Record:
    return Record(id, np.array(vector, dtype=np.float32), text, metadata)


def ask(*vectors: list[float]) -> np.ndarray:
    return np.array(vectors, dtype=np.float32)


ROWS = [
    record("east", [1, 0, 0], "one", package="numpy", line=1, public=True),
    record("north", [0, 1, 0], "two", package="torch", line=2, public=False),
    record("north-east", [1, 1, 0], "three", package="numpy", line=2, public=True),
]


def test_what_was_written_is_found_best_first_with_its_text_and_metadata(store: VectorStore) -> None:
    store.create(SPEC)
    assert store.upsert(SPEC.name, ROWS) == 3
    (found,) = store.search(SPEC.name, ask([1, 0.1, 0]), k=2)
    assert [match.id for match in found] == ["east", "north-east"]
    assert found[0].text == "one"
    assert found[0].metadata == {"package": "numpy", "line": 1, "public": True}
    assert found[0].score == pytest.approx(1 / np.sqrt(1.01), abs=1e-5)
    assert found[1].score == pytest.approx(1.1 / np.sqrt(2 * 1.01), abs=1e-5)


def test_queries_are_answered_each_in_its_place(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    found = store.search(SPEC.name, ask([0, 1, 0], [1, 0, 0]), k=1)
    assert [[match.id for match in matches] for matches in found] == [["north"], ["east"]]


def test_an_empty_collection_answers_with_nothing(store: VectorStore) -> None:
    store.create(SPEC)
    assert store.count(SPEC.name) == 0
    assert store.search(SPEC.name, ask([1, 0, 0], [0, 1, 0]), k=5) == [[], []]


def test_a_row_of_the_same_id_is_replaced(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    store.upsert(SPEC.name, [record("east", [0, 0, 1], "moved")])
    assert store.count(SPEC.name) == 3
    (found,) = store.search(SPEC.name, ask([0, 0, 1]), k=1)
    assert (found[0].id, found[0].text, found[0].metadata) == ("east", "moved", {})


def test_of_an_id_given_twice_in_one_write_the_last_row_stays(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, [record("a", [1, 0, 0], "old"), record("a", [0, 1, 0], "new")])
    assert store.count(SPEC.name) == 1
    (found,) = store.search(SPEC.name, ask([0, 1, 0]), k=2)
    assert [match.text for match in found] == ["new"]


def test_deleted_rows_are_gone_and_missing_ids_do_not_matter(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    store.delete(SPEC.name, ["east", "nowhere"])
    store.delete(SPEC.name, [])
    assert store.count(SPEC.name) == 2
    (found,) = store.search(SPEC.name, ask([1, 0, 0]), k=3)
    assert {match.id for match in found} == {"north", "north-east"}


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"package": "numpy"}, {"east", "north-east"}),
        ({"line": 2}, {"north", "north-east"}),
        ({"public": True}, {"east", "north-east"}),
        ({"package": "numpy", "line": 2}, {"north-east"}),
        ({"package": "absent"}, set()),
        ({"no_such_key": "numpy"}, set()),
        ({"line": "2"}, set()),
        ({"package": 'numpy" or id != "'}, set()),
    ],
)
def test_a_filter_keeps_the_rows_whose_metadata_are_equal(
    store: VectorStore, where: dict[str, Any], expected: set[str]
) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    (found,) = store.search(SPEC.name, ask([1, 1, 1]), k=10, where=where)
    assert {match.id for match in found} == expected


def test_awkward_text_survives(store: VectorStore) -> None:
    store.create(SPEC)
    awkward = 'quote " backslash \\ newline \n tab \t snowman ☃ emoji 🦜 nul \x00 {json: "x"}'
    metadata = {"said": awkward, "deep": {"a": [1, None]}}
    row = Record(awkward[:60], np.array([1, 0, 0], dtype=np.float32), awkward, metadata)
    store.upsert(SPEC.name, [row, ROWS[1]])
    (found,) = store.search(SPEC.name, ask([1, 0, 0]), k=1)
    assert (found[0].id, found[0].text, found[0].metadata) == (row.id, awkward, metadata)
    for said, expected in ((awkward, [row.id]), (awkward[:-1], [])):
        (found,) = store.search(SPEC.name, ask([1, 0, 0]), k=5, where={"said": said})
        assert [match.id for match in found] == expected
    store.delete(SPEC.name, [row.id])
    assert store.count(SPEC.name) == 1


def test_creating_again_keeps_the_rows(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    store.create(SPEC)
    assert store.count(SPEC.name) == 3
    assert store.describe(SPEC.name) == SPEC


def test_another_model_is_refused_and_told_what_to_do(store: VectorStore) -> None:
    store.create(SPEC)
    with pytest.raises(RequestError, match=r"tiny .*cannot be compared") as caught:
        store.create(CollectionSpec(SPEC.name, OTHER_MODEL))
    assert (caught.value.status, caught.value.code) == (409, "fingerprint_mismatch")
    assert caught.value.hint
    assert store.describe(SPEC.name) == SPEC


def test_collections_are_listed_described_and_dropped(store: VectorStore) -> None:
    names = ["b.dot", "a_under-dash", "plain"]
    for name in names:
        store.create(CollectionSpec(name, MODEL))
    assert store.list() == sorted(names)
    assert store.describe("b.dot").name == "b.dot"
    store.drop("b.dot")
    store.drop("b.dot")
    assert store.list() == ["a_under-dash", "plain"]


def test_a_dropped_collection_may_come_back_with_another_model(store: VectorStore) -> None:
    store.create(SPEC)
    store.upsert(SPEC.name, ROWS)
    store.drop(SPEC.name)
    wider = CollectionSpec(SPEC.name, Fingerprint("wide", "c" * 64, 4, normalized=False))
    store.create(wider)
    assert store.describe(SPEC.name) == wider
    assert store.count(SPEC.name) == 0
    store.upsert(SPEC.name, [record("a", [1, 0, 0, 0])])
    assert store.count(SPEC.name) == 1


def test_an_unknown_collection_is_404_and_names_the_known_ones(store: VectorStore) -> None:
    store.create(SPEC)
    for call in (
        lambda: store.describe("nope"),
        lambda: store.count("nope"),
        lambda: store.delete("nope", ["a"]),
        lambda: store.upsert("nope", ROWS),
        lambda: store.search("nope", ask([1, 0, 0]), k=1),
    ):
        with pytest.raises(RequestError, match="'nope'") as caught:
            call()
        assert (caught.value.status, caught.value.code) == (404, "collection_not_found")
        assert SPEC.name in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (record("a", [1, 0]), r"documents\[1\].vector has the shape \[1, 2\]"),
        (record("a", [1, 0, float("nan")]), r"documents\[1\].vector holds values that are not finite"),
        (record("", [1, 0, 0]), r"documents\[1\].id has 0 bytes"),
        (record("a", [1, 0, 0], "☃" * 22_000), r"documents\[1\].text has 66000 bytes"),
        (record("a", [1, 0, 0], "half \ud800"), r"documents\[1\].text is not valid Unicode"),
        (record("a", [1, 0, 0], when=object()), r"documents\[1\].metadata is not a JSON object"),
        (record("a", [1, 0, 0], much="x" * 70_000), r"documents\[1\].metadata has 70012 bytes"),
    ],
)
def test_a_row_that_cannot_be_stored_is_named_and_nothing_is_written(
    store: VectorStore, row: Record, message: str
) -> None:
    store.create(SPEC)
    with pytest.raises(RequestError, match=message) as caught:
        store.upsert(SPEC.name, [ROWS[0], row])
    assert caught.value.status == 400
    assert store.count(SPEC.name) == 0


@pytest.mark.parametrize(
    ("queries", "k", "where"),
    [
        (ask([1, 0]), 1, None),
        (ask([1, 0, 0]), 0, None),
        (ask([1, 0, 0]), 1001, None),
        (ask([1, 0, 0]), 1, {"bad key": 1}),
        (ask([1, 0, 0]), 1, {"key": [1]}),
        (ask([1, 0, 0]), 1, {"key": float("inf")}),
    ],
)
def test_a_search_that_cannot_be_asked_is_400(
    store: VectorStore, queries: np.ndarray, k: int, where: dict[str, Any] | None
) -> None:
    store.create(SPEC)
    with pytest.raises(RequestError) as caught:
        store.search(SPEC.name, queries, k, where=where)
    assert caught.value.status == 400


def test_writers_at_once_lose_nothing(store: VectorStore) -> None:
    store.create(SPEC)
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(8, 50, 3)).astype(np.float32)
    failures: list[Exception] = []

    def write(writer: int) -> None:
        try:
            for start in range(0, 50, 10):
                rows = [
                    Record(f"{writer}-{i}", vectors[writer, i], f"text {writer} {i}") for i in range(start, start + 10)
                ]
                store.upsert(SPEC.name, rows)
                (found,) = store.search(SPEC.name, vectors[writer, start : start + 1], k=1)
                assert found[0].score == pytest.approx(1, abs=1e-4)
        except Exception as failure:  # noqa: BLE001 - shown by the assertion below, whatever it is
            failures.append(failure)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert store.count(SPEC.name) == 400


def test_creators_at_once_make_one_collection(store: VectorStore) -> None:
    failures: list[Exception] = []

    def create() -> None:
        try:
            store.create(SPEC)
        except Exception as failure:  # noqa: BLE001 - shown by the assertion below, whatever it is
            failures.append(failure)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    store.upsert(SPEC.name, ROWS)
    assert store.count(SPEC.name) == 3


def test_first_writers_at_once_all_succeed(store: VectorStore) -> None:
    """Each makes the collection if it is not there, then writes: what the first requests of a client pool do."""
    faults: list[Exception] = []

    def write(collection: str, writer: int, start: threading.Barrier) -> None:
        start.wait()
        try:
            store.create(CollectionSpec(collection, MODEL))
            store.upsert(collection, [record(f"{writer}", [1, float(writer), 0])])
        except Exception as error:  # noqa: BLE001 - shown by the assertion below, whatever it is
            faults.append(error)

    for attempt in range(12):
        start = threading.Barrier(4)
        threads = [threading.Thread(target=write, args=(f"fresh-{attempt}", writer, start)) for writer in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert faults == []
        assert store.count(f"fresh-{attempt}") == 4


@pytest.mark.integration
def test_many_rows_go_in_batches_below_the_message_limit(lite_uri: str) -> None:
    store = MilvusVectors(lite_uri, max_batch_bytes=1 << 16)
    store.create(SPEC)
    rows = [record(str(i), [1, i, 0], "x" * 20_000) for i in range(40)]
    assert store.upsert(SPEC.name, rows) == 40
    assert store.count(SPEC.name) == 40
    store.drop(SPEC.name)
    store.close()


@pytest.mark.integration
def test_two_clients_see_each_others_writes(lite_uri: str) -> None:
    first, second = MilvusVectors(lite_uri), MilvusVectors(lite_uri)
    first.create(SPEC)
    second.create(SPEC)
    first.upsert(SPEC.name, ROWS)
    assert second.count(SPEC.name) == 3
    second.delete(SPEC.name, ["east"])
    assert first.count(SPEC.name) == 2
    first.drop(SPEC.name)
    first.close()
    second.close()
