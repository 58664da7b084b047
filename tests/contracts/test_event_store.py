"""What every log of the registry must do: the one in memory and the one in SQL."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from actors.registry.state import CheckpointFact, DataFact, Fact
from actors.registry.store import EventStore, Log, MemoryEventStore, SqlEventStore
from cluster.database import sqlite_uri
from cluster.errors import DependencyError, StateError

NOW = datetime(2026, 1, 1, 12, 30, 15, 123456, tzinfo=UTC)
Open = Callable[[], EventStore]


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """Opens the same log again and again, as several processes would."""
    log = Log()
    uri = sqlite_uri(tmp_path / "registry.db")
    return (lambda: MemoryEventStore(log)) if request.param == "memory" else (lambda: SqlEventStore(uri))


def data(number: int) -> Fact:
    return DataFact(id=f"errors@{number}", name="errors", digest="d", stage="examples")


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


def test_reading_starts_behind_a_number_and_stops_at_a_limit(open_store: Open) -> None:
    store = open_store()
    store.append([data(n) for n in range(1, 6)], after=0, at=NOW, by="ada")
    assert [event.seq for event in store.read(after=2)] == [3, 4, 5]
    assert [event.seq for event in store.read(after=1, limit=2)] == [2, 3]
    assert store.read(after=5) == []


def test_an_append_that_does_not_continue_the_log_adds_nothing(open_store: Open) -> None:
    store = open_store()
    store.append([data(1), data(2)], after=0, at=NOW, by="ada")
    with pytest.raises(DependencyError):
        store.append([data(3), data(4)], after=1, at=NOW, by="ada")
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
