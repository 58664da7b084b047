"""From what the engine says went wrong to an error that a client can be shown. Pure.

The engine reports faults in three ways: an error object instead of an answer, an exception, or an error
inside a stream. All three end here as one of `cluster.errors`. It knows the shapes, not vLLM's classes.
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from cluster.errors import CapacityError, FlywheelError, RequestError
from deployments.llm.protocol import Kind

ENGINE_RETRY_AFTER_S = 30.0
"""A dead engine is replaced after failed health checks and a start; asking earlier is of no use."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# vLLM puts its own names and values behind the sentence; `param` says that better.
_ASIDE = re.compile(r" \((?:parameter|value)=.*\)$")
_CODES = {400: "invalid_value", 404: "model_not_found"}
_PARSER_WORDS = "--tool-call-parser"
_CONTEXT_WORDS = ("maximum context length", "maximum model length", "longer than the maximum")


def from_report(report: Mapping[str, Any], kind: Kind) -> FlywheelError:
    """The error in the engine's `{"message", "type", "param", "code"}`. Its 5xx means: this engine is not well."""
    status = report.get("code")
    message = str(report.get("message") or "The engine gave no reason.")
    if not isinstance(status, int) or status >= 500:
        return engine_lost()
    return bad_request(message, kind, status=status, param=report.get("param"))


def bad_request(message: str, kind: Kind, *, status: int = 400, param: str | None = None) -> RequestError:
    """A request that the engine has refused, with OpenAI's code where the reason has one."""
    message = _ASIDE.sub("", message)
    if any(words in message for words in _CONTEXT_WORDS):
        # The engine names its own intermediate value ("input_tokens"); the client can only change what it sent.
        field = "messages" if kind == "chat" else "prompt"
        return RequestError(message, status=400, param=field, code=CONTEXT_LENGTH_EXCEEDED)
    if _PARSER_WORDS in message:
        # The engine names flags of a command line that is not ours.
        return RequestError(
            "This model is served without a parser for calls of tools.",
            param="tool_choice",
            code="tools_not_supported",
            hint="Leave `tools` out or send `tool_choice: none`; or serve with llm.tool_parser, for example hermes.",
        )
    return RequestError(message, status=status, param=param, code=_CODES.get(status))


def from_validation(error: ValidationError, body: Mapping[str, Any]) -> RequestError:
    """The first fault in `body`, with its dotted place; the others would only repeat it for each union member."""
    fault = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in _place(fault["loc"], body, missing=fault["type"] == "missing"))
    message = str(fault["msg"]).removeprefix("Value error, ")
    return RequestError(f"{place}: {message}" if place else message, param=place or None, code="invalid_value")


def engine_lost() -> CapacityError:
    """The engine died, or dies. The same request may pass on the replica that replaces it."""
    return CapacityError(
        "The engine stopped before it could answer. It is being replaced.", retry_after_s=ENGINE_RETRY_AFTER_S
    )


def _place(location: tuple[str | int, ...], body: Any, *, missing: bool) -> list[str | int]:
    """`location` without the names of union members, which pydantic puts in and a client has never seen."""
    place: list[str | int] = []
    for part in location:
        known = part in body if isinstance(body, Mapping) else isinstance(body, list) and part in range(len(body))
        if known:
            place.append(part)
            body = body[part]
    return [*place, location[-1]] if missing else place
