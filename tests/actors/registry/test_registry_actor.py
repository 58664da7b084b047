"""The actor's class without Ray: long polls, concurrency, and a log that fails at the worst moment."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import datetime
from pathlib import Path

import pytest

from actors.registry.actor import Registry
from actors.registry.state import AliasMove, DataFact, Event, Fact, Promote, VersionFact
from actors.registry.store import Log, MemoryEventStore
from cluster.errors import ConfigError, DependencyError, RequestError
from cluster.storage import Home
from cluster.tracking import MemoryTracker

DATABASE = "sqlite:///nothing.db"


def fact(source: Path) -> VersionFact:
    return VersionFact(name="triage", kind="adapter", source_path=source, base="smol")


def promote(version: int, command: str) -> Promote:
    return Promote("triage", "champion", version, "ada", "why", command)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
async def registry(tmp_path: Path, log: Log) -> AsyncIterator[Registry]:
    registry = Registry(
        Home(tmp_path / "home"),
        DATABASE,
        open_store=lambda _: MemoryEventStore(log),
        open_tracker=MemoryTracker,
        find_dead=lambda _: {},
    )
    yield registry
    registry.close()


async def test_who_waits_is_woken_by_a_move_and_not_by_facts_of_training(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    start = await registry.snapshot()
    waiting = [asyncio.create_task(registry.wait_snapshot(start.number, 10)) for _ in range(50)]
    await asyncio.sleep(0.02)
    await registry.data(DataFact(id="errors@1", name="errors", digest="d", stage="examples"), "ada")
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting)
    version = await registry.register(fact(make_adapter()), "ada")
    seen = await asyncio.gather(*waiting)
    assert {tuple(snapshot.versions) for snapshot in seen} == {(version.id,)}

    asked_at = time.monotonic()
    same = await registry.wait_snapshot(seen[0].number, 0.2)
    assert same == seen[0]
    assert time.monotonic() - asked_at >= 0.2


async def test_a_poll_with_an_old_number_is_answered_at_once(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    await registry.register(fact(make_adapter()), "ada")
    async with asyncio.timeout(1):
        assert (await registry.wait_snapshot(0, 60)).number == 1
        # A number of another database, greater than ours, is as old.
        assert (await registry.wait_snapshot(99, 60)).number == 1


async def test_the_same_content_registered_twenty_times_at_once_is_one_version(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    sources = [make_adapter(f"a{number}") for number in range(20)]
    versions = await asyncio.gather(*(registry.register(fact(source), "ada") for source in sources))
    assert {version.id for version in versions} == {"triage/1"}
    assert len(list((await registry.home()).versions.joinpath("triage").iterdir())) == 1


async def test_nothing_is_copied_for_a_registration_that_cannot_be(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    wrong = fact(make_adapter()).model_copy(update={"run_id": "unheard-of"})
    with pytest.raises(RequestError, match="unheard-of"):
        await registry.register(wrong, "ada")
    assert not (await registry.home()).versions.exists()
    with pytest.raises(ConfigError, match="no folder"):
        await registry.register(fact(Path("/nowhere")), "ada")
    assert (await registry.status()).events == 0


async def test_a_caller_that_gives_up_leaves_the_registry_whole(
    registry: Registry, log: Log, make_adapter: Callable[..., Path]
) -> None:
    await registry.register(fact(make_adapter()), "ada")
    task = asyncio.create_task(registry.promote(promote(1, "a")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await registry.promote(promote(1, "a"))
    assert [event.seq for event in log.events] == [1, 2]


class Flaky(MemoryEventStore):
    """Keeps the events and then reports that it failed, as a connection that breaks during a commit does."""

    broken = False

    def append(self, facts: Sequence[Fact], *, after: int, at: datetime, by: str) -> tuple[Event, ...]:
        events = super().append(facts, after=after, at=at, by=by)
        if self.broken:
            raise DependencyError("the connection broke")
        return events


async def test_a_commit_of_unknown_outcome_is_read_back_before_the_next(
    tmp_path: Path, make_adapter: Callable[..., Path]
) -> None:
    store = Flaky()
    registry = Registry(Home(tmp_path), DATABASE, open_store=lambda _: store, find_dead=lambda _: {})
    await registry.register(fact(make_adapter()), "ada")
    store.broken = True
    with pytest.raises(DependencyError, match="broke"):
        await registry.promote(promote(1, "a"))
    store.broken = False
    move = await registry.promote(promote(1, "a"))
    assert isinstance(move, AliasMove)
    assert move.id == "triage@champion#1"
    assert (await registry.status()).events == 2
    assert (await registry.snapshot()).aliases == {"triage@champion": 1}
    registry.close()


async def test_the_status_names_no_password(tmp_path: Path) -> None:
    registry = Registry(
        Home(tmp_path),
        "postgresql+psycopg://ada:secret@db/flywheel",
        open_store=lambda _: MemoryEventStore(),
        find_dead=lambda _: {},
    )
    status = await registry.status()
    assert "secret" not in status.model_dump_json()
    assert "db/flywheel" in status.database
    registry.close()


async def test_mlflow_shows_what_was_acknowledged(registry: Registry, make_adapter: Callable[..., Path]) -> None:
    await registry.register(fact(make_adapter()), "ada")
    await registry.promote(promote(1, "a"))
    assert await registry.wait_mirrored(5)
    mirror = (await registry.status()).mirror
    assert mirror is not None
    assert (mirror.position, mirror.refused) == (2, 0)
