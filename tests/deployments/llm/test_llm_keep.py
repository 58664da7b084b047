import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.registry.snapshot import Kind, Route, Snapshot
from deployments.gateway.echo import PushedSnapshots
from deployments.llm.config import LLMConfig
from deployments.llm.keep import Keeper, kept
from deployments.llm.protocol import Adapter


def route(name: str, number: int, kind: Kind = "adapter", base: str = "owner/Smol") -> Route:
    return Route(name, number, kind, Path(name) / f"{number:012x}", f"{number:064x}", base)


ROUTES = [route("triage", 1), route("triage", 2), route("tickets", 1, "model"), route("other", 1, base="big")]
ALIASES: dict[str, int | dict[int, float]] = {
    "triage@champion": 1, "triage@canary": {1: 0.1, 2: 0.9}, "tickets@champion": 1, "other@champion": 1,
}  # fmt: skip
KNOWN = Snapshot.of_routes(ROUTES, ALIASES, root=Path("/home/versions"))


def test_references_become_versions_each_once() -> None:
    adapters, problems = kept(KNOWN, ["triage", "triage@champion", "triage/1", "triage@canary"], "smol")
    assert [adapter.version for adapter in adapters] == ["triage/1", "triage/2"]
    assert adapters[0] == Adapter("triage/1", "/home/versions/triage/000000000001", f"{1:064x}")
    assert not problems


def test_what_is_no_adapter_of_this_base_is_named_with_the_reason() -> None:
    adapters, problems = kept(KNOWN, ["triag", "tickets", "other", "triage/9"], "smol")
    assert not adapters
    assert "Near it: triage" in problems["triag"]
    assert problems["tickets"] == "tickets/1 is no adapter on smol: its kind is model, its base smol."
    assert problems["other"].endswith("its base big.")
    assert "serves the versions 1, 2" in problems["triage/9"]


def test_more_to_keep_than_a_replica_holds_is_a_fault_of_the_settings() -> None:
    with pytest.raises(ValidationError, match="keep names 3 adapters, but a replica holds max_adapters 2"):
        LLMConfig(model="smol", max_loras=2, max_adapters=2, keep=("a", "b", "c"))
    with pytest.raises(ValidationError):
        LLMConfig(model="smol", keep=("smol:a",))
    assert LLMConfig(model="smol", max_loras=1, max_adapters=1, keep=("a@champion", "a@champion")).keep


class Kept:
    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.called = asyncio.Event()

    async def __call__(self, adapters: list[Adapter]) -> None:
        self.calls.append([adapter.version for adapter in adapters])
        self.called.set()


async def test_it_follows_the_alias_and_says_nothing_twice() -> None:
    source, keep = PushedSnapshots(KNOWN), Kept()
    keeper = Keeper(["triage"], "smol", source, keep, poll_s=0.01)
    await keeper.start(wait_s=5)
    assert keep.calls == [["triage/1"]]
    await asyncio.sleep(0.1)  # polls that bring nothing new
    keep.called.clear()
    source.push(Snapshot.of_routes(ROUTES, {"triage@champion": 2}, number=2, root=Path("/home/versions")))
    async with asyncio.timeout(5):
        await keep.called.wait()
    await keeper.stop()
    assert keep.calls == [["triage/1"], ["triage/2"]]


async def test_what_could_not_be_kept_is_tried_again() -> None:
    keep = Kept()
    keeper = Keeper(["triage"], "smol", PushedSnapshots(KNOWN), keep, poll_s=0.01, retry_s=0.02)
    await keeper.start(wait_s=5)
    await asyncio.sleep(0.2)
    await keeper.stop()
    assert len(keep.calls) > 1


async def test_a_registry_that_is_away_stops_no_replica_and_unpins_nothing() -> None:
    source, keep = PushedSnapshots(KNOWN), Kept()
    source.go_away()
    keeper = Keeper(["triage"], "smol", source, keep, poll_s=0.01, retry_s=0.02)
    await keeper.start(wait_s=0.1)
    await keeper.stop()
    assert not keep.calls
