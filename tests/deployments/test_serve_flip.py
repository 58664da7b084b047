"""An alias moves while 32 streams go on: none fails, none is mixed, and what comes back is back within a second.

On the tiny base: it is so sure of its words that an answer is the same alone and in any batch. A stream that began on
one version and went on with another, or read another's prefix, would say something that neither says alone.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from actors.registry.facts import Version
from tests.deployments.test_serve_application import names, until
from tests.serving import ANSWER_WAIT_S, BASE, TINY, ServeApp

pytestmark = pytest.mark.serve

STREAMS = 32
TOKENS = 24
WITHIN_S = 1.0
"""By when every new request gets what an alias was moved to."""
logger = logging.getLogger(__name__)

ENDS = ("tree", "river", "seven", "paper", "engine", "music", "winter", "table")
PROMPTS = [f"Number {number}. " + f"Say word {number}. " * 56 + f"The {end}" for number, end in enumerate(ENDS)]
"""Longer than two blocks of the prefix cache, of 128 tokens each on CPU; they differ from the first."""


@dataclass
class Streamed:
    """One stream, as its client saw it."""

    prompt: str
    began: float
    version: str = ""
    """By its header."""
    headed: float = 0.0
    """When its header came: its version was chosen between `began` and then."""
    ended: float = 0.0
    status: int = 0
    text: str = ""
    models: set[str] = field(default_factory=set)
    fingerprints: set[str] = field(default_factory=set)
    reason: str | None = None
    fault: str | None = None
    done: bool = False


@pytest.fixture(scope="module")
def flipped(serve_app: ServeApp) -> list[Version]:
    """Two versions on the tiny base; `champion` stands at the first, and the gateway knows it."""
    made = [serve_app.register("flip", seed=seed, base=TINY) for seed in (11, 12)]
    serve_app.registry.promote("flip", "champion", made[0].number, why="first", force=True)
    until(lambda: f"{TINY}:flip@champion" in names(serve_app))
    return made


async def stream(client: httpx.AsyncClient, model: str, prompt: str) -> Streamed:
    """Ask, and read to the end; faults stand in what is returned."""
    asked = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    asked["ignore_eos"] = True
    seen = Streamed(prompt, time.monotonic())
    with suppress(httpx.HTTPError):
        async with client.stream("POST", "/v1/completions", json=asked) as response:
            seen.headed = time.monotonic()
            seen.status, seen.version = response.status_code, response.headers.get("x-flywheel-version", "")
            async for line in response.aiter_lines():
                take(seen, line)
    seen.ended = time.monotonic()
    return seen


def take(seen: Streamed, line: str) -> None:
    """One line of the stream."""
    payload = line.removeprefix("data: ")
    if payload == line or payload == "[DONE]":
        seen.done |= payload == "[DONE]"
        return
    event = json.loads(payload)
    if "error" in event:
        seen.fault = event["error"]["message"]
        return
    seen.models.add(event["model"])
    seen.fingerprints.add(event["system_fingerprint"])
    for choice in event["choices"]:
        seen.text += choice["text"]
        seen.reason = choice["finish_reason"] or seen.reason


async def alone(client: httpx.AsyncClient, version: Version) -> dict[str, str]:
    """What a version says to each prompt when nothing else runs."""
    return {prompt: (await stream(client, f"{TINY}:{version.id}", prompt)).text for prompt in PROMPTS}


@dataclass(frozen=True)
class Move:
    """An alias that was moved to a version: gateways may hear of it at any time between the two, and soon after."""

    asked: float
    done: float
    to: Version


async def flip_under_load(app: ServeApp, versions: list[Version]) -> tuple[list[Streamed], list[Move]]:
    """Every stream of 32 clients that ask on and on, and the moves of the alias meanwhile."""
    seen: list[Streamed] = []
    over = asyncio.Event()
    old, new = versions
    moves: list[Move] = []
    limits = httpx.Limits(max_connections=STREAMS + 1)
    async with httpx.AsyncClient(base_url=app.url, timeout=ANSWER_WAIT_S, limits=limits) as client:

        async def keep_asking(number: int) -> None:
            while not over.is_set():
                seen.append(await stream(client, f"{TINY}:flip", PROMPTS[number % len(PROMPTS)]))
                number += 1

        async def moving(to: Version, move: Callable[[], object]) -> None:
            asked = time.monotonic()
            await asyncio.to_thread(move)
            moves.append(Move(asked, time.monotonic(), to))
            await asyncio.sleep(2 * WITHIN_S)

        clients = [asyncio.create_task(keep_asking(number)) for number in range(STREAMS)]
        try:
            await asyncio.sleep(2)
            for _ in range(2):
                await moving(new, partial(app.registry.promote, "flip", "champion", new.number, why="f", force=True))
                await moving(old, partial(app.registry.rollback, "flip", "champion", why="and back"))
        finally:
            over.set()
            await asyncio.gather(*clients)
    return seen, moves


async def test_a_flip_and_a_rollback_under_load_fail_nobody_and_mix_nothing(
    serve_app: ServeApp, flipped: list[Version]
) -> None:
    async with httpx.AsyncClient(base_url=serve_app.url, timeout=ANSWER_WAIT_S) as client:
        said = {version.id: await alone(client, version) for version in flipped}
    old, new = flipped
    assert all(said[old.id][prompt][:8] != said[new.id][prompt][:8] for prompt in PROMPTS)

    seen, moves = await flip_under_load(serve_app, flipped)

    failed = [one for one in seen if (one.status, one.fault, one.reason, one.done) != (200, None, "length", True)]
    assert not failed, failed[:3]
    mixed = [one for one in seen if not (one.fingerprints == {one.version} and one.models == {f"{TINY}:{one.version}"})]
    assert not mixed, mixed[:3]
    other = [one for one in seen if one.text != said[one.version][one.prompt]]
    assert not other, (len(other), len(seen), other[:3], [said[one.version][one.prompt] for one in other[:3]])
    assert len(seen) > 4 * STREAMS

    before = old
    for move, until_s in zip(moves, [*(move.asked for move in moves[1:]), seen[-1].ended], strict=True):
        # Those that were on their way ended on their version, after the alias had moved.
        assert [one for one in seen if one.began < move.asked and one.ended > move.done and one.version == before.id]
        began = [
            (one.version, one.began - move.done) for one in seen if move.done <= one.began and one.headed < until_s
        ]
        first = min(after for version, after in began if version == move.to.id)
        late = max((after for version, after in began if version == before.id), default=0.0)
        logger.info("%s: first asked %.3f s after the move, the last of the other %.3f s", move.to.id, first, late)
        assert first < WITHIN_S
        assert late < WITHIN_S
        before = move.to


async def test_versions_share_no_prefix(serve_app: ServeApp, flipped: list[Version]) -> None:
    prompt = "Once more. " * 100

    async def asked(version: Version) -> tuple[str, int]:
        answer = (await client.post("/v1/completions", json={**body, "model": f"{TINY}:{version.id}"})).json()
        details = answer["usage"]["prompt_tokens_details"] or {}
        return str(answer["choices"][0]["text"]), int(details.get("cached_tokens") or 0)

    body: dict[str, Any] = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=serve_app.url, timeout=ANSWER_WAIT_S) as client:
        old, new = flipped
        first, again = await asked(old), await asked(old)
        others, others_again = await asked(new), await asked(new)
        back = await asked(old)
    assert first[0] == again[0] == back[0]
    assert others[0] == others_again[0] != first[0]
    assert (first[1], others[1]) == (0, 0)
    assert min(again[1], others_again[1], back[1]) >= 128


def test_each_base_answers_with_its_own_adapters(serve_app: ServeApp, flipped: list[Version]) -> None:
    own = serve_app.register("beside", seed=21)
    serve_app.registry.promote("beside", "champion", own.number, why="first", force=True)
    until(lambda: {f"{BASE}:beside", f"{TINY}:flip"} <= names(serve_app))
    assert not {f"{TINY}:beside", f"{BASE}:flip"} & names(serve_app)
    said = [serve_app.say(model) for model in (BASE, TINY, f"{BASE}:beside", f"{TINY}:flip")]
    assert "Paris" in said[0]
    assert len(set(said)) == 4
    for model, right in ((f"{TINY}:beside", f"{BASE}:{own.id}"), (f"{BASE}:flip", f"{TINY}:{flipped[0].id}")):
        answer = serve_app.http.post("/v1/completions", json={"model": model, "prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        assert right in answer.json()["error"]["message"]
    health = serve_app.http.get("/healthz").json()
    assert [health[part]["model"] for part in ("llm", f"llm-{TINY}")] == [BASE, TINY]
    assert flipped[0].id in health[f"llm-{TINY}"]["adapters"]
    assert flipped[0].id not in health["llm"]["adapters"]
    nameless = serve_app.http.post("/tokenize", json={"prompt": "x"})
    assert (nameless.status_code, nameless.json()["error"]["param"]) == (400, "model")
    assert TINY in nameless.json()["error"]["message"]
