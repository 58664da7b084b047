"""MLflow's model registry as a mirror of ours, caught up in the background.

Whoever moves an alias in MLflow's own UI has moved it behind our back: once the mirror is caught up, it looks for
such moves and hands them to the registry, which follows them or has them put back.

What has been mirrored is kept beside the log, so that a new registry goes on where the old one died; every step may
be done twice. An unreachable MLflow delays the mirror and nothing else: no call of the registry waits for it.
This module knows the log and the `Tracker` port; it knows neither Ray nor MLflow.
"""

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.registry.facts import AliasMove, Event, GateBegun, GateEnded, Retired, RunEnded, RunFact, Version
from actors.registry.state import State
from actors.registry.store import EventStore
from cluster.config import Config
from cluster.errors import DependencyError, StateError
from cluster.tracking import TrackedVersion, Tracker

_CONSUMER: Final = "mlflow"
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0
LOOK_EVERY_S: Final = 3.0
STAGE_TAG: Final = "flywheel.stage"

_logger = logging.getLogger(__name__)


class MirrorStatus(Config):
    """How far MLflow is behind. `refused` counts events that MLflow will never take; the log names them."""

    position: int
    behind: int
    refused: int
    failure: str | None
    """Why the last attempt failed; None while all is well."""


@dataclass(frozen=True)
class ForeignMove:
    """An alias stands elsewhere in the tracker than in `state`. `version` None: it is gone there, or points to
    something that is not ours."""

    name: str
    alias: str
    version: int | None
    state: State


class Mirror:
    """Puts versions, stages, aliases and the ends of runs into a tracker, in the order of the log.

    `root` is the version store. `follow` is asked about each move that was made in the tracker itself; True: it is in
    the log now, False: it has to be put back.
    """

    def __init__(
        self,
        store: EventStore,
        open_tracker: Callable[[], Tracker],
        state: Callable[[], State],
        follow: Callable[[ForeignMove], bool] = lambda _: False,
        *,
        root: Path = Path(),
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._root = root
        self._look_every_s = look_every_s
        self._follow = follow
        self._store = store
        self._open_tracker = open_tracker
        self._state = state
        self._tracker: Tracker | None = None
        self._position = store.position(_CONSUMER)
        self._refused = 0
        self._refused_names: set[str] = set()
        self._refusing: dict[tuple[str, str], int | None] = {}
        """Foreign moves that are recorded as refused and not put back yet: where the alias stands in the tracker."""
        self._failure: str | None = None
        self._work = threading.Event()
        self._ended = threading.Event()

    def status(self) -> MirrorStatus:
        """Where the mirror stands; from memory, at once."""
        return MirrorStatus(
            position=self._position,
            behind=max(0, self._state().seq - self._position),
            refused=self._refused,
            failure=self._failure,
        )

    def wake(self, _: State) -> None:
        """Say that there is something new."""
        self._work.set()

    def stop(self) -> None:
        """Let `run` return."""
        self._ended.set()
        self._work.set()

    def run(self) -> None:
        """Catch up whenever woken, until stopped; after a failure, again after a pause that doubles up to a minute."""
        pause_s = _FIRST_PAUSE_S
        self._work.set()
        while not self._ended.is_set():
            self._work.wait(self._look_every_s)
            self._work.clear()
            try:
                self.catch_up()
                self.look()
                pause_s = _FIRST_PAUSE_S
            except StateError as error:
                _logger.warning("the mirror stops: %s", error)
                return
            except Exception as error:
                # Whatever lies in somebody's MLflow: a dead thread would neither mirror nor notice moves any more.
                self._failure = str(error)
                _logger.warning(
                    "MLflow is %d events behind, next attempt in %.1f s: %s",
                    self.status().behind,
                    pause_s,
                    error,
                    exc_info=None if isinstance(error, DependencyError) else error,
                )
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._work.set()

    def look(self) -> None:
        """Find moves that were made in the tracker itself. Raises `DependencyError` if it is not there."""
        state = self._state()
        if not state.versions or self._position < state.seq:
            return
        try:
            found = self._opened().all_aliases()
            for name in sorted(state.versions.keys() - found.keys() - self._refused_names):
                self._show_again(state, name)
            for name, theirs in found.items():
                ours = state.aliases(name) if name in state.versions else theirs
                for alias in sorted(ours.keys() | theirs.keys()):
                    if ours.get(alias) != theirs.get(alias):
                        self._deal_with(ForeignMove(name, alias, theirs.get(alias), state), ours.get(alias))
        except DependencyError as error:
            self._failure = str(error)
            self._tracker = None
            raise

    def _show_again(self, state: State, name: str) -> None:
        """A model that somebody deleted in the tracker, or that a tracker with new tables has never seen."""
        _logger.warning("MLflow has lost %s; it is shown again", name)
        try:
            for version in state.versions[name]:
                # Without its run, which may be lost as well; a tag names it.
                self._opened().put_version(_shown(version, self._root, None))
                self._tag_stage(version.id)
            for alias, number in state.aliases(name).items():
                self._opened().put_alias(name, alias, number)
        except DependencyError as error:
            if error.retryable:
                raise
            self._refused_names.add(name)
            _logger.warning("MLflow does not take %s: %s", name, error)

    def _deal_with(self, move: ForeignMove, ours: int | None) -> None:
        # What has been committed since `state` may be the reason: then it is no foreign move.
        if self._state().seq != move.state.seq:
            return
        known = self._refusing.get((move.name, move.alias), ours)
        if known == move.version or not self._follow(move):
            # Said once, also if putting it back takes several attempts.
            self._refusing[move.name, move.alias] = move.version
            try:
                self._put_back(move.name, move.alias, ours)
            except DependencyError as error:
                if error.retryable:
                    raise
                _logger.warning("MLflow keeps %s@%s where it is: %s", move.name, move.alias, error)
                return
        self._refusing.pop((move.name, move.alias), None)

    def _put_back(self, name: str, alias: str, number: int | None) -> None:
        if number is None:
            self._opened().drop_alias(name, alias)
        else:
            self._put_alias(name, alias, number)

    def _put_alias(self, name: str, alias: str, number: int) -> None:
        """With the version that it points to, which somebody may have deleted there."""
        self._put_version(self._state().versions[name][number - 1])
        self._opened().put_alias(name, alias, number)

    def _put_version(self, version: Version) -> None:
        self._opened().put_version(_shown(version, self._root, self._tracking_run(version.run_id)))

    def _opened(self) -> Tracker:
        if self._tracker is None:
            self._tracker = self._open_tracker()
        return self._tracker

    def catch_up(self) -> None:
        """Mirror everything outstanding. Raises `DependencyError` at the first event for which MLflow is not there."""
        try:
            for event in self._store.read(after=self._position):
                self._put(event)
                self._store.advance(_CONSUMER, event.seq)
                self._position = event.seq
        except DependencyError as error:
            self._failure = str(error)
            # Whatever broke may have broken the client's connections too.
            self._tracker = None
            raise
        self._failure = None

    def _put(self, event: Event) -> None:
        if not isinstance(event.fact, Version | GateBegun | GateEnded | AliasMove | Retired | RunEnded):
            return
        try:
            match event.fact:
                case Version() as version:
                    self._put_version(version)
                    self._tag_stage(version.id)
                case GateBegun() | Retired() as fact:
                    self._tag_stage(fact.version_id)
                case GateEnded() as ended:
                    self._tag_stage(ended.gate_id.partition("#")[0], {"flywheel.gate": ended.reason})
                case AliasMove() as move:
                    self._put_alias(move.name, move.alias, move.version)
                    for number in move.split:
                        self._tag_stage(f"{move.name}/{number}")
                case RunEnded() as ended:
                    if run := self._tracking_run(ended.run_id):
                        self._opened().end_run(run, ended.status)
        except DependencyError as error:
            if error.retryable:
                raise
            # Asking again would not help, and everything behind it would wait for ever.
            self._refused += 1
            _logger.warning("MLflow does not take event %d (%s): %s", event.seq, event.fact.event, error)

    def _tag_stage(self, version_id: str, more: Mapping[str, str] | None = None) -> None:
        """The stage of now, not of then: the mirror may be behind, and only the last word is shown."""
        name, _, number = version_id.rpartition("/")
        tags = {
            STAGE_TAG: self._state().stages[version_id],
            **{key: value for key, value in (more or {}).items() if value},
        }
        self._opened().tag_version(name, int(number), tags)

    def _tracking_run(self, run_id: str | None) -> str | None:
        event = self._state().entries.get(run_id) if run_id else None
        return event.fact.tracking_run if event is not None and isinstance(event.fact, RunFact) else None


def _shown(version: Version, root: Path, run: str | None) -> TrackedVersion:
    facts = {
        "digest": version.digest,
        "kind": version.kind,
        "signed_by": version.signed_by,
        "base": version.base,
        "base_digest": version.base_digest,
        "run": version.run_id,
        "checkpoint": version.checkpoint_id,
        "data": version.data_version,
        "evaluation": version.evaluation_id,
        "code_commit": version.code_commit,
        "metrics": json.dumps(version.metrics) if version.metrics else None,
    }
    tags = {f"flywheel.{name}": value for name, value in facts.items() if value}
    return TrackedVersion(name=version.name, number=version.number, path=root / version.path, run=run, tags=tags)
