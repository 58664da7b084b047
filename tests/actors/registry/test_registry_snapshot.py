from pathlib import Path

import pytest

from actors.registry.snapshot import Route, Snapshot, resolve
from cluster.errors import RequestError


def route(name: str, version: int) -> Route:
    return Route(name=name, version=version, kind="adapter", path=Path("/v"), digest=f"{name}{version}", base="smol")


ROUTES = [route("triage", 1), route("triage", 2), route("triage", 10), route("search", 1)]
SNAPSHOT = Snapshot(
    number=9,
    versions={r.id: r for r in ROUTES},
    aliases={"triage@champion": 2, "triage@canary": 10, "search@canary": 1},
)


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("triage", "triage/2"),
        ("triage@champion", "triage/2"),
        ("triage@canary", "triage/10"),
        ("triage/1", "triage/1"),
        ("triage/10", "triage/10"),
    ],
)
def test_names_aliases_and_numbers_become_versions(reference: str, found: str) -> None:
    assert resolve(SNAPSHOT, reference).id == found


def test_the_default_alias_is_the_callers_choice() -> None:
    assert resolve(SNAPSHOT, "search", default_alias="canary").id == "search/1"


@pytest.mark.parametrize(
    ("reference", "hint"),
    [
        ("triag", "Near it: triage"),
        ("zebra", "Registered: search, triage"),
        ("triage/3", "versions 1, 2, 10"),
        ("triage/0", "name/version"),
        ("triage/x", "name/version"),
        ("triage/../1", "name/version"),
        ("triage@gone", "canary, champion"),
        ("search", "ask for search/1"),
        ("", "name/version"),
        ("a@b@c", "name/version"),
    ],
)
def test_what_is_not_there_is_a_404_that_says_what_is(reference: str, hint: str) -> None:
    with pytest.raises(RequestError) as caught:
        resolve(SNAPSHOT, reference)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert hint in str(caught.value.hint)


def test_a_names_versions_come_in_the_order_of_their_numbers() -> None:
    assert [r.version for r in SNAPSHOT.of("triage")] == [1, 2, 10]
    assert SNAPSHOT.aliases_of("triage") == {"champion": 2, "canary": 10}
    assert SNAPSHOT.names() == ["search", "triage"]
