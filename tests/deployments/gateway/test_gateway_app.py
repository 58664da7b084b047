"""The routes over the shipped fakes, asked by the official client and by hand."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from actors.registry.snapshot import Route, Snapshot
from cluster.errors import CapacityError, DependencyError, RequestError
from deployments.embedding.hashing import HashEmbedder
from deployments.embedding.prompts import Prompts
from deployments.gateway.admission import Admission
from deployments.gateway.app import Backend, Parts, create_app
from deployments.gateway.aside import SMALL_BYTES
from deployments.gateway.config import GatewayConfig
from deployments.gateway.echo import EchoEngine, PushedSnapshots
from deployments.gateway.metrics import GatewayMetrics
from deployments.gateway.models import Base, Encoder, Served
from deployments.gateway.usage import Usage
from deployments.reranking.overlap import WordOverlap
from deployments.snapshot import SnapshotFeed

TWO = [Route("triage", n, "adapter", Path("/v"), f"{n:064x}", "smol") for n in (1, 2)]
LONG_INPUT = b'{"model": "minilm", "input": "' + b"a " * 99 + b'"}'
CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "one two three"}]}


def embedder() -> HashEmbedder:
    return HashEmbedder(dimension=8, max_tokens=32, shorter=[4], prompts=Prompts(query="ask ", document="found "))


@dataclass
class Stand:
    """An application on fakes, and both kinds of client."""

    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI
    engine: EchoEngine
    registry: PushedSnapshots
    feed: SnapshotFeed
    usage: Usage
    admission: Admission


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    engine, registry = EchoEngine(), PushedSnapshots(Snapshot.of_routes(TWO, {"triage@champion": 1}))
    feed = SnapshotFeed(registry, poll_s=0.05)
    await feed.start(wait_s=0.5)
    usage = Usage()
    config = GatewayConfig(
        require_keys=False,
        max_request_bytes=4096,
        max_held_bytes=8192,
        request_timeout_s=0.8,
        idle_timeout_s=0.2,
        max_running=4,
        max_waiting=4,
        max_waiting_per_caller=2,
    )
    admission = Admission.of(config)
    served = Served((Base("smol"),), (Encoder("minilm"), Encoder("e5", "embedding-e5", "e5/3")), Encoder("cross"))
    parts = Parts(
        served,
        feed,
        GatewayMetrics(usage),
        {"smol": Backend(engine, admission)},
        {"minilm": embedder(), "e5": HashEmbedder(name="e5", dimension=16)},
        WordOverlap(name="cross", max_tokens=16),
    )
    app = create_app(parts, config)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway")
    sdk = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=http, max_retries=0)
    yield Stand(http, sdk, engine, registry, feed, usage, admission)
    assert (admission.running, admission.waiting) == (0, 0)
    await feed.stop()
    await http.aclose()


async def test_a_chat_says_which_version_answered(stand: Stand) -> None:
    response = await stand.sdk.chat.completions.with_raw_response.create(**{**CHAT, "model": "smol:triage@champion"})
    answer = response.parse()
    assert answer.choices[0].message.content == "triage/1: one two three"
    assert (answer.model, answer.system_fingerprint) == ("smol:triage/1", "triage/1")
    assert response.headers["x-flywheel-version"] == "triage/1"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_a_stream_ends_with_its_finish_and_gives_usage_when_asked(stand: Stand) -> None:
    plain = [chunk async for chunk in await stand.sdk.chat.completions.create(**CHAT, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in plain) == "base: one two three "
    assert plain[-1].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in plain)
    counted = [
        chunk
        async for chunk in await stand.sdk.chat.completions.create(
            **CHAT, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert counted[-1].choices == []
    assert counted[-1].usage is not None
    assert counted[-1].usage.completion_tokens == 4


async def test_text_completions(stand: Stand) -> None:
    answer = await stand.sdk.completions.create(model="smol:triage/2", prompt="a b")
    assert (answer.choices[0].text, answer.model) == ("triage/2: a b", "smol:triage/2")
    pieces = [chunk async for chunk in await stand.sdk.completions.create(model="smol", prompt="a", stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == "base: a "


@pytest.mark.parametrize("fault", [CapacityError("gone"), None], ids=["error", "silence"])
async def test_a_stream_that_breaks_raises_in_the_client(stand: Stand, fault: CapacityError | None) -> None:
    stand.engine.fault, stand.engine.breaks_after = fault, 2
    got = []
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012
        async for chunk in await stand.sdk.chat.completions.create(**CHAT, stream=True):
            got.append(chunk)
    assert len(got) == 2
    assert caught.value.code == "overloaded"
    assert 'broken_streams_total{model="smol"} 1.0' in (await stand.http.get("/metrics")).text
    (row,) = stand.usage.changed()
    assert (row.version_id, row.requests, row.failures) == ("smol", 1, 1)


async def test_a_stream_that_never_began_is_an_http_error(stand: Stand) -> None:
    stand.engine.breaks_after = 0
    response = await stand.http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (RequestError("too long", code="context_length_exceeded"), openai.BadRequestError),
        (DependencyError("adapter files are gone"), openai.InternalServerError),
        (ValueError("bug"), openai.InternalServerError),
    ],
)
async def test_the_engines_errors_are_typed_in_the_client(stand: Stand, fault: Any, raised: type[Exception]) -> None:
    stand.engine.fault = fault
    for stream in (False, True):
        with pytest.raises(raised) as caught:
            await stand.sdk.chat.completions.create(**CHAT, stream=stream)
        assert isinstance(caught.value, openai.APIStatusError)
        assert caught.value.code == getattr(fault, "code", None) or caught.value.status_code >= 500


async def test_an_alias_may_move_while_a_stream_runs(stand: Stand) -> None:
    stand.engine.pause_s = 0.02
    stream = await stand.sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"}, stream=True)
    first = await anext(stream)
    stand.registry.push(Snapshot.of_routes(TWO, {"triage@champion": 2}, number=2))
    async with asyncio.timeout(0.5):
        while stand.feed.current.number != 2:
            await asyncio.sleep(0.005)
    rest = [chunk async for chunk in stream]
    assert {chunk.model for chunk in [first, *rest]} == {"smol:triage/1"}
    after = await stand.sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"})
    assert after.model == "smol:triage/2"


async def test_requests_go_on_while_the_registry_is_away(stand: Stand) -> None:
    stand.registry.go_away()
    async with asyncio.timeout(0.5):
        while stand.feed.describe()["connected"]:
            await asyncio.sleep(0.005)
    answer = await stand.sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"})
    assert answer.model == "smol:triage/1"
    health = await stand.http.get("/healthz")
    assert (health.status_code, health.json()["registry"]["connected"]) == (200, False)


async def test_models_are_listed_and_retrieved(stand: Stand) -> None:
    listed = {model.id: model async for model in stand.sdk.models.list()}
    for name in listed:
        assert (await stand.sdk.models.retrieve(name)).id == name
    assert listed["smol:triage"].model_extra is not None
    assert listed["smol:triage"].model_extra["parent"] == "smol"
    assert listed["smol:triage"].model_extra["root"] == "smol:triage/1"
    with pytest.raises(openai.NotFoundError):
        await stand.sdk.models.retrieve("nope")


async def test_embeddings_are_the_same_numbers_in_both_encodings(stand: Stand) -> None:
    base64 = await stand.sdk.embeddings.create(model="minilm", input=["a b", "c"])  # the SDK's own default
    floats = await stand.sdk.embeddings.create(model="minilm", input=["a b", "c"], encoding_format="float")
    assert len(base64.data[0].embedding) == 8
    for one, other in zip(base64.data, floats.data, strict=True):
        np.testing.assert_array_equal(np.float32(one.embedding), np.float32(other.embedding))
    assert [one.index for one in floats.data] == [0, 1]
    assert floats.usage.prompt_tokens == 3
    assert (await stand.sdk.embeddings.create(model="minilm", input=[[1, 2, 3]])).usage.total_tokens == 3
    assert len((await stand.sdk.embeddings.create(model="minilm", input="a", dimensions=8)).data[0].embedding) == 8


async def test_each_embedder_answers_to_its_own_name_and_says_its_version(stand: Stand) -> None:
    for name, dimension, version in (("minilm", 8, "minilm"), ("e5", 16, "e5/3")):
        made = await stand.sdk.embeddings.with_raw_response.create(model=name, input="a")
        assert made.headers["x-flywheel-version"] == version
        answer = made.parse()
        assert (answer.model, len(answer.data[0].embedding)) == (name, dimension)
    parts = (await stand.http.get("/healthz")).json()
    assert (parts["embedding"]["model"], parts["embedding-e5"]["model"]) == ("hashing", "e5")


async def test_vectors_are_cut_and_normalised_again(stand: Stand) -> None:
    made = [await stand.sdk.embeddings.create(model="minilm", input="a b c d", dimensions=asked) for asked in (8, 4)]
    whole, short = (np.array(one.data[0].embedding) for one in made)
    np.testing.assert_allclose(short, whole[:4] / np.linalg.norm(whole[:4]), atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="8, 4") as caught:
        await stand.sdk.embeddings.create(model="minilm", input="a", dimensions=5)
    assert (caught.value.param, caught.value.code) == ("dimensions", "invalid_value")


async def test_the_models_prompts_stand_before_queries_and_documents(stand: Stand) -> None:
    texts = {"query": "ask one", "document": "found one", None: "one"}
    for input_type, whole in texts.items():
        made = await stand.sdk.embeddings.create(model="minilm", input="one", extra_body={"input_type": input_type})
        plain = await stand.sdk.embeddings.create(model="minilm", input=whole)
        assert made.data[0].embedding == plain.data[0].embedding
        assert made.usage.prompt_tokens == len(whole.split())
    with pytest.raises(openai.BadRequestError) as caught:
        await stand.sdk.embeddings.create(model="minilm", input="one", extra_body={"input_type": "passage"})
    assert caught.value.param == "input_type"


async def test_with_leave_to_truncate_a_long_input_is_read_as_far_as_it_goes(stand: Stand) -> None:
    made = await stand.sdk.embeddings.create(model="minilm", input=["a " * 99, "b"], extra_body={"truncate": True})
    assert made.usage.prompt_tokens == 33


async def test_an_answer_that_is_too_large_for_the_event_loop_is_the_same_json(stand: Stand) -> None:
    answered = await stand.http.post("/v1/embeddings", json={"model": "minilm", "input": ["x"] * 900})
    assert len(answered.content) > SMALL_BYTES
    assert answered.headers["content-type"] == "application/json"
    assert [row["index"] for row in answered.json()["data"]] == list(range(900))
    assert len({tuple(row["embedding"]) for row in answered.json()["data"]}) == 1


async def test_documents_are_ranked_best_first(stand: Stand) -> None:
    asked = {"model": "cross", "query": "read a file", "documents": ["sort", {"text": "read a file"}, "a file"]}
    answered = await stand.http.post("/v1/rerank", json={**asked, "top_n": 2, "return_documents": True})
    assert answered.headers["x-flywheel-version"] == "cross"
    said = answered.json()
    assert [(one["index"], one["document"]["text"]) for one in said["results"]] == [(1, "read a file"), (2, "a file")]
    assert said["results"][0]["relevance_score"] == pytest.approx(1)
    assert said["usage"]["total_tokens"] == 3 * (3 + 3) + 1 + 3 + 2
    assert len((await stand.http.post("/v1/rerank", json=asked)).json()["results"]) == 3
    long = {**asked, "documents": ["sort", "word " * 99]}
    refused = (await stand.http.post("/v1/rerank", json=long)).json()["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "documents[1]")
    assert (await stand.http.post("/v1/rerank", json={**long, "truncate": True})).status_code == 200
    assert (await stand.http.post("/v1/rerank", json={**asked, "model": "minilm"})).status_code == 400


async def test_bodies_are_bounded_all_together_and_each_gives_back_what_it_took(stand: Stand) -> None:
    arrive, come = asyncio.Event(), asyncio.Semaphore(0)

    async def slowly() -> AsyncIterator[bytes]:
        yield b'{"model": "minilm", "input": "' + b"a" * 4000
        come.release()
        await arrive.wait()
        yield b'"}'

    slow = [asyncio.create_task(stand.http.post("/v1/embeddings", content=slowly())) for _ in range(2)]
    for _ in slow:
        await come.acquire()
    body = {"model": "minilm", "input": "b" * 200}
    refused = await stand.http.post("/v1/embeddings", json=body)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    arrive.set()
    assert [(await one).status_code for one in slow] == [200, 200]
    for _ in range(60):  # more than fit at a time
        assert (await stand.http.post("/v1/embeddings", json=body)).status_code == 200


async def test_text_becomes_tokens_and_tokens_text_also_without_a_model(stand: Stand) -> None:
    for named in ({"model": "smol:triage"}, {}):
        made = await stand.http.post("/tokenize", json={**named, "prompt": "abc"})
        assert made.json()["tokens"] == [97, 98, 99]
        back = await stand.http.post("/detokenize", json={**named, "tokens": [97, 98, 99]})
        assert back.json() == {"prompt": "abc"}
    assert stand.engine.seen[0].adapter is not None
    assert stand.engine.seen[0].adapter.version == "triage/1"
    assert not any(row.prompt_tokens or row.completion_tokens for row in stand.usage.changed())


@pytest.mark.parametrize("names", [("queries", "documents"), ("text_1", "text_2")])
async def test_a_score_is_the_cosine_of_what_the_embedder_makes(stand: Stand, names: tuple[str, str]) -> None:
    query, documents = names
    response = await stand.http.post("/v1/score", json={"model": "minilm", query: "a b", documents: ["a b", "c"]})
    made = await embedder().embed(["a b", "a b", "c"])
    scores = [row["score"] for row in response.json()["data"]]
    np.testing.assert_allclose(scores, made.vectors[1:] @ made.vectors[0], atol=1e-6)
    assert scores[0] == pytest.approx(1)
    assert [row["index"] for row in response.json()["data"]] == [0, 1]
    assert response.json()["usage"]["prompt_tokens"] == 5
    pairs = await stand.http.post("/v1/score", json={"model": "minilm", query: ["c", "a b"], documents: ["c", "c"]})
    assert [row["score"] for row in pairs.json()["data"]] == pytest.approx([1, scores[1]])


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("POST", "/tokenize", b'{"model": "nope", "prompt": "a"}', 404, "model_not_found"),
        ("POST", "/tokenize", b'{"model": "minilm", "prompt": "a"}', 400, "model_not_supported"),
        ("POST", "/v1/score", b'{"model": "smol", "queries": "a", "documents": "b"}', 400, "model_not_supported"),
        ("POST", "/v1/score", b'{"model": "minilm", "queries": "a"}', 400, "invalid_value"),
        ("POST", "/v1/score", b'{"model": "minilm", "queries": "", "documents": "b"}', 400, "invalid_value"),
        ("POST", "/v1/score", b'{"model": "minilm", "queries": ["a", "b"], "documents": "c"}', 400, "invalid_value"),
        ("POST", "/v1/chat/completions", b'{"model": ', 400, "invalid_json"),
        ("POST", "/v1/chat/completions", b"[]", 400, "invalid_json"),
        ("POST", "/v1/chat/completions", json.dumps({**CHAT, "messages": "hi"}).encode(), 400, "invalid_value"),
        ("POST", "/v1/chat/completions", json.dumps({**CHAT, "model": "nope"}).encode(), 404, "model_not_found"),
        ("POST", "/v1/chat/completions", json.dumps({**CHAT, "model": "minilm"}).encode(), 400, "model_not_supported"),
        ("POST", "/v1/completions", json.dumps({"model": "smol"}).encode(), 400, "invalid_value"),
        ("POST", "/v1/embeddings", b'{"model": "minilm", "input": []}', 400, "invalid_value"),
        ("POST", "/v1/embeddings", b'{"model": "minilm", "input": "a", "dimensions": 3}', 400, "invalid_value"),
        ("POST", "/v1/embeddings", LONG_INPUT, 400, "context_length_exceeded"),
        ("POST", "/v1/embeddings", b'{"model": "smol", "input": "a"}', 400, "model_not_supported"),
        ("POST", "/v1/chat/completions", b" " * 5000, 413, "request_too_large"),
        ("POST", "/v1/nothing", b"{}", 404, "unknown_url"),
        ("GET", "/v1/chat/completions", b"", 405, "method_not_allowed"),
        ("POST", "/v1/collections/c/search", b'{"query": "q"}', 404, "collection_not_found"),
        ("POST", "/v1/collections/c/search", b'{"query": "q", "k": 0}', 400, "invalid_value"),
        ("POST", "/v1/collections/c/documents", b'{"documents": [{"id": "1"}]}', 400, "invalid_value"),
    ],
)  # fmt: skip
async def test_bad_requests_are_4xx_in_openais_shape(
    stand: Stand, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    response = await stand.http.request(method, path, content=content, headers={"x-request-id": "mine-1"})
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert response.headers["x-request-id"] == "mine-1"
    assert stand.engine.seen == []


async def test_a_body_without_a_length_is_bounded_too(stand: Stand) -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000

    response = await stand.http.post("/v1/chat/completions", content=endless())
    assert response.status_code == 413


async def test_a_request_gets_an_id_and_of_its_own_what_is_fit_for_a_log(stand: Stand) -> None:
    async def echoed(*asked: str) -> str:
        answer = await stand.http.get("/v1/models", headers=[("x-request-id", each) for each in asked])
        return answer.headers["x-request-id"]

    assert await echoed() != await echoed()
    assert await echoed("mine:1.a_b-c") == "mine:1.a_b-c"
    assert await echoed("a b\tc\x1b[31m") == "a_b_c__31m"
    assert await echoed("x" * 999) == "x" * 128


async def test_one_who_hangs_up_stops_the_generation(stand: Stand) -> None:
    stand.engine.pause_s = 0.05
    request = asyncio.create_task(stand.http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    await asyncio.sleep(0.12)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    await asyncio.sleep(0.02)
    assert stand.engine.stopped_early == 1


async def test_a_stream_that_takes_too_long_says_so(stand: Stand) -> None:
    stand.engine.pause_s = 0.15  # for each of ten words
    long = {**CHAT, "messages": [{"role": "user", "content": "word " * 10}]}
    with pytest.raises(openai.APIError, match="longer than the gateway waits") as caught:
        async for _ in await stand.sdk.chat.completions.create(**long, stream=True):
            pass
    assert caught.value.code == "timeout"


async def test_a_stream_that_falls_silent_ends_before_its_time(stand: Stand) -> None:
    stand.engine.pause_s = 0.3  # more than `idle_timeout_s`, less than `request_timeout_s`
    with pytest.raises(openai.APIError) as caught:
        async for _ in await stand.sdk.chat.completions.create(**CHAT, stream=True):
            pass
    assert (caught.value.code, "nothing for 0.2 s" in str(caught.value)) == ("timeout", True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/v1/score", "/tokenize"])
async def test_a_name_that_nothing_can_have_is_not_repeated(stand: Stand, path: str) -> None:
    asked = {**CHAT, "model": "x" * 3000, "input": "x", "queries": "x", "documents": "x"}
    answer = await stand.http.post(path, json=asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert len(answer.text) < 300


async def test_health_tells_when_a_part_is_gone(stand: Stand) -> None:
    stand.engine.fault = CapacityError("The engine stopped.")
    response = await stand.http.get("/healthz")
    assert (response.status_code, response.json()["status"]) == (503, "unavailable")
    assert response.json()["llm"]["error"]["message"] == "The engine stopped."


async def test_metrics_count_requests_and_tokens_with_bounded_labels(stand: Stand) -> None:
    await stand.sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"})
    await stand.http.post("/v1/chat/completions", json={**CHAT, "model": "made-up-name"})
    await stand.http.get("/made-up-path")
    text = (await stand.http.get("/metrics")).text
    assert 'requests_total{model="smol:triage/1",route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'requests_total{model="unmatched",route="/v1/chat/completions",status="404"} 1.0' in text
    assert 'requests_total{model="unmatched",route="unmatched",status="404"} 1.0' in text
    assert 'tokens_total{direction="completion",model="smol:triage/1"} 4.0' in text
    assert "made-up" not in text


async def test_a_split_alias_keeps_a_user_on_one_side_and_counts_what_each_side_answered(stand: Stand) -> None:
    stand.registry.push(Snapshot.of_routes(TWO, {"triage@champion": {1: 0.5, 2: 0.5}}, number=3))
    async with asyncio.timeout(0.9):
        while stand.feed.current.number != 3:
            await asyncio.sleep(0.005)

    async def version(user: str) -> str | None:
        answer = await stand.sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"}, user=user)
        return answer.system_fingerprint

    found = {user: await version(user) for user in map(str, range(20))}
    assert set(found.values()) == {"triage/1", "triage/2"}
    assert found == {user: await version(user) for user in found}
    counted = {row.version_id: row.requests for row in stand.usage.changed()}
    assert counted == {side: 2 * [*found.values()].count(side) for side in ("triage/1", "triage/2")}
    assert all(row.completion_tokens and not row.failures for row in stand.usage.changed())


async def test_who_asks_too_much_at_once_is_told_429_and_others_still_have_their_turn(stand: Stand) -> None:
    stand.engine.pause_s = 0.05

    async def ask(user: str) -> int:
        response = await stand.http.post("/v1/chat/completions", json={**CHAT, "user": user, "stream": True})
        if response.status_code == 429:
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
            assert int(response.headers["retry-after"]) >= 1
        return response.status_code

    flood = [asyncio.create_task(ask("greedy")) for _ in range(12)]
    await asyncio.sleep(0.02)
    assert await ask("modest") == 200
    assert sorted([await one for one in flood]) == [200] * 6 + [429] * 6


async def test_a_turn_comes_back_whatever_becomes_of_its_request(stand: Stand) -> None:
    for fault, breaks_after in ((CapacityError("gone"), None), (CapacityError("gone"), 1), (None, 1), (None, 0)):
        stand.engine.fault, stand.engine.breaks_after = fault, breaks_after
        for stream in (False, True):
            await stand.http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert (stand.admission.running, stand.admission.waiting) == (0, 0)
