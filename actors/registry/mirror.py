"""MLflow's model registry as a mirror of ours, caught up in the background.

What has been mirrored is kept beside the log, so that a new registry goes on where the old one died; every step may
be done twice. An unreachable MLflow delays the mirror and nothing else: no call of the registry waits for it.
This module knows the log and the `Tracker` port; it knows neither Ray nor MLflow.
"""

import json
import logging
import threading
from collections.abc import Callable
from typing import Final

from actors.registry.state import AliasMove, Event, RunEnded, RunFact, State, Version
from actors.registry.store import EventStore
from cluster.config import Config
from cluster.errors import DependencyError, StateError
from cluster.tracking import TrackedVersion, Tracker

_CONSUMER: Final = "mlflow"
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 60.0

_logger = logging.getLogger(__name__)


class MirrorStatus(Config):
    """How far MLflow is behind. `refused` counts events that MLflow will never take; the log names them."""

    position: int
    behind: int
    refused: int
    failure: str | None
    """Why the last attempt failed; None while all is well."""


class Mirror:
    """Puts versions, aliases and the ends of runs into a tracker, in the order of the log."""

    def __init__(self, store: EventStore, open_tracker: Callable[[], Tracker], state: Callable[[], State]) -> None:
        self._store = store
        self._open_tracker = open_tracker
        self._state = state
        self._tracker: Tracker | None = None
        self._position = store.position(_CONSUMER)
        self._refused = 0
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
            self._work.wait()
            self._work.clear()
            try:
                self.catch_up()
                pause_s = _FIRST_PAUSE_S
            except StateError as error:
                _logger.warning("the mirror stops: %s", error)
                return
            except DependencyError as error:
                _logger.warning(
                    "MLflow is %d events behind, next attempt in %.1f s: %s",
                    self.status().behind,
                    pause_s,
                    error,
                )
                self._ended.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self._work.set()

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
        if not isinstance(event.fact, Version | AliasMove | RunEnded):
            return
        try:
            if self._tracker is None:
                self._tracker = self._open_tracker()
            match event.fact:
                case Version() as version:
                    self._tracker.put_version(_shown(version, self._tracking_run(version.run_id)))
                case AliasMove() as move:
                    self._tracker.put_alias(move.name, move.alias, move.version)
                case RunEnded() as ended:
                    if run := self._tracking_run(ended.run_id):
                        self._tracker.end_run(run, ended.status)
        except DependencyError as error:
            if error.retryable:
                raise
            # Asking again would not help, and everything behind it would wait for ever.
            self._refused += 1
            _logger.warning("MLflow does not take event %d (%s): %s", event.seq, event.fact.event, error)

    def _tracking_run(self, run_id: str | None) -> str | None:
        event = self._state().entries.get(run_id) if run_id else None
        return event.fact.tracking_run if event is not None and isinstance(event.fact, RunFact) else None


def _shown(version: Version, run: str | None) -> TrackedVersion:
    facts = {
        "digest": version.digest,
        "kind": version.kind,
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
    return TrackedVersion(name=version.name, number=version.number, path=version.path, run=run, tags=tags)
