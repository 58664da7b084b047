"""What every log of the registry must do: the one in memory, in SQLite, and in a real PostgreSQL."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from threading import Barrier

import pytest

from actors.registry.facts import CheckpointFact, DataFact, Fact
from actors.registry.store import EventStore, Log, MemoryEventStore, SqlEventStore, read_log
from cluster.database import sqlite_uri
from cluster.errors import DependencyError, StateError
from tests.postgres import Postgres

NOW = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
Open = Callable[[], EventStore]


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that nobody has opened yet."""
    if request.param == "sqlite":
        return sqlite_uri(tmp_path / "registry.db")
    server: Postgres = request.getfixturevalue("postgres")
    return server.uri(server.create_database())


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same log again and again, as several processes would."""
    if request.param == "memory":
        return partial(MemoryEventStore, Log())
    if request.param == "sqlite":
        return partial(SqlEventStore, sqlite_uri(tmp_path / "registry.db"))
    server: Postgres = request.getfixturevalue("postgres")
    return partial(SqlEventStore, server.uri(server.create_database()))


def data(number: int, name: str = "errors") -> Fact:
    return DataFact(id=f"{name}@{number}", name=name, digest="d", stage="examples")


def test_events_come_back_whole_and_in_order_also_for_the_next_process(open_store: Open) -> None:
    store = open_store()
    nan = CheckpointFact(id="r/step-1", run_id="r", step=1, path=Path("/x"), metrics={"loss": float("nan")})
    written = [
        *store.append([data(1), data(2)], after=0, at=NOW, by="ada"),
        *store.append([nan], after=2, at=NOW.astimezone(timezone(timedelta(hours=5))), by="bob"),
    ]
    assert [event.seq for event in written] == [1, 2, 3]
    store.close()
    read = open_store().read()
    assert [(e.seq, e.at, e.by, e.fact.event) for e in read] == [
        (1, NOW, "ada", "data"),
        (2, NOW, "ada", "data"),
        (3, NOW, "bob", "checkpoint"),
    ]
    assert [e.fact.model_dump_json() for e in read] == [e.fact.model_dump_json() for e in written]


def test_a_body_of_a_megabyte_in_any_script_comes_back_as_it_was(open_store: Open) -> None:
    store = open_store()
    text = "naïve Σ 日本語 🦩 \"'\\ \n\t\u2028%s :x " * 30_000
    assert len(text.encode()) > 1 << 20
    store.append([data(1, text)], after=0, at=NOW, by="Åsa 'x' \U0001f9a9")
    (event,) = open_store().read()
    assert (event.fact, event.by) == (data(1, text), "Åsa 'x' \U0001f9a9")


def test_reading_starts_behind_a_number_and_stops_at_a_limit(open_store: Open) -> None:
    store = open_store()
    store.append([data(n) for n in range(1, 6)], after=0, at=NOW, by="ada")
    assert [event.seq for event in store.read(after=2)] == [3, 4, 5]
    assert [event.seq for event in store.read(after=1, limit=2)] == [2, 3]
    assert store.read(after=5) == []


@pytest.mark.parametrize("after", [0, 1, 3])
def test_an_append_that_does_not_continue_the_log_adds_nothing(open_store: Open, after: int) -> None:
    store = open_store()
    store.append([data(1), data(2)], after=0, at=NOW, by="ada")
    with pytest.raises(DependencyError, match="ends at event 2") as caught:
        store.append([data(3), data(4)], after=after, at=NOW, by="ada")
    assert caught.value.retryable
    assert [event.seq for event in store.read()] == [1, 2]


def test_an_older_writer_can_add_nothing_once_a_newer_one_has_opened_the_log(open_store: Open) -> None:
    old = open_store()
    old.append([data(1)], after=0, at=NOW, by="old")
    new = open_store()
    assert new.epoch > old.epoch
    with pytest.raises(StateError, match="taken over"):
        old.append([data(2)], after=1, at=NOW, by="old")
    with pytest.raises(StateError, match="taken over"):
        old.advance("mirror", 1)
    new.append([data(2)], after=1, at=NOW, by="new")
    assert [event.by for event in old.read()] == ["old", "new"]


def test_positions_are_kept_for_each_consumer(open_store: Open) -> None:
    store = open_store()
    assert store.position("mirror") == 0
    store.advance("mirror", 3)
    store.advance("mirror", 5)
    store.advance("other", 1)
    store.close()
    again = open_store()
    assert (again.position("mirror"), again.position("other"), again.position("new")) == (5, 1, 0)


def test_appends_that_meet_are_whole_or_refused(uri: str) -> None:
    """Threads that do not know of each other write behind the same event, again and again."""
    store = SqlEventStore(uri)
    together = Barrier(4)
    refusals: list[str] = []

    def write(thread: int) -> int:
        kept = 0
        together.wait()
        for number in range(8):
            after = len(store.read())
            try:
                store.append([data(number, f"t{thread}"), data(-number, f"t{thread}")], after=after, at=NOW, by="x")
                kept += 1
            except DependencyError as error:
                refusals.append(error.message)
        return kept

    with ThreadPoolExecutor(4) as pool:
        kept = sum(pool.map(write, range(4)))
    assert all("ends at event" in refusal for refusal in refusals), refusals
    events = store.read()
    assert [event.seq for event in events] == list(range(1, 2 * kept + 1))
    pairs = zip(events[::2], events[1::2], strict=True)
    assert all(first.fact.name == second.fact.name for first, second in pairs)


def _take(uri: str) -> int:
    return SqlEventStore(uri).epoch


def test_writers_that_open_a_fresh_log_at_once_get_an_epoch_each(uri: str) -> None:
    together = Barrier(6)

    def open_() -> int:
        together.wait()
        return _take(uri)

    with ThreadPoolExecutor(6) as pool:
        epochs = list(pool.map(lambda _: open_(), range(6)))
    assert sorted(epochs) == [1, 2, 3, 4, 5, 6]


@pytest.mark.integration
def test_only_the_last_of_the_writers_that_opened_it_may_write(uri: str) -> None:
    first = SqlEventStore(uri)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert sorted(pool.map(_take, [uri] * 2)) == [2, 3]
    with pytest.raises(StateError, match="taken over"):
        first.append([data(1)], after=0, at=NOW, by="first")
    last = SqlEventStore(uri)
    last.append([data(1)], after=0, at=NOW, by="last")
    assert [event.by for event in first.read()] == ["last"]


def test_who_only_looks_fences_nobody_and_creates_nothing(uri: str, tmp_path: Path) -> None:
    assert read_log(uri) == []
    assert not list(tmp_path.iterdir())
    store = SqlEventStore(uri)
    written: Sequence[object] = store.append([data(1)], after=0, at=NOW, by="ada")
    assert read_log(uri) == list(written)
    store.append([data(2)], after=1, at=NOW, by="ada")
