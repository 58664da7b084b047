from collections import Counter
from pathlib import Path

import pytest

from actors.registry.actor import SnapshotLog
from actors.registry.apikeys import ApiKey
from actors.registry.snapshot import Model, Route, Snapshot, resolve
from cluster.errors import RequestError


def route(name: str, version: int) -> Route:
    return Route(name=name, version=version, kind="adapter", path=Path("/v"), digest=f"{name}{version}", base="smol")


ROUTES = [route("triage", 1), route("triage", 2), route("triage", 10), route("search", 1)]
SNAPSHOT = Snapshot.of_routes(
    ROUTES,
    {"triage@champion": 2, "triage@canary": 10, "search@canary": 1, "triage@split": {1: 0.25, 2: 0.75}},
    number=9,
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
        ("triage@gone", "canary, champion, split"),
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
    assert SNAPSHOT.aliases_of("triage") == {"champion": 2, "canary": 10, "split": 2}
    assert SNAPSHOT.names() == ["search", "triage"]


def test_a_split_alias_gives_each_key_its_version_for_good_and_each_version_its_share() -> None:
    keys = [f"user-{number}" for number in range(4000)]
    found = [resolve(SNAPSHOT, "triage@split", key=key).version for key in keys]
    assert found == [resolve(SNAPSHOT, "triage@split", key=key).version for key in keys]
    assert abs(found.count(1) / len(found) - 0.25) < 0.03
    assert set(found) == {1, 2}
    assert resolve(SNAPSHOT, "triage@split").version == 2


def test_more_traffic_for_a_canary_moves_nobody_back() -> None:
    def canaries(share: float) -> set[int]:
        split = Snapshot.of_routes(ROUTES, {"triage@champion": {1: 1 - share, 2: share}})
        return {user for user in range(500) if resolve(split, "triage", key=str(user)).version == 2}

    assert canaries(0.1) < canaries(0.3) < canaries(0.9)


def test_who_applies_every_change_knows_what_who_asks_for_all_of_it_knows() -> None:
    first = Snapshot.of_routes(ROUTES[:2], {"triage@champion": 1}, number=1)
    second = Snapshot(number=2, models={**first.models, "search": SNAPSHOT.models["search"]})
    change = second.since(first)
    assert [*change.models] == ["search"]
    assert first.updated(change) == second
    assert Snapshot().updated(second.whole()) == second


def test_keys_travel_when_they_have_changed_and_only_then() -> None:
    key = ApiKey("key-0123456789ab", "ci", "a" * 64)
    bare = Snapshot(number=1)
    keyed = Snapshot(number=2, keys={key.id: key})
    moved = Snapshot(number=3, models=SNAPSHOT.models, keys=dict(keyed.keys))
    revoked = Snapshot(number=4, models=moved.models)
    assert keyed.since(bare).keys == {key.id: key}
    assert moved.since(keyed).keys is None
    assert keyed.updated(moved.since(keyed)) == moved
    assert revoked.since(moved).keys == {}
    assert moved.updated(revoked.since(moved)) == revoked
    assert Snapshot().updated(moved.whole()) == moved

    log = SnapshotLog(bare)
    for each in (keyed, moved, revoked):
        log.add(each)
    for start in (bare, keyed, moved):
        assert start.updated(log.since((start.epoch, start.number))) == revoked
    log.add(Snapshot(number=5, models=revoked.models))
    assert log.since((0, 4)).keys is None


def test_a_snapshot_log_catches_up_who_missed_some_and_sends_all_to_who_missed_too_many() -> None:
    def step(number: int, *, epoch: int = 1) -> Snapshot:
        model = Model("triage", aliases={"champion": {number: 1.0}})
        return Snapshot(epoch, number, models={**steps[-1].models, f"m{number}": model} if steps else {})

    steps: list[Snapshot] = []
    for number in range(6):
        steps.append(step(number))
    log = SnapshotLog(steps[0], kept=3)
    for snapshot in steps[1:]:
        log.add(snapshot)
    assert log.since((1, 5)).models == {}
    late = log.since((1, 3))
    assert (sorted(late.models), late.whole) == (["m4", "m5"], False)
    assert steps[3].updated(late) == steps[5]
    for unknown in ((1, 0), (1, 77), (0, 4)):
        assert log.since(unknown).whole
        assert Snapshot().updated(log.since(unknown)) == steps[5]


THREE = [route("triage", number) for number in (1, 2, 3)]
USERS = [f"user-{number}" for number in range(8000)]


def sides(split: dict[int, float], alias: str = "champion") -> dict[str, int]:
    """Which version each user gets."""
    known = Snapshot.of_routes(THREE, {f"triage@{alias}": split})
    return {user: resolve(known, f"triage@{alias}", key=user).version for user in USERS}


@pytest.mark.parametrize(
    "split", [{1: 0.5, 2: 0.5}, {1: 0.9, 2: 0.1}, {1: 0.98, 2: 0.01, 3: 0.01}, {1: 0.2, 2: 0.3, 3: 0.5}]
)
def test_each_version_gets_its_share_of_the_users(split: dict[int, float]) -> None:
    found = Counter(sides(split).values())
    square = sum((found[number] - share * len(USERS)) ** 2 / (share * len(USERS)) for number, share in split.items())
    assert square < 13.8  # chi-square, two degrees of freedom: one in a thousand; the users are always the same


def test_a_share_that_grows_moves_users_to_its_version_and_none_elsewhere() -> None:
    """Also where others stand before and behind it, and shrink alike."""
    before, after = sides({1: 0.5, 2: 0.3, 3: 0.2}), sides({1: 0.25, 2: 0.65, 3: 0.1})
    moved = [(before[user], after[user]) for user in USERS if before[user] != after[user]]
    assert {to for _, to in moved} == {2}
    assert abs(len(moved) / len(USERS) - 0.35) < 0.03


def test_the_order_of_the_numbers_decides_nothing() -> None:
    assert sides({3: 0.3, 1: 0.7}) == sides({1: 0.7, 3: 0.3})


def test_one_canarys_users_are_not_every_canarys() -> None:
    one, other = (
        {user for user, number in sides({1: 0.8, 2: 0.2}, alias).items() if number == 2}
        for alias in ("champion", "canary")
    )
    assert abs(len(one & other) / len(one) - 0.2) < 0.05
