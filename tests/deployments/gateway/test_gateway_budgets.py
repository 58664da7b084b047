"""Budgets that several gateways keep together, and that outlive each of them: on the registry's real tables."""

import asyncio
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from actors.registry.apikeys import ApiKey
from actors.registry.serving import BudgetUse, KeyUse, ServingBook, ServingReport, read_key_use
from cluster.database import open_engine, sqlite_uri
from cluster.errors import DependencyError, RequestError
from deployments.gateway.budgets import BudgetFeed
from deployments.gateway.errors import problem
from deployments.gateway.limits import Limiter
from deployments.gateway.usage import Charge, KeyUsage

NOON = datetime(2026, 1, 31, 12, 30, tzinfo=UTC)
BUDGET = 1000
DAILY = ApiKey("key-0123456789ab", "ci", "a" * 64, budget_tokens=BUDGET, budget_period="day")
MONTHLY = ApiKey("key-ba9876543210", "team", "b" * 64, budget_tokens=BUDGET, budget_period="month")


@dataclass
class World:
    """The registry's tables, the time, and whether the registry is there."""

    book: ServingBook
    now: datetime = NOON
    away: bool = False


@dataclass
class Gateway:
    """The part of one gateway replica that counts, in one life of it."""

    world: World
    source: str
    keys: KeyUsage = field(init=False)
    limiter: Limiter = field(init=False)

    def __post_init__(self) -> None:
        self.keys = KeyUsage(clock=lambda: self.world.now)
        self.limiter = Limiter(charged=self.keys.charged, hear_first=True, now=lambda: self.world.now)

    def use(self, key: ApiKey, tokens: int) -> bool:
        """Whether a request of so many tokens went through."""
        try:
            self.limiter.reserve(key, tokens).settle(tokens // 2, tokens - tokens // 2)
        except RequestError as refused:
            if refused.code != "insufficient_quota":
                raise
            return False
        return True

    def report(self) -> None:
        """Say what was charged, if the registry is there."""
        rows = self.keys.changed()
        if rows and not self.world.away:
            self.world.book.enter(ServingReport(source=self.source, node="n", keys=rows), at=self.world.now)
            self.keys.reported(rows)

    def hear(self) -> None:
        if not self.world.away:
            self.limiter.learn(self.world.book.budget_use([DAILY, MONTHLY], but=self.source, now=self.world.now))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    engine = open_engine(sqlite_uri(tmp_path / "registry.db"))
    yield World(ServingBook(engine))
    engine.dispose()


def gateways(world: World, *sources: str) -> list[Gateway]:
    made = [Gateway(world, source) for source in sources]
    for gateway in made:
        gateway.hear()
    return made


@pytest.mark.parametrize("seed", range(5))
def test_two_gateways_keep_one_budget_to_within_what_they_have_not_told_each_other(world: World, seed: int) -> None:
    chance, pair = random.Random(seed), gateways(world, "a", "b")
    used, unheard = 0, {"a": 0, "b": 0}  # of the other
    for _ in range(400):
        gateway = chance.choice(pair)
        if chance.random() < 0.1:
            for each in pair:
                each.report()
            gateway.hear()
            unheard[gateway.source] = 0
        tokens = chance.randint(1, 30)
        there_was = BUDGET - used + unheard[gateway.source]
        assert gateway.use(DAILY, tokens) == (tokens <= there_was)
        if tokens <= there_was:
            used += tokens
            unheard["b" if gateway.source == "a" else "a"] += tokens
    assert used >= BUDGET - 30


def test_a_gateway_that_was_restarted_goes_on_from_what_was_used(world: World) -> None:
    (first,) = gateways(world, "gateway#1")
    assert first.use(DAILY, 900)
    first.report()
    again = Gateway(world, "gateway#2")
    with pytest.raises(DependencyError, match="has not heard") as unheard:
        again.limiter.reserve(DAILY, 1)
    assert problem(unheard.value).headers["Retry-After"]
    again.limiter.reserve(ApiKey("key-1", "free", ""), 10**6)  # a key without a budget need not wait for it
    again.hear()
    assert not again.use(DAILY, 101)
    assert again.use(DAILY, 100)


def test_while_the_registry_is_away_it_counts_on_and_reports_when_it_is_back(world: World) -> None:
    first, second = gateways(world, "a", "b")
    world.away = True
    assert first.use(DAILY, 600)
    first.report()
    first.hear()
    assert not first.use(DAILY, 401)
    world.away = False
    first.report()
    second.hear()
    assert not second.use(DAILY, 401)
    assert second.use(DAILY, 400)


def test_a_report_that_is_lost_or_comes_twice_or_late_changes_nothing(world: World) -> None:
    (one,) = gateways(world, "a")
    one.use(DAILY, 100)
    old = one.keys.changed()
    one.use(DAILY, 200)
    for rows in (one.keys.changed(), old, one.keys.changed()):
        world.book.enter(ServingReport(source="a", node="n", keys=rows), at=world.now)
    found = world.book.budget_use([DAILY], but="b", now=world.now)
    assert found == {DAILY.id: BudgetUse(datetime(2026, 1, 31, tzinfo=UTC), 300)}
    assert world.book.budget_use([DAILY], but="a", now=world.now)[DAILY.id].tokens == 0


def test_a_new_period_begins_at_nothing_wherever_the_tokens_were_used(world: World) -> None:
    first, second = gateways(world, "a", "b")
    for key in (DAILY, MONTHLY):
        assert first.use(key, BUDGET)
    first.report()
    second.hear()
    assert not second.use(DAILY, 1)
    world.now += timedelta(hours=12)  # February: what was heard is of January
    assert second.use(DAILY, 1)
    assert second.use(MONTHLY, 1)
    second.hear()
    assert second.use(MONTHLY, BUDGET - 1)
    assert not second.use(MONTHLY, 1)


def test_use_is_read_by_key_and_hour_of_all_gateways_together(world: World, tmp_path: Path) -> None:
    first, second = gateways(world, "a", "b")
    first.use(DAILY, 10)
    second.keys.charged(DAILY.id, Charge(prompt=1, completion=2, estimated=3))
    for gateway in (first, second):
        gateway.report()
    engine = open_engine(sqlite_uri(tmp_path / "registry.db"))
    assert read_key_use(engine) == [
        KeyUse(
            key_id=DAILY.id,
            hour=NOON.replace(minute=0),
            requests=2,
            prompt_tokens=6,
            completion_tokens=7,
            estimated_tokens=3,
        )
    ]
    engine.dispose()


async def test_the_feed_asks_until_it_is_answered_and_goes_on_when_the_registry_went_away() -> None:
    answers: list[Mapping[str, BudgetUse] | None] = [None, {}, None, {"k": BudgetUse(NOON, 5)}]
    learnt: list[Mapping[str, BudgetUse]] = []

    async def ask() -> Mapping[str, BudgetUse]:
        answer = answers.pop(0) if answers else {}
        if answer is None:
            raise DependencyError("The registry is away.")
        return answer

    feed = BudgetFeed(ask, learnt.append, every_s=0.01)
    await feed.start(wait_s=5)
    assert learnt == [{}]
    async with asyncio.timeout(5):
        while {"k": BudgetUse(NOON, 5)} not in learnt:
            await asyncio.sleep(0.01)
    await feed.stop()


async def test_a_gateway_without_a_registry_starts_all_the_same() -> None:
    async def ask() -> Mapping[str, BudgetUse]:
        raise DependencyError("The registry is away.")

    feed = BudgetFeed(ask, lambda _: None, every_s=0.01)
    await feed.start(wait_s=0.03)
    await feed.stop()


def test_a_share_that_changes_moves_the_limits_of_keys_that_are_known() -> None:
    now_ns = 0
    limiter, key = Limiter(clock_ns=lambda: now_ns), ApiKey("key-1", "k", "", rpm=10, tpm=100)
    going = limiter.reserve(key, 40)
    limiter.share(2)
    half = limiter.reserve(key, 10)
    assert (half.headers["x-ratelimit-limit-tokens"], half.headers["x-ratelimit-remaining-tokens"]) == ("50", "20")
    going.refund()  # forty of what was the whole are twenty of the half
    assert limiter.reserve(key, 1).headers["x-ratelimit-remaining-tokens"] == "39"
    now_ns += 60 * 10**9
    limiter.share(1)
    assert limiter.reserve(key, 100).headers["x-ratelimit-limit-requests"] == "10"
