"""The registry as an actor: the one place of a cluster where versions and aliases change.

It is a singleton because numbers and aliases need one order of events; it may die at any time because that
order stands in SQL. The class is plain: a test constructs it without Ray, `client.RegistryClient.start` names
and detaches it. What it may do stands in `state`, how it is kept in `store`; here is only the shell: threads
for what blocks, a long poll for who waits.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import Final, TypeVar

from tenacity import before_sleep_log, retry, retry_if_exception, stop_after_delay, wait_exponential

from actors.registry import drivers, views
from actors.registry.artifacts import admit
from actors.registry.ledger import Ledger, utc_now
from actors.registry.lineage import Link, chain
from actors.registry.mirror import Mirror
from actors.registry.snapshot import Snapshot
from actors.registry.state import (
    AliasMove,
    CheckpointFact,
    Command,
    DataFact,
    Driver,
    EvaluationFact,
    Promote,
    Register,
    Rollback,
    RunEnded,
    RunFact,
    State,
    Version,
    VersionFact,
    snapshot,
)
from actors.registry.store import EventStore, SqlEventStore
from cluster.database import without_password
from cluster.errors import FlywheelError
from cluster.storage import Home
from cluster.tracking import MlflowTracker, Tracker, prepare_tracking

LONGEST_POLL_S: Final = 60.0
_WATCH_EVERY_S: Final = 15.0
_DATABASE_PATIENCE_S: Final = 60.0
_COPIES_AT_ONCE: Final = 2
_MIRROR_POLL_S: Final = 0.05

_logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


def open_mlflow(home: Home, uri: str | None) -> Tracker:
    """MLflow at `uri`, or this installation's own."""
    return MlflowTracker(uri or prepare_tracking(home))


class Registry:
    """Versions, aliases, and the facts they come from. All methods are safe to call twice with the same arguments.

    Methods raise `RequestError` and `StateError` as `state.decide` does, and `DependencyError` if SQL fails.
    `by` says who asks; it is kept with the event.
    """

    def __init__(
        self,
        home: Home,
        database: str,
        *,
        open_store: Callable[[str], EventStore] = SqlEventStore,
        open_tracker: Callable[[], Tracker] | None = None,
        find_dead: Callable[[Iterable[Driver]], drivers.Verdicts] = drivers.ask_ray,
    ) -> None:
        """Take over the log at `database` (a SQLAlchemy URI) and catch up with it; other writers are fenced.

        `open_tracker` opens the tracker behind the registry; None: there is none.
        """
        self._home = home
        self._database = database
        self._started_at = utc_now()
        self._find_dead = find_dead
        self._store = _patiently(partial(open_store, database))
        self._ledger = _patiently(partial(Ledger, self._store))
        self._snapshot = snapshot(self._ledger.state)
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._ledger.listen(self._publish)
        # Commits must not queue behind copies of gigabytes, nor either of them behind the long polls.
        self._commits = ThreadPoolExecutor(2, thread_name_prefix="registry-commit")
        self._copies = ThreadPoolExecutor(_COPIES_AT_ONCE, thread_name_prefix="registry-copy")
        self._ended = threading.Event()
        self._mirror: Mirror | None = None
        if open_tracker is not None:
            self._mirror = Mirror(self._store, open_tracker, lambda: self._ledger.state)
            self._ledger.listen(self._mirror.wake)
            threading.Thread(target=self._mirror.run, name="registry-mirror", daemon=True).start()
        watching = partial(drivers.watch, self._ledger, find_dead, every_s=_WATCH_EVERY_S, ended=self._ended)
        threading.Thread(target=watching, name="registry-drivers", daemon=True).start()
        _logger.info("the registry is at event %d, epoch %d", self._ledger.state.seq, self._ledger.epoch)

    # Facts

    async def data(self, fact: DataFact, by: str) -> DataFact:
        """Record a data version."""
        return await self._commit(fact, by, DataFact)

    async def begin_run(self, fact: RunFact, by: str) -> RunFact:
        """Record that a run began, or that one which stopped or failed is taken up again."""
        if fact.id in self._ledger.state.entries:
            # Its first driver may have died a second ago.
            await self._in_thread(self._commits, partial(drivers.close_abandoned, self._ledger, self._find_dead))
        return await self._commit(fact, by, RunFact)

    async def checkpoint(self, fact: CheckpointFact, by: str) -> CheckpointFact:
        """Record a committed checkpoint of a run that goes on."""
        return await self._commit(fact, by, CheckpointFact)

    async def end_run(self, fact: RunEnded, by: str) -> RunEnded:
        """Record how a run ended."""
        return await self._commit(fact, by, RunEnded)

    async def evaluation(self, fact: EvaluationFact, by: str) -> EvaluationFact:
        """Record an evaluation."""
        return await self._commit(fact, by, EvaluationFact)

    # Versions and aliases

    async def register(self, fact: VersionFact, by: str) -> Version:
        """Make the folder at `fact.source_path` a version; content that is a version of that name already stays it.

        The files are copied first and recorded then: whoever dies between leaves no version. `ConfigError` for a
        folder that may not be registered.
        """
        self._ledger.check(fact)
        artifact = await self._in_thread(self._copies, partial(admit, fact, self._home))
        return await self._commit(Register(fact, artifact), by, Version)

    async def promote(self, command: Promote) -> AliasMove:
        """Move an alias; the answer is the move that put it where it stands."""
        return await self._commit(command, command.by, AliasMove)

    async def rollback(self, command: Rollback) -> AliasMove:
        """Move an alias back."""
        return await self._commit(command, command.by, AliasMove)

    # Reading

    async def snapshot(self) -> Snapshot:
        """What servers need to know, now."""
        return self._snapshot

    async def wait_snapshot(self, after: int, timeout_s: float) -> Snapshot:
        """The first snapshot whose number is not `after`; after `timeout_s` (at most a minute) the present one."""
        changed = asyncio.Event()
        waiter = (asyncio.get_running_loop(), changed)
        self._waiting.add(waiter)
        try:
            # Looked at after joining the waiters, so that no commit can fall between.
            if self._snapshot.number == after:
                await asyncio.wait_for(changed.wait(), min(timeout_s, LONGEST_POLL_S))
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(waiter)
        return self._snapshot

    async def models(self) -> tuple[views.ModelView, ...]:
        """Every registered name with its versions and aliases."""
        return views.models(self._ledger.state)

    async def version(self, reference: str) -> views.VersionView:
        """All about the version that `name`, `name@alias` or `name/3` means."""
        return views.version(self._ledger.state, reference)

    async def run(self, run_id: str) -> views.RunView:
        """One run and how it stands."""
        await self._close_abandoned()
        return views.run(self._ledger.state, run_id)

    async def runs(self) -> tuple[views.RunView, ...]:
        """Every run, the newest first."""
        await self._close_abandoned()
        return views.runs(self._ledger.state)

    async def history(self, name: str) -> tuple[views.HistoryEntry, ...]:
        """Everything that happened to a name."""
        return views.history(self._ledger.state, name)

    async def aliases_at(self, name: str, moment: datetime) -> dict[str, int]:
        """Where the aliases of a name stood at a moment."""
        return views.aliases_at(self._ledger.state, name, moment)

    async def lineage(self, reference: str) -> tuple[Link, ...]:
        """What something was made from and what was made from it."""
        return tuple(chain(self._ledger.state, reference))

    # The registry itself

    async def home(self) -> Home:
        """Whose versions these are."""
        return self._home

    async def pid(self) -> int:
        """The process that answers."""
        return os.getpid()

    async def status(self) -> views.RegistryStatus:
        """How the registry itself stands."""
        await self._close_abandoned()
        state = self._ledger.state
        return views.RegistryStatus(
            pid=os.getpid(),
            epoch=self._ledger.epoch,
            home=self._home.root,
            database=without_password(self._database),
            started_at=self._started_at,
            events=state.seq,
            snapshot=state.snapshot_number,
            models=len(state.versions),
            running=tuple(run.id for run in state.running()),
            mirror=self._mirror.status() if self._mirror else None,
        )

    async def wait_mirrored(self, timeout_s: float) -> bool:
        """Whether MLflow shows everything, as soon as it does or after `timeout_s`. True if there is no mirror."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while self._mirror is not None and self._mirror.status().behind:
            if asyncio.get_running_loop().time() >= deadline:
                return False
            await asyncio.sleep(_MIRROR_POLL_S)
        return True

    def close(self) -> None:
        """End the threads and let go of the database; for a registry outside Ray."""
        self._ended.set()
        if self._mirror is not None:
            self._mirror.stop()
        self._commits.shutdown()
        self._copies.shutdown()
        self._store.close()

    async def _commit(self, command: Command, by: str, kind: type[_Answer]) -> _Answer:
        # In a thread, a commit runs to its end even if the caller is cancelled.
        answer = await self._in_thread(self._commits, partial(self._ledger.commit, command, by=by))
        assert isinstance(answer, kind)
        return answer

    async def _close_abandoned(self) -> None:
        await self._in_thread(self._commits, partial(drivers.close_abandoned, self._ledger, self._find_dead))

    async def _in_thread(self, pool: ThreadPoolExecutor, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _publish(self, state: State) -> None:
        """Called in the committing thread: renew the snapshot and wake who waits for it."""
        if state.snapshot_number == self._snapshot.number:
            return
        self._snapshot = snapshot(state)
        for loop, changed in tuple(self._waiting):
            loop.call_soon_threadsafe(changed.set)


def _patiently(work: Callable[[], _Answer]) -> _Answer:
    """`work`, again for a minute while the database does not answer: Ray gives a constructor no second chance."""

    @retry(
        retry=retry_if_exception(lambda error: isinstance(error, FlywheelError) and error.retryable),
        stop=stop_after_delay(_DATABASE_PATIENCE_S),
        wait=wait_exponential(multiplier=0.2, max=5),
        before_sleep=before_sleep_log(_logger, logging.WARNING),
        reraise=True,
    )
    def attempt() -> _Answer:
        return work()

    return attempt()
