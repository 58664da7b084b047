"""Several bases in one application, on fakes: each has its own adapters, its own queue and its own health."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from actors.registry.snapshot import Route, Snapshot
from cluster.errors import CapacityError
from deployments.embedding.hashing import HashEmbedder
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served
from deployments.snapshot import SnapshotFeed

ROUTES = [
    Route("triage", 1, "adapter", Path("/v"), "1" * 64, "smol"),
    Route("tickets", 1, "adapter", Path("/v"), "2" * 64, "llama"),
]
CONFIG = GatewayConfig(
    require_keys=False, request_timeout_s=5.0, max_running=1, max_waiting=1, max_waiting_per_caller=1, max_wait_s=5.0
)


@dataclass
class Two:
    """An application of two bases, `smol` and `llama`."""

    http: httpx.AsyncClient
    engines: dict[str, EchoEngine]

    async def ask(self, model: str | None, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
        named = {"model": model} if model is not None else {}
        messages = {"messages": [{"role": "user", "content": "one two"}]} if "chat" in path else {}
        return await self.http.post(path, json={**named, **messages, **more})


@pytest.fixture
async def two() -> AsyncIterator[Two]:
    feed = SnapshotFeed(
        PushedSnapshots(Snapshot.of_routes(ROUTES, {"triage@champion": 1, "tickets@champion": 1})), poll_s=5
    )
    await feed.start(wait_s=0.5)
    engines = {"smol": EchoEngine(), "llama": EchoEngine()}
    backends = {name: Backend(engine, Admission.of(CONFIG)) for name, engine in engines.items()}
    served = Served(
        (Base("smol", max_model_len=128), Base("llama", part="llm-llama", max_model_len=64)), (Encoder("minilm"),)
    )
    embedder = HashEmbedder(dimension=8, max_tokens=32)
    app = create_app(Parts(served, feed, GatewayMetrics(), backends, {"minilm": embedder}), CONFIG)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        yield Two(http, engines)
    assert [(one.admission.running, one.admission.waiting) for one in backends.values()] == [(0, 0)] * 2
    await feed.stop()


@pytest.mark.parametrize(
    ("model", "base", "said"),
    [
        ("smol", "smol", "smol"),
        ("llama", "llama", "llama"),
        ("smol:triage", "smol", "smol:triage/1"),
        ("llama:tickets@champion", "llama", "llama:tickets/1"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_name_goes_to_its_base_and_no_other(two: Two, model: str, base: str, said: str, stream: bool) -> None:
    answer = await two.ask(model, stream=stream)
    assert answer.status_code == 200
    assert f'"model":"{said}"' in answer.text.replace('": "', '":"')
    assert [name for name, engine in two.engines.items() if engine.seen] == [base]


@pytest.mark.parametrize(
    ("model", "way_out"),
    [
        ("smol:tickets", "'llama:tickets/1'"),
        ("llama:triage/1", "'smol:triage/1'"),
        ("lama", "'llama'"),
        ("gpt-4o", "smol, llama, minilm"),
    ],
)
async def test_an_adapter_fits_on_its_base_alone_and_the_way_out_is_told(two: Two, model: str, way_out: str) -> None:
    answer = await two.ask(model)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert way_out in answer.json()["error"]["message"]
    assert not any(engine.seen for engine in two.engines.values())


async def test_every_base_is_listed_with_its_own_adapters_and_context(two: Two) -> None:
    listed = {card["id"]: card for card in (await two.http.get("/v1/models")).json()["data"]}
    own = {"smol": "triage", "llama": "tickets"}
    adapters = {f"{base}:{name}{end}" for base, name in own.items() for end in ("", "@champion", "/1")}
    assert set(listed) == {"smol", "llama", "minilm"} | adapters
    for id_, card in listed.items():
        base = id_.partition(":")[0]
        assert card["parent"] == (base if ":" in id_ else None)
        assert card["max_model_len"] == {"smol": 128, "llama": 64, "minilm": None}[base]
        assert (await two.http.get(f"/v1/models/{id_}")).json() == card


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_tokens_without_a_model_are_refused_where_several_could_be_meant(two: Two, path: str) -> None:
    refused = await two.ask(None, path, prompt="ab", tokens=[97])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "invalid_value", "model")
    assert "smol, llama" in error["message"]
    assert (await two.ask("llama", path, prompt="ab", tokens=[97])).status_code == 200
    assert (len(two.engines["smol"].seen), len(two.engines["llama"].seen)) == (0, 1)


async def test_a_slow_base_takes_no_place_of_another(two: Two) -> None:
    two.engines["smol"].pause_s = 0.2
    slow = [asyncio.create_task(two.ask("smol", stream=True, user=str(user))) for user in range(3)]
    await asyncio.sleep(0.05)  # one runs, one waits, one too many was told so
    quick = await two.ask("llama", stream=True)
    assert quick.status_code == 200
    assert sum(not one.done() for one in slow) == 2
    assert sorted([(await one).status_code for one in slow]) == [200, 200, 429]


async def test_health_names_each_base_also_the_one_that_is_not_well(two: Two) -> None:
    well = await two.http.get("/healthz")
    assert (well.status_code, well.json()["llm"]["model"], well.json()["llm-llama"]["model"]) == (200, "echo", "echo")
    two.engines["llama"].fault = CapacityError("The engine stopped.")
    ill = await two.http.get("/healthz")
    assert (ill.status_code, ill.json()["llm"].get("error")) == (503, None)
    assert (ill.json()["llm-llama"]["model"], ill.json()["llm-llama"]["error"]["code"]) == ("llama", "overloaded")
    assert (await two.ask("smol")).status_code == 200
    assert (await two.ask("llama")).status_code == 503
