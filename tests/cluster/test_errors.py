"""Errors cross Ray's actor borders by pickle: every fact must arrive."""

import pickle

import pytest

from cluster.errors import (
    CapacityError,
    ConfigError,
    DependencyError,
    FlywheelError,
    RateLimitError,
    RequestError,
    StateError,
    TrainingError,
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no file x", hint="give y"),
        RequestError("too long", status=400, param="messages", code="context_length_exceeded"),
        CapacityError("full", retry_after_s=2.5, hint="wait"),
        RateLimitError("slow down", retry_after_s=2.5, hint="wait"),
        DependencyError("gone", retryable=False),
        StateError("illegal", hint="legal: a"),
        TrainingError("rank 1 died"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_pickle_keeps_type_and_every_fact(error: FlywheelError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.__dict__ == error.__dict__
    assert str(copy) == error.message


def test_only_a_users_mistake_is_a_usage_error() -> None:
    assert ConfigError("x").exit_code == 2
    assert {kind.exit_code for kind in FlywheelError.__subclasses__() if kind is not ConfigError} == {1}
