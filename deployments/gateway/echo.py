"""Shipped fakes of the ports: an application without weights, for tests and for trying out a client.

They keep the ports' contracts; what they answer is made from the question. The embedder without weights is
`embedding.hashing`.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from actors.registry.snapshot import Snapshot
from cluster.errors import DependencyError, FlywheelError
from deployments.llm.protocol import Answer, Generation


@dataclass
class EchoEngine:
    """Answers with the last message, word by word, under the name of the adapter that was asked."""

    fault: FlywheelError | None = None
    """Raised instead of an answer, or in the middle of a stream if `breaks_after` is set."""
    breaks_after: int | None = None
    """Events after which a stream stops: with `fault`, or in silence."""
    pause_s: float = 0.0
    """Between two events."""
    seen: list[Generation] = field(default_factory=list)
    stopped_early: int = 0

    async def generate(self, generation: Generation) -> AsyncIterator[Answer]:
        self.seen.append(generation)
        if self.fault and self.breaks_after is None:
            raise self.fault
        if generation.kind == "tokenize":
            found = [ord(letter) for letter in str(generation.body.get("prompt", ""))]
            yield {"count": len(found), "max_model_len": 128, "tokens": found}
            return
        if generation.kind == "detokenize":
            yield {"prompt": "".join(map(chr, generation.body.get("tokens", [])))}
            return
        words = _words(generation)
        usage = {"prompt_tokens": 3, "completion_tokens": len(words), "total_tokens": 3 + len(words)}
        if not generation.body.get("stream"):
            yield self._whole(generation, " ".join(words), usage)
            return
        ended = False
        try:
            for number, event in enumerate(self._events(generation, words, usage)):
                if number == self.breaks_after:
                    ended = True
                    if self.fault:
                        raise self.fault
                    return
                await asyncio.sleep(self.pause_s)
                yield event.encode()
            ended = True
        finally:
            self.stopped_early += not ended

    async def describe(self) -> dict[str, Any]:
        if self.fault:
            raise self.fault
        return {"model": "echo"}

    def _whole(self, generation: Generation, text: str, usage: dict[str, int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
        if generation.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return {**self._head(generation), "choices": [choice], "usage": usage}

    def _events(self, generation: Generation, words: list[str], usage: dict[str, int]) -> list[str]:
        chunks: list[dict[str, Any]] = []
        for number, word in enumerate(words):
            choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if number == len(words) - 1 else None}
            if generation.kind == "chat":
                choice["delta"] = {"content": f"{word} "}
            else:
                choice["text"] = f"{word} "
            chunks.append({**self._head(generation), "choices": [choice]})
        if (generation.body.get("stream_options") or {}).get("include_usage"):
            chunks.append({**self._head(generation), "choices": [], "usage": usage})
        return [*(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks), "data: [DONE]\n\n"]

    def _head(self, generation: Generation) -> dict[str, Any]:
        kind = "chat.completion" if generation.kind == "chat" else "text_completion"
        suffix = ".chunk" if generation.body.get("stream") and generation.kind == "chat" else ""
        return {"id": generation.request_id, "object": kind + suffix, "created": 0, "model": "echo"}


def _words(generation: Generation) -> list[str]:
    if generation.kind == "completions":
        asked = str(generation.body["prompt"])
    else:
        asked = str(generation.body["messages"][-1].get("content", ""))
    speaker = generation.adapter.version if generation.adapter else "base"
    return [f"{speaker}:", *asked.split()]


@dataclass
class PushedSnapshots:
    """A registry that says what it is told to say, and can be away."""

    current: Snapshot = field(default_factory=Snapshot)
    away: bool = False
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, snapshot: Snapshot) -> None:
        """The registry has moved on."""
        self.current = snapshot
        self._wake()

    def go_away(self) -> None:
        """Every call fails from now on, also those that wait."""
        self.away = True
        self._wake()

    def come_back(self) -> None:
        """Calls are answered again."""
        self.away = False

    async def wait_snapshot(self, after: Snapshot, timeout_s: float) -> Snapshot:
        if not self.away and (self.current.epoch, self.current.number) == (after.epoch, after.number):
            changed = self._changed
            try:
                async with asyncio.timeout(timeout_s):
                    await changed.wait()
            except TimeoutError:
                return self.current
        if self.away:
            raise DependencyError("The registry is away.")
        return self.current

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
