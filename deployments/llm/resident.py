"""Adapters on one replica: from the node's cache into the engine and out again, while requests go on.

The shell around `Residency`: it fetches, loads, evicts and waits; what goes when is decided there. Files are fetched
before a slot is asked for, so that a slow or broken one costs nobody else's slot.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Protocol

from cluster.errors import CapacityError, DependencyError, FlywheelError, RequestError
from deployments.llm.adapters import AdapterCache
from deployments.llm.protocol import Adapter, version_of
from deployments.llm.residency import Fault, Lease, Load, Loading, Refused, Residency, Resident, Wait

SLOT_WAIT_S = 30.0
"""How long a request waits for a slot while all are in use; a generation on a CPU takes that long."""
PATIENCE_S = 15.0
"""After which it claims one: no new request gets on the adapter in it, and it waits for those that are."""
_RETRY_AFTER_S = 5.0
_ABORT_WAIT_S = 5.0
_ABORT_POLL_S = 0.005

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The engine's memory for adapters, by the names under which it knows them."""

    async def load(self, name: str, folder: str) -> None:
        """Bring it in. `ValueError` if the engine refuses it; it then holds nothing of it."""
        ...

    async def remove(self, name: str) -> None:
        """Take it out: its name, and its memory."""
        ...

    def uses(self, name: str) -> bool:
        """Whether it still computes with it, if only because an abort is on its way."""
        ...


class ResidentAdapters:
    """What `limit` adapters the engine holds; `changed` is called after any of them came or went."""

    def __init__(
        self,
        cache: AdapterCache,
        engine: Engine,
        *,
        limit: int,
        base: str,
        changed: Callable[[], None] = lambda: None,
        slot_wait_s: float = SLOT_WAIT_S,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._cache = cache
        self._engine = engine
        self._limit = limit
        self._base = base
        self._changed = changed
        self._slot_wait_s = slot_wait_s
        self._patience_s = patience_s
        self._residency = Residency(limit)
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()

    @property
    def names(self) -> tuple[str, ...]:
        """What the engine holds, by its own names, sorted."""
        return tuple(sorted(self._residency.resident))

    @property
    def versions(self) -> tuple[str, ...]:
        """What the engine holds, by version id, sorted."""
        return _versions(self._residency.resident)

    @property
    def kept(self) -> tuple[str, ...]:
        """What is to stay in whoever comes, by version id, sorted."""
        return _versions(self._residency.pinned)

    @property
    def faults(self) -> Mapping[str, Fault]:
        """Versions that could not be brought in the last time that somebody wanted them."""
        return {version_of(name): fault for name, fault in self._residency.faults.items()}

    def describe(self) -> dict[str, object]:
        """Facts for health and for people."""
        return {
            "adapters": list(self.versions),
            "adapters_kept": list(self.kept),
            "adapters_failed": {
                version: {"why": fault.why, "at": fault.at.isoformat(timespec="seconds")}
                for version, fault in self.faults.items()
            },
        }

    @asynccontextmanager
    async def used(self, adapter: Adapter) -> AsyncIterator[str | None]:
        """Inside, the engine holds it, and goes on holding it. Gives the adapter's own chat template, if it has one.

        `DependencyError` or `RequestError` for what is wrong with this adapter; `CapacityError` if no slot got free.
        """
        lease = await self._lease(adapter)
        try:
            yield self._cache.template(adapter)
        finally:
            self._residency.release(lease)
            self._tell()

    async def keep(self, adapters: list[Adapter]) -> None:
        """From now on exactly these stay in, whoever comes; returns when each is in, or has failed (see `faults`)."""
        self._residency.pin(adapter.engine_name for adapter in adapters)
        self._tell()
        for adapter in adapters:
            try:
                async with self.used(adapter):
                    pass
            except FlywheelError as error:
                logger.warning("Adapter %s is to be kept, but is not in yet: %s", adapter.version, error)

    async def _lease(self, adapter: Adapter) -> Lease:
        # Also when the engine has the adapter already: it may have to read the files again (see adapters.py).
        folder = await self._fetch(adapter)
        decision = await self._decision(adapter.engine_name)
        if isinstance(decision, Refused):
            raise DependencyError(
                f"Adapter {adapter.version} finds no room: all {self._limit} places are kept for others.",
                hint="Serve with a larger llm.max_adapters, or with fewer in llm.keep.",
            )
        if isinstance(decision, Load):
            # A task of its own: one client that hangs up must not take the adapter from those who wait for it.
            flight = asyncio.create_task(self._bring(adapter, folder, decision.evict))
            self._flights[adapter.engine_name] = flight
            flight.add_done_callback(_heard)
        if flying := self._flights.get(adapter.engine_name):
            try:
                await asyncio.shield(flying)
            except BaseException:
                self._residency.release(decision.lease)
                self._tell()
                raise
        return decision.lease

    async def _decision(self, name: str) -> Resident | Loading | Load | Refused:
        """What can be done, once something can; `CapacityError` after too long a wait."""
        decision = self._residency.lease(name)
        if not isinstance(decision, Wait):
            return decision
        clock = asyncio.get_running_loop().time
        patient_until = clock() + self._patience_s
        try:
            async with asyncio.timeout(self._slot_wait_s) as waiting:
                while isinstance(decision, Wait):
                    overdue = clock() >= patient_until
                    if overdue:
                        self._residency.claim(name)
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(None if overdue else patient_until):
                            await self._news.wait()
                    decision = self._residency.lease(name)
                waiting.reschedule(None)
            return decision
        except TimeoutError:
            raise CapacityError(
                f"All {self._limit} adapters that a replica holds are in use.",
                retry_after_s=_RETRY_AFTER_S,
                hint="Ask again later, or serve with a larger llm.max_adapters.",
            ) from None
        finally:
            if isinstance(decision, Wait):
                self._residency.waive(name)
                self._tell()

    async def _fetch(self, adapter: Adapter) -> str:
        try:
            return str(await self._cache.fetch(adapter))
        except (DependencyError, RequestError) as error:
            self._residency.failed(adapter.engine_name, error.message, datetime.now(UTC))
            raise

    async def _bring(self, adapter: Adapter, folder: str, evict: str | None) -> None:
        name = adapter.engine_name
        fault = "the engine stopped"
        try:
            if evict is not None:
                await self._remove(evict)
                logger.info("Adapter %s made room for %s.", version_of(evict), adapter.version)
            await self._engine.load(name, folder)
            fault = ""
        except ValueError as error:
            logger.error("The engine refused adapter %s: %s", adapter.version, error)
            fault = f"The engine cannot load adapter {adapter.version}: it does not fit {self._base}."
            raise RequestError(
                fault,
                status=422,
                param="model",
                code="adapter_invalid",
                hint="Register an adapter that was trained on this base.",
            ) from None
        finally:
            del self._flights[name]
            self._settle(name, fault)

    async def _remove(self, name: str) -> None:
        # Its last user has hung up, and the engine may not have heard. If it never does, it loads the files again.
        with suppress(TimeoutError):
            async with asyncio.timeout(_ABORT_WAIT_S):
                while self._engine.uses(name):
                    await asyncio.sleep(_ABORT_POLL_S)
        await self._engine.remove(name)

    def _settle(self, name: str, fault: str) -> None:
        if fault:
            self._residency.failed(name, fault, datetime.now(UTC))
        else:
            self._residency.loaded(name)
        self._tell()
        self._changed()

    def _tell(self) -> None:
        """Wake all who wait: each asks again. One that is gone by then keeps nobody from being woken."""
        news, self._news = self._news, asyncio.Event()
        news.set()


def _versions(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({version_of(name) for name in names}))


def _heard(flight: asyncio.Task[None]) -> None:
    """All who waited may have hung up; the fault stands in `faults` in any case."""
    if not flight.cancelled():
        flight.exception()
