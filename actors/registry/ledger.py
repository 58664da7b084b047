"""The one writer: decide, append, apply, one command at a time.

It may be called from any thread. It knows the state machine and the log; it knows neither Ray nor MLflow, and
nothing of who waits for a change.
"""

import threading
from collections.abc import Callable
from datetime import UTC, datetime

from actors.registry.facts import Event, Fact, VersionFact
from actors.registry.rules import Command, Decision, check, decide
from actors.registry.state import State, replay
from actors.registry.store import EventStore
from cluster.errors import DependencyError


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


class Ledger:
    """The registry's state in memory, equal to its log at every moment that a caller can see."""

    def __init__(self, store: EventStore, *, clock: Callable[[], datetime] = utc_now) -> None:
        self._store = store
        self._clock = clock
        self._writing = threading.Lock()
        self._uncertain = False
        self._listeners: list[Callable[[State], None]] = []
        self._state = replay(store.read())

    @property
    def state(self) -> State:
        """The acknowledged state; an immutable value that later commits do not touch."""
        return self._state

    @property
    def epoch(self) -> int:
        """Our number among all the writers that this log has had."""
        return self._store.epoch

    def listen(self, listener: Callable[[State], None]) -> None:
        """Call `listener` with the state after every commit, in the thread that commits."""
        self._listeners.append(listener)

    def check(self, fact: VersionFact) -> None:
        """Raise what registering `fact` would raise now, whatever its content."""
        check(self._state, fact)

    def commit(self, command: Command, *, by: str) -> Fact:
        """Carry out `command` for `by`; when this returns, what it did is durable.

        Raises what `decide` raises, and `DependencyError` if the log fails: the command may then have been kept or
        not, and the same command again gets the right answer either way.
        """
        with self._writing:
            if self._uncertain:
                # A commit broke off: what stands in the log is the truth.
                self._take(self._store.read(after=self._state.seq))
                self._uncertain = False
            now = max(self._clock(), self._state.at or datetime.min.replace(tzinfo=UTC))
            decision: Decision = decide(self._state, command, now=now)
            if decision.facts:
                try:
                    events = self._store.append(decision.facts, after=self._state.seq, at=now, by=by)
                except DependencyError:
                    self._uncertain = True
                    raise
                self._take(events)
        return decision.answer

    def _take(self, events: list[Event] | tuple[Event, ...]) -> None:
        self._state = replay(events, self._state)
        for listener in self._listeners:
            listener(self._state)
