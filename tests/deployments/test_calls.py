import pytest
from ray.exceptions import ActorDiedError, RaySystemError, RayTaskError
from ray.serve.exceptions import BackPressureError

from cluster.errors import CapacityError, DependencyError, FlywheelError, RequestError
from deployments.calls import translated


def test_an_error_that_a_deployment_raised_comes_back_with_all_its_facts() -> None:
    raised = RequestError("too long", status=413, param="input", code="c", hint="less")
    wrapped = RayTaskError("embed", "Traceback …", raised).as_instanceof_cause()
    back = translated(wrapped, "the embedder")
    assert isinstance(back, RequestError)
    assert (back.message, back.status, back.param, back.code, back.hint) == ("too long", 413, "input", "c", "less")


def test_an_unforeseen_error_stays_unforeseen() -> None:
    wrapped = RayTaskError("embed", "Traceback …", KeyError("x")).as_instanceof_cause()
    assert not isinstance(translated(wrapped, "the embedder"), FlywheelError)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ActorDiedError(), CapacityError),
        (BackPressureError(5, 4), CapacityError),
        (RaySystemError("?"), DependencyError),
    ],
)
def test_a_part_that_is_away_is_worth_another_try(error: Exception, kind: type[FlywheelError]) -> None:
    found = translated(error, "the embedder")
    assert type(found) is kind
    assert isinstance(found, FlywheelError)
    assert found.retryable
    assert "the embedder" in found.message
