"""What other gateways have charged to the budgets of API keys, heard from the registry again and again.

Each gateway reports what it has charged (`reporting`) and asks what all others have, so that they keep one budget
together and one that was restarted goes on where it was. While the registry is away each counts on by itself, and
what it has charged is reported when the registry is back.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from actors.registry.serving import BudgetUse

EVERY_S = 3.0
"""Between two questions, and between two reports: a budget may be overrun by what others charge meanwhile."""
FIRST_EVERY_S = 0.5

logger = logging.getLogger(__name__)


class BudgetFeed:
    """Calls `learn` with what `ask` answers, every `every_s` seconds. `ask` raises `cluster.errors` only."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[Mapping[str, BudgetUse]]],
        learn: Callable[[Mapping[str, BudgetUse]], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self._ask = ask
        self._learn = learn
        self._every_s = every_s
        self._known = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self, *, wait_s: float) -> None:
        """Begin; returns with the first answer, or without one after `wait_s`."""
        self._task = asyncio.create_task(self._follow(), name="registry-budgets")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._known.wait()

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _follow(self) -> None:
        while True:
            try:
                self._learn(await self._ask())
                self._known.set()
            except Exception as error:  # noqa: BLE001 (with a dead task others' use would never be heard of again)
                logger.info("The registry did not say what budgets have been used elsewhere: %s", error)
            await asyncio.sleep(self._every_s if self._known.is_set() else min(FIRST_EVERY_S, self._every_s))
