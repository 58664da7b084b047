import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.errors import CapacityError, DependencyError, RequestError
from deployments.llm.adapters import AdapterCache
from deployments.llm.protocol import Adapter
from deployments.llm.residency import LOADS
from deployments.llm.resident import ResidentAdapters


def adapter(name: str) -> Adapter:
    return Adapter(f"{name}/1", f"/versions/{name}", name * 64)


A, B, C = (adapter(name) for name in "abc")


class Files(AdapterCache):
    """A cache in which some copies come late, or never."""

    def __init__(self) -> None:
        self.slow: dict[str, asyncio.Event] = {}
        self.lost: set[str] = set()

    async def fetch(self, adapter: Adapter) -> Path:
        if adapter.version in self.slow:
            await self.slow[adapter.version].wait()
        if adapter.version in self.lost:
            raise DependencyError(f"Adapter {adapter.version} cannot be loaded: its files are missing.")
        return Path("/cache", adapter.digest)

    def template(self, adapter: Adapter) -> str | None:
        return f"template of {adapter.version}"


class Memory:
    """An engine's memory that insists on what vLLM needs: room before a load, and nobody who computes at a removal."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: set[str] = set()
        self.computing: set[str] = set()
        self.refuses: set[str] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.loads = 0
        self.loading = 0

    async def load(self, name: str, folder: str) -> None:
        self.loads += 1
        self.loading += 1
        assert self.loading <= LOADS
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.loading -= 1
        if name in self.refuses:
            raise ValueError("no such module")
        assert name not in self.held
        assert len(self.held) < self.limit
        assert folder.startswith("/cache/")
        self.held.add(name)

    async def remove(self, name: str) -> None:
        assert name not in self.computing
        await asyncio.sleep(0)
        self.held.remove(name)

    def uses(self, name: str) -> bool:
        return name in self.computing


class Replica:
    """What the tests look at together."""

    def __init__(self, limit: int, **waits_s: float) -> None:
        self.files, self.memory, self.changes = Files(), Memory(limit), 0
        self.adapters = ResidentAdapters(
            self.files, self.memory, limit=limit, base="base", changed=self._changed, **waits_s
        )

    def _changed(self) -> None:
        self.changes += 1

    async def use(self, adapter: Adapter, turns: int = 1) -> None:
        async with self.adapters.used(adapter) as template:
            assert template == f"template of {adapter.version}"
            assert adapter.engine_name in self.memory.held
            for _ in range(turns):
                await asyncio.sleep(0)
                assert adapter.engine_name in self.memory.held


async def settle(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not until():
            await asyncio.sleep(0)


async def test_a_crowd_of_first_uses_is_one_load() -> None:
    replica = Replica(2)
    await asyncio.gather(*(replica.use(A) for _ in range(50)))
    assert (replica.memory.loads, replica.changes) == (1, 1)
    assert replica.adapters.versions == ("a/1",)


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_many_more_than_fit_all_get_their_turn(limit: int) -> None:
    replica = Replica(limit)
    wanted = [adapter(name) for name in "abcdefgh"] * 6
    async with asyncio.timeout(10):
        await asyncio.gather(*(replica.use(a, turns=n % 4) for n, a in enumerate(wanted)))
    assert set(replica.adapters.names) == replica.memory.held
    assert len(replica.memory.held) == limit


async def test_one_that_hangs_up_takes_the_adapter_from_nobody_and_loses_no_wakeup() -> None:
    replica = Replica(1)
    replica.memory.gate.clear()
    first, second = (asyncio.create_task(replica.use(A)) for _ in range(2))
    await settle(lambda: replica.memory.loading == 1)
    waiting = [asyncio.create_task(replica.use(B)) for _ in range(3)]
    await asyncio.sleep(0)
    first.cancel()
    waiting[0].cancel()
    await asyncio.sleep(0)
    replica.memory.gate.set()
    async with asyncio.timeout(5):
        await asyncio.gather(second, *waiting[1:])
    assert replica.adapters.versions == ("b/1",)


async def test_a_load_that_nobody_waits_for_any_more_ends_and_can_be_evicted() -> None:
    replica = Replica(1)
    replica.memory.gate.clear()
    alone = asyncio.create_task(replica.use(A))
    await settle(lambda: replica.memory.loading == 1)
    alone.cancel()
    replica.memory.gate.set()
    await replica.use(B)
    assert replica.memory.held == {B.engine_name}


async def test_a_slow_download_stops_nobody_else() -> None:
    replica = Replica(1)
    replica.files.slow["a/1"] = asyncio.Event()
    slow = asyncio.create_task(replica.use(A))
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await replica.use(B)
        await replica.use(C)
    replica.files.slow["a/1"].set()
    await slow


async def test_a_missing_one_costs_no_slot_and_its_fault_is_told_until_it_works() -> None:
    replica = Replica(1)
    await replica.use(B)
    replica.files.lost.add("a/1")
    with pytest.raises(DependencyError, match="files are missing"):
        await replica.use(A)
    assert replica.adapters.versions == ("b/1",)
    assert "files are missing" in replica.adapters.faults["a/1"].why
    replica.files.lost.clear()
    await replica.use(A)
    assert not replica.adapters.faults


async def test_one_that_the_engine_refuses_is_refused_to_all_who_wait_and_tried_again_for_the_next() -> None:
    replica = Replica(1)
    replica.memory.refuses.add(A.engine_name)
    ends = await asyncio.gather(*(replica.use(A) for _ in range(5)), return_exceptions=True)
    assert {type(end) for end in ends} == {RequestError}
    assert (replica.memory.loads, set(replica.adapters.faults)) == (1, {"a/1"})
    replica.memory.refuses.clear()
    await replica.use(A)
    assert replica.memory.loads == 2


async def test_what_is_in_use_stays_and_whoever_needs_its_place_is_told_after_a_while() -> None:
    replica = Replica(1, slot_wait_s=0.05)
    async with replica.adapters.used(A):
        with pytest.raises(CapacityError, match="All 1 adapters"):
            await replica.use(B)
        assert replica.memory.held == {A.engine_name}
    await replica.use(B)


async def test_adapters_that_are_always_in_use_keep_nobody_out_for_ever() -> None:
    replica = Replica(1, patience_s=0.02)
    stop = asyncio.Event()

    async def wanted_all_the_time() -> None:
        while not stop.is_set():
            async with replica.adapters.used(A):
                await asyncio.sleep(0.005)

    crowd = [asyncio.create_task(wanted_all_the_time()) for _ in range(4)]
    await settle(lambda: replica.memory.held == {A.engine_name})
    async with asyncio.timeout(5):
        await replica.use(B)
    stop.set()
    await asyncio.gather(*crowd)
    assert replica.adapters.versions == ("a/1",)


async def test_one_that_gives_up_leaves_the_slot_that_it_claimed_to_its_users() -> None:
    replica = Replica(1, slot_wait_s=0.05, patience_s=0.01)
    async with replica.adapters.used(A):
        with pytest.raises(CapacityError):
            await replica.use(B)
        async with asyncio.timeout(5):
            await replica.use(A)


async def test_an_abort_that_is_on_its_way_is_waited_for() -> None:
    replica = Replica(1)
    await replica.use(A)
    replica.memory.computing.add(A.engine_name)
    other = asyncio.create_task(replica.use(B))
    await asyncio.sleep(0.02)
    assert replica.memory.held == {A.engine_name}
    replica.memory.computing.clear()
    await other


async def test_kept_ones_are_brought_in_and_stay_and_a_broken_one_does_not_stop_the_others() -> None:
    replica = Replica(2)
    replica.files.lost.add("a/1")
    await replica.adapters.keep([A, B])
    assert (replica.adapters.versions, replica.adapters.kept) == (("b/1",), ("a/1", "b/1"))
    await replica.use(C)
    await replica.use(adapter("d"))
    assert replica.adapters.versions == ("b/1", "d/1")
    replica.files.lost.clear()
    await replica.adapters.keep([A, B])
    with pytest.raises(DependencyError, match="all 2 places are kept"):
        await replica.use(C)
    await replica.adapters.keep([C])
    assert "c/1" in replica.adapters.versions


async def test_describe_is_plain() -> None:
    replica = Replica(1)
    replica.files.lost.add("a/1")
    await replica.use(B)
    with pytest.raises(DependencyError):
        await replica.use(A)
    said = replica.adapters.describe()
    assert said["adapters"] == ["b/1"]
    assert said["adapters_kept"] == []
    assert "files are missing" in str(said["adapters_failed"])
