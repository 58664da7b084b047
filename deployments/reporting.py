"""What a replica tells the registry of itself, again and again while it lives; the registry may be away."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from actors.registry.client import RegistryHandle
from actors.registry.serving import ServingReport

EVERY_S = 15.0
REST_S = 0.5
"""Between two reports at least: adapters may come and go many times a second."""
_PATIENCE_S = 5.0

logger = logging.getLogger(__name__)


class Reporter:
    """Sends what `make` says every `every_s` seconds, and at once after `soon`; then calls `done` with it."""

    def __init__(
        self,
        make: Callable[[], ServingReport | None],
        done: Callable[[ServingReport], None] = lambda _: None,
        *,
        send: Callable[[ServingReport], Awaitable[None]] | None = None,
        every_s: float = EVERY_S,
        rest_s: float = REST_S,
    ) -> None:
        self._make = make
        self._done = done
        self._send = send or RegistryHandle(patience_s=_PATIENCE_S).report
        self._every_s = every_s
        self._rest_s = rest_s
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running event loop."""
        self._task = asyncio.create_task(self._run(), name="registry-report")

    def soon(self) -> None:
        """There is something new that should not wait."""
        self._wake.set()

    async def stop(self) -> None:
        """Send what is left, if the registry takes it, and end."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            await self._report()

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._report()
            await asyncio.sleep(self._rest_s)

    async def _report(self) -> None:
        report = self._make()
        if report is None:
            return
        try:
            await self._send(report)
        except Exception as error:  # noqa: BLE001 (serving does not depend on it, and the next report says it again)
            logger.info("The registry did not take a report; it goes with the next: %s", error)
        else:
            self._done(report)


def whoami() -> tuple[str, str]:
    """This replica's id, which no other life of it has, and its node's."""
    import ray
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id, ray.get_runtime_context().get_node_id()


def siblings() -> int:
    """How many replicas this replica's deployment has by its settings as they are now, itself among them."""
    from ray import serve

    return max(1, int(serve.get_replica_context().world_size))


def node_address() -> str:
    """The address at which other nodes of the cluster reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
