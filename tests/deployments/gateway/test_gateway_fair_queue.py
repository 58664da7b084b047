"""The queue's core on virtual time: invariants, fairness, and what it does under three times the load it can bear."""

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.gateway import fair_queue
from deployments.gateway.fair_queue import FairQueue, Limits, Place, Refused, State

SECONDS_PER_TOKEN = 0.002
RUNNING = 8
TOKENS_MEAN = 300
CAPACITY_PER_S = RUNNING / (TOKENS_MEAN * SECONDS_PER_TOKEN)
UNBOUNDED = Limits(max_running=RUNNING, max_waiting=10**9, max_waiting_per_key=10**9, max_wait_s=math.inf)


@pytest.mark.parametrize("changes", [{"max_running": 0}, {"max_waiting": -1}, {"max_wait_s": -1.0}])
def test_limits_that_make_no_sense_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="lets nothing run"):
        Limits(**{"max_running": 1, "max_waiting": 1, "max_waiting_per_key": 1, "max_wait_s": 1.0, **changes})


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_makes_no_sense_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        FairQueue(UNBOUNDED, weight=lambda _: weight).arrive("a", 1, 0.0)


steps = st.lists(
    st.tuples(st.sampled_from(["arrive", "arrive", "leave", "late"]), st.sampled_from("abc"), st.integers(1, 50)),
    max_size=80,
)


@given(steps, st.integers(1, 3), st.integers(0, 6), st.integers(0, 4), st.sampled_from([2.0, 50.0, math.inf]))
@settings(max_examples=200, deadline=None)
def test_the_limits_hold_and_no_place_is_lost_or_idle(
    steps: list[tuple[str, str, int]], running: int, waiting: int, per_key: int, wait_s: float
) -> None:
    queue = FairQueue(Limits(running, waiting, per_key, wait_s))
    places: list[Place] = []
    for number, (step, key, amount) in enumerate(steps):
        now_s = float(number)
        if step == "arrive":
            place, displaced = queue.arrive(key, amount, now_s)
            assert all(one.state is State.DISPLACED for one in displaced)
            if isinstance(place, Place):
                places.append(place)
        elif places:
            place = places[amount % len(places)]
            if step == "late":
                queue.late(place)
            else:
                ran = place.state is State.RUNNING
                changed = queue.leave(place, now_s, used=amount)
                assert sum(one.state is State.RUNNING for one in changed) <= ran
        states = Counter(one.state for one in places)
        assert (queue.running, queue.waiting) == (states[State.RUNNING], states[State.WAITING])
        assert queue.running <= running
        assert queue.waiting <= waiting
        assert all(n <= per_key for n in Counter(one.key for one in places if one.state is State.WAITING).values())
        # Nobody waits beside an idle place.
        assert not queue.waiting or queue.running == running
    for place in places:
        queue.leave(place, math.inf)
    assert (queue.running, queue.waiting) == (0, 0)


@given(
    st.lists(st.integers(1, 400), min_size=30, max_size=60),
    st.lists(st.integers(1, 400), min_size=30, max_size=60),
    st.sampled_from([(1.0, 1.0), (1.0, 3.0), (0.5, 4.0)]),
)
@settings(max_examples=100, deadline=None)
def test_two_keys_that_always_ask_get_tokens_by_their_weights(
    first: list[int], second: list[int], weights: tuple[float, float]
) -> None:
    """Goyal's theorem 1: served ÷ weight never differs by more than the largest request of each ÷ its weight."""
    weight = dict(zip("ab", weights, strict=True))
    queue = FairQueue(Limits(1, 1000, 1000, math.inf), weight=weight.__getitem__)
    busy, _ = queue.arrive("a", 1, 0.0)
    for key, sizes in (("a", first), ("b", second)):
        for tokens in sizes:
            queue.arrive(key, tokens, 0.0)
    left, served = Counter(a=len(first), b=len(second)), Counter[str]()
    assert isinstance(busy, Place)
    bound = (max(first) + 1) / weight["a"] + max(second) / weight["b"]
    while all(left.values()):
        (busy,) = queue.leave(busy, 0.0)
        served[busy.key] += busy.tokens
        left[busy.key] -= 1
        assert abs(served["a"] / weight["a"] - served["b"] / weight["b"]) <= bound


def test_the_expected_wait_counts_the_own_line_and_the_fair_part_of_the_others_by_the_rate_of_full_seconds() -> None:
    queue, now_s = FairQueue(Limits(1, 100, 100, math.inf)), 0.0
    for _ in range(3):  # ten tokens a second, with hours of nothing between
        place, _ = queue.arrive("x", 100, now_s)
        assert isinstance(place, Place)
        queue.leave(place, now_s + 10.0)
        now_s += 3600.0
    assert queue.expected_wait_s("a") == 0.0
    for key in ("x", "a", "b", "b", "b"):  # the first of them runs
        queue.arrive(key, 20, now_s)
    assert queue.expected_wait_s("x") == pytest.approx(6.0, rel=0.01)  # what runs, and one of a and of b before it
    assert queue.expected_wait_s("a") == pytest.approx(6.0, rel=0.01)  # what runs, its own, and one of b's three
    assert queue.expected_wait_s("b") == pytest.approx(10.0, rel=0.01)


def test_requests_of_one_key_keep_their_order() -> None:
    queue = FairQueue(Limits(1, 10, 10, math.inf))
    places = [queue.arrive("a", tokens, 0.0)[0] for tokens in (5, 500, 1, 50)]
    order = []
    running = places[0]
    while isinstance(running, Place):
        order.append(running)
        running = next(iter(queue.leave(running, 0.0)), None)  # type: ignore[arg-type]
    assert order == places


def test_a_stream_of_new_keys_does_not_starve_one_that_came_before() -> None:
    queue = FairQueue(Limits(1, 100, 100, math.inf))
    running = queue.arrive("x", 10, 0.0)[0]
    second = [queue.arrive("regular", 10, 0.0)[0] for _ in range(2)][1]
    for number in range(20):
        queue.arrive(f"new {number}", 10, 0.0)
    for number in range(100):
        assert isinstance(running, Place)
        queue.arrive(f"later {number}", 10, 0.0)
        (running,) = queue.leave(running, 0.0)
        if running is second:
            break
    assert running is second
    assert number < 60


def test_keys_that_came_once_are_forgotten() -> None:
    queue = FairQueue(Limits(2, 10, 10, math.inf))
    keeps, _ = queue.arrive("stays", 1, 0.0)
    for number in range(10 * fair_queue._KEYS_KEPT):
        place, _ = queue.arrive(f"key {number}", 1, 0.0)
        assert isinstance(place, Place)
        queue.leave(place, 0.0)
    assert len(queue._lines) <= 2 * fair_queue._KEYS_KEPT
    # Nor do requests that are withdrawn leave anything behind.
    queue.arrive("other", 1, 0.0)
    for _ in range(10 * fair_queue._KEYS_KEPT):
        place, _ = queue.arrive("fickle", 1, 0.0)
        assert isinstance(place, Place)
        queue.leave(place, 0.0)
    assert len(queue._heads) <= 2 * fair_queue._KEYS_KEPT
    assert isinstance(keeps, Place)


@dataclass
class Served:
    waits_s: dict[str, list[float]] = field(default_factory=dict)
    totals_s: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and total time of everything that was finished."""
    refused: Counter[str] = field(default_factory=Counter)


def run(queue: FairQueue, arrivals: Iterable[tuple[float, str, int]]) -> Served:
    """An engine of `RUNNING` places behind the queue; a request takes its place for its tokens' time."""
    served, ends, numbers = Served(), [], count()  # type: ignore[var-annotated]
    timeouts: deque[Place] = deque()

    def started(place: Place, now_s: float) -> None:
        served.waits_s.setdefault(place.key, []).append(now_s - place.arrived_s)
        heapq.heappush(ends, (now_s + place.tokens * SECONDS_PER_TOKEN, next(numbers), place))

    def end() -> None:
        now_s, _, place = heapq.heappop(ends)
        served.totals_s.append((place.tokens, now_s - place.arrived_s))
        for other in queue.leave(place, now_s):
            if other.state is State.RUNNING:
                started(other, now_s)

    for at_s, key, tokens in arrivals:
        while ends and ends[0][0] <= at_s:
            end()
        while timeouts and timeouts[0].arrived_s + queue._limits.max_wait_s <= at_s:
            queue.late(timeouts.popleft())
        place, _ = queue.arrive(key, tokens, at_s)
        if isinstance(place, Refused):
            served.refused[place.why] += 1
        elif place.state is State.RUNNING:
            started(place, at_s)
        else:
            timeouts.append(place)
    while ends:
        end()
    return served


def poisson(per_s: float, seconds: float, key: str, seed: int) -> Iterator[tuple[float, str, int]]:
    chance, at_s = random.Random(seed), 0.0
    while (at_s := at_s + chance.expovariate(per_s)) < seconds:
        yield at_s, key, round(min(2000, max(20, chance.expovariate(1 / TOKENS_MEAN))))


def test_a_key_that_floods_does_not_starve_another() -> None:
    flood = list(poisson(5 * CAPACITY_PER_S, 60, "flood", 1))
    quiet = list(poisson(0.2 * CAPACITY_PER_S, 60, "quiet", 2))
    limits = Limits(max_running=RUNNING, max_waiting=64, max_waiting_per_key=48, max_wait_s=10.0)
    shared = run(FairQueue(limits), heapq.merge(flood, quiet))
    alone = run(FairQueue(limits), quiet)
    # The baseline: the same requests in one line, which is first come, first served.
    in_line = run(FairQueue(limits), ((at_s, "all", tokens) for at_s, _, tokens in heapq.merge(flood, quiet)))
    waits = sorted(shared.waits_s["quiet"])
    assert len(waits) == len(alone.waits_s["quiet"]) == len(quiet)
    # Someone must end before it starts; the flood's queue it does not see.
    assert max(waits) < 3 * TOKENS_MEAN * SECONDS_PER_TOKEN
    in_line_waits = sorted(in_line.waits_s["all"])
    assert waits[len(waits) // 2] < in_line_waits[len(in_line_waits) // 2] / 5
    # … and the flood still gets what is left.
    assert sum(tokens for tokens, _ in shared.totals_s) > 0.95 * sum(tokens for tokens, _ in in_line.totals_s)


def test_goodput_under_three_times_the_load_stays_near_its_peak() -> None:
    seconds, deadline_s = 120.0, 5.0
    limits = Limits(max_running=RUNNING, max_waiting=512, max_waiting_per_key=512, max_wait_s=2.0)

    def goodput(limits: Limits, load: float) -> float:
        """Tokens per second that came in time."""
        arrivals = heapq.merge(*(poisson(load * CAPACITY_PER_S / 4, seconds, key, ord(key)) for key in "abcd"))
        served = run(FairQueue(limits), arrivals)
        return sum(tokens for tokens, total_s in served.totals_s if total_s <= deadline_s) / seconds

    ours = {load: goodput(limits, load) for load in (0.5, 0.8, 1.0, 1.5, 2.0, 3.0)}
    peak = max(ours.values())
    assert peak > 0.9 * RUNNING / SECONDS_PER_TOKEN
    assert ours[3.0] >= 0.9 * peak
    # First come, first served without a bound: by the time of its turn, each has been given up.
    assert goodput(UNBOUNDED, 0.8) >= 0.95 * ours[0.8]
    in_one_line = FairQueue(UNBOUNDED)
    collapsed = run(in_one_line, poisson(3 * CAPACITY_PER_S, seconds, "all", 5))
    assert sum(tokens for tokens, total_s in collapsed.totals_s if total_s <= deadline_s) / seconds < 0.2 * peak


def test_who_is_let_in_is_not_kept_for_longer_than_was_expected() -> None:
    """Shedding by the expected wait, and not by the time-out: hardly anybody is let in only to be sent away later."""
    limits = Limits(max_running=RUNNING, max_waiting=512, max_waiting_per_key=512, max_wait_s=2.0)
    arrivals = list(poisson(3 * CAPACITY_PER_S, 120, "all", 9))
    served = run(FairQueue(limits), arrivals)
    answered = len(served.totals_s)
    late = len(arrivals) - answered - served.refused.total()
    assert served.refused["wait"] > 0.5 * len(arrivals)
    assert late < 0.15 * answered
    assert max(served.waits_s["all"]) <= limits.max_wait_s
