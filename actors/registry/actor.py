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
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Final, TypeVar

from tenacity import before_sleep_log, retry, retry_if_exception, stop_after_delay, wait_exponential

from actors.registry import drivers, gc, views
from actors.registry.facts import (
    AliasMove,
    ApiKeyCreated,
    ApiKeyRevoked,
    Artifact,
    CheckpointFact,
    Collected,
    DataFact,
    Driver,
    EvaluationFact,
    ExternalMove,
    Fact,
    FeedbackFact,
    GateBegun,
    GateEnded,
    Pinned,
    Retired,
    RunEnded,
    RunFact,
    RunIncident,
    Version,
    VersionFact,
)
from actors.registry.ledger import Ledger, utc_now
from actors.registry.lineage import Link, chain
from actors.registry.mirror import LOOK_EVERY_S, ForeignMove, Mirror
from actors.registry.rules import (
    Adopt,
    BeginGate,
    Command,
    CreateKey,
    Pin,
    Promote,
    Register,
    Retire,
    RevokeKey,
    Rollback,
)
from actors.registry.serving import BudgetUse, ServingBook, ServingReport
from actors.registry.snapshot import Change, Snapshot
from actors.registry.state import State, snapshot
from actors.registry.store import EventStore, SqlEventStore
from cluster.database import open_engine, without_password
from cluster.errors import DependencyError, FlywheelError, RequestError, StateError
from cluster.storage import LOCK, Home, only_one
from cluster.tracking import MlflowTracker, Tracker, prepare_tracking

LONGEST_POLL_S: Final = 60.0
_WATCH_EVERY_S: Final = 15.0
_DATABASE_PATIENCE_S: Final = 60.0
_REPLICA_PATIENCE: Final = timedelta(seconds=90)
_MIRROR_POLL_S: Final = 0.05

_logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


def open_mlflow(home: Home, uri: str | None) -> Tracker:
    """MLflow at `uri`, or this installation's own."""
    return MlflowTracker(prepare_tracking(home, uri))


def open_serving(database: str) -> ServingBook:
    """The tables of what servers report, in the registry's own database."""
    return ServingBook(open_engine(database))


class Registry:
    """Versions, aliases, and the facts they come from. All methods are safe to call twice with the same arguments.

    Methods raise `RequestError` and `StateError` as `rules.decide` does, and `DependencyError` if SQL fails.
    `by` says who asks; it is kept with the event.
    """

    def __init__(
        self,
        home: Home,
        database: str,
        *,
        open_store: Callable[[str], EventStore] = SqlEventStore,
        open_book: Callable[[str], ServingBook] = open_serving,
        open_tracker: Callable[[], Tracker] | None = None,
        find_dead: Callable[[Iterable[Driver]], drivers.Verdicts] = drivers.ask_ray,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """Take over the log at `database` (a SQLAlchemy URI) and catch up with it; other writers are fenced.

        `open_tracker` opens the tracker behind the registry; None: there is none. How soon a move that was made in
        the tracker itself is noticed is `look_every_s`.
        """
        self._home = home
        self._database = database
        self._started_at = utc_now()
        self._find_dead = find_dead
        self._store = _patiently(partial(open_store, database))
        self._ledger = _patiently(partial(Ledger, self._store))
        self._book = _patiently(partial(open_book, database))
        self._snapshots = SnapshotLog(self._seen(self._ledger.state))
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._ledger.listen(self._publish)
        # Commits must not queue behind gigabytes that are being deleted, nor either of them behind the long polls.
        self._commits = ThreadPoolExecutor(2, thread_name_prefix="registry-commit")
        self._files = ThreadPoolExecutor(1, thread_name_prefix="registry-files")
        self._ended = threading.Event()
        self._mirror: Mirror | None = None
        if open_tracker is not None:
            self._mirror = Mirror(
                self._store,
                open_tracker,
                lambda: self._ledger.state,
                self._follow,
                root=home.versions,
                look_every_s=look_every_s,
            )
            self._ledger.listen(self._mirror.wake)
            threading.Thread(target=self._mirror.run, name="registry-mirror", daemon=True).start()
        watching = partial(watch, self._look_after, every_s=_WATCH_EVERY_S, ended=self._ended)
        threading.Thread(target=watching, name="registry-watch", daemon=True).start()
        _logger.info("the registry is at event %d, epoch %d", self._ledger.state.seq, self._ledger.epoch)

    # Facts

    async def data(self, fact: DataFact, by: str) -> DataFact:
        """Record a data version."""
        return await self._commit(fact, by, DataFact)

    async def feedback(self, fact: FeedbackFact, by: str) -> FeedbackFact:
        """Record a feedback set."""
        return await self._commit(fact, by, FeedbackFact)

    async def begin_run(self, fact: RunFact, by: str) -> RunFact:
        """Record that a run began, or that one which stopped or failed is taken up again."""
        if fact.id in self._ledger.state.entries:
            # Its first driver may have died a second ago.
            await self._close_abandoned()
        return await self._commit(fact, by, RunFact)

    async def checkpoint(self, fact: CheckpointFact, by: str) -> CheckpointFact:
        """Record a committed checkpoint of a run that goes on."""
        return await self._commit(fact, by, CheckpointFact)

    async def end_run(self, fact: RunEnded, by: str) -> RunEnded:
        """Record how a run ended."""
        return await self._commit(fact, by, RunEnded)

    async def incident(self, fact: RunIncident, by: str) -> RunIncident:
        """Record what happened to the workers of a run."""
        return await self._commit(fact, by, RunIncident)

    async def evaluation(self, fact: EvaluationFact, by: str) -> EvaluationFact:
        """Record an evaluation."""
        return await self._commit(fact, by, EvaluationFact)

    # Versions, gates and aliases

    async def check(self, fact: VersionFact) -> None:
        """Raise what registering `fact` would raise now: asked before gigabytes are copied."""
        self._ledger.check(fact)

    async def register(self, command: Register, by: str) -> Version:
        """Make an artifact that lies in the version store a version; content that is a version already stays it.

        `DependencyError` if its files are not there: a collection took them before anything pointed to them.
        """
        return await self._commit_files(command.artifact, command, by)

    async def adopt(self, command: Adopt, by: str) -> Version:
        """As `register`, with the facts that a version of another installation was made from."""
        return await self._commit_files(command.register.artifact, command, by)

    async def begin_gate(self, command: BeginGate) -> GateBegun:
        """Set a version to `evaluating`."""
        return await self._commit(command, command.by, GateBegun)

    async def end_gate(self, fact: GateEnded, by: str) -> GateEnded:
        """Set a version to `passed` or `blocked`, with the evidence, or back to what it was."""
        return await self._commit(fact, by, GateEnded)

    async def promote(self, command: Promote) -> AliasMove:
        """Move an alias; the answer is the move that put it where it stands."""
        return await self._commit(command, command.by, AliasMove)

    async def rollback(self, command: Rollback) -> AliasMove:
        """Move an alias back."""
        return await self._commit(command, command.by, AliasMove)

    async def retire(self, command: Retire) -> Retired:
        """Take a version out of traffic for good."""
        return await self._commit(command, command.by, Retired)

    async def pin(self, command: Pin) -> Pinned:
        """Keep the files of a version, or let go of them."""
        return await self._commit(command, command.by, Pinned)

    async def collect(self, min_age_s: float, dry_run: bool, by: str) -> views.Collection:
        """Free what nothing reaches and what is older than `min_age_s`; `dry_run`: say only what that is."""
        return await self._in_thread(self._files, partial(self._collect, min_age_s, dry_run, by))

    async def create_key(self, command: CreateKey) -> ApiKeyCreated:
        """Let an API key in. Its secret stays with the caller: only the hash comes here."""
        return await self._commit(command, command.by, ApiKeyCreated)

    async def revoke_key(self, command: RevokeKey) -> ApiKeyRevoked:
        """Let an API key in no longer; gateways learn it as they learn of an alias."""
        return await self._commit(command, command.by, ApiKeyRevoked)

    # Reading

    async def snapshot(self) -> Snapshot:
        """What servers need to know, now."""
        return self._snapshots.current

    async def wait_snapshot(self, after: tuple[int, int], timeout_s: float) -> Change:
        """What has changed since the snapshot of (epoch, number) `after`, as soon as something has.

        After `timeout_s` (at most a minute) a change that is empty. Who has been away for too long gets it all.
        """
        changed = asyncio.Event()
        waiter = (asyncio.get_running_loop(), changed)
        self._waiting.add(waiter)
        try:
            # Looked at after joining the waiters, so that no commit can fall between.
            if self._snapshots.position == after:
                await asyncio.wait_for(changed.wait(), min(timeout_s, LONGEST_POLL_S))
        except TimeoutError:
            pass
        finally:
            self._waiting.discard(waiter)
        return self._snapshots.since(after)

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

    async def needed_checkpoints(self, run_id: str) -> dict[int, str]:
        """The steps of a run whose checkpoints must stay, each with the reason."""
        return views.needed_checkpoints(self._ledger.state, run_id)

    async def history(self, name: str) -> tuple[views.HistoryEntry, ...]:
        """Everything that happened to a name."""
        return views.history(self._ledger.state, name)

    async def live_at(self, name: str, moment: datetime) -> tuple[views.LiveView, ...]:
        """Where the aliases of a name stood at a moment, and why."""
        return views.live_at(self._ledger.state, name, moment)

    async def lineage(self, reference: str) -> tuple[Link, ...]:
        """What something was made from and what was made from it, as far as the traffic that it has had."""
        holdings, traffic = await self._in_thread(self._commits, self._book.read)
        return tuple(chain(self._ledger.state, reference, holdings=holdings, traffic=traffic))

    # What servers say

    async def report(self, report: ServingReport) -> None:
        """Keep which versions a server holds and what traffic they have had."""
        await self._in_thread(self._commits, partial(self._book.enter, report, at=utc_now()))

    async def budget_use(self, source: str) -> dict[str, BudgetUse]:
        """What every live key with a budget has used of it, by all servers but `source`, which counts its own."""
        keys = tuple(self._snapshots.current.keys.values())
        return await self._in_thread(self._commits, partial(self._book.budget_use, keys, but=source, now=utc_now()))

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
        self._files.shutdown()
        self._store.close()
        self._book.close()

    async def _commit(self, command: Command, by: str, kind: type[_Answer]) -> _Answer:
        # In a thread, a commit runs to its end even if the caller is cancelled.
        answer = await self._in_thread(self._commits, partial(self._ledger.commit, command, by=by))
        assert isinstance(answer, kind)
        return answer

    async def _commit_files(self, artifact: Artifact, command: Command, by: str) -> Version:
        def commit() -> Fact:
            folder = self._home.versions / artifact.path
            # A collection holds this lock while it takes a folder away, and looks at the state once more.
            with only_one(folder.parent / LOCK):
                if not folder.is_dir():
                    raise DependencyError(
                        f"The files of {artifact.path} are not in the version store.",
                        hint="They were freed before the version was recorded. Register the folder again.",
                        retryable=False,
                    )
                return self._ledger.commit(command, by=by)

        answer = await self._in_thread(self._commits, commit)
        assert isinstance(answer, Version)
        return answer

    async def _close_abandoned(self) -> None:
        await self._in_thread(self._commits, partial(drivers.close_abandoned, self._ledger, self._find_dead))

    async def _in_thread(self, pool: ThreadPoolExecutor, work: Callable[[], _Answer]) -> _Answer:
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def _look_after(self) -> None:
        """What has to be looked at now and then, because nobody will report it."""
        drivers.close_abandoned(self._ledger, self._find_dead)
        self._close_unseen()

    def _close_unseen(self) -> None:
        """End what silent replicas held; not before those that live have had time to find this registry."""
        if utc_now() - self._started_at > _REPLICA_PATIENCE:
            self._book.close_unseen(before=utc_now() - _REPLICA_PATIENCE)

    def _follow(self, move: ForeignMove) -> bool:
        """Whether a move made in MLflow stands in the log now; what the rules refuse is kept as refused."""
        refused = "it is gone there, or points to a version that is not Flywheel's"
        if move.version is not None:
            command = Promote(
                move.name,
                move.alias,
                {move.version: 1.0},
                by="mlflow",
                why="moved in MLflow",
                command=f"mlflow-{move.name}@{move.alias}-{move.state.seq}",
                expected=move.state.split(move.name, move.alias) or {},
                external=True,
            )
            try:
                self._ledger.commit(command, by="mlflow")
            except (StateError, RequestError) as error:
                refused = error.message
            else:
                return True
        self._ledger.commit(
            ExternalMove(
                id=f"{move.name}@{move.alias}#external-{move.state.seq}",
                name=move.name,
                alias=move.alias,
                version=move.version,
                where="MLflow",
                refused=refused,
                at=utc_now(),
            ),
            by="mlflow",
        )
        _logger.warning("%s@%s was moved in MLflow and is put back: %s", move.name, move.alias, refused)
        return False

    def _collect(self, min_age_s: float, dry_run: bool, by: str) -> views.Collection:
        # The replicas that live now; one that fell silent is closed first.
        self._close_unseen()
        loaded = {held.version_id for held in self._book.read()[0] if held.until is None}
        grace = timedelta(seconds=min_age_s)
        state = self._ledger.state
        found = gc.look(self._home, state)
        plan = gc.plan(self._ledger.state, found, self._home, now=utc_now(), grace=grace, loaded=loaded)
        if dry_run:
            return views.collection(plan.free, plan.kept, dry_run=True)
        if plan.version_ids:
            # First nothing is routed there any more, then the files go. Refused if something has come to need them.
            self._ledger.commit(Collected(version_ids=plan.version_ids), by=by)
        outcome = gc.collect(plan, self._home, lambda: self._ledger.state)
        return views.collection(outcome.freed, plan.kept, left=outcome.left, dry_run=False)

    def _seen(self, state: State) -> Snapshot:
        return snapshot(state, epoch=self._ledger.epoch, root=self._home.versions)

    def _publish(self, state: State) -> None:
        """Called in the committing thread: renew the snapshot and wake who waits for it."""
        if state.snapshot_number == self._snapshots.current.number:
            return
        self._snapshots.add(self._seen(state))
        for loop, changed in tuple(self._waiting):
            loop.call_soon_threadsafe(changed.set)


class SnapshotLog:
    """The present snapshot, and the last changes that led to it, for whoever has missed some of them."""

    def __init__(self, first: Snapshot, *, kept: int = 1024) -> None:
        self.current = first
        self._changing = threading.Lock()  # commits come from a thread, questions from the event loop
        self._steps: deque[tuple[int, Change]] = deque(maxlen=kept)
        """Each change with the number of the snapshot that it changed."""

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, number) of the present snapshot."""
        return self.current.epoch, self.current.number

    def add(self, snapshot: Snapshot) -> None:
        """A newer snapshot of the same epoch."""
        change = snapshot.since(self.current)
        with self._changing:
            self._steps.append((self.current.number, change))
            self.current = snapshot

    def since(self, after: tuple[int, int]) -> Change:
        """What makes the snapshot of (epoch, number) `after` the present one; all of it, if that is not known."""
        epoch, number = after
        with self._changing:
            current = self.current
            steps = [(before, change) for before, change in self._steps if before >= number]
        if after == (current.epoch, current.number):
            return current.since(current)
        if epoch != current.epoch or not steps or steps[0][0] != number:
            return current.whole()
        models = {name: model for _, change in steps for name, model in change.models.items()}
        keys = next((change.keys for _, change in reversed(steps) if change.keys is not None), None)
        return replace(steps[-1][1], models=models, keys=keys)


def watch(look: Callable[[], None], *, every_s: float, ended: threading.Event) -> None:
    """`look` now and every `every_s` seconds, until `ended`; what goes wrong is logged, and the next round comes."""
    while True:
        try:
            look()
        except Exception as error:
            _logger.warning("the registry could not look after its affairs: %s", error, exc_info=error)
        if ended.wait(every_s):
            return


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
