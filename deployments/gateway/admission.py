"""A bounded, fair queue in front of an engine. The decisions are `fair_queue`'s; here are futures and a clock.

How it is used: one `Admission` for each engine, or for a gateway's share of the fleet, in one event loop; `key` is
whose request it is (the API key, or the `user` of the body), `tokens` an estimate of prompt and answer.

    admission = Admission(max_running=64, max_waiting=256, max_waiting_per_key=64, max_wait_s=20.0)
    async with admission.turn(key, tokens) as turn:
        …generate…
        turn.used = usage.prompt_tokens + usage.completion_tokens

Entering waits for the turn, or raises `RateLimitError` (429): at once if the wait would be too long or the queue is
full, after `max_wait_s` at the latest. Leaving the block, in whatever way, gives the place to exactly one other. A
task that is cancelled while it waits (its client hung up) gives up its place.

`max_wait_s` should be what the callers' patience leaves once a typical generation's own time is taken off: what is
let in is then served in time, and an engine that is asked for three times what it can do goes on doing what it can.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from cluster.errors import RateLimitError
from deployments.gateway.config import GatewayConfig
from deployments.gateway.fair_queue import FairQueue, Limits, Place, Refused, State

SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0
"""A rate that was measured in a bad minute should not keep a client away for long."""

_SLOWLY = "Send fewer requests at once, or ask again later."


@dataclass(slots=True)
class Turn:
    """One admitted request."""

    waited_s: float
    used: int | None = None
    """Set it once it is known: the tokens it really took. The key is charged these and not the estimate."""


class Admission:
    """Lets `max_running` requests through for each replica, and holds the others by key. Used from one event loop."""

    def __init__(
        self,
        *,
        max_running: int,
        max_waiting: int,
        max_waiting_per_key: int,
        max_wait_s: float,
        weight: Callable[[str], float] = lambda _: 1.0,
        replicas: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`weight`: a key's share relative to the others'; asked once while a key is known.

        `replicas`: how many engines there are now; each takes `max_running`.
        """
        self._limits = Limits(max_running, max_waiting, max_waiting_per_key, max_wait_s)
        self._queue = FairQueue(self._limits, weight=weight, replicas=replicas)
        self._clock = clock
        self._wakes: dict[Place, asyncio.Future[None]] = {}

    @classmethod
    def of(cls, config: GatewayConfig, *, replicas: Callable[[], int] = lambda: 1) -> "Admission":
        """As the settings say."""
        return cls(
            max_running=config.max_running,
            max_waiting=config.max_waiting,
            max_waiting_per_key=config.max_waiting_per_caller,
            max_wait_s=config.max_wait_s,
            replicas=replicas,
        )

    @property
    def running(self) -> int:
        return self._queue.running

    @property
    def waiting(self) -> int:
        return self._queue.waiting

    @asynccontextmanager
    async def turn(self, key: str, tokens: int) -> AsyncIterator[Turn]:
        """A place for one request of about `tokens`, for as long as the block runs. Raises `RateLimitError`."""
        place, displaced = self._queue.arrive(key, tokens, self._clock())
        self._wake(displaced)
        if isinstance(place, Refused):
            raise self._refusal(place.why, place.expected_wait_s)
        turn = Turn(waited_s=0.0)
        try:
            if place.state is State.WAITING:
                await self._wait(place)
            turn.waited_s = self._clock() - place.arrived_s
            yield turn
        finally:
            # Also of one that was woken and cancelled before it could run: its place goes on to the next.
            self._wake(self._queue.leave(place, self._clock(), used=turn.used))

    async def _wait(self, place: Place) -> None:
        wake = self._wakes[place] = asyncio.get_running_loop().create_future()
        try:
            # Not `wait_for`: in Python 3.11 it can lose a cancellation that comes together with the result.
            await asyncio.wait([wake], timeout=self._limits.max_wait_s)
        finally:
            del self._wakes[place]
        self._queue.late(place)
        if place.state is not State.RUNNING:
            raise self._refusal(place.state.value, self._queue.expected_wait_s(place.key))

    def _wake(self, changed: Iterable[Place]) -> None:
        for place in changed:
            wake = self._wakes.get(place)
            if wake is not None and not wake.done():
                wake.set_result(None)

    def _refusal(self, why: str, expected_wait_s: float) -> RateLimitError:
        limits = self._limits
        said = {
            "key_full": f"{limits.max_waiting_per_key} of your requests wait already, as many as may.",
            "full": f"The queue is full: {limits.max_waiting} requests wait.",
            "wait": f"The wait would be about {expected_wait_s:.0f} s, and may be {limits.max_wait_s:g} s.",
            "displaced": "The queue is full, and callers with less in it go first.",
            "late": f"No turn came within {limits.max_wait_s:g} s.",
        }
        retry_after_s = min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, expected_wait_s))
        return RateLimitError(said[why], retry_after_s=retry_after_s, hint=_SLOWLY)
