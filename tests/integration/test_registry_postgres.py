"""The registry and MLflow on a real PostgreSQL: a server that crashes, a network that loses answers, a partition."""

import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.registry.actor import Registry, open_mlflow
from actors.registry.facts import DataFact, RunEnded, RunFact
from actors.registry.ledger import Ledger
from actors.registry.reader import read_state
from actors.registry.store import SqlEventStore
from cluster import environment
from cluster.errors import DependencyError, StateError
from cluster.storage import Home
from cluster.tracking import MlflowTracker, prepare_tracking, shown_uri
from tests.postgres import PASSWORD, Postgres, Proxy

pytestmark = pytest.mark.integration


@pytest.fixture
def database(postgres: Postgres) -> str:
    """The name of a fresh database."""
    return postgres.create_database()


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[Proxy]:
    between = Proxy(postgres.port)
    yield between
    between.close()


def data(number: int) -> DataFact:
    return DataFact(id=f"errors@{number}", name="errors", digest="d", stage="examples")


def test_a_restart_of_the_server_between_two_commits_is_not_noticed(postgres: Postgres, database: str) -> None:
    ledger = Ledger(SqlEventStore(postgres.uri(database)))
    ledger.commit(data(1), by="ada")
    postgres.restart()
    ledger.commit(data(2), by="ada")
    assert Ledger(SqlEventStore(postgres.uri(database))).state == ledger.state
    assert ledger.state.seq == 2


def test_a_commit_whose_answer_was_lost_is_found_in_the_log(postgres: Postgres, database: str, proxy: Proxy) -> None:
    ledger = Ledger(SqlEventStore(postgres.uri(database, port=proxy.port)))
    ledger.commit(data(1), by="ada")
    happened = proxy.lose_next_commit_answer()
    with pytest.raises(DependencyError) as caught:
        ledger.commit(data(2), by="ada")
    assert happened()
    assert caught.value.retryable
    # Nobody was told, so nobody sees it yet; but it stands, and the same command is not carried out twice.
    assert ledger.state.seq == 1
    assert ledger.commit(data(2), by="ada") == data(2)
    ledger.commit(data(3), by="ada")
    assert [event.fact for event in SqlEventStore(postgres.uri(database)).read()] == [data(1), data(2), data(3)]


def test_a_writer_that_is_cut_off_in_the_middle_does_not_hold_up_the_next_one(
    postgres: Postgres, database: str, proxy: Proxy
) -> None:
    """The old one holds the writer's lock when the network goes; the server lets go of it, and fences it."""
    uri = postgres.uri(database, port=proxy.port)
    old = SqlEventStore(f"{uri}?options=-c%20idle_in_transaction_session_timeout%3D1500&tcp_user_timeout=1500")
    old.append([data(1)], after=0, at=datetime.now(UTC), by="old")
    proxy.freeze_before_next_commit()
    with ThreadPoolExecutor(1) as pool:
        cut_off = pool.submit(old.append, [data(2)], after=1, at=datetime.now(UTC), by="old")
        assert proxy.frozen.wait(5)
        started = time.monotonic()
        new = SqlEventStore(postgres.uri(database))
        assert time.monotonic() - started < 5
        new.append([data(3)], after=1, at=datetime.now(UTC), by="new")
        proxy.heal()
        with pytest.raises(DependencyError):
            cut_off.result(timeout=30)
    with pytest.raises(StateError, match="taken over"):
        old.append([data(2)], after=2, at=datetime.now(UTC), by="old")
    assert [event.by for event in new.read()] == ["old", "new"]


def test_nothing_acknowledged_is_lost_when_the_server_dies_under_load(postgres: Postgres, database: str) -> None:
    uri = postgres.uri(database)
    ledger = Ledger(SqlEventStore(uri))
    acknowledged: list[DataFact] = []
    failures: list[DependencyError] = []
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            while not ended.is_set():
                try:
                    ledger.commit(data(number), by="ada")
                    acknowledged.append(data(number))
                    break
                except DependencyError as error:
                    failures.append(error)
                    time.sleep(0.02)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3):
            before, seen = len(failures), len(acknowledged)
            _until(lambda seen=seen: len(acknowledged) > seen + 5)
            postgres.crash()
            _until(lambda before=before: len(failures) > before)
            postgres.start()
    finally:
        ended.set()
        writer.join(timeout=30)
    assert all(error.retryable and error.hint for error in failures)
    assert not any(PASSWORD in f"{error} {error.hint}" for error in failures)
    kept = [event.fact for event in SqlEventStore(uri).read()]
    # At most the last one, which may have been under way, stands there without having been acknowledged.
    assert kept[: len(acknowledged)] == acknowledged
    assert len(kept) - len(acknowledged) <= 1


@pytest.fixture
async def registry(
    postgres: Postgres, database: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Registry]:
    """Log and MLflow in one database, side by side."""
    caplog.set_level(logging.DEBUG)
    home, tracking = Home(tmp_path / "home"), postgres.uri(database)
    registry = Registry(
        home,
        postgres.uri(database),
        open_tracker=lambda: open_mlflow(home, tracking),
        find_dead=lambda _: {},
    )
    yield registry
    registry.close()
    assert PASSWORD not in caplog.text


async def test_the_whole_registry_stands_on_postgresql_and_its_status_shows_no_password(
    registry: Registry, postgres: Postgres, database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MlflowTracker(prepare_tracking(Home(tmp_path / "home"), postgres.uri(database)))
    run = tracker.begin_run("r", experiment="triage", params={}, tags={})
    await registry.begin_run(RunFact(id="r", name="triage", base="b", base_digest="d", tracking_run=run), "ada")
    postgres.restart()
    await registry.end_run(RunEnded(run_id="r", status="completed"), "ada")
    status = await registry.status()
    assert status.database.startswith("postgresql+psycopg://")
    assert ":***@" in status.database
    assert status.database.endswith(f"/{database}")
    assert await registry.wait_mirrored(60)
    assert tracker.run(run).status == "completed"

    monkeypatch.setenv(environment.DATABASE_URI, postgres.uri(database))
    assert read_state(Home(tmp_path / "home")).ended.keys() == {"r"}
    monkeypatch.setenv(environment.DATABASE_URI, postgres.uri(postgres.create_database()))
    assert read_state(Home(tmp_path / "home")).seq == 0


def test_mlflow_is_created_once_in_postgresql_however_many_meet_there(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow  # noqa: F401 (threads that import it at once find it half done)

    caplog.set_level(logging.DEBUG)
    home = Home(tmp_path / "home")
    monkeypatch.setenv(environment.TRACKING_URI, postgres.uri(postgres.create_database()))
    with ThreadPoolExecutor(3) as pool:
        (uri,) = set(pool.map(lambda _: prepare_tracking(home), range(3)))
    assert sum("created MLflow's tables" in record.message for record in caplog.records) == 1
    started = time.monotonic()
    assert prepare_tracking(home) == uri
    assert time.monotonic() - started < 1

    tracker = MlflowTracker(uri)
    run = tracker.begin_run("r", experiment="triage", params={"lr": "1"}, tags={})
    tracker.log_metrics(run, {"loss": 1.5}, step=1)
    postgres.restart()
    assert tracker.history(run, "loss") == [(1, 1.5)]
    assert list(home.root.glob("*.db")) == []
    with pytest.raises(DependencyError) as caught:
        tracker.run("nothing")
    assert PASSWORD not in f"{caplog.text} {caught.value} {shown_uri(uri)}"

    postgres.crash()
    try:
        with pytest.raises(DependencyError) as caught:
            tracker.run(run)
    finally:
        postgres.start()
    assert caught.value.retryable
    assert PASSWORD not in str(caught.value)


def _until(true: object, within_s: float = 20) -> None:
    assert callable(true)
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
