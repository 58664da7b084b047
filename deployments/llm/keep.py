"""The adapters of `llm.keep`: which versions they are now, and that every replica has them before traffic asks.

Each replica follows the registry for this itself. A gateway cannot see to it: it reaches one replica of its choice
with a call, not each, and those that start later not at all. While the registry is away the last answer stands.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

from actors.registry.snapshot import Snapshot, resolve
from cluster.errors import RequestError
from cluster.models import served_name
from deployments.llm.protocol import Adapter
from deployments.snapshot import SnapshotFeed, SnapshotSource

POLL_S = 10.0
RETRY_S = 60.0
"""How soon a kept adapter that could not be loaded is tried again, if nothing moves in the registry."""

logger = logging.getLogger(__name__)


def kept(known: Snapshot, references: Sequence[str], base: str) -> tuple[list[Adapter], dict[str, str]]:
    """The versions that `references` mean now, and why of those that mean none. Of a split, the largest share."""
    adapters: dict[str, Adapter] = {}
    problems: dict[str, str] = {}
    for reference in references:
        try:
            route = resolve(known, reference)
        except RequestError as error:
            problems[reference] = f"{error.message} {error.hint or ''}".strip()
            continue
        if route.kind != "adapter" or served_name(route.base) != base:
            found = f"its kind is {route.kind}, its base {served_name(route.base)}"
            problems[reference] = f"{route.id} is no adapter on {base}: {found}."
            continue
        adapters[route.id] = Adapter(version=route.id, path=str(known.folder(route)), digest=route.digest)
    return list(adapters.values()), problems


class Keeper:
    """Calls `keep` with the versions that `references` mean, whenever they mean others, and again while one fails."""

    def __init__(
        self,
        references: Sequence[str],
        base: str,
        source: SnapshotSource,
        keep: Callable[[list[Adapter]], Awaitable[None]],
        *,
        poll_s: float = POLL_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._references = references
        self._base = base
        self._keep = keep
        self._retry_s = retry_s
        self._news = asyncio.Event()
        self._feed = SnapshotFeed(source, poll_s=poll_s, heard=self._news.set)
        self._task: asyncio.Task[None] | None = None
        self.problems: dict[str, str] = {}
        """Why of the references that mean no adapter of this base."""

    async def start(self, *, wait_s: float) -> None:
        """Begin; returns when the first are in, or after `wait_s`: a registry that is away stops no replica."""
        if not self._references:
            return
        first = asyncio.Event()
        self._task = asyncio.create_task(self._run(first), name="keep-adapters")
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._feed.start(wait_s=wait_s)
                await first.wait()

    async def stop(self) -> None:
        """End following."""
        await self._feed.stop()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _run(self, first: asyncio.Event) -> None:
        clock, last, again_at = asyncio.get_running_loop().time, None, 0.0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._retry_s):
                    await self._news.wait()
            self._news.clear()
            if not self._feed.known:
                continue
            adapters, problems = kept(self._feed.current, self._references, self._base)
            for reference in problems.keys() - self.problems.keys():
                logger.warning("llm.keep: %s", problems[reference])
            self.problems = problems
            if adapters == last and clock() < again_at:
                continue
            await self._keep(adapters)
            last, again_at = adapters, clock() + self._retry_s
            first.set()
