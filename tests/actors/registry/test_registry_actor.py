"""The actor's class without Ray: long polls, concurrency, and a log that fails at the worst moment."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.registry.actor import Registry, open_serving
from actors.registry.facts import AliasMove, Artifact, DataFact, Event, Fact, GateEnded, VersionFact
from actors.registry.rules import BeginGate, Promote, Register
from actors.registry.serving import ServingReport, Traffic
from actors.registry.snapshot import resolve
from actors.registry.store import Log, MemoryEventStore
from actors.registry.upload import admit
from cluster.database import sqlite_uri
from cluster.errors import DependencyError, RequestError, StateError
from cluster.signing import signature_path, verify
from cluster.storage import Home
from cluster.tracking import MemoryTracker


def register(content: str) -> Register:
    fact = VersionFact(name="triage", kind="adapter", source_path=Path("/s"), base="smol")
    return Register(fact, Artifact(path=Path("triage") / content, digest=content))


def with_files(home: Home) -> Home:
    """A home in whose store something lies for each content that `register` knows."""
    for content in ("aa", "bb", "cc"):
        (home.versions / "triage" / content).mkdir(parents=True)
    return home


def promote(version: int, command: str) -> Promote:
    return Promote("triage", "champion", {version: 1.0}, "ada", "why", command, force=True)


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def tracker() -> MemoryTracker:
    return MemoryTracker()


@pytest.fixture
async def registry(tmp_path: Path, log: Log, tracker: MemoryTracker) -> AsyncIterator[Registry]:
    home = with_files(Home(tmp_path / "home"))
    registry = Registry(
        home,
        sqlite_uri(tmp_path / "registry.db"),
        open_store=lambda _: MemoryEventStore(log),
        open_tracker=lambda: tracker,
        find_dead=lambda _: {},
        look_every_s=0.05,
    )
    yield registry
    registry.close()


async def test_who_waits_is_woken_by_a_move_and_not_by_facts_of_training(registry: Registry) -> None:
    start = await registry.snapshot()
    waiting = [asyncio.create_task(registry.wait_snapshot((start.epoch, start.number), 10)) for _ in range(50)]
    await asyncio.sleep(0.02)
    await registry.data(DataFact(id="errors@1", name="errors", digest="d", stage="examples"), "ada")
    await asyncio.sleep(0.02)
    assert not any(task.done() for task in waiting)
    version = await registry.register(register("aa"), "ada")
    seen = [start.updated(change) for change in await asyncio.gather(*waiting)]
    assert {resolve(snapshot, "triage/1").id for snapshot in seen} == {version.id}

    asked_at = time.monotonic()
    same = await registry.wait_snapshot((seen[0].epoch, seen[0].number), 0.2)
    assert seen[0].updated(same) == seen[0]
    assert time.monotonic() - asked_at >= 0.2


async def test_a_poll_with_an_old_number_is_answered_at_once(registry: Registry) -> None:
    await registry.register(register("aa"), "ada")
    async with asyncio.timeout(1):
        for position in ((1, 0), (1, 99), (0, 1)):  # also one of another database, or of an earlier life
            assert (await registry.wait_snapshot(position, 60)).number == 1


async def test_the_same_content_registered_twenty_times_at_once_is_one_version(registry: Registry) -> None:
    versions = await asyncio.gather(*(registry.register(register("aa"), "ada") for _ in range(20)))
    assert {version.id for version in versions} == {"triage/1"}


async def test_a_registration_that_cannot_be_is_refused_before_anything_is_copied(registry: Registry) -> None:
    with pytest.raises(RequestError, match="unheard-of"):
        await registry.check(register("aa").fact.model_copy(update={"run_id": "unheard-of"}))
    await registry.check(register("aa").fact)
    assert (await registry.status()).events == 0


async def test_a_caller_that_gives_up_leaves_the_registry_whole(registry: Registry, log: Log) -> None:
    await registry.register(register("aa"), "ada")
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


async def test_a_commit_of_unknown_outcome_is_read_back_before_the_next(tmp_path: Path) -> None:
    store = Flaky()
    registry = Registry(
        with_files(Home(tmp_path)),
        sqlite_uri(tmp_path / "registry.db"),
        open_store=lambda _: store,
        find_dead=lambda _: {},
    )
    await registry.register(register("aa"), "ada")
    store.broken = True
    with pytest.raises(DependencyError, match="broke"):
        await registry.promote(promote(1, "a"))
    store.broken = False
    move = await registry.promote(promote(1, "a"))
    assert isinstance(move, AliasMove)
    assert move.id == "triage@champion#1"
    assert (await registry.status()).events == 2
    assert (await registry.snapshot()).aliases_of("triage") == {"champion": 1}
    registry.close()


async def test_the_status_names_no_password(tmp_path: Path) -> None:
    registry = Registry(
        Home(tmp_path),
        "postgresql+psycopg://ada:secret@db/flywheel",
        open_store=lambda _: MemoryEventStore(),
        open_book=lambda _: open_serving(sqlite_uri(tmp_path / "registry.db")),
        find_dead=lambda _: {},
    )
    status = await registry.status()
    assert "secret" not in status.model_dump_json()
    assert "db/flywheel" in status.database
    registry.close()


async def test_mlflow_shows_what_was_acknowledged(registry: Registry) -> None:
    await registry.register(register("aa"), "ada")
    await registry.promote(promote(1, "a"))
    assert await registry.wait_mirrored(5)
    mirror = (await registry.status()).mirror
    assert mirror is not None
    assert (mirror.position, mirror.refused) == (2, 0)


async def test_a_move_in_mlflow_is_followed_if_the_gate_was_passed_and_else_put_back_and_kept(
    registry: Registry, tracker: MemoryTracker
) -> None:
    for content in ("aa", "bb", "cc"):
        await registry.register(register(content), "ada")
    await registry.promote(promote(1, "a"))
    begun = await registry.begin_gate(BeginGate("triage/2", "ada", "g"))
    await registry.end_gate(GateEnded(gate_id=begun.id, outcome="passed"), "ada")
    assert await registry.wait_mirrored(5)

    tracker.put_alias("triage", "champion", 2)
    await _eventually(lambda: _moved(registry) == 2)
    tracker.put_alias("triage", "champion", 3)
    await _eventually(lambda: tracker.aliases("triage") == {"champion": 2})
    *_, followed, refused = await registry.history("triage")
    assert (followed.what, followed.by, followed.version) == ("external", "mlflow", 2)
    assert (refused.what, refused.version, refused.alias) == ("external refused", 3, "champion")
    assert "triage/3 is candidate" in refused.why


def _moved(registry: Registry) -> int:
    return registry._ledger.state.aliases("triage")["champion"]


async def _eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(8):
        while not check():
            await asyncio.sleep(0.02)


async def test_lineage_goes_on_to_what_servers_have_reported(registry: Registry) -> None:
    await registry.register(register("aa"), "ada")
    now = datetime.now(UTC)
    row = Traffic(version_id="triage/1", hour=now.replace(minute=0, second=0, microsecond=0), requests=3)
    await registry.report(ServingReport(source="llm#a", node="n1", holds=("triage/1",)))
    await registry.report(ServingReport(source="gateway#b", node="n1", traffic=(row,)))
    links = await registry.lineage("triage")
    assert [link.id for link in links] == ["triage/1", "replica/llm#a", f"traffic/triage/1/{now:%Y-%m-%d}"]


async def test_a_collection_frees_what_nothing_reaches_and_the_same_content_brings_it_back(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    home = await registry.home()
    commands = []
    for seed in (1, 2):
        fact = VersionFact(name="triage", kind="adapter", source_path=make_adapter(f"a{seed}", seed=seed), base="smol")
        commands.append(Register(fact, admit(fact, home)))
        await registry.register(commands[-1], "ada")
    await registry.promote(promote(1, "a"))
    await registry.report(ServingReport(source="llm#a", node="n", holds=("triage/2",)))
    assert (await registry.collect(0, False, "ada")).freed == ()  # a replica holds the other one
    await registry.report(ServingReport(source="llm#a", node="n", holds=()))
    planned = await registry.collect(0, True, "ada")
    assert [freed.what for freed in planned.freed] == ["version triage/2"]
    one, two = (home.versions / command.artifact.path for command in commands)
    assert two.is_dir()

    freed = await registry.collect(0, False, "ada")
    assert (freed.freed[0].path, freed.left) == (two, {})
    assert (one.is_dir(), two.exists(), signature_path(two).exists()) == (True, False, False)
    with pytest.raises(StateError, match="files have been freed"):
        await registry.promote(promote(2, "b"))
    assert [*(await registry.snapshot()).models["triage"].versions] == [1]

    again = await registry.register(Register(commands[1].fact, admit(commands[1].fact, home)), "ada")
    assert again.id == "triage/2"
    assert verify(two, home, what="triage/2", digest=again.digest)
    await registry.promote(promote(2, "c"))


async def test_collections_that_run_beside_registrations_never_take_what_has_become_a_version(
    registry: Registry, make_adapter: Callable[..., Path]
) -> None:
    home = await registry.home()
    sources = [make_adapter(f"a{seed}", seed=seed) for seed in range(3)]

    outcomes: list[str] = []

    async def register_and_promote(turn: int) -> None:
        fact = VersionFact(name="triage", kind="adapter", source_path=sources[turn % 3], base="smol")
        artifact = await asyncio.to_thread(admit, fact, home)
        await asyncio.sleep(0.002 * (turn % 4))
        try:
            version = await registry.register(Register(fact, artifact), "ada")
            await asyncio.sleep(0.002 * (turn % 3))
            await registry.promote(promote(version.number, f"p{turn}"))
            outcomes.append("promoted")
        except DependencyError:
            outcomes.append("freed before it was a version")
        except StateError:
            outcomes.append("freed before it was promoted")

    ended = asyncio.Event()

    async def collect() -> None:
        while not ended.is_set():
            with contextlib.suppress(StateError):  # something that was to go has become needed: nothing went
                await registry.collect(0, False, "ada")

    collecting = asyncio.create_task(collect())
    for turn in range(24):
        await register_and_promote(turn)
    # Not cancelled: a collection goes on in its thread when nobody waits for it, and would free what we ask for below.
    ended.set()
    await collecting
    await register_and_promote(24)
    assert outcomes[-1] == "promoted"
    snapshot = await registry.snapshot()
    there = [snapshot.models["triage"].versions[number] for number in snapshot.models["triage"].versions]
    assert there
    for route in there:
        assert verify(snapshot.folder(route), home, what=route.id, digest=route.digest)
