"""How the rest of Flywheel talks to the registry: `RegistryClient` from blocking code, `RegistryHandle` from async.

Both find the actor by its name and ride over its death: a call that was lost is made again, which the registry's
commands allow, and gives up with `DependencyError` when the registry has been away for `patience_s`.
Both can be pickled into Ray tasks. This module knows Ray; it must not know how the registry works inside.
"""

import asyncio
import getpass
import os
import socket
import time
import uuid
from datetime import datetime
from functools import partial
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.registry import drivers
from actors.registry.actor import Registry, open_mlflow
from actors.registry.apikeys import ApiKey
from actors.registry.config import ACTOR_NAME, NAMESPACE
from actors.registry.facts import (
    AliasMove,
    ApiKeyCreated,
    ApiKeyRevoked,
    Artifact,
    CheckpointFact,
    DataFact,
    EvaluationFact,
    Fact,
    FeedbackFact,
    GateBegun,
    GateEnded,
    Origin,
    Pinned,
    Retired,
    RunEnded,
    RunFact,
    RunIncident,
    Version,
    VersionFact,
)
from actors.registry.lineage import Link
from actors.registry.rules import Adopt, BeginGate, CreateKey, Pin, Promote, Register, Retire, RevokeKey, Rollback
from actors.registry.serving import BudgetUse, ServingReport
from actors.registry.snapshot import Change, Snapshot, Split
from actors.registry.upload import admit
from actors.registry.views import Collection, HistoryEntry, LiveView, ModelView, RegistryStatus, RunView, VersionView
from cluster import environment
from cluster.database import sqlite_uri, without_password
from cluster.errors import DependencyError, FlywheelError, StateError
from cluster.progress import Sink, silent
from cluster.storage import Home

PATIENCE_S: Final = 60.0
_PAUSE_S: Final = 0.2
_LONG_S: Final = 1800.0

_Answer = TypeVar("_Answer")


class RegistryClient:
    """The registry from blocking code. Errors are those of `actor.Registry`."""

    def __init__(self, *, by: str | None = None, patience_s: float = PATIENCE_S) -> None:
        """`by`: who is kept as the author of facts (default: user@machine)."""
        self._by = by or _caller()
        self._patience_s = patience_s

    @classmethod
    def start(
        cls, home: Home, *, database: str | None = None, tracking: str | None = None, by: str | None = None
    ) -> "RegistryClient":
        """The cluster's registry, started if there is none yet. It outlives this driver, not the cluster.

        `database` is a SQLAlchemy URI (default: `FLYWHEEL_DATABASE_URI`, or SQLite in `home`), `tracking` an MLflow
        URI (default: `FLYWHEEL_TRACKING_URI`, or MLflow's tables in `home`). `StateError` if the running one belongs
        to another home, or keeps its log elsewhere than it was told here.
        """
        # Read here: the actor has the environment of whoever started its node.
        told = database or environment.database_uri()
        database, tracking = told or sqlite_uri(home.registry_database), tracking or environment.tracking_uri()
        options = ray.remote(Registry).options(
            name=ACTOR_NAME,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            # A call that was on its way when the actor died is made again by Ray; all of them allow that.
            max_task_retries=-1,
        )
        options.remote(home, database, open_tracker=partial(open_mlflow, home, tracking))
        client = cls(by=by)
        running = client._call(Home, "home")
        if running != home:
            raise StateError(
                f"This cluster's registry belongs to {running.root}, not to {home.root}.",
                hint=f"Set FLYWHEEL_HOME={running.root}, or use another cluster.",
            )
        if told is not None and (kept := client.status().database) != without_password(told):
            raise StateError(
                f"This cluster's registry keeps its log in {kept}, not in {without_password(told)}.",
                hint=f"Unset {environment.DATABASE_URI}, or stop that registry's cluster first.",
            )
        return client

    @classmethod
    def connect(cls, *, by: str | None = None) -> "RegistryClient":
        """The registry that runs; `DependencyError` at once if there is none."""
        _actor()
        return cls(by=by)

    def data(self, fact: DataFact) -> DataFact:
        """Record a data version."""
        return self._call(DataFact, "data", fact, self._by)

    def begin_run(self, fact: RunFact) -> RunFact:
        """Record that a run began; this process's Ray job is its driver unless `fact` names one."""
        if fact.driver is None:
            fact = fact.model_copy(update={"driver": drivers.current()})
        return self._call(RunFact, "begin_run", fact, self._by)

    def checkpoint(self, fact: CheckpointFact) -> CheckpointFact:
        """Record a committed checkpoint."""
        return self._call(CheckpointFact, "checkpoint", fact, self._by)

    def end_run(self, fact: RunEnded) -> RunEnded:
        """Record how a run ended."""
        return self._call(RunEnded, "end_run", fact, self._by)

    def incident(self, fact: RunIncident) -> RunIncident:
        """Record what happened to the workers of a run."""
        return self._call(RunIncident, "incident", fact, self._by)

    def evaluation(self, fact: EvaluationFact) -> EvaluationFact:
        """Record an evaluation."""
        return self._call(EvaluationFact, "evaluation", fact, self._by)

    def register(self, fact: VersionFact, *, recipe: dict[str, Any] | None = None, sink: Sink = silent) -> Version:
        """Bring the folder `fact.source_path` into the version store, signed, and make it a version.

        The files go from here to the store in parts, with their progress to `sink`; a call that broke off goes on
        where it was. The actor only ever sees facts. `recipe` goes into the version's card.
        """
        self._call(type(None), "check", fact)
        home = self._call(Home, "home")
        while True:
            artifact = admit(fact, home, sink, recipe=recipe)
            try:
                return self.record(fact, artifact)
            except DependencyError:
                # A collection may come between the two, if hours do.
                if (home.versions / artifact.path).is_dir():
                    raise

    def record(self, fact: VersionFact, artifact: Artifact) -> Version:
        """Make an artifact that lies in the version store a version."""
        return self._call(Version, "register", Register(fact, artifact), self._by)

    def adopt(self, origins: tuple[Fact, ...], fact: VersionFact, artifact: Artifact, origin: Origin) -> Version:
        """As `record`, for a version of another installation, with the facts that it was made from."""
        return self._call(Version, "adopt", Adopt(origins, Register(fact, artifact, origin)), self._by)

    def feedback(self, fact: FeedbackFact) -> FeedbackFact:
        """Record a feedback set."""
        return self._call(FeedbackFact, "feedback", fact, self._by)

    def begin_gate(self, version_id: str) -> GateBegun:
        """Set a version to `evaluating`, until `end_gate` or until this process's Ray job has ended."""
        command = BeginGate(version_id, self._by, _command_id(), drivers.current())
        return self._call(GateBegun, "begin_gate", command)

    def end_gate(self, fact: GateEnded) -> GateEnded:
        """Set a version to `passed` or `blocked`, or back to what it was."""
        return self._call(GateEnded, "end_gate", fact, self._by)

    def promote(
        self,
        name: str,
        alias: str,
        to: int | Split,
        *,
        by: str | None = None,
        why: str,
        expected: int | Split | None = None,
        force: bool = False,
    ) -> AliasMove:
        """Move an alias to a version, or split its traffic over several by their shares.

        `expected`: where it must stand now (0: it must not exist yet). Without a passed gate only by `force`.
        """
        if expected is not None:
            expected = ({expected: 1.0} if expected else {}) if isinstance(expected, int) else expected
        split = {to: 1.0} if isinstance(to, int) else to
        command = Promote(name, alias, split, by or self._by, why, _command_id(), expected, force)
        return self._call(AliasMove, "promote", command)

    def rollback(self, name: str, alias: str, *, by: str | None = None, why: str) -> AliasMove:
        """Move an alias back to where it stood before its last promotion."""
        return self._call(AliasMove, "rollback", Rollback(name, alias, by or self._by, why, _command_id()))

    def retire(self, version_id: str, *, why: str) -> Retired:
        """Take a version out of traffic for good."""
        return self._call(Retired, "retire", Retire(version_id, self._by, why, _command_id()))

    def pin(self, version_id: str, *, pinned: bool = True, why: str) -> Pinned:
        """Keep a version's files from garbage collection, or let go of them."""
        return self._call(Pinned, "pin", Pin(version_id, pinned, self._by, why))

    def collect(self, *, min_age_s: float, dry_run: bool) -> Collection:
        """Free what nothing reaches and what is older than `min_age_s`; `dry_run`: say only what that is."""
        return self._call(Collection, "collect", min_age_s, dry_run, self._by, timeout_s=_LONG_S)

    def create_key(self, key: ApiKey) -> ApiKeyCreated:
        """Let an API key in: `apikeys.Secret.make` made its secret, of which only the hash goes to the registry."""
        return self._call(ApiKeyCreated, "create_key", CreateKey(key, self._by))

    def revoke_key(self, key_id: str, *, why: str) -> ApiKeyRevoked:
        """Let an API key in no longer."""
        return self._call(ApiKeyRevoked, "revoke_key", RevokeKey(key_id, self._by, why, _command_id()))

    def snapshot(self) -> Snapshot:
        """All versions and aliases as servers need them."""
        return self._call(Snapshot, "snapshot")

    def wait_snapshot(self, after: Snapshot, timeout_s: float) -> Snapshot:
        """The first snapshot that differs from `after`, or `after` once `timeout_s` is over."""
        position = (after.epoch, after.number)
        change = self._call(Change, "wait_snapshot", position, timeout_s, timeout_s=timeout_s + self._patience_s)
        return after.updated(change)

    def show(self, reference: str) -> VersionView:
        """All about the version that `name`, `name@alias` or `name/3` means."""
        return self._call(VersionView, "version", reference)

    def run(self, run_id: str) -> RunView:
        """One run and how it stands."""
        return self._call(RunView, "run", run_id)

    def runs(self) -> tuple[RunView, ...]:
        """Every run, the newest first."""
        return self._call(tuple, "runs")

    def needed_checkpoints(self, run_id: str) -> dict[int, str]:
        """The steps of a run whose checkpoints must stay, each with the reason."""
        return self._call(dict, "needed_checkpoints", run_id)

    def history(self, name: str) -> tuple[HistoryEntry, ...]:
        """Everything that happened to a name, oldest first."""
        return self._call(tuple, "history", name)

    def live_at(self, name: str, moment: datetime) -> tuple[LiveView, ...]:
        """Where the aliases of `name` stood at `moment` (with time zone), and why."""
        return self._call(tuple, "live_at", name, moment)

    def lineage(self, reference: str) -> tuple[Link, ...]:
        """Everything that an id (or a model reference) was made from and everything made from it, in order."""
        return self._call(tuple, "lineage", reference)

    def list(self) -> tuple[ModelView, ...]:
        """Every registered name with its versions and aliases."""
        return self._call(tuple, "models")

    def status(self) -> RegistryStatus:
        """How the registry itself stands."""
        return self._call(RegistryStatus, "status")

    def pid(self) -> int:
        """The process of the actor, on its node."""
        return self._call(int, "pid")

    def wait_mirrored(self, timeout_s: float) -> bool:
        """Whether MLflow shows everything, as soon as it does or after `timeout_s`."""
        return self._call(bool, "wait_mirrored", timeout_s, timeout_s=timeout_s + self._patience_s)

    def _call(self, kind: type[_Answer], method: str, *arguments: Any, timeout_s: float | None = None) -> _Answer:
        deadline = time.monotonic() + (timeout_s or self._patience_s)
        while True:
            try:
                reference = getattr(_actor(), method).remote(*arguments)
                answer = ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
            except RayTaskError as error:
                raise _cause(error) from None
            except (RayActorError, GetTimeoutError, DependencyError) as error:
                _raise_if_stillborn(error)
                if time.monotonic() + _PAUSE_S >= deadline:
                    raise _away(error) from None
                time.sleep(_PAUSE_S)
            else:
                assert isinstance(answer, kind)
                return answer


class RegistryHandle:
    """What a server needs of the registry, from async code: it never blocks the event loop."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s

    async def snapshot(self) -> Snapshot:
        """All versions and aliases."""
        return await self._call(Snapshot, "snapshot")

    async def wait_snapshot(self, after: Snapshot, timeout_s: float) -> Snapshot:
        """The first snapshot that differs from `after`, or `after` once `timeout_s` is over.

        Only what has changed travels. `DependencyError` if the registry is away; a server then goes on with the
        snapshot it has and asks again.
        """
        position = (after.epoch, after.number)
        change = await self._call(Change, "wait_snapshot", position, timeout_s, timeout_s=timeout_s + self._patience_s)
        return after.updated(change)

    async def report(self, report: ServingReport) -> None:
        """Tell which versions this server holds and what traffic they have had."""
        await self._call(type(None), "report", report)

    async def budget_use(self, source: str) -> dict[str, BudgetUse]:
        """What every live key with a budget has used of it, by all servers but `source`."""
        return await self._call(dict, "budget_use", source)

    async def show(self, reference: str) -> VersionView:
        """All about the version that `name`, `name@alias` or `name/3` means."""
        return await self._call(VersionView, "version", reference)

    async def status(self) -> RegistryStatus:
        """How the registry itself stands."""
        return await self._call(RegistryStatus, "status")

    async def _call(self, kind: type[_Answer], method: str, *arguments: Any, timeout_s: float | None = None) -> _Answer:
        clock = asyncio.get_running_loop().time
        deadline = clock() + (timeout_s or self._patience_s)
        while True:
            try:
                # Looking an actor up by name asks the GCS and blocks for as long as that takes.
                actor = await asyncio.to_thread(_actor)
                async with asyncio.timeout_at(deadline):
                    answer = await getattr(actor, method).remote(*arguments)
            except RayTaskError as error:
                raise _cause(error) from None
            except (RayActorError, TimeoutError, DependencyError) as error:
                _raise_if_stillborn(error)
                if clock() + _PAUSE_S >= deadline:
                    raise _away(error) from None
                await asyncio.sleep(_PAUSE_S)
            else:
                assert isinstance(answer, kind)
                return answer


def _actor() -> Any:
    try:
        return ray.get_actor(ACTOR_NAME, namespace=NAMESPACE)
    except ValueError:
        raise DependencyError(
            "No registry runs in this Ray cluster.",
            hint="Any `flywheel` command that writes starts one: train, serve, demo.",
        ) from None


def _cause(error: RayTaskError) -> BaseException:
    """What the actor raised, without Ray's wrapping of its traceback."""
    cause = error.cause
    return cause if isinstance(cause, FlywheelError) else error


def _raise_if_stillborn(error: BaseException) -> None:
    """Waiting does not help an actor whose constructor failed: Ray does not try that again."""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        raise DependencyError(
            f"The registry cannot start: {str(error).strip().splitlines()[-1]}",
            hint="Mend what it names, then start it again.",
            retryable=False,
        ) from None


def _away(error: BaseException) -> DependencyError:
    if isinstance(error, DependencyError):
        return error
    return DependencyError(
        f"The registry does not answer: {(str(error).splitlines() or [type(error).__name__])[0]}",
        hint="Look at `ray list actors` and the log of the actor; its database may be unreachable.",
    )


def _caller() -> str:
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        # A container may run as a user that has no name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _command_id() -> str:
    return uuid.uuid4().hex
