import string
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import CapacityError
from deployments.gateway.fleet import Ask, Fleet, Replica
from deployments.gateway.routing import Affine

POLICY = Affine(slack=1.25, comfortable_tokens=0)
LOADED = 10_000


def fleet(count: int, **facts: object) -> Fleet:
    return Fleet.of(Replica(f"r{number}", **{"slots": 4, **facts}) for number in range(count))  # type: ignore[arg-type]


def changed(snapshot: Fleet, id: str, **facts: object) -> Fleet:
    return snapshot.told(replace(snapshot.replicas[id], **facts))  # type: ignore[arg-type]


def test_without_a_replica_the_caller_is_told_when_to_come_back() -> None:
    for empty in (Fleet.of([]), fleet(2, healthy=False), fleet(2, draining=True)):
        with pytest.raises(CapacityError) as refused:
            POLICY.choose(Ask("a/1"), empty)
        assert refused.value.retry_after_s > 0
        assert refused.value.status == 503


def test_a_cold_adapter_has_one_home_and_goes_where_it_lies_once_it_is_loaded() -> None:
    snapshot = fleet(8)
    home = POLICY.choose(Ask("a/1"), snapshot)
    assert home.why == "home"
    other = next(id for id in snapshot.replicas if id != home.replica)
    choice = POLICY.choose(Ask("a/1"), changed(snapshot, other, resident={"a/1": 0}))
    assert (choice.replica, choice.why) == (other, "resident")


def test_a_copy_is_made_only_when_all_holders_are_above_the_bound() -> None:
    ask = Ask("a/1", tokens=10)
    one = changed(fleet(4), "r0", resident={"a/1": LOADED}, tokens_in_flight=LOADED)
    spread = POLICY.choose(ask, one)
    assert spread.why == "spread"
    two = changed(one, spread.replica, resident={"a/1": 0})
    assert POLICY.choose(ask, two).replica == spread.replica
    idle_again = changed(two, "r0", resident={"a/1": 0}, tokens_in_flight=0)
    assert POLICY.choose(ask, idle_again).why == "resident"


def test_copies_that_the_load_does_not_need_are_left_alone() -> None:
    """Otherwise the requests of an adapter that was hot once would keep all its copies young for ever."""
    everywhere = fleet(8, resident={"a/1": 0, "b/1": 500}, tokens_in_flight=500)
    chosen = {POLICY.choose(Ask("a/1", prefix=word, tokens=1), everywhere).replica for word in string.ascii_letters}
    assert len(chosen) == 1
    hot = fleet(8, resident={"a/1": 400, "b/1": 100}, tokens_in_flight=500)
    chosen = {POLICY.choose(Ask("a/1", prefix=word, tokens=1), hot).replica for word in string.ascii_letters}
    assert len(chosen) == 6  # ⌈3201 / (1.25 × 500)⌉


def test_a_pinned_engine_gets_no_further_adapter_while_another_has_a_slot() -> None:
    snapshot = fleet(4)
    home = POLICY.choose(Ask("a/1"), snapshot).replica
    pinned = changed(snapshot, home, slots=2, resident={"x/1": 1, "y/1": 1}, tokens_in_flight=2)
    assert POLICY.choose(Ask("a/1", tokens=100), pinned).why == "spill"
    evictable = changed(snapshot, home, slots=2, resident={"x/1": 1, "y/1": 0}, tokens_in_flight=1)
    assert POLICY.choose(Ask("a/1", tokens=100), evictable).replica == home
    crowded = Fleet.of(replace(one, slots=1, resident={"x/1": 1}) for one in snapshot.replicas.values())
    assert POLICY.choose(Ask("a/1"), crowded).why == "crowded"


def test_a_prefix_is_sent_where_it_was_and_versions_are_not_mixed() -> None:
    snapshot = fleet(64)
    prefixes = [f"prefix {number}" for number in range(200)]
    placed = [POLICY.choose(Ask(prefix=one, tokens=0), snapshot).replica for one in prefixes]
    assert placed == [POLICY.choose(Ask(prefix=one, tokens=0), snapshot).replica for one in prefixes]
    assert len(set(placed)) > 50
    # The same text for two versions has two places, also when name and text could be cut elsewhere.
    key = POLICY._prefix_key
    assert len({key(Ask("a/1", "1x")), key(Ask("a/11", "x")), key(Ask("a/2", "1x")), key(Ask(None, "1x"))}) == 4


def test_only_the_beginning_of_a_prefix_decides() -> None:
    snapshot, system = fleet(64), "You are helpful. " * 40
    assert len({POLICY.choose(Ask(prefix=f"{system}{turn}"), snapshot).replica for turn in range(50)}) == 1


def test_a_prefix_leaves_its_replica_when_that_is_above_the_bound() -> None:
    snapshot = fleet(4, tokens_in_flight=100)
    ask = Ask(prefix="hello", tokens=1)
    favourite = POLICY.choose(ask, snapshot).replica
    assert POLICY.choose(ask, changed(snapshot, favourite, tokens_in_flight=200)).replica != favourite
    # … but not a quiet fleet: a batch of a few is as fast as one.
    comfortable = Affine(slack=1.25, comfortable_tokens=200)
    assert comfortable.choose(ask, changed(snapshot, favourite, tokens_in_flight=200)).replica == favourite
    waits = changed(snapshot, favourite, tokens_in_flight=200, waiting=1)
    assert comfortable.choose(ask, waits).replica != favourite


def test_load_is_tokens_and_not_requests() -> None:
    snapshot = Fleet.of([Replica("few", tokens_in_flight=8000, running=2), Replica("many", running=40)])
    snapshot = changed(snapshot, "many", tokens_in_flight=4000)
    assert POLICY.choose(Ask(tokens=1), snapshot).replica == "many"


replica_facts = st.builds(
    lambda number, slots, resident, base, waiting, healthy, draining: Replica(
        f"r{number}",
        slots=slots,
        resident=resident,
        tokens_in_flight=base + sum(resident.values()),
        waiting=waiting,
        healthy=healthy,
        draining=draining,
    ),
    st.integers(0, 15),
    st.integers(1, 4),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 500), max_size=4),
    st.integers(0, 2000),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
)
asks = st.builds(Ask, st.none() | st.sampled_from("abcdefgh"), st.text(max_size=3), st.integers(1, 800))


@given(st.lists(replica_facts, max_size=12), asks, st.sampled_from([1.0, 1.25, 2.0]), st.sampled_from([0, 1000]))
@settings(max_examples=300, deadline=None)
def test_the_chosen_replica_is_usable_and_within_the_bound(
    replicas: list[Replica], ask: Ask, slack: float, comfortable: int
) -> None:
    snapshot = Fleet.of(replicas)
    policy = Affine(slack=slack, comfortable_tokens=comfortable)
    usable = [one for one in snapshot.replicas.values() if one.usable]
    if not usable:
        with pytest.raises(CapacityError):
            policy.choose(ask, snapshot)
        return
    choice = policy.choose(ask, snapshot)
    chosen = snapshot.replicas[choice.replica]
    assert chosen.usable
    mean = sum(one.tokens_in_flight for one in usable) / len(usable)
    bound = max(slack * (mean + ask.tokens / len(usable)), comfortable)
    alternatives = [
        one for one in usable if one.tokens_in_flight <= bound and (not ask.adapter or one.can_take(ask.adapter))
    ]
    if chosen.tokens_in_flight > bound:
        assert choice.why == "crowded"
        assert not [one for one in alternatives if one.tokens_in_flight <= slack * mean]
    if ask.adapter and choice.why != "crowded":
        assert chosen.can_take(ask.adapter)


@given(st.lists(asks, min_size=1, max_size=60), st.sampled_from([1.0, 1.25, 2.0]))
@settings(max_examples=60, deadline=None)
def test_loads_stay_bounded_as_requests_pile_up(many: list[Ask], slack: float) -> None:
    """Mirrokni et al.'s bound, in tokens: no replica gets beyond slack × mean and one request."""
    snapshot, policy = fleet(5, slots=100), Affine(slack=slack, comfortable_tokens=0)
    for ask in many:
        snapshot = snapshot.sent(policy.choose(ask, snapshot).replica, ask)
    largest = max(ask.tokens for ask in many)
    mean = snapshot.tokens_in_flight / 5
    assert max(one.tokens_in_flight for one in snapshot.usable) <= slack * mean + largest


@given(st.integers(2, 40), st.data())
@settings(max_examples=30, deadline=None)
def test_a_replica_that_joins_or_leaves_moves_only_its_share(count: int, data: st.DataObject) -> None:
    before = fleet(count)
    gone = data.draw(st.sampled_from(sorted(before.replicas)))
    after = before.without(gone)
    names = [f"adapter-{number}/1" for number in range(300)]
    homes = {name: POLICY.choose(Ask(name, tokens=0), before).replica for name in names}
    later = {name: POLICY.choose(Ask(name, tokens=0), after).replica for name in names}
    # Read forwards a leave, backwards a join.
    assert {name for name in names if homes[name] != later[name]} == {name for name in names if homes[name] == gone}
    assert sum(home == gone for home in homes.values()) <= 300 / count * 2 + 12


def test_homes_are_spread_evenly() -> None:
    homes = Counter(POLICY.choose(Ask(f"a{number}/1", tokens=0), fleet(64)).replica for number in range(6400))
    assert len(homes) == 64
    assert min(homes.values()) > 50
    assert max(homes.values()) < 150


events = st.lists(st.tuples(st.sampled_from(["told", "without", "sent", "finished"]), replica_facts, asks), max_size=30)


@given(events)
@settings(max_examples=150, deadline=None)
def test_the_indices_are_those_that_would_be_made_anew(steps: list[tuple[str, Replica, Ask]]) -> None:
    snapshot = fleet(3)
    for step, replica, ask in steps:
        if step == "told":
            snapshot = snapshot.told(replica)
        elif step == "without":
            snapshot = snapshot.without(replica.id)
        elif replica.id in snapshot.replicas:
            snapshot = getattr(snapshot, step)(replica.id, ask)
        anew = Fleet.of(snapshot.replicas.values())
        assert snapshot.usable == anew.usable
        assert snapshot.positions == anew.positions
        assert {name: set(held) for name, held in snapshot.holders.items()} == {
            name: set(held) for name, held in anew.holders.items()
        }
        assert snapshot.tokens_in_flight == anew.tokens_in_flight
        assert list(snapshot.seeds) == list(anew.seeds)


def test_what_was_sent_is_counted_until_it_is_finished() -> None:
    empty, ask = fleet(2), Ask("a/1", tokens=70)
    sent = empty.sent("r1", ask)
    assert (sent.tokens_in_flight, sent.replicas["r1"].running, sent.replicas["r1"].resident) == (70, 1, {"a/1": 70})
    over = sent.finished("r1", ask)
    assert (over.tokens_in_flight, over.replicas["r1"].running, over.replicas["r1"].pinned) == (0, 0, 0)
    assert sent.without("r1").finished("r1", ask).tokens_in_flight == 0


class LookedUp(Mapping[str, tuple[int, ...]]):
    """An index that counts look-ups and cannot be gone through."""

    def __init__(self, inner: Mapping[str, tuple[int, ...]]) -> None:
        self._inner = inner
        self.looks = 0

    def __getitem__(self, name: str) -> tuple[int, ...]:
        self.looks += 1
        return self._inner[name]

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("A choice went through all adapters.")

    def __len__(self) -> int:
        return len(self._inner)


def test_a_choice_looks_at_few_replicas_and_goes_through_no_adapters() -> None:
    snapshot = Fleet.of(
        Replica(f"r{number}", slots=16, resident={f"a{number * 16 + slot}/1": 0 for slot in range(16)})
        for number in range(64)
    )
    index = LookedUp(snapshot.holders)
    snapshot = replace(snapshot, holders=index)
    for number in range(1000):
        choice = POLICY.choose(Ask(f"a{number}/1", prefix="x"), snapshot)
        assert (choice.why, choice.looked) == ("resident", 1)
    assert index.looks == 1000
    worst = POLICY.choose(Ask("cold/1"), replace(fleet(64, slots=0), holders=index))
    assert worst.looked <= 2 * 64
