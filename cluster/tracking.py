"""The experiment tracker and model catalogue behind Flywheel: MLflow, or memory under the same contract.

This module knows MLflow: how its database is created without a race, which sources of a model version a server
accepts, how its errors are told apart. It must not know the registry; what it is asked to show is a `TrackedVersion`.
"""

import fcntl
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from cluster import environment
from cluster.database import open_engine, scrub, sqlite_path, sqlite_uri, transaction, uri_for_others, without_password
from cluster.errors import DependencyError
from cluster.storage import PARTIAL_PREFIX, Home

TrackedStatus = Literal["running", "completed", "failed", "stopped"]

_CREATION_LOCK: Final = 0x666C79776865656C
"""Number of the advisory lock under which a PostgreSQL database becomes MLflow's ("flywheel")."""

KEY_TAG: Final = "flywheel.id"
"""Tag by which a run or a version that we made is found again."""

_PAGE: Final = 200
_STATUS: Final[Mapping[TrackedStatus, str]] = {
    "running": "RUNNING",
    "completed": "FINISHED",
    "failed": "FAILED",
    "stopped": "KILLED",
}
_logger = logging.getLogger(__name__)
_REFUSALS: Final = frozenset(
    {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "PERMISSION_DENIED"}
)


@dataclass(frozen=True)
class TrackedVersion:
    """A model version as a catalogue shows it. `run` is the tracker's own id of the run that made it."""

    name: str
    number: int
    path: Path
    run: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.number}"


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    status: TrackedStatus
    params: Mapping[str, str]
    tags: Mapping[str, str]


class Tracker(Protocol):
    """Runs with metrics, and a catalogue of versions with aliases. Every call blocks and may be repeated.

    Errors are `DependencyError`: retryable if the same call may pass later, not retryable if it was refused.
    """

    def begin_run(self, key: str, *, experiment: str, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """The tracker's id of the run `key` (ours); created if need be, set to running if it had ended."""
        ...

    def log_metrics(self, run: str, metrics: Mapping[str, float], *, step: int) -> None:
        """Values of one step."""
        ...

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        """(step, value) of a metric in the order of steps; of a step that was logged twice, the later value."""
        ...

    def end_run(self, run: str, status: TrackedStatus) -> None:
        """Set the status of a run; a run that has this status already stays as it is."""
        ...

    def run(self, run: str) -> TrackedRun:
        """A run as the tracker shows it."""
        ...

    def put_version(self, version: TrackedVersion) -> None:
        """Show `version`, once however often it is put."""
        ...

    def put_alias(self, name: str, alias: str, number: int) -> None:
        """Let an alias point to a version that has been put."""
        ...

    def versions(self, name: str) -> dict[int, dict[str, str]]:
        """Tags by number of the versions that have been put."""
        ...

    def drop_alias(self, name: str, alias: str) -> None:
        """Take an alias away; one that is not there is no error."""
        ...

    def tag_version(self, name: str, number: int, tags: Mapping[str, str]) -> None:
        """Set tags of a version that has been put."""
        ...

    def aliases(self, name: str) -> dict[str, int]:
        """Number of the version each alias points to."""
        ...

    def all_aliases(self) -> dict[str, dict[str, int | None]]:
        """`aliases` of every model; None for one that points to a version that we have not put."""
        ...


def prepare_tracking(home: Home, uri: str | None = None) -> str:
    """URI of the MLflow behind this installation, its database created whole if it does not exist.

    That is `uri`, or what `FLYWHEEL_TRACKING_URI` says, or a SQLite file in `home`. A database takes seconds the first
    time and nothing later; a server (`http://…`) is not asked at all.
    Several processes that open a fresh MLflow database at once break it for good (mlflow 3.17), so one makes it: a
    file beside its place, under a lock, moved there when it is finished; in PostgreSQL under a lock of the server's.
    """
    uri = uri or environment.tracking_uri() or sqlite_uri(home.tracking_database)
    if _is_server(uri):
        return uri
    file = sqlite_path(uri)
    if file is None:
        _prepare_server_database(uri, home.tracking_artifacts)
    elif not file.exists():
        _prepare_file(file, home.tracking_artifacts)
    return uri


class MlflowTracker:
    """MLflow at a tracking URI: a database (`sqlite:///…`, `postgresql://…`) or a server (`http://…`).

    A database has been through `prepare_tracking`.
    """

    def __init__(self, uri: str) -> None:
        self._served = _is_server(uri)
        self._uri = uri = uri if self._served else uri_for_others(uri)
        # What a version's tag says never changes; asked once.
        self._numbers: dict[tuple[str, str], int | None] = {}
        with _translated(uri):
            from mlflow import MlflowClient  # 2 s

            self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    def begin_run(self, key: str, *, experiment: str, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        with _translated(self._uri):
            experiment_id = self._experiment(experiment)
            found = self._client.search_runs([experiment_id], f"tags.`{KEY_TAG}` = '{key}'", max_results=1)
            if found:
                run = str(found[0].info.run_id)
                self._client.update_run(run, status=_STATUS["running"])
            else:
                run = str(self._client.create_run(experiment_id, run_name=key, tags={KEY_TAG: key, **tags}).info.run_id)
            for name, value in params.items():
                self._client.log_param(run, name, value)
        return run

    def log_metrics(self, run: str, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        with _translated(self._uri):
            self._client.log_batch(run, metrics=[Metric(name, value, now_ms, step) for name, value in metrics.items()])

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        with _translated(self._uri):
            points = self._client.get_metric_history(run, metric)
        return sorted({int(p.step): float(p.value) for p in sorted(points, key=lambda p: p.timestamp)}.items())

    def end_run(self, run: str, status: TrackedStatus) -> None:
        with _translated(self._uri):
            if self._client.get_run(run).info.status != _STATUS[status]:
                self._client.set_terminated(run, _STATUS[status])

    def run(self, run: str) -> TrackedRun:
        with _translated(self._uri):
            found = self._client.get_run(run)
        status: TrackedStatus = next(
            (ours for ours, theirs in _STATUS.items() if theirs == found.info.status), "running"
        )
        return TrackedRun(status, dict(found.data.params), dict(found.data.tags))

    def put_version(self, version: TrackedVersion) -> None:
        with _translated(self._uri):
            if self._find(version.name, version.key) is not None:
                return
            _unless_exists(self._client.create_registered_model, version.name)
            source, run = str(version.path), version.run
            if self._served:
                # A server refuses a path of its client's machine; it takes what was logged to one of its runs.
                run = run or self.begin_run(version.key, experiment="registry", params={}, tags={})
                folder = f"versions/{version.key}"
                self._client.log_artifacts(run, source, folder)
                source = f"runs:/{run}/{folder}"
            tags = {KEY_TAG: version.key, **version.tags}
            self._client.create_model_version(version.name, source, run, tags, await_creation_for=0)

    def put_alias(self, name: str, alias: str, number: int) -> None:
        with _translated(self._uri):
            theirs = self._find(name, f"{name}/{number}")
            if theirs is None:
                raise DependencyError(
                    f"MLflow does not show {name}/{number}, so {alias!r} cannot point to it.", retryable=False
                )
            self._client.set_registered_model_alias(name, alias, theirs)

    def versions(self, name: str) -> dict[int, dict[str, str]]:
        with _translated(self._uri):
            found = self._client.search_model_versions(f"name = '{name}'")
        numbered = ((_number(name, version.tags), dict(version.tags)) for version in found)
        return {number: tags for number, tags in numbered if number is not None}

    def aliases(self, name: str) -> dict[str, int]:
        with _translated(self._uri):
            theirs = dict(self._client.get_registered_model(name).aliases)
            tags = {alias: self._client.get_model_version(name, version).tags for alias, version in theirs.items()}
        numbered = {alias: _number(name, of) for alias, of in tags.items()}
        return {alias: number for alias, number in numbered.items() if number is not None}

    def drop_alias(self, name: str, alias: str) -> None:
        with _translated(self._uri):
            self._client.delete_registered_model_alias(name, alias)

    def tag_version(self, name: str, number: int, tags: Mapping[str, str]) -> None:
        with _translated(self._uri):
            theirs = self._find(name, f"{name}/{number}")
            if theirs is None:
                raise DependencyError(f"MLflow does not show {name}/{number}.", retryable=False)
            for key, value in tags.items():
                self._client.set_model_version_tag(name, theirs, key, value)

    def all_aliases(self) -> dict[str, dict[str, int | None]]:
        found: dict[str, dict[str, int | None]] = {}
        page: str | None = None
        with _translated(self._uri):
            while True:
                models = self._client.search_registered_models(max_results=_PAGE, page_token=page)
                for model in models:
                    found[model.name] = {
                        alias: self._our_number(model.name, str(version)) for alias, version in model.aliases.items()
                    }
                page = models.token
                if not page:
                    return found

    def _our_number(self, name: str, theirs: str) -> int | None:
        if (name, theirs) not in self._numbers:
            tags = self._client.get_model_version(name, theirs).tags
            self._numbers[name, theirs] = _number(name, tags)
        return self._numbers[name, theirs]

    def _find(self, name: str, key: str) -> str | None:
        """MLflow's number of our version. It differs from ours if somebody registers there by hand."""
        found = self._client.search_model_versions(f"name = '{name}' and tags.`{KEY_TAG}` = '{key}'", max_results=1)
        return str(found[0].version) if found else None

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        if known is None:
            location = None
            if not self._served:
                # MLflow's own default is ./mlruns of whoever asks; stay beside the default experiment instead.
                default = self._client.get_experiment("0").artifact_location
                location = f"{default.rpartition('/')[0]}/{name}"
            _unless_exists(self._client.create_experiment, name, location)
            known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id)


@dataclass
class _MemoryRun:
    status: TrackedStatus = "running"
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)


class MemoryTracker:
    """A tracker in this process's memory. `down` makes it unreachable, as a server can be."""

    def __init__(self) -> None:
        self.down = False
        self._runs: dict[str, _MemoryRun] = {}
        self._versions: dict[str, dict[int, dict[str, str]]] = {}
        self._aliases: dict[str, dict[str, int]] = {}

    def begin_run(self, key: str, *, experiment: str, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        self._reach()
        known = self._runs.setdefault(f"{experiment}:{key}", _MemoryRun(tags={KEY_TAG: key, **tags}))
        known.status = "running"
        known.params |= params
        return f"{experiment}:{key}"

    def log_metrics(self, run: str, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in metrics.items():
            self._run(run).metrics.setdefault(name, {})[step] = value

    def history(self, run: str, metric: str) -> list[tuple[int, float]]:
        return sorted(self._run(run).metrics.get(metric, {}).items())

    def end_run(self, run: str, status: TrackedStatus) -> None:
        self._run(run).status = status

    def run(self, run: str) -> TrackedRun:
        known = self._run(run)
        return TrackedRun(known.status, dict(known.params), dict(known.tags))

    def put_version(self, version: TrackedVersion) -> None:
        self._reach()
        self._versions.setdefault(version.name, {}).setdefault(version.number, {KEY_TAG: version.key, **version.tags})

    def put_alias(self, name: str, alias: str, number: int) -> None:
        self._reach()
        if number not in self._versions.get(name, {}):
            raise DependencyError(f"There is no {name}/{number} that {alias!r} could point to.", retryable=False)
        self._aliases.setdefault(name, {})[alias] = number

    def versions(self, name: str) -> dict[int, dict[str, str]]:
        self._reach()
        return {number: dict(tags) for number, tags in self._versions.get(name, {}).items()}

    def drop_alias(self, name: str, alias: str) -> None:
        self._reach()
        self._aliases.get(name, {}).pop(alias, None)

    def tag_version(self, name: str, number: int, tags: Mapping[str, str]) -> None:
        self._reach()
        if number not in self._versions.get(name, {}):
            raise DependencyError(f"There is no {name}/{number}.", retryable=False)
        self._versions[name][number] |= tags

    def all_aliases(self) -> dict[str, dict[str, int | None]]:
        self._reach()
        return {name: dict(self._aliases.get(name, {})) for name in self._versions}

    def aliases(self, name: str) -> dict[str, int]:
        self._reach()
        if name not in self._versions:
            raise DependencyError(f"There is no model {name!r}.", retryable=False)
        return dict(self._aliases.get(name, {}))

    def _run(self, run: str) -> _MemoryRun:
        self._reach()
        if run not in self._runs:
            raise DependencyError(f"There is no run {run!r}.", retryable=False)
        return self._runs[run]

    def _reach(self) -> None:
        if self.down:
            raise DependencyError("The tracker is down.", hint="Set `down` to False.")


def _prepare_file(target: Path, artifacts: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if target.exists():
            return
        scratch = target.with_name(f"{PARTIAL_PREFIX}{target.name}-{uuid.uuid4().hex[:8]}")
        try:
            _create(sqlite_uri(scratch), artifacts)
            # The write-ahead log is a property of the file: trainers can log while the registry reads.
            engine = open_engine(sqlite_uri(scratch))
            engine.connect().close()
            engine.dispose()
            scratch.rename(target)
        finally:
            for leftover in scratch.parent.glob(f"{scratch.name}*"):
                leftover.unlink()


def _prepare_server_database(uri: str, artifacts: Path) -> None:
    engine = open_engine(uri)
    try:
        if _created(engine):
            return
        with engine.connect() as session, _translated(uri):
            # Outside a transaction, which the server would end as idle while MLflow creates its tables. The lock goes
            # with the session, also when we die.
            session.execution_options(isolation_level="AUTOCOMMIT")
            session.execute(text("SET lock_timeout = '120s'"))
            session.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _CREATION_LOCK})
            if not _created(engine):
                _create(uri_for_others(uri), artifacts)
            session.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _CREATION_LOCK})
            session.invalidate()
    finally:
        engine.dispose()


def _created(engine: Engine) -> bool:
    """MLflow's migrations are one transaction, which writes this row last."""
    with transaction(engine) as connection:
        if not inspect(connection).has_table("alembic_version"):
            return False
        return connection.execute(text("SELECT 1 FROM alembic_version")).first() is not None


def _create(uri: str, artifacts: Path) -> None:
    started_s = time.monotonic()
    for noisy in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # 2 s

    with _translated(uri):
        store = SqlAlchemyStore(uri, str(artifacts))
        store.engine.dispose()
    _logger.info("created MLflow's tables in %s in %.1f s", without_password(uri), time.monotonic() - started_s)


def _is_server(uri: str) -> bool:
    return uri.startswith(("http://", "https://"))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel lets go of it if we die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException

    try:
        yield
    except MlflowException as error:
        raise DependencyError(
            f"MLflow at {shown_uri(uri)} refused or failed: {_first_line(error, uri)}",
            hint="Check that it runs and that its database is of this MLflow's version (`mlflow db upgrade`).",
            retryable=error.error_code not in _REFUSALS,
        ) from error
    except (SQLAlchemyError, RequestException, OSError) as error:
        raise DependencyError(f"MLflow at {shown_uri(uri)} cannot be reached: {_first_line(error, uri)}") from error


def _unless_exists(create: Callable[..., Any], *arguments: Any) -> None:
    """Call `create`; that somebody else has created the same meanwhile is as good."""
    from mlflow.exceptions import MlflowException

    try:
        create(*arguments)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _number(name: str, tags: Mapping[str, str]) -> int | None:
    """Our number of a version; None for one that is not ours, whatever its tag says."""
    owner, _, number = tags.get(KEY_TAG, "").rpartition("/")
    return int(number) if owner == name and re.fullmatch("[1-9][0-9]{0,8}", number) else None


def _first_line(error: BaseException, uri: str) -> str:
    """What happened, in a line; MLflow repeats the URI in it, with the password."""
    line = (str(error).splitlines() or [type(error).__name__])[0].replace(uri, shown_uri(uri))
    return line if _is_server(uri) else scrub(line, uri)


def shown_uri(uri: str) -> str:
    """A tracking URI as it may be shown and logged: without a password."""
    if not _is_server(uri):
        return without_password(uri)
    scheme, sign, rest = uri.partition("://")
    return f"{scheme}{sign}{rest.rpartition('@')[2]}"
