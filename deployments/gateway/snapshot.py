"""The gateway's own copy of the registry's snapshot, kept fresh in the background.

Requests read `current` and never wait for the registry. While the registry is away the last copy serves on. When
it is back it sends what has changed since, or everything if it cannot know: the registry is right, not the copy.
"""

import asyncio
import contextlib
import logging
import time

from actors.registry.snapshot import Snapshot
from deployments.gateway.ports import SnapshotSource

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
_SLACK_S = 10.0
"""How much later than asked an answer may come; a source that keeps its promise has given up by then."""

_NOTHING_YET = Snapshot(epoch=-1)

logger = logging.getLogger(__name__)


class SnapshotFeed:
    """Holds the last snapshot and follows its source by long poll."""

    def __init__(self, source: SnapshotSource, *, poll_s: float) -> None:
        self._source = source
        self._poll_s = poll_s
        self._task: asyncio.Task[None] | None = None
        self._heard_at: float | None = None
        self._connected = False
        self.current = Snapshot()

    async def start(self, *, wait_s: float) -> None:
        """Begin to follow; returns with the first snapshot, or without one after `wait_s`."""
        first = asyncio.Event()
        self._task = asyncio.create_task(self._follow(first), name="registry-snapshot")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await first.wait()

    async def stop(self) -> None:
        """End the long poll."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    @property
    def heard(self) -> bool:
        """Whether the registry has ever answered: until then nothing is known, not even who has a key."""
        return self._heard_at is not None

    def describe(self) -> dict[str, object]:
        """Facts for health: is the registry there, and how old is what we know."""
        age_s = None if self._heard_at is None else round(time.monotonic() - self._heard_at, 1)
        return {"connected": self._connected, "snapshot": self.current.number, "age_s": age_s}

    def _after(self) -> Snapshot:
        """Until the first answer, a snapshot that no registry has: also one without versions answers at once."""
        return self.current if self._heard_at is not None else _NOTHING_YET

    async def _follow(self, first: asyncio.Event) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                # Not `wait_for`: in Python 3.11 it swallows a cancellation that comes together with the result.
                async with asyncio.timeout(self._poll_s + _SLACK_S):
                    snapshot = await self._source.wait_snapshot(self._after(), self._poll_s)
            except Exception as error:  # noqa: BLE001 (with a dead task it would serve the last snapshot for ever)
                if self._connected or (self._heard_at is None and pause_s == FIRST_PAUSE_S):
                    logger.warning("The registry is away (%s); serving snapshot %d.", error, self.current.number)
                self._connected = False
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
                continue
            if snapshot.number != self.current.number:
                logger.info("Registry snapshot %d → %d.", self.current.number, snapshot.number)
            self.current, self._connected, self._heard_at, pause_s = snapshot, True, time.monotonic(), FIRST_PAUSE_S
            first.set()
