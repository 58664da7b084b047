"""The way of an answer from a replica to the gateway, over real sockets on loopback; the engine is the shipped fake."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from cluster.errors import CapacityError, DependencyError, FlywheelError, RequestError
from cluster.signing import SignatureError
from deployments.gateway.echo import EchoEngine
from deployments.llm import wire
from deployments.llm.protocol import Adapter, Answer, Generation
from deployments.llm.wire import Address, Outlet, SilentReplica

HOST = "127.0.0.1"
ADAPTER = Adapter("triage/3", "/versions/triage/3", "0" * 64)


def chat(content: str = "one two", *, stream: bool = False, adapter: Adapter | None = None) -> Generation:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "stream": stream}
    return Generation("chat", body, "wire-test", adapter)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine(pause_s=0.01)


@pytest.fixture
async def address(engine: EchoEngine) -> AsyncIterator[Address]:
    outlet = Outlet(engine.generate, host=HOST)
    yield await outlet.start()
    await outlet.stop()


async def all_of(http: aiohttp.ClientSession, address: Address, generation: Generation) -> list[Answer]:
    return [answer async for answer in wire.answers(http, address, generation)]


async def test_an_answer_arrives_as_the_engine_gave_it(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    for generation in (chat(adapter=ADAPTER), chat(stream=True)):
        arrived = await all_of(http, address, generation)
        given = [answer async for answer in engine.generate(generation)]
        assert engine.seen[-2] == generation
        if generation.body["stream"]:
            assert b"".join(piece for piece in arrived if isinstance(piece, bytes)) == b"".join(given)  # type: ignore[arg-type]
        else:
            assert arrived == given


@pytest.mark.parametrize("text", ["Hé 😀", "half a pair \ud83d", '"quoted" \\ \n\u2028', "\x00"])
async def test_what_a_client_may_write_in_json_arrives_at_the_engine(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine, text: str
) -> None:
    await all_of(http, address, replace(chat(text), kind="chat"))
    assert engine.seen[-1].body["messages"][0]["content"] == text


ERRORS = [
    RequestError("too long", status=413, param="messages", code="c", hint="less"),
    CapacityError("full", retry_after_s=7.5),
    DependencyError("gone", hint="look", retryable=False),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_arrives_as_it_was_raised(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine, error: FlywheelError
) -> None:
    engine.fault = error
    with pytest.raises(type(error)) as caught:
        await all_of(http, address, chat(stream=True))
    assert vars(caught.value) == vars(error)


async def test_a_subclass_arrives_as_its_nearest_known_kind(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    engine.fault = SignatureError("adapter triage/3", "unsigned", "nobody vouches for it")
    with pytest.raises(DependencyError, match="nobody vouches for it") as caught:
        await all_of(http, address, chat())
    assert not caught.value.retryable


async def test_an_unforeseen_error_says_nothing_of_itself(http: aiohttp.ClientSession) -> None:
    async def generate(_: Generation) -> AsyncIterator[Answer]:
        raise KeyError("/secret/path")
        yield b""

    outlet = Outlet(generate, host=HOST)
    address = await outlet.start()
    try:
        with pytest.raises(FlywheelError) as caught:
            await all_of(http, address, chat())
    finally:
        await outlet.stop()
    assert caught.value.status == 500
    assert "secret" not in caught.value.message


async def test_a_fault_in_mid_stream_is_the_last_event(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    engine.fault, engine.breaks_after = CapacityError("the engine died"), 2
    pieces = await all_of(http, address, chat(stream=True))
    assert b'"error": {"message": "the engine died", "code": 503' in pieces[-1]  # type: ignore[operator]


async def test_who_hangs_up_stops_the_generation(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    async with aclosing(wire.answers(http, address, chat("word " * 500, stream=True))) as answers:
        await anext(answers)
    async with asyncio.timeout(1):
        while not engine.stopped_early:
            await asyncio.sleep(0.01)


async def test_nobody_is_answered_without_the_secret(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    with pytest.raises(CapacityError):
        await all_of(http, Address(address.url, "guessed"), chat())
    async with http.get(f"{address.url}/generate") as response:
        assert response.status == 401
    assert not engine.seen


async def test_a_replica_that_is_not_there_is_being_replaced(http: aiohttp.ClientSession) -> None:
    outlet = Outlet(EchoEngine().generate, host=HOST)
    address = await outlet.start()
    await outlet.stop()
    with pytest.raises(CapacityError, match="replaced"):
        await all_of(http, address, chat())


REPLICA = """
import asyncio
from deployments.gateway.echo import EchoEngine
from deployments.llm.wire import Outlet

async def main():
    address = await Outlet(EchoEngine(pause_s=0.05).generate, host="127.0.0.1").start()
    print(address.url, address.secret, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_a_replica_that_is_killed_in_mid_stream_is_not_a_quiet_end(http: aiohttp.ClientSession) -> None:
    with subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        address = Address(*replica.stdout.readline().split())
        answers = wire.answers(http, address, chat("word " * 500, stream=True))
        assert await anext(answers)
        os.kill(replica.pid, signal.SIGKILL)
        with pytest.raises(CapacityError):
            await asyncio.wait_for(_to_the_end(answers), timeout=2)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_replica_that_hangs_is_given_up_before_and_after_its_first_word(
    http: aiohttp.ClientSession, *, begun: bool
) -> None:
    with subprocess.Popen([sys.executable, "-c", REPLICA], stdout=subprocess.PIPE, text=True) as replica:
        assert replica.stdout is not None
        address = Address(*replica.stdout.readline().split())
        answers = wire.answers(http, address, chat("word " * 500, stream=True), quiet_s=0.2, alive_wait_s=0.2)
        try:
            if begun:
                assert await anext(answers)
            os.kill(replica.pid, signal.SIGSTOP)
            with pytest.raises(SilentReplica) as caught:
                await asyncio.wait_for(_to_the_end(answers), timeout=3)
        finally:
            os.kill(replica.pid, signal.SIGKILL)
    assert isinstance(caught.value.told, CapacityError)


async def test_an_engine_that_thinks_for_long_is_not_given_up(
    http: aiohttp.ClientSession, address: Address, engine: EchoEngine
) -> None:
    engine.pause_s = 0.3
    answers = wire.answers(http, address, chat("one", stream=True), quiet_s=0.05, alive_wait_s=0.05)
    assert b"[DONE]" in b"".join([piece async for piece in answers if isinstance(piece, bytes)])


async def _to_the_end(answers: AsyncIterator[Answer]) -> None:
    async for _ in answers:
        pass
