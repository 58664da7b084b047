import asyncio
from contextlib import AsyncExitStack

import pytest

from cluster.errors import RateLimitError
from deployments.gateway.admission import Admission, Turn
from deployments.gateway.errors import problem


def admission(**changes: object) -> Admission:
    limits = {"max_running": 1, "max_waiting": 4, "max_waiting_per_key": 2, "max_wait_s": 5.0}
    return Admission(**{**limits, **changes})  # type: ignore[arg-type]


async def settled() -> None:
    """Everything that can go on without time passing has done so."""
    for _ in range(10):
        await asyncio.sleep(0)


class Caller:
    """A task that takes a turn and holds it until it is let go."""

    def __init__(self, front: Admission, key: str, tokens: int = 10, used: int | None = None) -> None:
        self.turn: Turn | None = None
        self._go = asyncio.Event()
        self.task = asyncio.create_task(self._run(front, key, tokens, used))

    async def _run(self, front: Admission, key: str, tokens: int, used: int | None) -> None:
        async with front.turn(key, tokens) as turn:
            self.turn = turn
            await self._go.wait()
            turn.used = used

    async def finish(self) -> None:
        await finish(self)

    def let_go(self) -> None:
        self._go.set()


async def finish(*callers: Caller) -> None:
    """All of them take their turns, in whatever order these come, and leave."""
    for caller in callers:
        caller.let_go()
    await asyncio.gather(*(caller.task for caller in callers))
    await settled()


async def test_a_released_place_wakes_exactly_one() -> None:
    front = admission(max_running=2)
    callers = [Caller(front, key) for key in "abcde"]
    await settled()
    assert [caller.turn is not None for caller in callers] == [True, True, False, False, False]
    assert (front.running, front.waiting) == (2, 3)
    await callers[0].finish()
    assert [caller.turn is not None for caller in callers[2:]] == [True, False, False]
    assert (front.running, front.waiting) == (2, 2)
    await finish(*callers[1:])
    assert (front.running, front.waiting) == (0, 0)


async def test_a_full_queue_and_a_full_key_are_told_at_once_with_429() -> None:
    front = admission(max_waiting=3)
    callers = [Caller(front, key) for key in ("a", "a", "a")]
    await settled()
    with pytest.raises(RateLimitError, match="2 of your requests wait") as full:
        async with front.turn("a", 10):
            pass
    seen = problem(full.value)
    assert (seen.status, seen.code, seen.type) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert int(seen.headers["Retry-After"]) >= 1
    callers.append(Caller(front, "b"))
    await settled()
    with pytest.raises(RateLimitError, match="queue is full: 3"):
        async with front.turn("c", 1000):
            pass
    await finish(*callers)


async def test_a_full_queue_makes_room_for_a_caller_who_has_less_in_it() -> None:
    front = admission(max_waiting=2)
    first, second, third = [Caller(front, "greedy") for _ in range(3)]
    await settled()
    modest = Caller(front, "modest")
    await settled()
    with pytest.raises(RateLimitError, match="callers with less in it"):
        await third.task
    await finish(first, second, modest)
    assert modest.turn is not None


async def test_a_caller_who_goes_away_while_waiting_frees_the_place() -> None:
    front = admission()
    first, second, third = Caller(front, "a"), Caller(front, "a"), Caller(front, "b")
    await settled()
    second.task.cancel()
    await settled()
    assert (front.running, front.waiting) == (1, 1)
    await first.finish()
    assert third.turn is not None
    await third.finish()
    assert (front.running, front.waiting) == (0, 0)


async def test_a_caller_who_is_woken_and_cancelled_at_once_passes_its_place_on() -> None:
    front = admission()
    gate = AsyncExitStack()
    await gate.enter_async_context(front.turn("a", 10))
    woken, after = Caller(front, "b"), Caller(front, "c")
    await settled()
    await gate.aclose()  # the place is the second caller's from here on, and it has not run yet
    woken.task.cancel()
    await settled()
    assert woken.turn is None
    assert after.turn is not None
    await after.finish()
    assert (front.running, front.waiting) == (0, 0)


async def test_nobody_waits_longer_than_the_limit() -> None:
    front = admission(max_wait_s=0.01)
    first = Caller(front, "a")
    await settled()
    with pytest.raises(RateLimitError, match=r"within 0\.01 s"):
        async with front.turn("b", 10):
            pass
    assert (front.running, front.waiting) == (1, 0)
    await first.finish()


async def test_a_fault_in_the_block_gives_the_place_back() -> None:
    front = admission()
    with pytest.raises(KeyError):
        async with front.turn("a", 10):
            raise KeyError
    assert front.running == 0
    async with front.turn("a", 10) as turn:
        assert turn.waited_s >= 0


async def test_a_key_is_charged_what_its_request_took_and_not_the_estimate() -> None:
    front = admission(max_running=2, max_waiting_per_key=4)
    understated = Caller(front, "a", tokens=1, used=1000)
    holder = Caller(front, "h")
    waiters = [Caller(front, "a"), Caller(front, "b", tokens=100), Caller(front, "b", tokens=100)]
    await settled()
    await understated.finish()
    assert [caller.turn is not None for caller in waiters] == [False, True, False]
    await waiters[1].finish()
    assert [caller.turn is not None for caller in waiters] == [False, True, True]
    await finish(holder, *waiters)


async def test_a_hopeless_request_is_refused_by_the_measured_rate_and_told_when_to_ask_again() -> None:
    now_s = 0.0
    front = admission(max_wait_s=5.0, max_waiting=100, max_waiting_per_key=100, clock=lambda: now_s)
    for _ in range(4):  # ten tokens a second
        async with front.turn("a", 100):
            now_s += 10.0
    callers = [Caller(front, "a", 20) for _ in range(3)]
    await settled()
    assert (front.running, front.waiting) == (1, 2)
    # Two of the key's own and what runs: 60 tokens.
    with pytest.raises(RateLimitError, match="about 6 s, and may be 5 s") as refused:
        async with front.turn("a", 20):
            pass
    assert refused.value.retry_after_s == pytest.approx(6, abs=0.2)
    # Another key does not stand behind them.
    callers.append(Caller(front, "b", 20))
    await settled()
    assert front.waiting == 3
    await callers[0].finish()
    assert callers[3].turn is not None
    await callers[3].finish()
    await finish(*callers[1:3])
    assert (front.running, front.waiting) == (0, 0)


async def test_a_new_replica_is_filled_at_the_next_event() -> None:
    replicas = 1
    front = admission(max_running=2, max_waiting=8, max_waiting_per_key=8, replicas=lambda: replicas)
    callers = [Caller(front, key) for key in "abcdef"]
    await settled()
    assert (front.running, front.waiting) == (2, 4)
    replicas = 2
    await callers[0].finish()
    assert (front.running, front.waiting) == (4, 1)
    replicas = 0  # the gateway has lost sight of them all: what runs goes on, and one replica's worth may try
    await callers[1].finish()
    assert (front.running, front.waiting) == (3, 1)
    await finish(*callers[2:])
    assert (front.running, front.waiting) == (0, 0)
