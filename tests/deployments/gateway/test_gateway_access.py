"""A gateway with keys: every route but health is closed, each opens to its role, and no secret comes out anywhere."""

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import ValidationError

from actors.registry.apikeys import ApiKey, Role, Secret
from actors.registry.snapshot import Route, Snapshot
from cluster.errors import CapacityError
from deployments.embedding.hashing import HashEmbedder
from deployments.gateway import app as gateway_app
from deployments.gateway.admission import Admission, Turn
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.limits import Limiter
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served
from deployments.gateway.scope import Trace
from deployments.snapshot import SnapshotFeed

TWO = [Route(name, 1, "adapter", Path("/v"), f"{n:064x}", "smol") for n, name in enumerate(("team-a", "other"))]
CHAT: dict[str, Any] = {"model": "smol:team-a", "messages": [{"role": "user", "content": "one two"}], "max_tokens": 8}
USED = 3 + 3
"""What the echo says that `CHAT` has cost, whatever was reserved."""
OPEN = {"/healthz"}
REMAINING = "x-ratelimit-remaining-tokens"


@dataclass
class Gate:
    """A gateway with keys on fakes, and how to ask it."""

    app: FastAPI
    http: httpx.AsyncClient
    engine: EchoEngine
    registry: PushedSnapshots
    secrets: list[str]
    bare: Snapshot

    async def key(self, *roles: Role, models: tuple[str, ...] = ("*",), **limits: Any) -> dict[str, str]:
        """The header of a new key that the gateway knows."""
        secret = Secret.make()
        self.secrets.append(secret.text)
        key = ApiKey(secret.id, "k", secret.sha256, roles, models, **limits)
        current = self.registry.current
        await self.push(replace(current, number=current.number + 1, keys={**current.keys, key.id: key}))
        return {"authorization": f"Bearer {secret.text}"}

    async def push(self, snapshot: Snapshot) -> None:
        self.registry.push(snapshot)
        await asyncio.sleep(0.02)


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    bare = Snapshot.of_routes(TWO, {"team-a@champion": 1, "other@champion": 1})
    engine, registry = EchoEngine(), PushedSnapshots(bare)
    feed = SnapshotFeed(registry, poll_s=5)
    await feed.start(wait_s=0.5)
    limiter = Limiter(clock_ns=lambda: 0)  # nothing refills while a test runs
    parts = Parts(
        Served((Base("smol"),), (Encoder("minilm"),)),
        feed,
        GatewayMetrics(),
        {"smol": Backend(engine, Admission.of(GatewayConfig()))},
        {"minilm": HashEmbedder(dimension=8, max_tokens=32)},
        limiter=limiter,
    )
    app = create_app(parts, GatewayConfig(max_request_bytes=4096, request_timeout_s=0.4))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
    yield Gate(app, http, engine, registry, [], bare)
    await feed.stop()
    await http.aclose()


async def test_every_route_but_health_is_closed_to_strangers(gate: Gate) -> None:
    routes = [
        (route.path, method) for route in gate.app.routes if isinstance(route, APIRoute) for method in route.methods
    ]
    assert len(routes) == 13
    for path, method in routes:
        asked = path.replace("{model:path}", "smol").replace("{name}", "c")
        answer = await gate.http.request(method, asked, content=b"not even json")
        if path in OPEN:
            assert answer.status_code == 200
            continue
        assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer"), path
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert gate.engine.seen == []


@pytest.mark.parametrize(
    ("method", "path", "role"),
    [
        ("GET", "/v1/models", "infer"),
        ("GET", "/v1/models/smol", "infer"),
        ("POST", "/v1/chat/completions", "infer"),
        ("POST", "/v1/completions", "infer"),
        ("POST", "/v1/embeddings", "infer"),
        ("POST", "/v1/score", "infer"),
        ("POST", "/tokenize", "infer"),
        ("POST", "/detokenize", "infer"),
        ("POST", "/v1/collections/c/search", "infer"),
        ("POST", "/v1/collections/c/documents", "index"),
        ("GET", "/metrics", "admin"),
    ],
)
async def test_each_route_opens_to_its_role_only(gate: Gate, method: str, path: str, role: Role) -> None:
    every: tuple[Role, ...] = ("infer", "index", "admin")
    others = await gate.key(*(each for each in every if each != role))
    refused = await gate.http.request(method, path, headers=others, content=b"{}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "role_not_allowed")
    allowed = await gate.http.request(method, path, headers=await gate.key(role), content=b"{}")
    assert allowed.status_code in (200, 400)


async def test_a_key_sees_and_asks_only_the_models_of_its_patterns(gate: Gate) -> None:
    headers = await gate.key("infer", models=("smol:team-*",))
    listed = (await gate.http.get("/v1/models", headers=headers)).json()["data"]
    assert {card["id"] for card in listed} == {"smol:team-a", "smol:team-a@champion", "smol:team-a/1"}
    assert (await gate.http.post("/v1/chat/completions", headers=headers, json=CHAT)).status_code == 200
    # Whether they exist is not said either.
    for model in ("smol", "smol:other", "smol:nothing"):
        for answer in (
            await gate.http.post("/v1/chat/completions", headers=headers, json={**CHAT, "model": model}),
            await gate.http.get(f"/v1/models/{model}", headers=headers),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    embedding = await gate.http.post("/v1/embeddings", headers=headers, json={"model": "minilm", "input": "x"})
    assert embedding.status_code == 403


async def test_a_revocation_reaches_a_gateway_with_the_next_snapshot(gate: Gate) -> None:
    headers = await gate.key("infer")
    assert (await gate.http.get("/v1/models", headers=headers)).status_code == 200
    await gate.push(replace(gate.registry.current, number=9, keys={}))
    assert (await gate.http.get("/v1/models", headers=headers)).status_code == 401


async def test_a_gateway_that_knows_no_keys_yet_does_not_call_them_wrong() -> None:
    feed = SnapshotFeed(PushedSnapshots(), poll_s=5)  # not started: the registry has never answered
    app = create_app(Parts(Served(), feed, GatewayMetrics()), GatewayConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as http:
        answer = await http.get("/v1/models", headers={"authorization": f"Bearer {Secret.make().text}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "dependency_unavailable")


async def test_the_official_client_raises_its_typed_errors(gate: Gate) -> None:
    def sdk(headers: dict[str, str]) -> openai.AsyncOpenAI:
        key = headers["authorization"].removeprefix("Bearer ")
        return openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, http_client=gate.http, max_retries=0)

    with pytest.raises(openai.AuthenticationError):
        await sdk({"authorization": "Bearer none"}).chat.completions.create(**CHAT)
    with pytest.raises(openai.PermissionDeniedError):
        await sdk(await gate.key("index")).chat.completions.create(**CHAT)
    client = sdk(await gate.key("infer", rpm=1))
    assert (await client.chat.completions.create(**CHAT)).choices
    with pytest.raises(openai.RateLimitError) as refused:
        await client.chat.completions.create(**CHAT)
    assert refused.value.code == "rate_limit_exceeded"
    assert refused.value.response.headers["retry-after"] == "60"
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_settled_with_the_usage_and_a_failure_costs_none(gate: Gate, stream: bool) -> None:
    headers = await gate.key("infer", tpm=100)

    async def ask() -> httpx.Response:
        return await gate.http.post("/v1/chat/completions", headers=headers, json={**CHAT, "stream": stream})

    first = await ask()
    assert first.headers["x-ratelimit-limit-tokens"] == "100"
    before = int(first.headers[REMAINING])
    gate.engine.fault = CapacityError("full")
    assert (await ask()).status_code == 503
    gate.engine.fault = None
    assert int((await ask()).headers[REMAINING]) == before - USED


async def test_who_leaves_a_stream_early_keeps_what_was_reserved_and_a_broken_one_costs_none(gate: Gate) -> None:
    headers = await gate.key("infer", tpm=100)
    seen = gate.engine

    async def remaining() -> int:
        return int((await gate.http.post("/v1/chat/completions", headers=headers, json=CHAT)).headers[REMAINING])

    before = await remaining()
    seen.breaks_after, seen.fault = 1, CapacityError("gone")
    await gate.http.post("/v1/chat/completions", headers=headers, json={**CHAT, "stream": True})
    seen.breaks_after, seen.fault = None, None
    assert await remaining() == before - USED
    assembler = gateway_app.StreamAssembler(model="m", version="v", forward_usage=False)
    reservation = Limiter(clock_ns=lambda: 0).reserve(ApiKey("key-1", "k", "", tpm=50), 20)
    gateway_app._settle(
        gateway_app.Account(Turn(0.0), reservation, Trace("mine")), assembler
    )  # no usage came, and nothing broke
    assert reservation._allowance.tokens is not None
    reservation.refund()
    assert reservation._allowance.tokens.left(0) == 30


async def test_no_secret_comes_out_of_metrics_logs_errors_or_traces(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    admin, weak = await gate.key("admin", "infer", rpm=9), await gate.key("index")
    forged = {"authorization": admin["authorization"][:-4] + "AAAA"}
    said = []
    for headers in (admin, weak, forged):
        said.append((await gate.http.post("/v1/chat/completions", headers=headers, json=CHAT)).text)
        said.append((await gate.http.get("/metrics", headers=headers)).text)
        said.append((await gate.http.get("/healthz", headers=headers)).text)
    # Our own words; httpx, as a client, may log what it sends.
    said += [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    for secret in gate.secrets:
        for text in said:
            assert secret not in text
            assert secret[-20:-4] not in text


async def test_a_trace_names_the_key(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[Trace] = []
    monkeypatch.setattr("deployments.gateway.scope.Trace", lambda **facts: traces.append(Trace(**facts)) or traces[-1])
    await gate.http.get("/v1/models", headers=await gate.key("infer"))
    await gate.http.get("/v1/models")
    assert [trace.key for trace in traces] == [next(iter(gate.registry.current.keys)), None]


async def test_other_origins_get_no_permission(gate: Gate) -> None:
    origin = {"origin": "https://elsewhere.example"}
    key = await gate.key("infer", "admin")
    answers = [await gate.http.get(path, headers={**key, **origin}) for path in ("/healthz", "/v1/models", "/metrics")]
    answers.append(await gate.http.post("/v1/chat/completions", headers={**key, **origin}, json=CHAT))
    answers.append(await gate.http.get("/v1/models", headers=origin))
    wants = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    preflights = [await gate.http.options(path, headers={**origin, **wants}) for path in ("/v1/chat/completions", "/x")]
    assert [answer.status_code for answer in preflights] == [405, 404]
    for answer in (*answers, *preflights):
        assert not [name for name in answer.headers if name.startswith("access-control-")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "gateway.example"])
def test_a_gateway_without_keys_is_for_this_machine_only(host: str) -> None:
    assert GatewayConfig(host=host).require_keys
    with pytest.raises(ValidationError, match="flywheel keys create"):
        GatewayConfig(host=host, require_keys=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_on_loopback_keys_may_be_left_out(host: str) -> None:
    assert not GatewayConfig(host=host, require_keys=False).require_keys
