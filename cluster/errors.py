"""The errors that a person or a client can be shown.

    FlywheelError
    ├── ConfigError        a recipe, flag or file that cannot be used        exit 2   HTTP 400
    ├── RequestError       one request that cannot be served as asked        exit 1   HTTP 4xx
    ├── CapacityError      no room now; the same call may pass later         exit 1   HTTP 503
    │   └── RateLimitError more is asked than is served; ask more slowly     exit 1   HTTP 429
    ├── DependencyError    something we stand on is not reachable            exit 1   HTTP 503
    ├── StateError         an illegal move in the registry's state machine   exit 1   HTTP 409
    └── TrainingError      a run that ended without its result               exit 1   HTTP 500

A message says what happened and names the offending value; `hint` says what to change.
Every error survives pickling, because most of them cross a Ray actor boundary.
"""

from typing import Any, ClassVar


class FlywheelError(Exception):
    """Base of all errors whose text is meant to be read by a user."""

    exit_code: ClassVar[int] = 1
    status: int = 500

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retryable = retryable

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's default replays only `args`; keyword-only facts would be lost in transit.
        return (_rebuild, (type(self), self.__dict__.copy()))


def _rebuild(cls: type[FlywheelError], facts: dict[str, Any]) -> FlywheelError:
    error = cls.__new__(cls, facts["message"])
    error.args = (facts["message"],)
    error.__dict__.update(facts)
    return error


class ConfigError(FlywheelError):
    """A recipe, flag, file or value that the user has to change."""

    exit_code = 2
    status = 400


class RequestError(FlywheelError):
    """One request that cannot be answered as asked.

    `status` is the HTTP status, `param` the field at fault, `code` OpenAI's machine-readable reason, `headers` what
    else a client has to be told: how to authenticate, when to ask again.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        hint: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}


class CapacityError(FlywheelError):
    """No room at this moment. `retry_after_s` is when to ask again."""

    status = 503

    def __init__(self, message: str, *, retry_after_s: float = 1.0, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, retryable=True)
        self.retry_after_s = retry_after_s


class RateLimitError(CapacityError):
    """More is asked than is served: the caller's share, or the queue that all share, is full.

    Not a fault of the server: nothing is broken or being replaced, and asking more slowly helps. That is why it is
    429 where its base is 503, and why a version's traffic does not count it as a failure.
    """

    status = 429


class DependencyError(FlywheelError):
    """Ray, MLflow, Milvus, SQL or a package that cannot be reached or loaded."""

    status = 503

    def __init__(self, message: str, *, hint: str | None = None, retryable: bool = True) -> None:
        super().__init__(message, hint=hint, retryable=retryable)


class StateError(FlywheelError):
    """A move that the registry's state machine does not allow."""

    status = 409


class TrainingError(FlywheelError):
    """A run that ended without its result; the message is the one-line verdict."""
