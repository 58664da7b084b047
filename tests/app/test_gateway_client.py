"""The API key on its way from a person to a gateway: from where it is taken, and that it is shown nowhere."""

import httpx
import pytest

from app.cli.connection import api_key
from app.pipelines.demo import admitted
from app.pipelines.gateway import connect
from cluster import environment
from cluster.errors import ConfigError
from deployments.gateway.config import GatewayConfig


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.API_KEY, raising=False)


def test_a_key_given_outweighs_the_environments_and_blanks_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key(None) is None
    monkeypatch.setenv(environment.API_KEY, " fw-env\n")
    assert api_key(None) == "fw-env"
    assert api_key(" ") == "fw-env"
    assert api_key("fw-given") == "fw-given"
    monkeypatch.setenv(environment.API_KEY, " ")
    assert api_key(None) is None


@pytest.mark.parametrize("key", ["fw-sécret", "fw-a b", "fw-a\x1b"])
def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        api_key(key)
    assert key not in f"{refused.value} {refused.value.hint}"


def test_a_client_sends_its_key_as_bearer_and_none_without_one() -> None:
    with connect("http://gateway", "fw-x", timeout_s=1) as client:
        assert client.headers["authorization"] == "Bearer fw-x"
    with connect("http://gateway", None, timeout_s=1) as client:
        assert "authorization" not in client.headers
        assert client.timeout == httpx.Timeout(1)


def test_workers_are_not_handed_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.API_KEY, "fw-secret")
    assert "fw-secret" not in environment.for_workers().values()


def test_the_demo_needs_no_key_on_loopback_unless_its_recipe_wants_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert admitted(GatewayConfig()) == (GatewayConfig(require_keys=False), None)
    wanted = GatewayConfig(require_keys=True)
    with pytest.raises(ConfigError, match="needs an API key"):
        admitted(wanted)
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        admitted(GatewayConfig(host="0.0.0.0"))
    monkeypatch.setenv(environment.API_KEY, "fw-mine")
    assert admitted(wanted) == (wanted, "fw-mine")
    assert admitted(GatewayConfig(host="0.0.0.0"))[0].require_keys
