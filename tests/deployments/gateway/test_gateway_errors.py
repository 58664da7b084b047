import json

import pytest
from starlette.exceptions import HTTPException

from cluster.errors import CapacityError, ConfigError, DependencyError, RateLimitError, RequestError, StateError
from deployments.gateway.errors import problem


@pytest.mark.parametrize(
    ("error", "status", "type", "code", "param"),
    [
        (RequestError("no", param="model", code="c", status=404), 404, "invalid_request_error", "c", "model"),
        (RequestError("long", code="c"), 400, "invalid_request_error", "c", None),
        (CapacityError("full", retry_after_s=2.5), 503, "server_error", "overloaded", None),
        (RateLimitError("slow down"), 429, "rate_limit_error", "rate_limit_exceeded", None),
        (DependencyError("gone"), 503, "server_error", "dependency_unavailable", None),
        (ConfigError("bad"), 400, "invalid_request_error", None, None),
        (StateError("no move"), 409, "invalid_request_error", None, None),
        (HTTPException(404), 404, "invalid_request_error", "unknown_url", None),
        (HTTPException(405, headers={"Allow": "POST"}), 405, "invalid_request_error", "method_not_allowed", None),
        (TimeoutError(), 408, "timeout_error", "timeout", None),
        (KeyError("/secret/path"), 500, "server_error", "internal_error", None),
    ],
)  # fmt: skip
def test_every_error_has_openais_shape(
    error: BaseException, status: int, type: str, code: str | None, param: str | None
) -> None:
    response = problem(error).response()
    body = json.loads(bytes(response.body))
    assert response.status_code == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"], body["error"]["param"]) == (type, code, param)
    assert body["error"]["message"]


def test_a_client_is_told_when_to_come_back() -> None:
    assert problem(CapacityError("full", retry_after_s=2.5)).headers == {"Retry-After": "3"}
    assert problem(RateLimitError("slow down", retry_after_s=0.2)).headers == {"Retry-After": "1"}
    assert problem(DependencyError("bad files", retryable=False)).headers == {}
    assert problem(HTTPException(405, headers={"Allow": "POST"})).headers == {"Allow": "POST"}


def test_what_was_not_foreseen_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    found = problem(KeyError("/secret/path"))
    assert "secret" not in json.dumps(found.body())
    assert "/secret/path" in caplog.text


def test_the_way_out_is_in_the_message() -> None:
    assert problem(RequestError("Too long.", hint="Send less.")).message == "Too long. Send less."
