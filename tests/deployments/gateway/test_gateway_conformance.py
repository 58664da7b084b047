"""What the official client makes of every refusal, and of streams that end badly: over real sockets, on the fakes.

What needs the engine: tests/deployments/test_serve_conformance.py.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import CapacityError, DependencyError, FlywheelError, RateLimitError, RequestError
from deployments.gateway.config import GatewayConfig
from tests.loopback import KeyedGateway, keyed_gateway

CONFIG = GatewayConfig(max_request_bytes=4096, request_timeout_s=0.4, body_timeout_s=0.3)
HELLO: list[Any] = [{"role": "user", "content": "one two three"}]
CHAT: dict[str, Any] = {"model": "smol", "messages": HELLO}


@pytest.fixture
async def stand() -> AsyncIterator[KeyedGateway]:
    async with keyed_gateway(CONFIG) as gateway:
        yield gateway


def lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The gateway's own; the client and the server in this process log too."""
    return [record for record in caplog.records if record.name.startswith("deployments.gateway")]


@dataclass(frozen=True)
class Refusal:
    """What a client is told, and what the SDK raises for it."""

    raised: type[openai.APIStatusError]
    status: int
    code: str | None
    param: str | None = None
    type: str = "invalid_request_error"
    retry_after: bool = False

    def must_be(self, error: openai.APIStatusError) -> None:
        assert type(error) is self.raised
        found = (error.status_code, error.type, error.param, error.code)
        assert found == (self.status, self.type, self.param, self.code)
        assert isinstance(error.body, dict)
        assert set(error.body) == {"message", "type", "param", "code"}
        assert error.body["message"]
        assert error.response.headers["x-request-id"] == error.request_id
        assert ("retry-after" in error.response.headers) is self.retry_after
        if self.retry_after:
            assert int(error.response.headers["retry-after"]) >= 1


SERVER = "server_error"
FAULTS: dict[str, tuple[Exception, Refusal]] = {
    "context": (
        RequestError("Too long.", param="messages", code="context_length_exceeded"),
        Refusal(openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    ),
    "misfit": (
        RequestError("Too large a rank.", status=422, param="model", code="adapter_rank_too_large"),
        Refusal(openai.UnprocessableEntityError, 422, "adapter_rank_too_large", "model"),
    ),
    "queue": (
        RateLimitError("Much waits.", retry_after_s=1.2),
        Refusal(openai.RateLimitError, 429, "rate_limit_exceeded", type="rate_limit_error", retry_after=True),
    ),
    "dead": (
        CapacityError("Being replaced.", retry_after_s=30),
        Refusal(openai.InternalServerError, 503, "overloaded", type=SERVER, retry_after=True),
    ),
    "away": (
        DependencyError("Cannot be reached."),
        Refusal(openai.InternalServerError, 503, "dependency_unavailable", type=SERVER, retry_after=True),
    ),
    "gone": (
        DependencyError("The adapter's files are gone.", retryable=False),
        Refusal(openai.InternalServerError, 503, "dependency_unavailable", type=SERVER),
    ),
    "bug": (KeyError("/secret/path"), Refusal(openai.InternalServerError, 500, "internal_error", type=SERVER)),
}
"""What the engine raises → what the client is told."""


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_a_typed_error_before_the_first_byte(
    stand: KeyedGateway, name: str, stream: bool
) -> None:
    fault, refusal = FAULTS[name]
    stand.engine.fault = fault  # type: ignore[assignment]
    sdk = await stand.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.chat.completions.create(**CHAT, stream=stream)
    refusal.must_be(caught.value)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ({"messages": "hi"}, Refusal(openai.BadRequestError, 400, "invalid_value", "messages")),
        ({"messages": []}, Refusal(openai.BadRequestError, 400, "invalid_value", "messages")),
        ({"n": 129}, Refusal(openai.BadRequestError, 400, "invalid_value", "n")),
        ({"stream": "yes"}, Refusal(openai.BadRequestError, 400, "invalid_value", "stream")),
        ({"model": None}, Refusal(openai.BadRequestError, 400, "invalid_value", "model")),
        ({"model": "gpt-4o"}, Refusal(openai.NotFoundError, 404, "model_not_found", "model")),
        ({"model": "smol:nobody"}, Refusal(openai.NotFoundError, 404, "model_not_found", "model")),
        ({"model": "smol:triage@nobody"}, Refusal(openai.NotFoundError, 404, "model_not_found", "model")),
        ({"model": "smol:triage/9"}, Refusal(openai.NotFoundError, 404, "model_not_found", "model")),
        ({"model": "minilm"}, Refusal(openai.BadRequestError, 400, "model_not_supported", "model")),
        ({"messages": [{"content": "x" * 9000}]}, Refusal(openai.APIStatusError, 413, "request_too_large")),
    ],
)
async def test_what_the_gateway_refuses_never_reaches_the_engine(
    stand: KeyedGateway, body: dict[str, Any], refusal: Refusal
) -> None:
    sdk = await stand.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.chat.completions.create(**{**CHAT, **body})
    refusal.must_be(caught.value)
    assert stand.engine.seen == []


async def test_who_may_not_is_401_or_403(stand: KeyedGateway) -> None:
    unknown = Refusal(openai.AuthenticationError, 401, "invalid_api_key")
    role = Refusal(openai.PermissionDeniedError, 403, "role_not_allowed")
    model = Refusal(openai.PermissionDeniedError, 403, "model_not_allowed", "model")
    for sdk, refusal in (
        (stand.sdk("fw-wrong"), unknown),
        (await stand.client("index"), role),
        (await stand.client(models=("smol:team-*",)), model),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await sdk.chat.completions.create(**CHAT)
        refusal.must_be(caught.value)


async def test_an_unknown_route_is_404_and_a_wrong_method_405(stand: KeyedGateway) -> None:
    sdk = await stand.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.post("/nothing", body={}, cast_to=object)
    Refusal(openai.NotFoundError, 404, "unknown_url").must_be(caught.value)
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.get("/chat/completions", cast_to=object)
    Refusal(openai.APIStatusError, 405, "method_not_allowed").must_be(caught.value)
    assert caught.value.response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"rpm": 1}, "rate_limit_exceeded"),
        ({"tpm": 300}, "rate_limit_exceeded"),
        ({"budget_tokens": 300, "budget_period": "day"}, "insufficient_quota"),
    ],
)
async def test_a_key_that_is_used_up_is_429_with_when_to_ask_again(
    stand: KeyedGateway, limits: dict[str, Any], code: str
) -> None:
    stand.engine.pause_s = 0.05  # the first still holds what it has reserved when the second comes
    sdk = await stand.client(**limits)
    first = await sdk.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.chat.completions.create(**CHAT)
    Refusal(openai.RateLimitError, 429, code, type="rate_limit_error", retry_after=True).must_be(caught.value)
    stand.engine.pause_s = 0
    assert [chunk async for chunk in first]


async def test_an_answer_that_takes_too_long_is_408_and_is_not_asked_for_again(stand: KeyedGateway) -> None:
    stand.engine.pause_s = 0.5
    sdk = (await stand.client()).with_options(max_retries=2)
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.chat.completions.create(**CHAT, stream=True)
    Refusal(openai.APIStatusError, 408, "timeout", type="timeout_error").must_be(caught.value)
    assert len(stand.engine.seen) == 1


async def test_a_stream_that_takes_too_long_says_so_in_its_last_event(stand: KeyedGateway) -> None:
    stand.engine.pause_s = 0.15
    sdk, got = await stand.client(), 0
    with pytest.raises(openai.APIError) as caught:  # noqa: PT012
        async for _ in await sdk.chat.completions.create(**CHAT, stream=True):
            got += 1
    assert (caught.value.code, caught.value.type) == ("timeout", "timeout_error")
    assert 1 <= got < 4
    assert stand.engine.stopped_early == 1


@pytest.mark.parametrize(
    "fault", [CapacityError("gone"), DependencyError("gone"), None], ids=["503", "503d", "silence"]
)
async def test_a_stream_that_breaks_ends_with_an_error_event_and_done(
    stand: KeyedGateway, fault: FlywheelError | None
) -> None:
    stand.engine.fault, stand.engine.breaks_after = fault, 2
    sdk = await stand.client()
    async with sdk.chat.completions.with_streaming_response.create(**CHAT, stream=True) as response:
        assert response.status_code == 200
        events = [line async for line in response.iter_lines() if line]
    assert events[-1] == "data: [DONE]"
    assert '"error":' in events[-2]
    assert '"type":"server_error"' in events[-2]


async def test_a_body_that_does_not_come_is_408_and_holds_nothing(stand: KeyedGateway) -> None:
    key = (await stand.client(rpm=1)).api_key
    host, port = stand.url.removeprefix("http://").split(":")
    for sent in (b"", b'{"model": '):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\nx-request-id: slow\r\n"
            b"authorization: Bearer " + key.encode() + b"\r\n\r\n" + sent
        )
        begun = time.monotonic()
        answer = (await reader.read()).decode()  # to the end: the gateway closes the connection
        assert CONFIG.body_timeout_s <= time.monotonic() - begun
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        assert head.startswith("HTTP/1.1 408")
        assert "x-request-id: slow" in head
        assert '"code":"body_timeout"' in body
    # Neither has used up the one request a minute that the key has.
    assert (await stand.sdk(key).chat.completions.create(**CHAT)).choices


async def test_one_who_leaves_before_its_body_has_come_is_no_fault_of_ours(
    stand: KeyedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deployments.gateway")
    key = (await stand.client()).api_key
    host, port = stand.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n"
        b"authorization: Bearer " + key.encode() + b"\r\n\r\n{"
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    async with asyncio.timeout(0.2):
        while not lines(caplog):
            await asyncio.sleep(0.01)
    assert [(record.levelname, record.request["status"]) for record in lines(caplog)] == [("INFO", 499)]  # type: ignore[attr-defined]


async def test_browsers_of_other_origins_are_let_in_nowhere(stand: KeyedGateway) -> None:
    key = (await stand.client()).api_key
    origin = {"origin": "https://elsewhere.example", "authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=stand.url, headers=origin) as http:
        for path in ("/v1/chat/completions", "/v1/models", "/healthz", "/metrics", "/v1/nothing"):
            asked = await http.options(path, headers={"access-control-request-method": "POST"})
            assert asked.status_code in (404, 405)
            for answer in (asked, await http.get(path), await http.post(path, json=CHAT)):
                assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_each_request_leaves_one_line_that_says_what_became_of_it(
    stand: KeyedGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "deployments.gateway.scope")
    sdk = await stand.client()
    named = {"x-request-id": "mine-1"}
    await sdk.chat.completions.create(**{**CHAT, "model": "smol:triage"}, extra_headers=named)
    async for _ in await sdk.chat.completions.create(**CHAT, stream=True):
        pass
    await sdk.embeddings.create(model="minilm", input=["a b", "c"])
    with pytest.raises(openai.NotFoundError):
        await sdk.chat.completions.create(**{**CHAT, "model": "made-up"})
    facts: list[dict[str, Any]] = [record.request for record in lines(caplog)]  # type: ignore[attr-defined]
    assert [
        (
            fact["route"],
            fact["status"],
            fact["model"],
            fact["version"],
            fact["prompt_tokens"],
            fact["completion_tokens"],
        )
        for fact in facts
    ] == [
        ("/v1/chat/completions", 200, "smol:triage/1", "triage/1", 3, 4),
        ("/v1/chat/completions", 200, "smol", "smol", 3, 4),
        ("/v1/embeddings", 200, "minilm", "minilm", 3, 0),
        ("/v1/chat/completions", 404, "unmatched", "-", 0, 0),
    ]
    assert facts[0]["request_id"] == "mine-1"
    assert {fact["key"] for fact in facts} == {next(iter(stand.registry.current.keys))}
    said = lines(caplog)[0].getMessage()
    assert "status=200" in said
    assert "request_id=mine-1" in said
    assert not any(sdk.api_key in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "given", [[], "", [""], [[]], ["a", 3], ["a", [1]], [[1, -1]], [1.5], [True], {"a": 1}, None], ids=repr
)
async def test_an_input_that_cannot_be_embedded_is_400(stand: KeyedGateway, given: Any) -> None:
    sdk = await stand.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.embeddings.create(model="minilm", input=given)
    Refusal(openai.BadRequestError, 400, "invalid_value", "input").must_be(caught.value)


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        ({"encoding_format": "int8"}, Refusal(openai.BadRequestError, 400, "invalid_value", "encoding_format")),
        ({"input": "word " * 99}, Refusal(openai.BadRequestError, 400, "context_length_exceeded", "input[0]")),
        ({"input": [[7] * 99]}, Refusal(openai.BadRequestError, 400, "context_length_exceeded", "input[0]")),
        ({"model": "smol"}, Refusal(openai.BadRequestError, 400, "model_not_supported", "model")),
    ],
)
async def test_an_embedding_that_cannot_be_made_is_400(
    stand: KeyedGateway, asked: dict[str, Any], refusal: Refusal
) -> None:
    sdk = await stand.client()
    with pytest.raises(openai.APIStatusError) as caught:
        await sdk.embeddings.create(**{"model": "minilm", "input": "a", **asked})
    refusal.must_be(caught.value)
