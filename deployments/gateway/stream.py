"""A stream of server-sent events, made fit for the client and never silent about its end. Pure.

The engine's events come in pieces of bytes. Each is stamped with the model and version that answer. A stream
that stops without having finished (its replica was killed) gets an error event, because a client cannot tell such
an end from a good one.

Nearly every event only carries some text. Those are stamped as bytes: parsing and writing JSON for each token was
most of what the gateway cost. A quotation mark inside a JSON string is always escaped, so `"model":"…"` with bare
ones is the key, whatever a model writes. An event that says more (an end, usage, a fault, a second choice) is parsed.
"""

import json
from dataclasses import dataclass, field
from typing import Any

from cluster.errors import FlywheelError
from deployments.gateway.errors import problem
from deployments.llm.failures import engine_lost, from_report
from deployments.llm.protocol import Kind

DONE = b"data: [DONE]\n\n"
_PREFIX = b"data:"
_END = b"\n\n"
_TELLING = (b'"finish_reason":"', b'"usage":{', b'"error":', b'"system_fingerprint":')
"""What makes an event more than a piece of text."""
_ONLY_CHOICE = b'"choices":[{"index":0,'


@dataclass
class Usage:
    """Tokens of one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class StreamAssembler:
    """Feeds the engine's text in, gives the client's events out; `close` says how it ended."""

    model: str
    version: str
    forward_usage: bool
    kind: Kind = "chat"
    spoken_as: str | None = None
    """The engine's own name for the model; set: events that carry nothing else are stamped without being parsed."""
    usage: Usage = field(default_factory=Usage)
    _rest: bytes = b""
    _open: set[int] = field(default_factory=set)
    _closed: set[int] = field(default_factory=set)
    fault: FlywheelError | None = None
    """Why the stream cannot go on; an error event has been made of it."""
    _done: bool = False

    @property
    def complete(self) -> bool:
        """Every choice has its `finish_reason`, and the engine has said that it is done."""
        return self._done and self.fault is None and bool(self._closed) and not self._open

    def __post_init__(self) -> None:
        self._spoken = b'"model":' + json.dumps(self.spoken_as).encode() if self.spoken_as is not None else None
        self._stamp = f'"model":{json.dumps(self.model)},"system_fingerprint":{json.dumps(self.version)}'.encode()

    def feed(self, piece: bytes) -> list[bytes]:
        """The client's events for a piece of the engine's stream; an event may be cut anywhere between pieces."""
        *events, self._rest = (self._rest + piece).split(_END)
        return [made for event in events if (made := self._event(event)) is not None]

    def close(self) -> list[bytes]:
        """The last events of a stream that has ended: an error if it broke off, and always `[DONE]`."""
        if self.complete or self.fault:
            return [DONE]
        return self.fail(engine_lost())

    def fail(self, fault: FlywheelError) -> list[bytes]:
        """The last events of a stream that cannot go on."""
        return [self._error(fault), DONE]

    def _event(self, event: bytes) -> bytes | None:
        if self._is_text_only(event):
            self._open.add(0)
            assert self._spoken is not None
            return event.replace(self._spoken, self._stamp, 1) + _END
        data = event.strip().removeprefix(_PREFIX).strip()
        if not data or self.fault:
            return None
        if data == b"[DONE]":
            self._done = True
            return None
        try:
            payload: dict[str, Any] = json.loads(data)
        except ValueError:
            return self._error(engine_lost())
        if "error" in payload:
            return self._error(from_report(payload["error"], self.kind))
        return self._chunk(payload)

    def _is_text_only(self, event: bytes) -> bool:
        return (
            self._spoken is not None
            and self.fault is None
            and not self._closed
            and self._spoken in event
            and _ONLY_CHOICE in event
            and not any(word in event for word in _TELLING)
        )

    def _error(self, fault: FlywheelError) -> bytes:
        self.fault = fault
        return _sse(problem(fault).body())

    def _chunk(self, payload: dict[str, Any]) -> bytes | None:
        for choice in payload.get("choices", []):
            index = int(choice.get("index", 0))
            if choice.get("finish_reason"):
                self._open.discard(index)
                self._closed.add(index)
            elif index not in self._closed:
                self._open.add(index)
        if usage := payload.get("usage"):
            self.usage = Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0)
            if not self.forward_usage:
                if not payload.get("choices"):
                    return None
                del payload["usage"]
        return _sse(stamped(payload, model=self.model, version=self.version))


def stamped(payload: dict[str, Any], *, model: str, version: str) -> dict[str, Any]:
    """A response or chunk that says which model answered, and which version as its `system_fingerprint`."""
    return {**payload, "model": model, "system_fingerprint": version}


def _sse(payload: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(payload, ensure_ascii=False, separators=(',', ':'))}\n\n".encode(
        "utf-8", "surrogatepass"
    )
