"""Who stays on one side of a split alias: by what a client says of its session, and else by its key."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.registry.apikeys import ApiKey, Secret
from actors.registry.snapshot import Route, Snapshot, resolve
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Served
from deployments.snapshot import SnapshotFeed

ROUTES = [Route("triage", n, "adapter", Path("/v"), f"{n:064x}", "smol") for n in (1, 2)]
SECRETS = [Secret.make() for _ in range(24)]
SPLIT = Snapshot.of_routes(ROUTES, {"triage@champion": {1: 0.5, 2: 0.5}})
SPOKEN = ("x-session-id", "prompt_cache_key", "safety_identifier", "user")
"""In the order in which they count."""


def expected(session: str) -> str:
    return resolve(SPLIT, "triage", key=session).id


def sessions(version: str, count: int = 3) -> list[str]:
    """Some that belong on that version's side."""
    return [name for name in map("session-{}".format, range(64)) if expected(name) == version][:count]


class Gate:
    """A gateway before a split alias; it says which version answers."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def answers(self, *, key: Secret | None = None, path: str = "/v1/chat/completions", **said: str) -> str:
        headers = {"authorization": f"Bearer {key.text}"} if key else {}
        if "x-session-id" in said:
            headers["x-session-id"] = said.pop("x-session-id")
        body = {"model": "smol:triage", "messages": [{"role": "user", "content": "x"}], "prompt": "x", **said}
        answer = await self._http.post(path, json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-flywheel-version"]


async def gate(*, keys: bool) -> AsyncIterator[Gate]:
    known = {one.id: ApiKey(one.id, "k", one.sha256) for one in SECRETS}
    snapshot = Snapshot(number=1, models=SPLIT.models, keys=known)
    feed = SnapshotFeed(PushedSnapshots(snapshot), poll_s=5)
    await feed.start(wait_s=0.5)
    config = GatewayConfig(require_keys=keys)
    parts = Parts(
        Served((Base("smol"),)), feed, GatewayMetrics(), {"smol": Backend(EchoEngine(), Admission.of(config))}
    )
    app = create_app(parts, config)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        yield Gate(http)
    await feed.stop()


@pytest.fixture
async def open_gate() -> AsyncIterator[Gate]:
    async for one in gate(keys=False):
        yield one


@pytest.fixture
async def closed_gate() -> AsyncIterator[Gate]:
    async for one in gate(keys=True):
        yield one


@pytest.mark.parametrize("by", SPOKEN)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_a_session_stays_on_its_side(open_gate: Gate, by: str, path: str) -> None:
    for version in ("triage/1", "triage/2"):
        for session in sessions(version):
            assert [await open_gate.answers(path=path, **{by: session}) for _ in range(3)] == [version] * 3


@pytest.mark.parametrize("place", range(len(SPOKEN) - 1))
async def test_of_several_words_for_it_the_more_telling_counts(open_gate: Gate, place: int) -> None:
    one, other = sessions("triage/1")[0], sessions("triage/2")[0]
    for right, wrong in ((one, other), (other, one)):
        said = {SPOKEN[place]: right, **dict.fromkeys(SPOKEN[place + 1 :], wrong)}
        assert await open_gate.answers(**said) == expected(right)
        # An empty word is none.
        assert await open_gate.answers(**{**said, SPOKEN[place]: ""}) == expected(wrong)


async def test_without_a_word_a_key_stays_on_its_side_and_keys_divide(closed_gate: Gate) -> None:
    sides = {}
    for key in SECRETS:
        found = {await closed_gate.answers(key=key) for _ in range(3)}
        assert found == {expected(key.id)}
        sides[key.id] = found.pop()
    assert set(sides.values()) == {"triage/1", "triage/2"}
    for version in ("triage/1", "triage/2"):  # what a client says goes before its key
        assert await closed_gate.answers(key=SECRETS[0], user=sessions(version)[0]) == version


async def test_without_word_and_key_each_request_is_drawn_by_itself(open_gate: Gate) -> None:
    found = [await open_gate.answers() for _ in range(64)]
    assert 8 < found.count("triage/1") < 56  # 6 standard deviations


@pytest.mark.parametrize("value", [7, ["a"], True])
async def test_a_session_that_is_no_text_is_refused(open_gate: Gate, value: Any) -> None:
    for by in SPOKEN[1:]:
        body = {"model": "smol:triage", "messages": [{"role": "user", "content": "x"}], by: value}
        answer = await open_gate._http.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, by)
