"""From an exception to what a client sees. The HTTP status is decided here, in `problem`, and nowhere else.

Everything has OpenAI's shape, so that the official SDKs raise their typed errors:
`{"error": {"message", "type", "param", "code"}}`.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from cluster.errors import CapacityError, DependencyError, FlywheelError, RateLimitError, RequestError

DEPENDENCY_RETRY_AFTER_S = 5.0
_TYPES = {408: "timeout_error", 429: "rate_limit_error"}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Problem:
    """One error response."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON body, also the payload of an error event inside a stream."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def problem(error: BaseException) -> Problem:
    """The one place where an exception becomes a status."""
    match error:
        case RequestError():
            return Problem(error.status, _said(error), _type(error.status), error.param, error.code, error.headers)
        case RateLimitError():
            return _busy(error, "rate_limit_exceeded", error.retry_after_s)
        case CapacityError():
            return _busy(error, "overloaded", error.retry_after_s)
        case DependencyError():
            return _busy(error, "dependency_unavailable", DEPENDENCY_RETRY_AFTER_S if error.retryable else None)
        case FlywheelError():
            return Problem(error.status, _said(error), _type(error.status))
        case HTTPException(status_code=404):
            return Problem(404, "There is no such route.", _type(404), code="unknown_url")
        case HTTPException(status_code=405):
            headers = dict(error.headers or {})
            message = f"This route takes {headers.get('Allow', 'other methods')}."
            return Problem(405, message, _type(405), code="method_not_allowed", headers=headers)
        case HTTPException():
            return Problem(error.status_code, str(error.detail), _type(error.status_code))
        case TimeoutError():
            return problem(out_of_time())
        case _:
            # The text of an unforeseen error may hold paths or data: it goes to the log, not to the client.
            logger.error("A request failed unforeseen.", exc_info=error)
            return Problem(500, "The server failed to handle this request.", _type(500), code="internal_error")


def out_of_time() -> RequestError:
    """The request has used up `gateway.request_timeout_s`."""
    return RequestError(
        "The answer took longer than the gateway waits.",
        status=408,
        code="timeout",
        hint="Ask for less at once, or raise gateway.request_timeout_s.",
        # The SDKs repeat a 408 by themselves; this one would take as long again.
        headers={"x-should-retry": "false"},
    )


def fell_silent(idle_s: float) -> RequestError:
    """A stream that has begun, and has got nothing for `gateway.idle_timeout_s`."""
    return RequestError(f"The engine has said nothing for {idle_s:g} s.", status=504, code="timeout")


def _busy(error: FlywheelError, code: str, retry_after_s: float | None) -> Problem:
    headers = {"Retry-After": str(max(1, math.ceil(retry_after_s)))} if retry_after_s is not None else {}
    return Problem(error.status, _said(error), _type(error.status), code=code, headers=headers)


def _said(error: FlywheelError) -> str:
    return f"{error.message} {error.hint}" if error.hint else error.message


def _type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")
