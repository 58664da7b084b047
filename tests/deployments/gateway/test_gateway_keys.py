"""Who is let in: every way to be nobody looks the same, and a key opens what its roles and patterns say."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from actors.registry.apikeys import ApiKey, Secret
from cluster.errors import RequestError
from deployments.gateway.errors import problem
from deployments.gateway.keys import Caller, identify

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SECRET, OTHER = Secret.make(), Secret.make()
KEY = ApiKey(SECRET.id, "ci", SECRET.sha256, ("infer",), ("base:team-*", "minilm"))
KEYS = {KEY.id: KEY}


def test_a_live_key_is_its_caller() -> None:
    for scheme in ("Bearer", "bearer"):
        caller = identify(f"{scheme} {SECRET.text}", KEYS, role="infer", now=NOW)
        assert caller == Caller(KEY)
        assert caller.id == SECRET.id


FORGED = f"fw-{SECRET.id.removeprefix('key-')}-{OTHER.text[-43:]}"


@pytest.mark.parametrize(
    ("authorization", "keys"),
    [
        (None, KEYS),
        ("", KEYS),
        ("Bearer", KEYS),
        ("Bearer none", KEYS),
        (f"Basic {SECRET.text}", KEYS),
        (SECRET.text, KEYS),
        (f"Bearer {OTHER.text}", KEYS),
        (f"Bearer {FORGED}", KEYS),
        (f"Bearer {SECRET.text} x", KEYS),
        (f"Bearer {SECRET.sha256}", KEYS),
        (f"Bearer {SECRET.text}", {}),
        (f"Bearer {SECRET.text}", {KEY.id: replace(KEY, expires_at=NOW)}),
        ("Bearer \udce9\U0001f511", KEYS),
    ],
)
def test_all_ways_to_be_nobody_are_answered_alike(authorization: str | None, keys: dict[str, ApiKey]) -> None:
    with pytest.raises(RequestError) as none:
        identify(None, {}, role="infer", now=NOW)
    with pytest.raises(RequestError) as refused:
        identify(authorization, keys, role="infer", now=NOW)
    answer = problem(refused.value)
    assert answer == problem(none.value)
    assert (answer.status, answer.code, answer.headers) == (401, "invalid_api_key", {"WWW-Authenticate": "Bearer"})
    assert SECRET.text not in str(answer)


def test_a_key_expires_at_its_moment_and_not_before() -> None:
    keys = {KEY.id: replace(KEY, expires_at=NOW)}
    assert identify(f"Bearer {SECRET.text}", keys, role="infer", now=NOW - timedelta(seconds=1))


def test_a_role_that_a_key_has_not_is_403_and_admin_includes_no_other() -> None:
    for roles, role in ((("infer",), "index"), (("index",), "infer"), (("admin",), "infer")):
        with pytest.raises(RequestError, match=f"not the role '{role}'") as refused:
            identify(f"Bearer {SECRET.text}", {KEY.id: replace(KEY, roles=roles)}, role=role, now=NOW)  # type: ignore[arg-type]
        assert (refused.value.status, refused.value.code) == (403, "role_not_allowed")
        assert refused.value.hint is not None
        assert roles[0] in refused.value.hint


def test_a_model_outside_the_patterns_is_403() -> None:
    caller = Caller(KEY)
    for model in ("base:team-a", "base:team-b@canary", "minilm"):
        caller.require_model(model)
    for model in ("base", "base:other", "minilm2", ""):
        with pytest.raises(RequestError) as refused:
            caller.require_model(model)
        assert (refused.value.status, refused.value.code, refused.value.param) == (403, "model_not_allowed", "model")
