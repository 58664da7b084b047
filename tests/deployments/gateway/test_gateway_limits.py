"""Limits of keys: never more than the limit and the burst in a minute, refunds to the token, clocks that go back."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.registry.apikeys import ApiKey
from cluster.errors import RequestError
from deployments.gateway.errors import problem
from deployments.gateway.limits import Bucket, Budget, Limiter, Reservation, choices, estimate, require_choices

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
KEY = ApiKey("key-0123456789ab", "ci", "a" * 64)


class Clock:
    def __init__(self) -> None:
        self.ns = 5 * MINUTE
        self.now = datetime(2026, 1, 31, 23, 0, tzinfo=UTC)

    def limiter(self, *, replicas: int = 1) -> Limiter:
        return Limiter(replicas=replicas, clock_ns=lambda: self.ns, now=lambda: self.now)


def refusal(limiter: Limiter, key: ApiKey, tokens: int = 1) -> RequestError:
    with pytest.raises(RequestError) as refused:
        limiter.reserve(key, tokens)
    return refused.value


def test_requests_come_back_one_by_one() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, rpm=6)
    for _ in range(6):
        limiter.reserve(key, 1)
    refused = problem(refusal(limiter, key))
    assert (refused.status, refused.code, refused.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert refused.headers["Retry-After"] == "10"
    assert refused.headers["x-ratelimit-limit-requests"] == "6"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"] == "60000ms"
    clock.ns += 10 * SECOND - 1
    refusal(limiter, key)
    clock.ns += 1
    limiter.reserve(key, 1)
    refusal(limiter, key)


def test_what_is_refused_takes_nothing() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, rpm=2, tpm=100)
    limiter.reserve(key, 90)
    for _ in range(5):
        refusal(limiter, key, 20)
    limiter.reserve(key, 10)  # neither the second request nor the ten tokens are gone
    assert "requests" in refusal(limiter, key, 1).message


def test_usage_settles_an_estimate_and_more_than_it_is_a_debt() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, tpm=60)
    limiter.reserve(key, 60).settle(10)
    reservation = limiter.reserve(key, 50)
    assert reservation.headers["x-ratelimit-remaining-tokens"] == "0"
    reservation.settle(55)
    refused = refusal(limiter, key, 1)
    assert refused.headers["Retry-After"] == "6"
    reservation.settle(0)  # it is over; what comes later changes nothing
    reservation.refund()
    refusal(limiter, key, 1)
    clock.ns += 6 * SECOND
    limiter.reserve(key, 1)


def test_a_request_that_never_fits_is_told_that_waiting_does_not_help() -> None:
    limiter = Clock().limiter()
    refused = refusal(limiter, replace(KEY, tpm=60), 61)
    assert "Retry-After" not in refused.headers
    assert "waiting does not help" in (refused.hint or "")


def test_a_budget_counts_what_was_used_and_begins_again_with_its_period() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, budget_tokens=100, budget_period="day")
    limiter.reserve(key, 80).settle(50)
    open_one = limiter.reserve(key, 40)
    refused = problem(refusal(limiter, key, 11))
    assert (refused.status, refused.code) == (429, "insufficient_quota")
    assert refused.headers["Retry-After"] == "3600"
    open_one.refund()
    limiter.reserve(key, 50).settle(50)
    refusal(limiter, key, 1)
    clock.now += timedelta(hours=1)
    limiter.reserve(key, 100).settle(100)
    clock.now -= timedelta(hours=1)  # the day before does not come back
    refusal(limiter, key, 1)


@pytest.mark.parametrize(
    ("period", "now", "left_s"),
    [
        ("day", datetime(2026, 2, 28, 23, 59, 30, tzinfo=UTC), 30),
        ("month", datetime(2026, 1, 31, 0, 0, tzinfo=UTC), 86400),
        ("month", datetime(2026, 2, 1, 0, 0, tzinfo=UTC), 28 * 86400),
        ("month", datetime(2026, 12, 31, 23, 0, tzinfo=UTC), 3600),
    ],
)
def test_periods_end_with_the_day_and_the_month(period: Any, now: datetime, left_s: float) -> None:
    budget = Budget(5, period)
    assert budget.ends_in_s(now) == left_s
    budget.hold(5)
    budget.settle(5, 5, now)
    assert budget.left(now + timedelta(seconds=left_s - 1)) == 0
    assert budget.left(now + timedelta(seconds=left_s)) == 5


def test_replicas_share_a_limit_and_each_lets_one_request_through() -> None:
    clock = Clock()
    key = replace(KEY, rpm=10)
    shares = []
    for limiter in [clock.limiter(replicas=3) for _ in range(3)]:
        shares.append(0)
        for _ in range(10):
            try:
                limiter.reserve(key, 1)
            except RequestError:
                break
            shares[-1] += 1
    assert shares == [3, 3, 3]
    one = clock.limiter(replicas=3)
    one.reserve(replace(KEY, rpm=1), 1)
    assert refusal(one, replace(KEY, rpm=1)).headers["Retry-After"] == "180"


def test_keys_do_not_share_buckets_and_a_key_without_limits_has_none() -> None:
    limiter = Clock().limiter()
    limiter.reserve(replace(KEY, rpm=1), 1)
    limiter.reserve(replace(KEY, id="key-ffffffffffff", rpm=1), 1)
    free = replace(KEY, id="key-eeeeeeeeeeee")
    assert [limiter.reserve(free, 10**9).headers for _ in range(100)] == [{}] * 100


LIMITS = st.integers(1, 50)
# Each step: how the clock moves (also back), how many halves of the limit are asked for, and which earlier request is
# over first, with how much of what it had reserved.
STEPS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, SECOND, 30 * SECOND, MINUTE, MINUTE, -3 * SECOND, -MINUTE]),
        st.sampled_from([1, 2]),
        st.integers(0, 3),
        st.sampled_from([0, 0, 1]),
    ),
    min_size=4,
    max_size=40,
)


@settings(max_examples=400)
@given(limit=st.integers(1, 6), steps=STEPS)
def test_in_no_minute_more_is_used_than_the_limit_and_the_burst(
    limit: int, steps: list[tuple[int, int, int, int]]
) -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, tpm=2 * limit)
    furthest = 0  # that the limiter has seen
    used: list[list[int]] = []  # when it was let in, by the clock at its furthest, and what it cost
    going: list[tuple[Reservation, list[int]]] = []
    for step, halves, which, share in steps:
        clock.ns += step
        furthest = max(furthest, clock.ns)
        if which < len(going):
            reservation, entry = going.pop(which)
            entry[1] *= share
            reservation.settle(entry[1])
        try:
            reservation = limiter.reserve(key, halves * limit)
        except RequestError:
            continue
        used.append([furthest, halves * limit])
        going.append((reservation, used[-1]))
    for start, _ in used:
        window = sum(tokens for at, tokens in used if start <= at <= start + MINUTE)
        assert window <= 2 * 2 * limit


def test_two_reservations_do_not_both_get_back_what_the_bucket_had_room_for_once() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, tpm=10)
    first, second = limiter.reserve(key, 5), limiter.reserve(key, 5)
    clock.ns += MINUTE // 2
    limiter.reserve(key, 5).settle(5)
    first.refund()
    second.refund()  # had there been neither, the bucket would have been full, and half full now
    limiter.reserve(key, 5)
    refusal(limiter, key, 1)


def test_a_clock_that_goes_back_fills_nothing_twice() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, tpm=10)
    limiter.reserve(key, 10)
    for _ in range(3):
        clock.ns -= MINUTE
        refusal(limiter, key, 1)
        clock.ns += MINUTE
        refusal(limiter, key, 1)
    clock.ns += MINUTE
    limiter.reserve(key, 10)


@given(
    limit=LIMITS,
    taken=st.integers(0, 50),
    before=st.integers(0, 2 * MINUTE),
    held=st.integers(1, 50),
    part=st.integers(0, 50),
    others=st.lists(st.tuples(st.integers(0, MINUTE), st.integers(1, 10)), max_size=12),
)
def test_what_is_given_back_leaves_the_bucket_as_if_it_had_never_been_taken(
    limit: int, taken: int, before: int, held: int, part: int, others: list[tuple[int, int]]
) -> None:
    one, other = Bucket(limit), Bucket(limit)
    now = before
    for bucket in (one, other):
        if taken and bucket.wait_ns(taken, 0) == 0:
            bucket.settle(bucket.take(taken, 0), taken, 0)
    used = min(part, held)
    if one.wait_ns(held, now) != 0:
        return
    hold = one.take(held, now)
    other.settle(other.take(used, now), used, now)
    for step, tokens in others:
        now += step
        if one.wait_ns(tokens, now) == 0:  # the fuller one lets it through as well
            for bucket in (one, other):
                bucket.settle(bucket.take(tokens, now), tokens, now)
    one.settle(hold, used, now)
    assert one.full_in_ns(now) == other.full_in_ns(now)
    assert one.left(now) == other.left(now)


def test_reservations_that_lay_idle_are_not_saved_up() -> None:
    clock = Clock()
    limiter, key = clock.limiter(), replace(KEY, tpm=10)
    idle = []
    for _ in range(5):
        idle.append(limiter.reserve(key, 10))
        clock.ns += MINUTE
    let_in = 0
    for reservation in [*idle, None]:
        try:
            limiter.reserve(key, 10)
            let_in += 10
        except RequestError:
            pass
        if reservation is not None:
            reservation.refund()
    assert let_in == 10


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"messages": [{"role": "user", "content": "x" * 396}], "max_tokens": 10}, 1 + 99 + 10),
        ({"messages": [{"content": "x" * 4}], "max_completion_tokens": 5, "max_tokens": 9, "n": 3}, 1 + 15),
        ({"prompt": [1, 2, 3], "max_tokens": 1}, 4),
        ({"prompt": ["xxxx", "yyyy"], "max_tokens": 5, "n": 3}, 2 + 30),
        ({"prompt": [[1, 2], [3]], "max_tokens": 5}, 3 + 10),
        ({"prompt": "", "max_tokens": None}, 256),
        ({"prompt": "", "max_tokens": True, "n": -4}, 256),
        ({"input": ["xxxx", "yyyyy"]}, 3),
        ({"input": [[1, 2], [3]]}, 3),
        ({}, 1),
    ],
)
def test_an_estimate_is_the_text_and_what_may_be_answered(body: dict[str, Any], tokens: int) -> None:
    assert estimate(body) == tokens


def test_one_request_may_not_ask_for_any_number_of_answers() -> None:
    for fine in ({"messages": [], "n": 6}, {"prompt": ["a", "b"], "n": 3}, {"prompt": [1] * 9}, {"n": "7"}):
        require_choices(fine, 6)
    for body, param in (({"messages": [], "n": 7}, "n"), ({"prompt": ["a", "b"], "n": 4}, "prompt")):
        with pytest.raises(RequestError, match=f"asks for {choices(body)} answers") as caught:
            require_choices(body, 6)
        assert (caught.value.status, caught.value.param) == (400, param)
