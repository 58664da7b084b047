import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from actors.registry.snapshot import Snapshot
from deployments.gateway.echo import PushedSnapshots
from deployments.snapshot import SnapshotFeed


@pytest.fixture
def source() -> PushedSnapshots:
    return PushedSnapshots(Snapshot(1, 3))


@pytest.fixture
async def feed(source: PushedSnapshots) -> AsyncIterator[SnapshotFeed]:
    made = SnapshotFeed(source, poll_s=0.05)
    yield made
    await made.stop()


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(0.9):
        while not check():
            await asyncio.sleep(0.005)


async def test_it_starts_with_what_the_registry_has_and_follows(feed: SnapshotFeed, source: PushedSnapshots) -> None:
    await feed.start(wait_s=0.5)
    assert feed.current.number == 3
    source.push(Snapshot(1, 4))
    await eventually(lambda: feed.current.number == 4)


async def test_it_starts_without_a_registry_and_catches_up(feed: SnapshotFeed, source: PushedSnapshots) -> None:
    source.go_away()
    await feed.start(wait_s=0.05)
    assert feed.current == Snapshot()
    assert feed.describe()["connected"] is False
    source.come_back()
    await eventually(lambda: feed.current.number == 3)


async def test_it_keeps_the_last_snapshot_and_takes_whatever_a_returned_registry_says(
    feed: SnapshotFeed, source: PushedSnapshots
) -> None:
    await feed.start(wait_s=0.5)
    source.go_away()
    await eventually(lambda: not feed.describe()["connected"])
    assert feed.current.number == 3
    source.current = Snapshot(1, 2)  # restored from an older database: its number is smaller
    source.come_back()
    await eventually(lambda: feed.current.number == 2)
    assert feed.describe()["connected"] is True


@pytest.mark.parametrize("turns", range(6))
async def test_it_stops_also_at_the_moment_when_an_answer_arrives(
    source: PushedSnapshots, feed: SnapshotFeed, turns: int
) -> None:
    await feed.start(wait_s=0.5)
    await asyncio.sleep(0.001)  # it waits for the next snapshot
    source.push(Snapshot(1, 4))
    for _ in range(turns):
        await asyncio.sleep(0)
    stopping = asyncio.create_task(feed.stop())
    done, _ = await asyncio.wait([stopping], timeout=0.3)
    assert done
