"""Load on an OpenAI server: so many streams at once, each asking again as soon as it is answered.

What is kept of an answer is when its parts arrived. Knows no engine and no server but its URL.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

_WORDS: Final = ("river", "stone", "window", "letter", "garden", "engine", "winter", "paper", "silver", "mountain")
_PATIENCE_S: Final = 300.0


@dataclass(frozen=True)
class Ask:
    """One request: a user's message, and how many tokens to answer it with, no more and no less."""

    prompt: str
    tokens: int
    model: str | None = None
    """Unset: the model that the server is known for."""

    def body(self, model: str) -> dict[str, Any]:
        """What is sent. `ignore_eos` is vLLM's; without it answers differ in length, and so does the work."""
        return {
            "model": self.model or model,
            "messages": [{"role": "user", "content": self.prompt}],
            "max_tokens": self.tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True)
class Answer:
    """When a request was sent and when the parts of its text arrived, by this process's clock."""

    sent: float
    arrivals: tuple[float, ...] = ()
    tokens: int = 0
    prompt_tokens: int = 0
    fault: str | None = None
    """Why it does not count: refused, broken off, or ended without saying so."""


@dataclass(frozen=True)
class Load:
    """All answers of one turn. Figures are of those without a fault."""

    wall_s: float
    answers: tuple[Answer, ...]

    @property
    def faults(self) -> list[str]:
        return [answer.fault for answer in self.answers if answer.fault]

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self._good)

    @property
    def prompt_tokens(self) -> int:
        return sum(answer.prompt_tokens for answer in self._good)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens by the clock, from the first request to the last answer."""
        return self.tokens / self.wall_s

    def first_token_ms(self, share: float) -> float:
        """What `share` of the requests did not wait longer than for their first token."""
        return 1e3 * percentile([answer.arrivals[0] - answer.sent for answer in self._good], share)

    def between_tokens_ms(self, share: float) -> float:
        """What `share` of the pauses within answers were not longer than. Parts that came together have none."""
        pauses = [
            later - earlier
            for answer in self._good
            for earlier, later in zip(answer.arrivals, answer.arrivals[1:], strict=False)
        ]
        return 1e3 * percentile(pauses, share)

    @property
    def _good(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.fault is None]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values are not above; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def prompts(number: int, *, words: int, seed: int) -> list[str]:
    """`number` messages, reproducible; they differ from their first word on, so that no cache helps."""
    chance = random.Random(seed)
    return [
        f"{seed}-{each} Continue this list: " + " ".join(chance.choice(_WORDS) for _ in range(words))
        for each in range(number)
    ]


async def drive(url: str, model: str, asks: Sequence[Ask], *, streams: int, key: str | None = None) -> Load:
    """Ask all of `asks`, `streams` at once; nothing that the server does raises. Answers stand as they ended."""
    waiting = iter(asks)
    answers: list[Answer] = []
    # `trust_env`: a proxy of the machine's is not for loopback.
    async with httpx.AsyncClient(
        base_url=url,
        headers=authorization(key),
        timeout=_PATIENCE_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    ) as client:
        began = time.perf_counter()
        await asyncio.gather(*(_stream(client, model, waiting, answers) for _ in range(streams)))
        return Load(time.perf_counter() - began, tuple(answers))


def authorization(key: str | None) -> dict[str, str]:
    """The header that an API key is sent in."""
    return {"authorization": f"Bearer {key}"} if key else {}


async def _stream(client: httpx.AsyncClient, model: str, waiting: Iterator[Ask], answers: list[Answer]) -> None:
    for ask in waiting:
        answers.append(await answer_to(client, ask.body(model)))


async def answer_to(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """One streamed request, timed."""
    parts = _Parts()
    sent = time.perf_counter()
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if not response.is_success:
                said = (await response.aread()).decode(errors="replace")
                return Answer(sent, fault=f"HTTP {response.status_code}: {said[:300]}")
            async for piece in response.aiter_bytes():
                parts.take(piece, time.perf_counter())
    except httpx.HTTPError as error:
        return Answer(sent, fault=f"{type(error).__name__}: {error}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Answer(sent, fault=f"an event that is no chunk: {error!r}")
    return Answer(sent, tuple(parts.arrivals), parts.tokens, parts.prompt_tokens, parts.fault(body["max_tokens"]))


@dataclass
class _Parts:
    """Server-sent events, as they come."""

    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0
    prompt_tokens: int = 0
    finished: bool = False
    done: bool = False
    error: str | None = None
    rest: bytes = b""

    def take(self, piece: bytes, now: float) -> None:
        *lines, self.rest = (self.rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line.removeprefix(b"data:").strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])[:300]
            return
        if usage := event.get("usage"):
            self.tokens, self.prompt_tokens = usage["completion_tokens"], usage["prompt_tokens"]
        for choice in event.get("choices", ()):
            if choice["delta"].get("content"):
                self.arrivals.append(now)
            self.finished = self.finished or choice.get("finish_reason") is not None

    def fault(self, wanted: int) -> str | None:
        if self.error:
            return self.error
        if not self.finished or not self.done:
            return f"it ended without {'a finish_reason' if not self.finished else '[DONE]'}"
        if not self.arrivals or self.tokens != wanted:
            return f"it has {len(self.arrivals)} parts and {self.tokens} tokens, of {wanted} that were asked for"
        return None
